"""Test networks: parameter counts, shapes, initial values and repeatability."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from raysim.models import (
    Cct7,
    Cnn,
    DigitsCnn,
    Gpt,
    Gru,
    HuggingFaceModel,
    Mlp,
    MnistCnn,
    ModelRecipe,
    ResNet,
    SmallCnn,
    Timm,
    Torchvision,
    Transformer,
    UNet,
    Vgg11,
    is_split,
    is_stochastic,
)

BN = (nn.BatchNorm1d, nn.BatchNorm2d)
GN = (nn.GroupNorm,)
LN = (nn.LayerNorm,)
CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Row:
    """The expected numbers of one network.

    shape: the channels, height and width of an input.
    features, head: the numbers of parameters of the extractor and of the head.
    norms: for the normalisation layers, their number and types, and the numbers of their parameters
    and buffer entries.
    mac: millions of multiply-adds for one sample.
    positive: True if no feature is negative.
    light: a smaller shape for tests that compute outputs; None uses `shape`.
    """

    recipe: ModelRecipe
    shape: tuple[int, int, int]
    classes: int
    feature_dim: int
    features: int
    head: int
    norms: tuple[int, tuple[type[nn.Module], ...], int, int]  # layers, types, parameters, buffers
    mac: float
    positive: bool = True
    light: tuple[int, int, int] | None = None


NONE = (0, BN + GN + LN, 0, 0)
MNIST, CIFAR, LARGE, XRAY, LIGHT = (
    (1, 28, 28),
    (3, 32, 32),
    (3, 224, 224),
    (3, 384, 384),
    (3, 64, 64),
)
BN18, BN50, BN_DIGITS = (20, BN, 9_600, 9_620), (53, BN, 53_120, 53_173), (5, BN, 5_632, 5_637)
IMAGENET18, IMAGENET50 = ResNet(18, stem="imagenet"), ResNet(50, stem="imagenet")
TABLE = {
    "mnist_cnn": Row(
        MnistCnn(), MNIST, 10, 128, 370_560, 1_290, (4, GN, 896, 0), 73, positive=False
    ),
    "vgg11": Row(Vgg11(), CIFAR, 10, 512, 9_220_480, 5_130, NONE, 153),
    "vgg11 pacs": Row(Vgg11(), CIFAR, 7, 512, 9_220_480, 3_591, NONE, 153),
    "cct7_3x1": Row(
        Cct7(), CIFAR, 100, 256, 3_757_569, 25_700, (15, LN, 7_680, 0), 1_182, positive=False
    ),
    "resnet18 gn": Row(
        ResNet(18, norm="group"), CIFAR, 10, 512, 11_168_832, 5_130, (20, GN, 9_600, 0), 555
    ),
    "resnet18 bn": Row(ResNet(18), CIFAR, 10, 512, 11_168_832, 5_130, BN18, 555),
    "resnet18 cifar100": Row(ResNet(18), CIFAR, 100, 512, 11_168_832, 51_300, BN18, 555),
    "resnet18 imagenet": Row(
        IMAGENET18, LARGE, 65, 512, 11_176_512, 33_345, BN18, 1_814, light=LIGHT
    ),
    "resnet50 bn": Row(ResNet(50), CIFAR, 10, 2048, 23_500_352, 20_490, BN50, 1_298),
    "resnet50 imagenet": Row(
        IMAGENET50, XRAY, 2, 2048, 23_508_032, 4_098, BN50, 12_011, light=LIGHT
    ),
    "digits_cnn": Row(DigitsCnn(), CIFAR, 10, 512, 18_146_240, 5_130, BN_DIGITS, 62),
    "digits_cnn fedbn": Row(
        DigitsCnn("fedbn"), (3, 28, 28), 10, 512, 14_214_080, 5_130, BN_DIGITS, 48
    ),
    "cnn": Row(Cnn(), MNIST, 10, 512, 1_658_240, 5_130, NONE, 12),
    "cnn pool 2": Row(Cnn(pool=2), MNIST, 10, 512, 1_658_240, 5_130, NONE, 12),
    "mlp 64": Row(Mlp([64]), MNIST, 10, 64, 50_240, 650, NONE, 0.05),
    "mlp 2700": Row(Mlp([2700, 2700]), MNIST, 10, 2700, 9_412_200, 27_010, NONE, 9.4),
    "small_cnn": Row(SmallCnn(), (1, 8, 8), 10, 64, 13_056, 650, NONE, 0.09),
    "small_cnn bn": Row(SmallCnn("batch"), (1, 8, 8), 10, 64, 13_152, 650, (2, BN, 96, 98), 0.09),
    "small_cnn gn": Row(SmallCnn("group"), (1, 8, 8), 10, 64, 13_152, 650, (2, GN, 96, 0), 0.09),
}
# one per kind of network is run for real; the others differ from one of these in sizes only
RUN = [
    name
    for name in TABLE
    if name not in ("vgg11 pacs", "resnet18 cifar100", "resnet50 bn", "mlp 2700")
]


def count(parameters: object) -> int:
    return sum(p.numel() for p in parameters)  # type: ignore[attr-defined]


def outputs(
    net: nn.Module, kind: tuple[type[nn.Module], ...], shape: tuple[int, int, int]
) -> list[tuple[int, ...]]:
    """Return the output shapes of the modules of these types, in the order of their execution.

    The batch axis is left out.
    """
    shapes: list[tuple[int, ...]] = []
    for module in net.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda _m, _x, out: shapes.append(tuple(out.shape[1:])))
    with torch.no_grad():
        net.eval()(torch.empty(1, *shape, device="meta"))
    return shapes


def on_meta(row: Row) -> nn.Module:
    with torch.device("meta"):
        return row.recipe.build(row.shape, row.classes, seed=1)


@pytest.mark.parametrize("name", TABLE)
def test_network_has_the_known_number_of_parameters_and_flops(name: str) -> None:
    row = TABLE[name]
    net = on_meta(row)
    layers, kinds, norm_parameters, buffers = row.norms
    norms = [m for m in net.modules() if isinstance(m, kinds)]
    with FlopCounterMode(display=False) as counter:
        z = net.eval().features(torch.empty(1, *row.shape, device="meta"))
    assert z.shape == (1, row.feature_dim) and (net.feature_dim, net.num_classes) == (
        row.feature_dim,
        row.classes,
    )
    assert (count(net.extractor.parameters()), count(net.head.parameters())) == (
        row.features,
        row.head,
    )
    assert all(p.requires_grad for p in net.parameters())
    assert (len(norms), count(p for m in norms for p in m.parameters())) == (
        layers,
        norm_parameters,
    )
    assert count(net.buffers()) == buffers
    assert counter.get_total_flops() / 2e6 == pytest.approx(
        row.mac, abs=0.5 if row.mac > 10 else 0.05
    )


@pytest.mark.parametrize("name", RUN)
def test_network_computes_its_head_on_its_features(name: str) -> None:
    row = TABLE[name]
    net = row.recipe.build(row.shape, row.classes, seed=3).eval()
    assert isinstance(net.head, nn.Linear) and list(net.parameters())[-2:] == [
        net.head.weight,
        net.head.bias,
    ]
    shape = row.light or row.shape
    with torch.no_grad():
        for batch in (1, 3):
            x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(5))
            z = net.features(x)
            assert z.shape == (batch, row.feature_dim) and net(x).shape == (batch, row.classes)
            assert torch.equal(net(x), net.head(z))
    assert z.isfinite().all() and bool((z >= 0).all()) == row.positive


@pytest.mark.parametrize("name", RUN)
def test_only_stochastic_networks_have_outputs_that_depend_on_the_seed(name: str) -> None:
    row = TABLE[name]
    net = row.recipe.build(row.shape, row.classes, seed=3).train()
    x = torch.randn(4, *(row.light or row.shape), generator=torch.Generator().manual_seed(5))
    buffers = {key: value.clone() for key, value in net.named_buffers()}

    def forward(seed: int) -> list[Tensor]:
        for key, value in net.named_buffers():
            value.copy_(buffers[key])
        torch.manual_seed(seed)
        with torch.no_grad():
            return [net(x), *(value.clone() for value in net.buffers())]

    def equal(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    first = forward(1)
    assert equal(first, forward(1))
    assert is_stochastic(net) == isinstance(row.recipe, Cct7)
    assert equal(first, forward(2)) != is_stochastic(net)


def sequential(name: str) -> nn.Sequential:
    """Return the network of one of the workloads W1, W2 and W3 of `raysim bench`."""
    torch.manual_seed(20240)
    if name == "cnn pool 2":
        first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Flatten(), nn.Linear(64 * 49, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*first, *second, *dense)
    if name == "mlp 64":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    layers = [
        nn.Linear(784, 2700),
        nn.ReLU(),
        nn.Linear(2700, 2700),
        nn.ReLU(),
        nn.Linear(2700, 10),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.parametrize("name", ["cnn pool 2", "mlp 64", "mlp 2700"])
def test_model_of_a_benchmark_computes_the_same_as_nn_sequential(name: str) -> None:
    ours, plain = TABLE[name].recipe.build(MNIST, 10, seed=20240), sequential(name)
    assert len(list(ours.parameters())) == len(list(plain.parameters()))
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    x = torch.randn(2, *MNIST)
    assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize(
    "recipe", [Cct7(), ResNet(18), DigitsCnn(), SmallCnn("group")], ids=lambda r: type(r).__name__
)
def test_initial_parameters_depend_on_the_seed_only(
    recipe: ModelRecipe,
) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    one, two, other = (recipe.build(CIFAR, 10, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not torch.equal(one.head.weight, other.head.weight)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_feature_maps_have_the_shapes_given_in_the_papers() -> None:
    vgg = [(64, 32, 32), (128, 16, 16), *2 * [(256, 8, 8)], *2 * [(512, 4, 4)], *2 * [(512, 2, 2)]]
    assert outputs(on_meta(TABLE["vgg11"]), (nn.Conv2d,), CIFAR) == vgg
    assert outputs(on_meta(TABLE["mnist_cnn"]), GN, MNIST) == [(64, 28, 28), *3 * [(128, 14, 14)]]
    assert outputs(on_meta(TABLE["digits_cnn"]), (nn.MaxPool2d, nn.Flatten), CIFAR) == [
        (64, 16, 16),
        (64, 8, 8),
        (8192,),
    ]
    fedbn = outputs(on_meta(TABLE["digits_cnn fedbn"]), (nn.MaxPool2d, nn.Flatten), (3, 28, 28))
    assert fedbn == [(64, 14, 14), (64, 7, 7), (6272,)]
    for name in ("cnn", "cnn pool 2"):
        pools = outputs(on_meta(TABLE[name]), (nn.MaxPool2d, nn.Flatten), MNIST)
        assert pools == [(32, 14, 14), (64, 7, 7), (3136,)]


@pytest.mark.parametrize(
    ("name", "stem", "maps"),
    [
        ("resnet18 imagenet", (64, 56), [(64, 56), (128, 28), (256, 14), (512, 7)]),
        ("resnet18 gn", (64, 32), [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet50 bn", (64, 32), [(256, 32), (512, 16), (1024, 8), (2048, 4)]),
    ],
)
def test_resnet_feature_maps_have_the_shapes_of_the_paper(
    name: str, stem: tuple[int, int], maps: list[tuple[int, int]]
) -> None:
    net = on_meta(TABLE[name]).extractor
    stages = [net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4]
    seen: list[tuple[int, ...]] = []
    for stage in stages:
        stage.register_forward_hook(lambda _m, _x, out: seen.append(tuple(out.shape[1:])))
    net.eval()(torch.empty(1, *TABLE[name].shape, device="meta"))
    assert seen == [(channels, side, side) for channels, side in [stem, *maps]]
    counts = [147_968, 525_568, 2_099_712, 8_393_728], [215_808, 1_219_584, 7_098_368, 14_964_736]
    assert [count(stage.parameters()) for stage in stages[1:]] == counts["50" in name]
    assert count([*net.conv1.parameters(), *net.bn1.parameters()]) == (
        9_536 if "imagenet" in name else 1_856
    )
    shortcuts = [
        m for key, m in net.named_modules() if "downsample" in key and isinstance(m, BN + GN)
    ]
    assert len(shortcuts) == (4 if "50" in name else 3)


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"padding": 0, "stride": 2}, 352_650),
        ({"padding": 0, "stride": 3}, 90_506),
        ({"padding": 2, "stride": 3}, 352_650),
    ],
)
def test_cnn_has_the_stored_number_of_parameters_for_each_padding_and_stride(
    options: dict[str, int], total: int
) -> None:
    net = Cnn(**options).build(MNIST, 10, seed=1)  # type: ignore[arg-type]
    assert count(net.parameters()) == total
    assert net(torch.zeros(1, *MNIST)).shape == (1, 10)


def test_cnn_accepts_three_channels_and_32_pixels() -> None:
    net = Cnn().build(CIFAR, 10, seed=1).extractor
    assert count(net[0].parameters()) == 2_432 and net[7].in_features == 4096


@pytest.mark.parametrize("depth", [18, 50])
def test_resnet_with_imagenet_stem_equals_the_resnet_of_torchvision(depth: int) -> None:
    import torchvision

    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=2).eval()
    ours = ResNet(depth, stem="imagenet").build(LIGHT, 2, seed=1).eval()  # type: ignore[arg-type]
    ours.extractor.load_state_dict(
        {k: v for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    )
    ours.head.load_state_dict(theirs.fc.state_dict())
    x = torch.randn(2, *LIGHT)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_initial_weights_of_resnet_have_a_variance_of_2_divided_by_fan_out(stem: str) -> None:
    net = ResNet(18, stem=stem).build((1, 32, 32), 10, seed=1)  # type: ignore[arg-type]
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20 and all(m.bias is None for m in convolutions)
    for m in convolutions:
        want = (2 / (m.out_channels * m.kernel_size[0] ** 2)) ** 0.5
        assert m.weight.std().item() == pytest.approx(
            want, rel=5 / (2 * m.weight.numel()) ** 0.5
        )  # five standard errors
    for m in net.modules():
        assert not isinstance(m, BN) or bool((m.weight == 1).all() and (m.bias == 0).all())


def test_initial_weights_of_vgg_have_a_variance_of_2_divided_by_fan_out() -> None:
    net = Vgg11().build(CIFAR, 10, seed=1)
    for m in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        want = (2 / (9 * m.out_channels)) ** 0.5
        assert m.weight.std().item() == pytest.approx(want, rel=5 / (2 * m.weight.numel()) ** 0.5)
        assert not m.bias.any()


def test_cct_initial_weights_have_the_standard_deviations_of_the_released_code() -> None:
    net = Cct7().build(CIFAR, 100, seed=1).extractor
    convolution, position, block = net[0], net[4], net[5]
    assert convolution.weight.std().item() == pytest.approx((2 / 27) ** 0.5, rel=0.05)
    assert position.weight.shape == (1, 256, 256) and position.weight.std().item() == pytest.approx(
        0.2, rel=0.02
    )
    assert count(block.parameters()) == 526_336
    for layer in (block.attention.qkv, block.attention.out, *block.mlp[::2], net[-1].score):
        assert layer.weight.std().item() == pytest.approx(
            0.02, rel=5 / (2 * layer.weight.numel()) ** 0.5
        )
        assert layer.bias is None or not layer.bias.any()


def test_cct_block_adds_its_output_to_the_normalised_input() -> None:
    block = Cct7().build(CIFAR, 100, seed=1).extractor[8].eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(2), std=0.1)
        u = torch.randn(2, 5, 256)
        qkv = block.before(u) @ block.attention.qkv.weight.T
        query, key, value = (t.view(2, 5, 4, 64).transpose(1, 2) for t in qkv.split(256, dim=2))
        mixed = (
            nn.functional.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(2, 5, 256)
        )
        v = block.between(u + block.attention.out(mixed))
        torch.testing.assert_close(block(u), v + block.mlp(v))


def test_cct_drop_rates_rise_evenly_from_block_to_block() -> None:
    net = Cct7().build(CIFAR, 100, seed=1).extractor
    assert [block.path.p for block in net[5:12]] == pytest.approx([i / 60 for i in range(7)])
    path = net[11].path.train()
    torch.manual_seed(4)
    out = path(torch.ones(2000, 3, 2))
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.9])
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert (out[:, 0, 0] == 0).float().mean().item() == pytest.approx(
        0.1, abs=0.035
    )  # five standard errors
    assert torch.equal(path.eval()(out), out)


def test_model_is_stochastic_if_it_has_dropout_or_stochastic_depth() -> None:
    import torchvision

    assert not is_stochastic(Cct7(attention_dropout=0.0, drop_path=0.0).build(CIFAR, 10, seed=1))
    assert is_stochastic(Cct7(attention_dropout=0.0).build(CIFAR, 10, seed=1))
    assert is_stochastic(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout2d(0.5))))
    assert not is_stochastic(nn.Sequential(nn.Dropout(0.0)))
    assert is_stochastic(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert is_stochastic(torchvision.ops.StochasticDepth(0.2, "row"))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (
            lambda: SmallCnn("layer"),
            "model.norm='layer'",
        ),
        (lambda: ResNet(34), "model.depth=34"),
        (lambda: ResNet(18, groups=3), "model.groups=3"),
        (lambda: ResNet(18, pretrained=True), "model.stem=imagenet"),
        (lambda: ResNet(18, norm="group", stem="imagenet", pretrained=True), "model.norm=batch"),
        (lambda: Mlp([]), "model.widths=[]"),
        (lambda: Mlp([64, 0]), "model.widths=[64, 0]"),
        (lambda: Cnn(pool=4), "model.pool=4"),
        (lambda: Cct7(drop_path=1.0), "model.drop_path=1.0"),
        (lambda: DigitsCnn("fedavg"), "model.variant='fedavg'"),
        (lambda: Vgg11().build(MNIST, 10, seed=1), "model=vgg11"),
        (
            lambda: SmallCnn().build((1, 3, 3), 10, seed=1),
            "model=small_cnn",
        ),
        (
            lambda: ResNet(18, stem="imagenet", pretrained=True).build(MNIST, 10, seed=1),
            "model.pretrained=true",
        ),
    ],
)
def test_error_of_a_wrong_model_setting_contains_its_key(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(key)):
        make()


def test_pretrained_weights_are_read_from_the_cache_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    stored = torchvision.models.resnet18(num_classes=1000)
    file = (
        tmp_path
        / "hub"
        / "checkpoints"
        / Path(torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url).name
    )
    file.parent.mkdir(parents=True)
    torch.save(stored.state_dict(), file)
    net = ResNet(18, stem="imagenet", pretrained=True).build(LARGE, 65, seed=1)
    assert all(
        torch.equal(p, stored.state_dict()[key]) for key, p in net.extractor.state_dict().items()
    )
    assert torch.equal(net.head.weight, IMAGENET18.build(LARGE, 65, seed=1).head.weight)
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.pretrained=true .*resnet18"):
        ResNet(18, stem="imagenet", pretrained=True).build(LARGE, 65, seed=1)


def test_missing_pretrained_weights_raise_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_args: object, **_options: object) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ValueError, match=r"model\.pretrained=false"):
        ResNet(50, stem="imagenet", pretrained=True).build(XRAY, 2, seed=1)


CONFIGS: dict[str, ModelRecipe] = {
    "mlp": Mlp(),
    "mnist_cnn": MnistCnn(),
    "cnn": Cnn(),
    "digits_cnn": DigitsCnn(),
    "small_cnn": SmallCnn(),
    "unet": UNet(),
    "vgg11": Vgg11(),
    "resnet18": ResNet(18),
    "resnet50": ResNet(50),
    "cct7_3x1": Cct7(),
    "gru": Gru(),
    "transformer": Transformer(),
    "gpt": Gpt(),
    "torchvision": Torchvision("resnet18"),
    "timm": Timm("resnet10t"),
    "huggingface": HuggingFaceModel("bert"),
}


def test_tests_cover_every_configuration_file_of_a_model() -> None:
    assert {path.stem for path in (CONF / "model").glob("[!_]*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_file_of_a_model_lists_all_settings_and_defaults(
    name: str, tmp_path: Path
) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    (tmp_path / "config.yaml").write_text(
        f"defaults: [_self_, model: {name}]\nhydra: {{searchpath: ['file://{CONF}']}}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        options = OmegaConf.to_container(compose("config").model)
    recipe = CONFIGS[name]
    target = options.pop("_target_")
    assert target == f"{type(recipe).__module__}.{type(recipe).__name__}"
    stored = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    assert stored == dataclasses.asdict(recipe)  # an option without a line could not be overridden


def test_unet_has_an_output_at_each_pixel() -> None:
    for norm in ("none", "batch", "group"):
        net = UNet(width=4, levels=2, norm=norm).build((3, 16, 24), 5, seed=0)
        assert net(torch.zeros(2, 3, 16, 24)).shape == (2, 5, 16, 24)
        assert not is_split(net)
    # 3x3 convolutions with 64, 128, 256, 512 and 1024 maps: the paper's network
    paper = UNet(width=64, levels=4, norm="none").build((1, 32, 32), 2, seed=0)
    assert count(paper.parameters()) == 31_030_658  # the usual count
    with pytest.raises(ValueError, match=r"model\.levels=3"):
        UNet(levels=3).build((1, 12, 16), 2, seed=0)
