import shutil

import pytest

pytest.importorskip("flwr")

from raysim.cli import call
from raysim.commands.flower import read_request, run_flower
from raysim.primitives.errors import RefusedError

QUICK = ["runtime=inprocess"]


@pytest.fixture
def app(project):
    return str(project)


def test_flower_command_prints_rounds(app, capsys):
    assert run_flower([app, *QUICK, "fleet=lognormal"], ["num-server-rounds=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["type", "round", "dispatched"]
    assert lines[2].split()[0] == "train"
    assert "virtual time" in lines[-1]


def test_flower_command_accepts_both_run_config_and_overrides(app, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # a narrow table has several parts
    assert call(["flower", "run", app, "--run-config", "num-server-rounds=1", *QUICK]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5  # a row for training, one for evaluation


def test_flower_command_continues_a_run(app, tmp_path, capsys):
    out = f"out={tmp_path / 'run'}"
    run_flower([app, *QUICK, out], [])
    first = capsys.readouterr().out
    run_flower([app, *QUICK, out, "resume=latest"], [])
    assert capsys.readouterr().out == first
    assert (tmp_path / "run" / "messages.csv").is_file()


def test_flower_command_prints_a_table_of_seeds(app, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # a narrow table has several parts
    run_flower([app, *QUICK, "seed=0..2", f"out={tmp_path / 'runs'}"], ["num-server-rounds=1"])
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line[:1].isdigit()].count("2") == 1
    assert "deviation" in table
    assert str(tmp_path / "runs") in table.splitlines()[-1]
    assert "seed-" not in table
    assert (tmp_path / "runs" / "seed-1" / "summary.json").is_file()


def test_flower_command_reads_clients_and_config_of_the_project(app):
    request = read_request([app, "clients=7", "samples=9"], ["lr=0.5 data.rows=3"])
    assert (request.clients, request.samples) == (7, 9)
    assert request.run_config == {"lr": 0.5, "data.rows": 3}
    assert request.project.clients == 5
    assert request.project.config["data.rows"] == 20


def test_flower_command_reads_run_config_from_a_file(app, tmp_path):
    file = tmp_path / "values.toml"
    file.write_text("lr = 0.25\n[data]\nrows = 4\n")
    assert read_request([app], [str(file)]).run_config == {"lr": 0.25, "data.rows": 4}


@pytest.mark.parametrize(
    ("words", "config", "key"),
    [
        (["rounds=3"], [], "rounds"),
        (["clients=many"], [], "clients"),
        (["clients=0"], [], "clients=0"),
        (["fleet=none_of_these"], [], "fleet"),
        (["runtime.workers=0"], [], "runtime.workers"),
        ([], ["learning-rate=1"], "learning-rate"),
        ([], ["lr=a"], "--run-config"),
        ([], ["lr"], "--run-config"),
        ([], ["missing.toml"], "missing.toml"),
        (["another_folder"], [], "another_folder"),
    ],
)
def test_flower_command_refuses_wrong_settings(app, words, config, key):
    with pytest.raises(RefusedError, match=key):
        run_flower([app, *QUICK, *words], config)


def test_flower_command_refuses_a_folder_without_an_app(tmp_path, capsys):
    assert call(["flower", "run", str(tmp_path)]) == 2
    assert "clientapp" in capsys.readouterr().err


def test_flower_command_error_mentions_the_line_of_a_broken_app(app, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(app, project)
    text = (project / "pyproject.toml").read_text()
    broken = text.replace("tiny_flower_app.client_app:app", "tiny_flower_app.missing_package:app")
    (project / "pyproject.toml").write_text(broken)
    with pytest.raises(RefusedError, match=r"a_package_that_does_not_exist.*line 3"):
        run_flower([str(project), *QUICK], [])
