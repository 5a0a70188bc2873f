"""Test overrides with letters of any language, and with signs that Hydra itself would reject."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysim.commands.sweep.overrides import sort_overrides
from raysim.commands.sweep.space import Choice
from raysim.experiment.compose import compose
from raysim.experiment.overrides import read_override
from raysim.experiment.run_overrides import expand_override, single_override
from raysim.primitives.errors import RefusedError

TEXTS = [
    "/home/ü/x",
    "/daten/größe 2/bilder",
    "C:\\Daten\\Ärzte",
    "数据/训练集",
    "データ/画像 一覧",
    "данные",
    "مجلد/صور",
    "de\u0301composé",
    "\U0001f642/x",
    "a=b",
    "/mnt/run=3/lr=0.1",
    "~/data",
    "it#1!",
    "a;b&c^d`e<f>g",
    "/home/My Data (1)/train",
    "5ü",
    "nullü",
    "1e3é",
    "ü\\=x",
    "Zq0000fcZ/ü",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", ["out", "data.root"])
def test_text_override_can_contain_special_characters_without_quotes(key: str, text: str) -> None:
    expected = text.replace("\\=", "=")  # an escape that Hydra's grammar knows
    assert read_override(f"{key}={text}").value == expected
    config = compose(["data=mnist", f"{key}={text}"])
    assert (config.out if key == "out" else config.data.root) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[ü,b]", ["ü", "b"]),
        ("[数据, 'a,ü', 1, null]", ["数据", "a,ü", 1, None]),
        ("{ü: {ä: 1}, b: [é]}", {"ü": {"ä": 1}, "b": ["é"]}),
        ("'ü, (a) = b'", "ü, (a) = b"),
        ('"/home/ü, x"', "/home/ü, x"),
        ("${ü}", "${ü}"),
        ("3", 3),
        ("true", True),
        ("1e-3", 1e-3),
        ("", ""),
        ("int('3')", 3),
    ],
)
def test_spelling_of_an_override_value_determines_its_python_type(
    value: str, expected: Any
) -> None:
    found = read_override(f"x={value}")
    assert found.value == expected
    assert type(found.value) is type(expected)


def test_study_overrides_can_contain_letters_of_any_language() -> None:
    assert expand_override("data.root=/ü/a,/日/b=c") == (
        "data.root",
        ["data.root=/ü/a", "data.root=/日/b=c"],
    )
    assert expand_override("x='ü,1',é") == ("x", ["x='ü,1'", "x=é"])


def test_sweep_overrides_can_contain_letters_of_any_language() -> None:
    sweep = sort_overrides(["data.root=/ü/a,/日/b", "out=/é=1", "seed=0..2"])
    assert sweep.space["data.root"] == Choice(("/ü/a", "/日/b"))
    assert sweep.space["seed"] == Choice((0, 1, 2))
    assert sweep.fixed == ["out=/é=1"]


def test_option_names_and_paths_can_contain_letters_of_any_language(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "größe.yaml").write_text(
        "_target_: raysim.data.sources.Mnist\nroot: null\n"
    )
    assert compose(["data=größe", "data.root=/ä"], [tmp_path]).choices.data == "größe"


@pytest.mark.parametrize(
    "text",
    [
        "out=a(b",
        "größe=1",
        "out=größe,klein",
        "ü",
        "rounds=3 seed=ü",
        "out=\udcff",
        "~out",
        "+out=ü",
    ],
)
def test_error_shows_an_override_as_the_user_wrote_it(text: str) -> None:
    with pytest.raises(RefusedError) as refused:
        compose([text])
    sentence = str(refused.value)
    assert any(part in sentence for part in (text, repr(text), text.partition("=")[0]))
    assert "Zq" not in sentence


def test_error_of_interval_override_suggests_command_sweep_and_not_command_study() -> None:
    with pytest.raises(RefusedError, match="raysim sweep") as refused:
        single_override("local.lr=interval(0.01,1)")
    assert "raysim study" not in str(refused.value)


@pytest.mark.parametrize("text", ["method=glob(*)", "seed=shuffle(1,2)"])
def test_error_of_glob_or_shuffle_in_an_override_suggests_only_a_single_value(text: str) -> None:
    with pytest.raises(RefusedError, match="gives several values") as refused:
        single_override(text)
    key = text.partition("=")[0]
    assert str(refused.value).endswith(f"Write {key}=VALUE")


@pytest.mark.parametrize("read", [single_override, expand_override])
def test_override_that_renames_a_group_is_refused(read: Callable[[str], object]) -> None:
    with pytest.raises(RefusedError, match="renames a group"):
        read("method@x=fedavg,fedprox")


def test_error_of_a_path_with_a_comma_shows_how_to_quote_it() -> None:
    with pytest.raises(RefusedError, match=r"data\.root=\"a,b\""):
        single_override("data.root=/home/a,/b")
    assert single_override('data.root="/home/a,b"').value == "/home/a,b"
