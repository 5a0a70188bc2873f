"""Write the reference pages: methods, configuration, Python interface and cluster guide.

Descriptions are docstrings and comments of YAML files. Allowed values are read from annotations and
from the errors that a class raises. Traffic is what the methods declare to the planner.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
from mathematics import typeset

from jobs.papers.tables import PAPERS, tables as paper_tables
from raysim.api.composition import check_names, check_together
from raysim.api.declarations import Evaluation, Finetune, Local
from raysim.api.declare import with_required_settings
from raysim.api.method import Method
from raysim.api.setup import MethodDeclaration
from raysim.api.state_values import pack
from raysim.commands.methods import first_line
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import load_yaml as read_yaml, to_dict
from raysim.experiment.describe import hook_names
from raysim.experiment.groups import find_groups as all_groups
from raysim.experiment.instantiate import TARGET, defaults, describe_type, format_value, resolve
from raysim.experiment.settings import ExecutionOptions, RuntimeOptions, Tracking
from raysim.methods import fedavg
from raysim.methods.lora_factors import LORA_METHODS
from raysim.models import SmallCnn
from raysim.models.lora import Lora
from raysim.simulation.load import Loads
from raysim.training.attack import Attack
from raysim.training.run_spec import (
    Checkpoint,
    Faults,
    RunSettings,
    RunSpec,
    StateBudget,
    declare_run,
)

ROOT = Path(__file__).parent.parent
load_yaml, groups, tables = map(functools.cache, (read_yaml, all_groups, paper_tables))
INVALID_VALUES = (-(10**15), 10**15, "no such value")  # a checked option refuses one of them


def write(docs: Path) -> None:
    """Write all reference pages into docs/reference."""
    folder = docs / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    pages = {"configuration": configuration(), "cluster": cluster(), "method_list": method_list()}
    pages |= {"api": api_page()}
    pages |= {"methods/fedavg": fedavg_page()}
    pages |= {f"methods/{option}": method_page(option) for option in groups().files["method"]}
    for name, text in pages.items():
        (path := folder / f"{name}.md").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# --- text -----------------------------------------------------------------------------------------
GREEK = {
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eps": "ε"},
    **{"zeta": "ζ", "eta": "η", "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν"},
    **{"xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "psi": "ψ"},
    **{"omega": "ω", "Delta": "Δ", "Sigma": "Σ", "Theta": "Θ"},
    **{"sum": "∑", "prod": "∏", "grad": "∇", "sqrt": "√"},
}
SIGNS = {"<-": "←", ">=": "≥", "<=": "≤", "->": "→", "+-": "±", "!=": "≠"}
_SYMBOL = re.compile(
    rf"(?<![A-Za-z.`=])({'|'.join(GREEK)})(?![a-z=])|({'|'.join(map(re.escape, SIGNS))})"
)


def formula(line: str) -> str:
    """Return a line of a formula with Greek letters and mathematical signs.

    Columns keep their places: the letters that a word loses are added to the next wide gap.
    """
    cells = re.split(r"( {2,})", line)
    lost = 0
    for index, cell in enumerate(cells):
        if index % 2:
            cells[index] = cell + " " * lost
            lost = 0
            continue
        written = _SYMBOL.sub(lambda match: GREEK.get(match[0]) or SIGNS[match[0]], cell)
        lost += len(cell) - len(written)
        cells[index] = written
    return "".join(cells)


def typeset_line(line: str) -> str:
    """Return a line of formulas as mathematics, or as code if it cannot be typeset."""
    tex = typeset(line, formula)
    return formula(line) if tex is None else f"\n$$\n{tex}\n$$\n"


_HEADING = re.compile(r"(?:(?<=\n\n)|\A)([A-Z].*[^.:\n])\n(?=- )")


def prose(text: str, write_code: Callable[[str], str] = str) -> str:
    """Convert a docstring to Markdown. Indented lines stay code, and `<` elsewhere is escaped.

    A line becomes a heading if it starts a paragraph with a capital letter and a list follows at
    once. The line must not end like a sentence or with a colon.

    write_code: function that changes the lines of code.
    """
    lines = inspect.cleandoc(text).split("\n")
    plain = (
        write_code(line)
        if line.startswith("    ")
        else line.replace("``", "`").replace("<", "&lt;")
        for line in lines
    )
    return _HEADING.sub(r"## \1\n\n", "\n".join(plain))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, or "" without rows."""
    lines = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    titles = list(head)
    lines = [" | ".join(titles), " | ".join(["---"] * len(titles)), *lines] if lines else []
    return "".join(f"| {line} |\n" for line in lines)


def code(value: object) -> str:
    """Format a value as inline code."""
    return f"`{format_value(value)}`"


def first_sentence(text: str | None) -> str:
    """Return the first line of a docstring."""
    return (text or "").strip().partition("\n")[0]


# --- what an option may be ------------------------------------------------------------------------
def allowed(make: Callable[..., object], option: str) -> str:
    """Return the values that a class allows for an option, from the error of an invalid value."""
    for value in INVALID_VALUES:
        try:
            make(**{option: value})
        except (ValueError, TypeError, AttributeError) as error:
            sentence = re.split(r"; did you mean|\.$", str(error))[0]
            found = re.search(
                rf"\b{option}=\S.*? (?:must be|does not exist: use one of) ([^:]*)", sentence
            )
            if found:
                return found[1].replace("'", "")
    return ""


def kind(cls: Callable[..., object], option: str) -> str:
    """Describe the type that the annotation of an option allows."""
    try:
        hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
    except (NameError, TypeError):
        return ""
    text = re.sub(
        r"a mapping with the keys [\w, ]+?(?= or |$)",
        "a mapping",
        describe_type(hints.get(option, object)),
    )
    return "" if text == "a value" else text


def options(
    cls: Callable[..., object], values: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield each option with its default and its allowed values."""
    for option, value in values.items():
        make = functools.partial(cls, **_other_values(values, option))
        descriptions = [kind(cls, option), allowed(make, option)]
        yield option, code(value), "; ".join(dict.fromkeys(filter(None, descriptions)))


def _other_values(values: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the values of the other options, without mappings and references to other keys."""
    result = {}
    for key, value in values.items():
        is_reference = str(value).startswith("${")
        if key != option and not isinstance(value, Mapping) and not is_reference:
            result[key] = value
    return result


# --- methods --------------------------------------------------------------------------------------
@functools.cache
def parts(option: str) -> dict[str, dict[str, Any]]:
    """Return the methods in an option's file in `conf/method`, with their values."""
    return load_yaml(groups().files["method"][option])


@functools.cache
def instances() -> dict[str, Method]:
    """Return every method by its name, with the values of its file."""
    methods = {}
    for option in groups().files["method"]:
        nodes = parts(option)
        if "${" in str(nodes):  # refers to other keys
            nodes = to_dict(compose([f"method=[{option}]"]))["method"]
        for name, node in nodes.items():
            arguments = {key: value for key, value in node.items() if key != TARGET}
            methods[name] = resolve(node[TARGET], name)(**arguments)
    return methods


def method_list() -> str:
    """Return the page that lists all methods."""
    entries: list[tuple[str, str, str | None]] = [("fedavg", fedavg.PAPER, fedavg.__doc__)]
    for option in groups().files["method"]:
        method = instances()[next(iter(parts(option)))]
        entries.append((option, method.paper, inspect.getmodule(type(method)).__doc__))  # type: ignore[union-attr]
    rows = []
    for option, paper, text in entries:
        summary = prose(first_line((text or "").strip())).rstrip(".")
        rows.append((f"[{option}](methods/{option}.md)", paper, summary))
    pages = "```{toctree}\n:hidden:\n:glob:\n\nmethods/*\n```"
    return f"# All methods\n\n{table(('option', 'paper', 'summary'), rows)}\n{pages}\n"


def fedavg_page() -> str:
    """Return the page of FedAvg, the empty list of methods."""
    about = f"*{fedavg.PAPER}*. FedAvg is the empty list of methods, `method=fedavg`.\n\n"
    return f"# fedavg\n\n{about}{prose(fedavg.__doc__ or '', typeset_line)}\n"


def method_page(option: str) -> str:
    """Return the page of one option of the group `method`."""
    names = list(parts(option))
    if names != [option]:
        return _several_parts(option, names)
    method = instances()[option]
    module = importlib.import_module(type(method).__module__)
    sections = [
        f"# {option}\n\n*{method.paper}*. Use it with `method={option}`, or combined: "
        f"`method={option}+OTHER`.\n",
        prose(module.__doc__ or "", typeset_line),
        _options(method),
        _hooks(method),
        _traffic(method),
        _combinations(method),
        _published(option),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _several_parts(option: str, names: list[str]) -> str:
    module = importlib.import_module(type(instances()[names[0]]).__module__)
    files = groups().files["method"]
    links = ", ".join(f"[{name}]({name}.md)" if name in files else f"`{name}`" for name in names)
    intro = f"# {option}\n\n`method={option}` stands for a list of the methods {links}.\n"
    text = prose(module.__doc__ or "", typeset_line)
    return "\n\n".join([intro, text, _published(option)]) + "\n"


def _options(method: Method) -> str:
    values = {key: value for key, value in parts(method.name)[method.name].items() if key != TARGET}
    rows = []
    comments = _comments(method.name)
    for name, *rest in options(type(method), values):
        meaning = comments.get(name) or described(type(method), name)
        rows.append((f"`method.{method.name}.{name}`", *rest, meaning.replace("<", "&lt;")))
    about = prose(type(method).__doc__ or "")
    if not rows:
        return f"## Options\n\n{about}\n\nThis method has no options."
    return f"## Options\n\n{about}\n\n{table(('key', 'default', 'allowed', 'meaning'), rows)}"


def _comments(name: str) -> dict[str, str]:
    """Return the comment of each option in the file of a method."""
    path = groups().files["method"][name]
    comments = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        match = _LINE.match(line)
        if match and match[4]:
            comments[match[2]] = match[4]
    return comments


def _hooks(method: Method) -> str:
    rows = []
    for slot in hook_names(type(method)):
        about = first_sentence(getattr(Method, slot).__doc__)
        rows.append((f"`{slot}`", about.replace("<", "&lt;")))
    if not rows:
        return "## Hooks\n\nThis method overrides no hooks; it only declares what the run needs."
    return f"## Hooks\n\n{table(('hook', 'what it does'), rows)}"


@functools.cache
def small_run() -> RunSpec:
    """Return a run on a small network with BatchNorm."""
    words = "data=synthetic data.samples=200 data.test_samples=20 data.domains=2 partition=iid"
    words += " partition.clients=4 schedule.cohort=4 model=small_cnn model.norm=batch"
    more = "local.batch=10 runtime=inprocess device=cpu"
    return build([*words.split(), *more.split()]).spec


def _traffic(method: Method) -> str:
    """Return what a client receives, sends and keeps besides the vector."""
    spec = _alone(method)
    if method.name == "dp_fedavg":  # it refuses BatchNorm
        spec = replace(spec, model=SmallCnn())
    declarations = declare_run(spec)
    (declared,), layout = declarations.methods, declarations.layout
    loads = Loads(spec, declarations, np.full(4, 40))
    load, plain = loads(0, 5, 3, 3), spec.settings.local.budget(40)
    state = declared.client_states(40)
    rows = [
        (
            "a client receives, besides the vector",
            _floats(load.down - layout.shared, layout.shared),
        ),
        ("a client sends, besides its update", _floats(load.up - layout.shared, layout.shared)),
        ("computation of a client, compared with plain training", _samples(load.work - plain)),
        (
            "parameters that never travel",
            f"{layout.personal:,} floats" if layout.personal else "none",
        ),
        ("a client keeps between its jobs", _state(state)),
        (
            "a client sends once, before the first round",
            "yes" if declared.contribute else "nothing",
        ),
        ("weights of clients, unless `weighting` is set", method.weighting),
    ]
    about = (
        f"For a network of {layout.shared:,} shared floats and a client with 40 samples "
        "(`local.epochs=5`). Virtual time and the columns of traffic in the history count the same:"
    )
    return f"## Traffic and state\n\n{about}\n\n{table(('what', 'how much'), rows)}"


def _floats(count: float, shared: int) -> str:
    if not count:
        return "nothing"
    share = f", {count / shared:.2f} of the vector" if shared else ""
    return f"{count:,.0f} {'float' if count == 1 else 'floats'}{share}"


def _samples(count: float) -> str:
    if not count:
        return "the same"
    return f"as for {abs(count):g} {'more' if count > 0 else 'fewer'} training samples"


def _state(state: Mapping[str, Any]) -> str:
    tensors = pack(state)
    named = (f"`{name}` {list(tensor.shape)}" for name, tensor in tensors.items())
    return ", ".join(named) or "nothing"


def _alone(method: Method) -> RunSpec:
    """Return the small run with one method, its weights of clients and the settings it requires."""
    spec = small_run()
    local = with_required_settings(spec.settings.local, method)
    settings = replace(spec.settings, local=local, weighting=method.weighting)
    model = _small_cnn(method, norm="batch")
    return replace(spec, model=model, methods=(method,), settings=settings)


def _small_cnn(method: Method, norm: Literal["none", "batch"] = "none") -> SmallCnn:
    """Return the small network, with adapters for a method that is about them."""
    rank = 2 if method.name in LORA_METHODS else 0
    return SmallCnn(norm=norm, lora=Lora(rank=rank))


@functools.cache
def _declared(name: str) -> MethodDeclaration:
    """Return what a method declares in the small run, on a model without BatchNorm."""
    method = instances()[name]
    spec = replace(_alone(method), model=_small_cnn(method))
    return declare_run(spec).methods[0]


def _combinations(method: Method) -> str:
    rows = []
    for option, other in instances().items():
        if method.name == other.name:
            continue
        try:
            check_names([method, other])
            check_together([_declared(method.name), _declared(option)])
        except ValueError as error:
            rows.append((f"`{other.name}`", _reason(str(error))))
    if not rows:
        return "## Combinations\n\nIt can be combined with every other method."
    count = len(instances()) - 1 - len(rows)
    return (
        f"## Combinations\n\nIt can be combined with {count} of the other {len(instances()) - 1} "
        f"methods. A list with one of these is refused:\n\n{table(('method', 'reason'), rows)}"
    )


def _reason(sentence: str) -> str:
    text = sentence.removesuffix("; keep one of them")
    text = re.sub(r"^method '\w+' and method '\w+' ", "", text)
    return re.sub(r"^method '(\w+)' cannot be combined with method '\w+': ", "", text)


def _published(option: str) -> str:
    names = set(parts(option))
    presets = [
        name
        for name, path in groups().files["experiment"].items()
        if names & _methods_of_preset(path)
    ]
    printed = [
        table.name
        for paper in PAPERS
        for table in tables(paper).values()
        if any(names & set(cell.methods) or option in cell.methods for cell in table.cells)
    ]
    lines = []
    if presets:
        lines.append(
            "Presets with the papers' values: "
            f"{', '.join(f'`experiment={name}`' for name in presets)}."
        )
    if printed:
        commands = ", ".join(f"`uv run python -m jobs.papers.report {name}`" for name in printed)
        lines.append(f"Compare your runs with the published numbers: {commands}.")
    if lines:
        return "## Published settings and numbers\n\n" + "\n\n".join(lines)
    return ""


@functools.cache
def _methods_of_preset(preset: Path) -> set[str]:
    """Return the methods that a preset has values for, including those of its parent presets."""
    node = load_yaml(preset)
    root = next(folder for folder in preset.parents if folder.name == "experiment").parent
    methods = set(node.get("method") or {})
    for parent in node.get("defaults", ()):
        if isinstance(parent, str) and parent.startswith("/"):
            methods |= _methods_of_preset(root / f"{parent[1:]}.yaml")
    return methods


# --- settings -------------------------------------------------------------------------------------
GROUPS = {
    "method": "A list of methods; [all methods](method_list.md) has the keys of each.",
    "schedule": "When clients are dispatched and when their updates are aggregated.",
    "selection": (
        "Which of the idle, available clients are dispatched; see [Selection](../selection.md)."
    ),
    "fleet": "How fast clients train and send on the virtual clock, and when they are available.",
    "topology": "How many models the server has, which clients each serves, and how they exchange.",
    "compression": (
        "How updates and steps of the server are encoded; see [Compression](../compression.md)."
    ),
    "data": "Where the samples come from, and how they are changed.",
    "partition": "Which client holds which samples.",
    "model": "The network.",
    "loss": "The loss that clients minimise.",
    "learner": (
        "What trains in place of the network and raysim's steps; "
        "see [Your own training loop](../own_training.md)."
    ),
    "local": "How a client trains.",
    "evaluate": "What is scored, and how often.",
    "runtime": "Where workers run, and what resources each of them gets.",
    "tracking": "Where results are logged besides the results folder.",
    "observer": (
        "A list of observers, which follow a run in addition to raysim's own files and pictures."
    ),
    "experiment": "Settings of papers: each option sets values of the other groups.",
    "sweep": "Search spaces of `raysim sweep`.",
}
SETTINGS: dict[str, type] = {  # the class of each section that has no `_target_`
    "": RunSettings,
    "local": Local,
    "evaluate": Evaluation,
    "evaluate.finetune": Finetune,
    "checkpoint": Checkpoint,
    "state": StateBudget,
    "faults": Faults,
    "attack": Attack,
    "runtime": RuntimeOptions,
    "tracking": Tracking,
}


def configuration() -> str:
    """Return the page with every key of every group."""
    known = groups().files
    top = next(iter(known["data"].values())).parents[1]
    texts = [
        "# Configuration\n",
        "Set any key on the command line with an override, `KEY=VALUE`. A group takes the name of "
        "an option, every other key takes a value. The error for a wrong name suggests "
        "the nearest valid one, or lists all of them. This page is generated from the files in "
        "`conf/` and the classes behind them.\n",
        "## The run itself\n",
        _keys(top / "config.yaml", ""),
    ]
    for group in (*GROUPS, *sorted(known.keys() - GROUPS.keys())):
        texts.append(f"## {group}\n\n{GROUPS.get(group, '')}\n")
        files = known.get(group, {})
        if group in ("method", "experiment", "sweep"):
            rows = (
                [(f"`{name}`", _head(path)) for name, path in files.items()]
                if group != "method"
                else []
            )
            texts.append(table(("option", "description"), rows))
            continue
        common = {path: file for file in files.values() for path in _inherited(file)}
        for path, heir in sorted(common.items()):
            texts.append(
                f"### {group}: keys that several options share\n\n{_head(path)}\n\n"
                f"{_keys(path, group, heir)}"
            )
        for name, path in files.items():
            texts.append(f"### {group}={name}\n\n{_about(path)}\n\n{_keys(path, group)}")
    return "\n".join(texts)


def _inherited(path: Path) -> Iterator[Path]:
    for each in load_yaml(path).get("defaults", ()):
        if isinstance(each, str) and each != "_self_":
            yield from _inherited(parent := path.parent / f"{each}.yaml")
            yield parent


def _head(path: Path) -> str:
    """Return the comments of a file that start at the beginning of a line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    comments = (
        line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line
    )
    return " ".join(comments).replace("<", "&lt;")


def _about(path: Path) -> str:
    """Return the comment at the head of a file, or else the docstring of its class."""
    target = load_yaml(path).get(TARGET)
    text = _head(path) or (prose(resolve(target, "").__doc__ or "") if target else "")
    return text


def _keys(path: Path, group: str, heir: Path | None = None) -> str:
    """Return the table of a file's keys.

    heir: a file that names the class, if this one does not.
    """
    node = load_yaml(heir or path)
    cls = resolve(node[TARGET], group) if TARGET in node else None
    rows = []
    for key, value, comment in _lines(path):
        full = f"{group}.{key}" if group else key
        owner, _, leaf = full.rpartition(".")
        if key.rpartition(".")[0] and owner not in SETTINGS:
            make, leaf = None, ""
        else:
            make = SETTINGS.get(owner) or cls
        if not group and owner == "":
            make = (
                RunSettings
                if leaf in {f.name for f in dataclasses.fields(RunSettings)}
                else ExecutionOptions
            )
        meaning = comment or described(make, leaf)
        rows.append(
            (f"`{full}`", f"`{value}`", _allowed_values(make, leaf), meaning.replace("<", "&lt;"))
        )
    return table(("key", "default", "allowed", "meaning"), rows)


def described(cls: type | None, option: str) -> str:
    """Return what the docstring of a class says about an option: "name: meaning."; or ""."""
    if cls is None or not option:
        return ""
    names = "|".join(map(re.escape, inspect.signature(cls).parameters))
    several = rf"(?:(?:{names}), )*"
    for paragraph in re.split(r"\n\s*\n", inspect.getdoc(cls) or ""):
        text = " ".join(paragraph.split())
        start = rf"(?:^|[.;)] ){several}{option}(?:, \w+)*: "
        match = re.search(rf"{start}(.*?)(?=\.? {several}(?:{names}): |\.?$)", text)
        if match:
            return match[1]
    return ""


def _allowed_values(cls: type | None, option: str) -> str:
    if cls is None or option not in inspect.signature(cls).parameters:
        return ""
    values = {key: value for key, value in defaults(cls).items() if value != "???"}
    ((_, _, description),) = options(cls, {option: values.get(option)})
    return description


_LINE = re.compile(r'^( *)"?([A-Za-z_]\w*)"?: *([^#]*?)(?: +# ?(.*))?$')


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a file, each with its value and its comment.

    `_target_` and the keys below `defaults` and `method` are left out. So is a key that has neither
    a value nor a comment.
    """
    above: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        match = _LINE.match(line)
        if match is None:
            continue
        indent, key, value, comment = len(match[1]), match[2], match[3].strip(), match[4] or ""
        above = [parent for parent in above if parent[0] < indent]
        names = [name for _, name in above] + [key]
        above.append((indent, key))
        if names[0] in ("defaults", "method") or TARGET in names or (value == "" and not comment):
            continue
        yield ".".join(names), value or "...", comment


# --- Python ---------------------------------------------------------------------------------------
API = {
    "Runs and results": (
        "Start runs and read their results.",
        "raysim: run build load study sweep report Result StudyResult SweepResult Report",
        "raysim.results.report: Run RunGroup",
    ),
    "Methods": (
        "What a method of your own extends, and what its hooks get.",
        "raysim: Method Learner LocalResult",
        "raysim.api.setup: Setup",
        "raysim.api.local_job: LocalJob PersonalModel",
        "raysim.api.context: Context Batch Outputs Stage Plan",
        "raysim.api.server_view: Aggregation ServerView",
        "raysim.simulation.server: Server",
        "raysim.api.declarations: Task Local Evaluation Participation",
    ),
    "Data and models": (
        "What data, partitions and models of your own extend.",
        "raysim: Source Raw Partitioner Partition CSR ModelRecipe Classifier",
    ),
    "Simulation": (
        "What schedules, fleets and observers of your own extend.",
        "raysim: Schedule Fleet Observer",
    ),
    "Errors": (
        "What raysim raises.",
        "raysim: RefusedError Interrupted TooManyFailuresError ObserverError",
    ),
}


def api_page() -> str:
    """Return the page about the classes and functions for Python, from their docstrings."""
    texts = [
        "# Python interface\n",
        "The classes and functions that your code uses, in the words of their docstrings. "
        "`help(raysim.Method)` shows the same. [From Python](../python.md) explains them by "
        "examples.\n",
    ]
    for title, (about, *places) in API.items():
        texts.append(f"## {title}\n\n{about}\n")
        for place in places:
            module, _, names = place.partition(": ")
            owner = importlib.import_module(module)
            texts += [_api_entry(module, name, getattr(owner, name)) for name in names.split()]
    return "\n".join(texts)


def _api_entry(module: str, name: str, value: Any) -> str:
    """Return the documentation of a class with its public members, or of a function."""
    lines = [f"### {name}\n", f"```text\n{module}.{name}{_signature(value)}\n```\n"]
    lines.append(prose(inspect.getdoc(value) or "") + "\n")
    if inspect.isclass(value):
        for member_name, member in _members(value):
            kind_of = "property" if _is_property(member) else ""
            head = kind_of or _signature(member)
            text = prose(inspect.getdoc(member) or "")
            lines.append(f"**`{member_name}`** `{head}`\n\n{text}\n")
    return "\n".join(lines)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and properties that a class defines and documents."""
    for name, member in vars(cls).items():
        is_documented = callable(member) or _is_property(member)
        if not name.startswith("_") and is_documented and inspect.getdoc(member):
            yield name, member


def _is_property(member: object) -> bool:
    return isinstance(member, (property, functools.cached_property))


def _signature(value: Any) -> str:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"'(\w[\w\[\], .|]*)'(?=[,)\s]|$)", r"\1", signature)


# --- the guide to clusters ------------------------------------------------------------------------
def cluster() -> str:
    """Return jobs/README.md with the files that it links to."""
    folder = ROOT / "jobs"
    text = (folder / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](../")
    links = dict.fromkeys(re.findall(r"\]\(([\w./]+)(?<!\.md)\)", text))
    files = []
    for link in links:
        language = {".yaml": "yaml", ".sh": "bash"}.get(Path(link).suffix, "text")
        files.append(
            f"### {Path(link).name}\n\n"
            f"````{language}\n{(folder / link).read_text(encoding='utf-8')}````\n"
        )
        text = text.replace(f"]({link})", f"](#{Path(link).name.lower().replace('.', '')})")
    return f"{text}\n## The files\n\n" + "\n".join(files)
