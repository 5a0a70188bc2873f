"""Compare ways to train a small GPT on clients: full fine-tuning, DiLoCo and adapters.

    python -m jobs.language_study run runs/language
    python -m jobs.language_study collect runs/language
    python -m jobs.language_study page

`run` trains a base model centrally. Then each method trains this model, with three seeds. After an
interruption, the same command continues. Further arguments are overrides of every run; the study
itself sets `data.root`. `collect` and `page` write docs/studies/language.json, .md and .png.

`run runs/language only=DiLoCo,FedIT` executes the runs of these methods only. Then `collect` keeps
the stored numbers of all other methods, which must belong to the same base model.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from jobs.asynchrony_study import mean
from jobs.command import run_study
from jobs.papers.results import hardware
from jobs.study_curves import curves_figure, draw_panel

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "language.md"
STORE = PAGE.with_suffix(".json")
SEEDS = range(3)
CLIENTS = 8
MODEL = [
    "data=text", "data.tokenizer=bytes", "data.length=128", "model=gpt", "model.width=192",
    "model.heads=6", "model.blocks=6", "weighting=uniform", "local.epochs=null",
    "local.sampling=replacement", "local.optimizer=adamw",
    "checkpoint.every=0", "tracking=none", "runtime=local", "runtime.threads=1",
]  # fmt: skip
BASE = [
    "partition=iid", "partition.clients=1", "partition.test_fraction=0", "schedule.cohort=1",
    "rounds=1", "local.batch=8", "local.steps=3000", "local.lr=0.003", "local.schedule=cosine",
    "local.schedule_over=steps", "local.warmup_steps=100", "local.clip=1.0",
]  # fmt: skip
SETTING = [
    "partition=natural", "partition.test_fraction=0.1", "local.batch=4", "local.steps=25",
    "local.lr=0.001", "local.keep_optimizer=true", "rounds=6", "evaluate.every=2",
    "fleet=lognormal", "fleet.speed=20", "fleet.bandwidth_up=1000000",
    "fleet.bandwidth_down=2500000",
]  # fmt: skip
ROUNDS = [f"schedule.cohort={CLIENTS}"]  # of all clients
ADAPTERS = [
    *ROUNDS, "model.lora.rank=8", "model.lora.layers=[qkv,out,up,down,head]", "local.lr=0.004",
]  # fmt: skip
UNCHANGED = "base"  # a run whose steps are too small to change a weight
METHODS: dict[str, list[str]] = {
    UNCHANGED: [
        "method=fedavg", *ROUNDS, "rounds=1", "evaluate.every=1", "local.steps=1", "local.lr=1e-30",
    ],
    "FedAvg": ["method=fedavg", *ROUNDS],
    "DiLoCo": [
        "method=fedavgm", "method.fedavgm.server_lr=0.7", "method.fedavgm.nesterov=true",
        *ROUNDS,
    ],
    "asynchronous DiLoCo": [
        "method=delayed_nesterov", "schedule=immediate", f"schedule.concurrency={CLIENTS}",
        f"rounds={6 * CLIENTS}", f"evaluate.every={2 * CLIENTS}",
    ],
    "FedIT": ["method=fedavg", *ADAPTERS],
    "FFA-LoRA": ["method=ffa_lora", *ADAPTERS],
    "FedSA-LoRA": ["method=fedsa_lora", *ADAPTERS],
    "FlexLoRA": ["method=flexlora", "method.flexlora.ranks=[2,4,8]", *ADAPTERS],
    "HetLoRA": ["method=hetlora", "method.hetlora.ranks=[2,4,8]", *ADAPTERS],
}  # fmt: skip

# Rates of the clients' AdamW that are tried with the first seed. The other methods have the rate of
# `SETTING` or `ADAPTERS`.
RATES: dict[str, tuple[float, ...]] = {
    "DiLoCo": (0.0001, 0.0003, 0.001),
    "asynchronous DiLoCo": (0.00003, 0.0001, 0.0003),
}
ONLY = "only="  # an argument of `run` that names methods


# --- runs ---------------------------------------------------------------------------------------
def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write topics of Python's documentation as texts for the base model and for 8 clients.

    Every second topic is for the base model. Return its file, and the folder with a file for each
    client.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    base, clients = folder / "base.txt", folder / "clients"
    clients.mkdir(parents=True, exist_ok=True)
    base.write_text("\n".join(topics[name] for name in names[::2]), encoding="utf-8")
    for number, part in enumerate(np.array_split(np.array(names[1::2]), CLIENTS)):
        text = "\n".join(topics[name] for name in part.tolist())
        (clients / f"client_{number}.txt").write_text(text, encoding="utf-8")
    return base, clients


def folder_name(method: str) -> str:
    """Return the prefix that the folder names of a method's runs start with."""
    return method.replace(" ", "_").lower()


def folder_of(folder: Path, method: str, seed: int, rate: float | None = None) -> Path:
    """Return the folder of a run.

    folder: the folder of all runs.
    rate: the learning rate of the run; None if the learning rate of the method is fixed, because
    the method is not in `RATES`.
    """
    name = folder_name(method)
    if rate is not None:
        name += f"-lr_{rate:g}"
    return folder / f"{name}-{seed}"


def is_finished(out: Path) -> bool:
    """Return True if the run in this folder has finished."""
    return (out / "summary.json").exists()


def tried_rates(folder: Path, method: str) -> dict[float, float]:
    """Map each learning rate of a method to the perplexity of its run on the first seed.

    The learning rates are those in `RATES[method]` whose run has finished.
    """
    outs = {rate: folder_of(folder, method, SEEDS[0], rate) for rate in RATES[method]}
    return {rate: measured(out)["perplexity"] for rate, out in outs.items() if is_finished(out)}


def best_rate(folder: Path, method: str) -> float | None:
    """Return the learning rate at which a method has the lowest perplexity on the first seed.

    Return None if `RATES` lacks the method, whose rate is then fixed. Raise ValueError if a run at
    one of the rates `RATES[method]` is missing.
    """
    if method not in RATES:
        return None
    tried = tried_rates(folder, method)
    if len(tried) < len(RATES[method]):
        raise ValueError(
            f"{folder}: runs of {method} at some learning rates are missing. Make them with the "
            "subcommand 'run' of this script."
        )
    return min(tried, key=lambda rate: tried[rate])


def run_all(folder: Path, more: Sequence[str]) -> None:
    """Train the base model centrally, then execute the missing runs, one seed after another.

    Each run starts from the base model.
    more: overrides for every run. With "only=DiLoCo,FedIT", only runs of these methods and of
    `UNCHANGED` are executed.
    """
    import raysim

    chosen = list(METHODS)
    for argument in more:
        if argument.startswith(ONLY):
            chosen = [UNCHANGED, *argument.removeprefix(ONLY).split(",")]
    more = [argument for argument in more if not argument.startswith(ONLY)]
    unknown = set(chosen) - METHODS.keys()
    if unknown:
        raise ValueError(f"{ONLY}{unknown.pop()} is not a method. Use {', '.join(METHODS)}.")

    base_text, client_texts = write_texts(folder)
    base = folder / "base"
    if not is_finished(base):
        resume = ["resume=latest"] if base.exists() else []
        words = [*MODEL, *BASE, f"out={base}", *resume, *more, f"data.root={base_text}"]
        raysim.run(words, quiet=True)
    start = [*more, f"data.root={client_texts}", f"init.file={base / 'model.safetensors'}"]
    for seed, method in product(SEEDS, chosen):
        rates: Sequence[float | None] = RATES.get(method, ())
        if seed != SEEDS[0] or not rates:
            rates = [best_rate(folder, method)]
        for rate in rates:
            out = folder_of(folder, method, seed, rate)
            if is_finished(out):
                continue
            print(out.name, flush=True)
            own = [] if rate is None else [f"local.lr={rate:g}"]
            words = [*MODEL, *SETTING, *METHODS[method], *own, f"seed={seed}", f"out={out}"]
            resume = ["resume=latest"] if out.exists() else []
            raysim.run([*words, *resume, *start], quiet=True)


def measured(folder: Path) -> dict[str, Any]:
    """Return the numbers of one finished run for the page docs/studies/language.md.

    folder: the folder that the run has written.
    """
    from safetensors.numpy import load_file

    from raysim.results.history import read_history
    from raysim.results.stored_runs import SAMPLES

    rows: list[Any] = [*read_history(folder / "history.parquet")]
    summary = json.loads((folder / "summary.json").read_text())
    scored = [row for row in rows if row["perplexity"] is not None]
    samples = folder / SAMPLES
    weights = load_file(folder / "model.safetensors")

    def megabytes(row: Any) -> float:
        return 4e-6 * float(row["floats_down"] + row["floats_up"])

    curve = []
    for row in scored:
        costs = [round(row["virtual_seconds"], 3), round(megabytes(row), 4)]
        curve.append([*costs, round(row["perplexity"], 4)])
    return {
        "perplexity": scored[-1]["perplexity"],
        "central": scored[-1].get("perplexity_global"),
        "accuracy": scored[-1]["accuracy"],
        "megabytes": megabytes(rows[-1]),
        "seconds": rows[-1]["virtual_seconds"],
        "curve": curve,
        "parameters": sum(values.size for values in weights.values()),
        "text": samples.read_text(encoding="utf-8") if samples.exists() else "",
        "model_sha256": summary["model_sha256"],
        "device": hardware(summary["identity"]),
        "libraries": summary["identity"]["libraries"],
    }


def collect(folder: Path) -> None:
    """Write the numbers of the finished runs to docs/studies/language.json.

    A seed with an unfinished run is left out. A method without runs in `folder` keeps its stored
    numbers. Raise ValueError if the stored runs had another base model than those in `folder`.
    Raise it, too, if a run that `best_rate` needs is missing.
    """
    present = [method for method in METHODS if [*folder.glob(f"{folder_name(method)}-*")]]
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    store: dict[str, Any] = {method: {} for method in METHODS}
    for seed in SEEDS:
        outs = {
            method: folder_of(folder, method, seed, best_rate(folder, method)) for method in present
        }
        if not all(map(is_finished, outs.values())):
            continue
        for method in METHODS:
            if method in outs:
                store[method][str(seed)] = measured(outs[method])
            else:
                store[method][str(seed)] = stored[method][str(seed)]
        if len(present) == len(METHODS):
            continue
        base, stored_base = (some[UNCHANGED][str(seed)] for some in (store, stored))
        if base["model_sha256"] != stored_base["model_sha256"]:
            raise ValueError(
                f"{folder} has another base model than {STORE.name}, so the numbers of its methods "
                "cannot be shown with the stored ones. The base model depends on the device and on the "
                "versions of the software. Use the device and the versions of the stored runs, or run "
                "all methods again."
            )
    for method in RATES:
        if method in present and str(SEEDS[0]) in store[method]:
            store[method][str(SEEDS[0])]["rates"] = tried_rates(folder, method)
    STORE.write_text(json.dumps(store, indent=1) + "\n")


# --- the page -----------------------------------------------------------------------------------
def table(store: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each method: means over the seeds.

    store: the stored numbers of the runs, by method and seed.
    """
    heads = ["method", "perplexity, clients", "perplexity, central", "next token right, %"]
    heads += ["MB, down and up", "virtual s"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for method, by_seed in store.items():
        runs = list(by_seed.values())
        cells = [method, mean([one["perplexity"] for one in runs], "{:.2f}")]
        has_central = all(one["central"] is not None for one in runs)
        central = mean([one["central"] for one in runs], "{:.2f}") if has_central else "—"
        cells += [central, mean([100 * one["accuracy"] for one in runs], "{:.1f}")]
        if method == UNCHANGED:
            cells += ["—", "—"]
        else:
            cells += [mean([one["megabytes"] for one in runs], "{:.1f}")]
            cells += [mean([one["seconds"] for one in runs], "{:.0f}")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(store: dict[str, Any], path: Path) -> None:
    """Draw one panel with perplexity against virtual time, and one with perplexity against traffic.

    Lines show means over the seeds, with bands from the lowest to the highest perplexity.
    store: the runs' numbers, by method and seed.
    """
    titles = ("virtual seconds", "MB, down and up")
    with curves_figure(path, 2, 5, None, "perplexity, mean of the clients") as axes:
        for place, (ax, title) in enumerate(zip(axes, titles, strict=True)):
            curves_of: dict[str, Sequence[np.ndarray]] = {
                method: [np.array(one["curve"])[:, [place, -1]] for one in by_seed.values()]
                for method, by_seed in store.items()
                if method != UNCHANGED
            }
            draw_panel(ax, curves_of, title, "{x:g}")


PARAGRAPH = """The text is the reference that ships with Python (`pydoc_data.topics`), as bytes. Every second topic
trains a base model, a GPT of {parameters:,} parameters; the others belong to 8 clients, about five
neighbouring topics each. All methods start from the base and train with AdamW, 25 steps of 4 rows
of 128 tokens per job, six jobs of each client (asynchronously as many updates in all). Adapters
have rank 8, also that of the output layer; FlexLoRA and HetLoRA draw 2, 4 or 8 for each client. The
{rates} Clients have log-normal speeds and send 1 MB per second."""
TEXT = """# A small GPT on clients: full fine-tuning, DiLoCo and adapters

This study compares methods that fine-tune a language model on clients, by perplexity, traffic and
virtual time.

{paragraph}

{seeds} Scores are those of the clients' own tests, and of the ends of all texts (central).
FedSA-LoRA has a model for each client, so it has no central score.

{conclusions}

![Perplexity against virtual time and traffic](language.png)

{table}

What the model of each method writes (the first seed; `samples.txt` in the folder of a run):

{texts}

All runs share `{setting}`; `language.json` has the digest of each run. They were made on {device};
on two CPU cores all of them take less than two hours.
To repeat:

```bash
bash jobs/studies.sh language
```
"""
# What the stored numbers show.
CONCLUSIONS = """**Full fine-tuning is best, with FedAvg and DiLoCo alike.** DiLoCo is 0.01 of perplexity behind
FedAvg on the clients' tests (0.00 to 0.02), with a third of its learning rate: its server momentum
makes longer steps than FedAvg's mean. With FedAvg's rate, 0.001, it is 0.08 behind (first
seed).

**Adapters come close at a fraction of the cost.** FedIT is 0.09 behind FedAvg (0.06 to 0.10), with
6 % of the bytes and less than half of the virtual time. FFA-LoRA, FlexLoRA and HetLoRA send about
half of FedIT's bytes. FlexLoRA is 0.05 behind FedIT, FFA-LoRA and HetLoRA are 0.09 behind.

**Asynchronous DiLoCo makes as many updates in less than half of the time**, and is 0.17 behind
FedAvg (0.12 to 0.24): stale updates add to the momentum, so it needs a tenth of FedAvg's rate.

**FedSA-LoRA overfits.** Its second factor never leaves a client, and the texts of a client are
short: after the second round its test perplexity is 3.80, after the sixth 3.98. More text for each
client, or fewer rounds, would show it at its best."""


def describe_rates(store: dict[str, Any]) -> str:
    """Return how the learning rates were chosen: a sentence without its first word, "The"."""
    chosen = []
    for method in RATES:
        rates = store[method][str(SEEDS[0])].get("rates")
        if rates:
            best = min(rates, key=lambda rate: rates[rate])
            chosen.append(f"that of {method} ({best}) the best one of {', '.join(rates)}")
    names = "FedAvg" if chosen else "FedAvg and DiLoCo"
    fedavg = f"rate of {names} is the better one of 0.0003 and 0.001 for FedAvg"
    adapters = "that of all adapters the better one of 0.001 and 0.004 for FedIT"
    return f"{', '.join([fedavg, *chosen, adapters])}."


def describe_seeds(store: dict[str, Any]) -> str:
    """Return a sentence about the seeds, which are the same for all methods."""
    seeds = [set(by_seed) for by_seed in store.values()]
    assert all(one == seeds[0] for one in seeds), "collect stores seeds that all methods have"
    if len(seeds[0]) == 1:
        return f"Numbers are of seed {min(seeds[0])} alone, so differences may be chance."
    names = ", ".join(sorted(seeds[0]))
    return f"Numbers are means over the seeds {names} ± sample standard deviation."


def page_text(store: dict[str, Any]) -> str:
    """Return the text of the page docs/studies/language.md.

    store: the numbers of the runs, as docs/studies/language.json has them.
    """
    texts = []
    for method, by_seed in store.items():
        text = by_seed["0"]["text"]
        if text:
            quoted = text.replace("```", "'''")
            texts.append(f"{method}:\n\n```text\n{quoted}\n```")
    paragraph = PARAGRAPH.format(
        parameters=next(iter(store.values()))["0"]["parameters"], rates=describe_rates(store)
    )
    return TEXT.format(
        paragraph=textwrap.fill(paragraph, 100),
        conclusions=CONCLUSIONS,
        seeds=describe_seeds(store),
        table=table(store),
        texts="\n\n".join(texts),
        setting=" ".join([*MODEL, *SETTING]),
        device=store[UNCHANGED]["0"]["device"],
    )


def write_page() -> None:
    """Write the page docs/studies/language.md and its picture.

    The picture is language.png, in the folder of the page. The numbers come from
    docs/studies/language.json, which `collect` wrote.
    """
    store = json.loads(STORE.read_text())
    PAGE.write_text(page_text(store))
    draw(store, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    run_study(__doc__, run_all, collect, write_page)
