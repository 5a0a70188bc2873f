"""Test options and classes of users' packages: installed ones, and ones passed with --allow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysim import cli
from raysim.commands.methods import find_methods
from raysim.commands.submit.package import JobCommand, with_plugins
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.groups import find_groups
from raysim.experiment.instantiate import resolve
from raysim.experiment.plugins import conf_folders_of, installed_packages
from raysim.primitives.errors import RefusedError

METHOD = """
from raysim import Method

class Quiet(Method):
    name = "quiet"
    paper = "a test"
"""
OBSERVER = """
from raysim import Observer

class Diary(Observer):
    def __init__(self, word):
        self.word = word

    def on_round(self, run, event):
        print(self.word, event.row["round"], "is over")
"""
SMALL = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "data.samples=60",
        "partition=iid",
        "partition.clients=3",
    ),
    *("schedule.cohort=2", "model=mlp", "rounds=1", "out=run"),
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a Python package into the folder "quietly", and yield the path of this folder.

    The package defines a method, which `method=quiet` chooses. When the test starts, the current
    folder contains only "quietly".
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    place = tmp_path / "quietly"
    (place / "conf" / "method").mkdir(parents=True)
    (place / "__init__.py").write_text(METHOD)
    (place / "conf" / "method" / "quiet.yaml").write_text("quiet: {_target_: quietly.Quiet}\n")
    installed_packages.cache_clear()
    yield place
    installed_packages.cache_clear()
    sys.modules.pop("quietly", None)


def install(package: Path) -> None:
    """Write the files by which an installer registers a package with an entry point."""
    folder = package.parent / "quietly-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: quietly\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[raysim.plugins]\nquietly = quietly\n")
    sys.path.insert(0, str(package.parent))


def test_installed_package_needs_no_allow_flag(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(package)
    assert installed_packages() == ("quietly",)
    assert find_groups().files["method"]["quiet"] == package / "conf" / "method" / "quiet.yaml"
    assert "quietly" not in sys.modules, "nothing is imported before a class of it is named"
    assert cli.call(["run", "method=quiet", *SMALL]) == 0
    assert "quiet" in capsys.readouterr().out
    assert cli.call(["run", "out=run", "resume=latest", "rounds=2"]) == 0
    assert cli.call(["methods"]) == 0 and "quiet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "config", "packed"),
    [
        (["method=fedavg,fedprox+quiet"], None, True),
        (["seed=1"], "stored.yaml", True),
        (["method=fedprox"], None, False),
    ],
)
def test_submitted_job_includes_packages_that_its_options_or_configuration_use(
    words: list[str], config: str | None, packed: bool, package: Path
) -> None:
    install(package)
    Path("stored.yaml").write_text("method:\n  quiet:\n    _target_: quietly.Quiet\n")
    command, extra = with_plugins(
        JobCommand(["study", *words], words, config=config), ["stored.yaml"]
    )
    assert extra == (["stored.yaml", package] if packed else ["stored.yaml"])
    assert command.entrypoint.endswith(f"{words[0]} --allow quietly" if packed else words[0])
    again, same = with_plugins(JobCommand([*command.words], words, config=config), extra)
    assert (again.words, same) == (command.words, extra), "what is named already comes once"


def test_allowed_package_must_be_allowed_again_in_the_next_command(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["run", "method=quiet", *SMALL]) == 2
    assert "method=quiet does not exist" in capsys.readouterr().err
    assert cli.call(["run", "--allow", "quietly", "method=quiet", *SMALL]) == 0
    assert cli.call(["run", "out=run", "resume=latest", "rounds=2"]) == 2
    assert "allow it with --allow quietly" in capsys.readouterr().err
    assert (
        cli.call(["study", "--allow", "quietly", "method=[],[quiet]", *SMALL[:-1], "out=study"])
        == 0
    )
    assert cli.call(["partition", "--allow", "quietly", "method=quiet", *SMALL]) == 0


def test_package_adds_no_options_if_it_is_missing_or_is_a_single_file(package: Path) -> None:
    (package.parent / "single.py").write_text("")
    sys.path.insert(0, str(package.parent))
    assert conf_folders_of(["nowhere", "single", "..", ""]) == []
    assert conf_folders_of(["quietly", "quietly.parts"]) == [package / "conf"]


@pytest.mark.parametrize("words", ["method=quiet", "method=fedprox+quiet", "method=quiet,fedprox"])
def test_error_of_unknown_option_suggests_package_in_the_working_folder(
    words: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["study" if "," in words else "run", words]) == 2
    error = capsys.readouterr().err
    assert "method=quiet" in error
    assert "quietly/conf/method/quiet.yaml" in error
    assert "--allow quietly" in error
    (package / "__init__.py").unlink()
    assert cli.call(["run", "method=quiet"]) == 2
    assert "--allow" not in capsys.readouterr().err, (
        "what Python does not take for a package is none"
    )


def test_argument_allow_is_refused_if_it_is_no_list_or_a_package_is_missing(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["run", "--allow", "quitely", "method=quiet"]) == 2
    assert capsys.readouterr().err.startswith("raysim: allow=quitely")
    with pytest.raises(RefusedError, match=r"^allow=quitely\.parts"):
        build("rounds=1", allow=["quitely.parts"])
    with pytest.raises(RefusedError, match=r"^allow='quietly'"):
        build("rounds=1", allow="quietly")
    assert conf_folders_of(["quitely"]) == [], "a job is told by the nodes, which may have it"


def test_package_in_the_current_folder_can_be_allowed_by_its_name(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = package.parent / "around" / "quietly"
    around.mkdir(parents=True)
    inner = package.rename(around / "quietly")
    monkeypatch.setattr(
        sys, "path", [str(around.parent), *(each for each in sys.path if each)]
    )  # of `python ../t.py`
    with pytest.raises(RefusedError, match=f"^allow=quietly: .*{inner}"):
        build("method=quiet", allow=["quietly"])
    monkeypatch.chdir(around)
    experiment = build(["method=quiet", *SMALL], allow=["quietly"])
    assert [method.name for method in experiment.spec.methods] == ["quiet"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "bad:\n  _target_: quietly.Quiet\n   mu: 1\n",
            r"bad\.yaml .*line 3, column 6",
        ),
        (
            "_target_: quietly.Quiet\n",
            r"bad\.yaml has _target_",
        ),
        ("", r"bad\.yaml is empty"),
        (
            "bad: {_target_: os.system}\n",
            r"method\.bad\._target_=os\.system",
        ),
    ],
)
def test_broken_option_file_is_refused_only_if_the_option_is_chosen(
    text: str, said: str, package: Path
) -> None:
    (package / "conf" / "method" / "bad.yaml").write_text(text)
    assert build(["method=quiet", *SMALL], allow=["quietly"]).spec.methods
    with pytest.raises(RefusedError, match=said):
        build(["method=quiet+bad", *SMALL], allow=["quietly"])
    with pytest.raises(RefusedError, match=said):
        find_methods(["quiet"], [str(package / "conf")], ["quietly"])


def test_installed_option_with_the_name_of_a_built_in_one_is_refused(package: Path) -> None:
    (package / "conf" / "method" / "fedprox.yaml").write_text(
        "fedprox: {_target_: quietly.Quiet}\n"
    )
    install(package)
    with pytest.raises(
        RefusedError,
        match=r"quietly/conf/method/fedprox\.yaml",
    ):
        compose(["method=[]"])


def test_option_file_of_a_later_folder_replaces_that_of_an_earlier_folder(tmp_path: Path) -> None:
    for name, speed in (("one", 11.0), ("two", 12.0)):
        (folder := tmp_path / name / "fleet").mkdir(parents=True)
        (folder / "ideal.yaml").write_text(
            f"_target_: raysim.simulation.fleet.Ideal\nspeed: {speed}\n"
        )
        (tmp_path / name / "config.yaml").write_text(
            "rounds: 1\n"
        )  # the user's own file is no part of it
    found = to_dict(compose([], [tmp_path / "one", tmp_path / "two"]))
    assert found["fleet"]["speed"] == 12.0 and found["rounds"] > 1
    assert (
        find_groups([tmp_path / "one"]).files["fleet"]["ideal"] == tmp_path / "one/fleet/ideal.yaml"
    )


def test_class_of_an_option_must_be_in_an_installed_or_allowed_package(package: Path) -> None:
    with pytest.raises(RefusedError, match="allow it with --allow quietly"):
        resolve("quietly.Quiet", "method.quiet")
    install(package)
    installed_packages.cache_clear()
    assert resolve("quietly.Quiet", "method.quiet").__name__ == "Quiet"


# --- observers ------------------------------------------------------------------------------------
def test_observer_chosen_as_an_option_is_also_used_after_resume(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "conf" / "observer").mkdir()
    (package / "conf" / "observer" / "diary.yaml").write_text(
        "diary: {_target_: quietly.Diary, word: round}\n"
    )
    (package / "__init__.py").write_text(OBSERVER)
    allowed = ("run", "--quiet", "--allow", "quietly")
    assert cli.call([*allowed, "observer=diary", "observer.diary.word=lap", *SMALL]) == 0
    assert capsys.readouterr().out == "lap 1 is over\n"
    assert cli.call([*allowed, "out=run", "resume=latest", "rounds=2"]) == 0
    assert capsys.readouterr().out == "lap 2 is over\n"
    assert cli.call([*allowed, "out=run", "resume=latest", "rounds=3", "observer=[]"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.call(["run", "observer=diary", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "quietly/conf/observer/diary.yaml" in error
    assert "--allow quietly" in error
    (package / "conf" / "observer" / "diary.yaml").unlink()
    assert cli.call(["run", "observer=diary", *SMALL]) == 2
    assert (
        "observer=diary does not exist: the valid ones are tensorboard, wandb\n"
        in capsys.readouterr().err
    )
