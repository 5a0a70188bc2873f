import logging

import numpy as np
import pytest

pytest.importorskip("flwr")

import raysim
from raysim.flower.learner import FlowerLearner
from raysim.flower.project import load_client_app
from raysim.primitives.errors import RefusedError
from raysim.simulation.events import RunStoppedError

QUICK = (
    "runtime=inprocess tracking=none rounds=3 data=synthetic partition=iid partition.clients=6 "
    "schedule.cohort=3"
)


def run(project, tmp_path, words="", name="run", **settings):
    words = f"{QUICK} {words}"
    learner = FlowerLearner(folder=str(project), **settings)
    return raysim.run(words, learner=learner, quiet=True, out=str(tmp_path / name))


def broken(kind):
    return {"app": f"tiny_flower_app.broken:{kind}", "parameters": BROKEN_PARAMETERS}


BROKEN_PARAMETERS = "tiny_flower_app.broken:parameters"


def test_flower_app_as_learner_learns_and_reports_its_own_metrics(project, tmp_path):
    result = run(project, tmp_path)
    history = result.history
    assert list(history["flower.round"]) == [1, 2, 3]
    assert history["flower.seen"].iloc[2] > 0  # the records of a client stay
    assert history["eval_loss"].iloc[2] < history["eval_loss"].iloc[0]
    assert np.allclose(history["accuracy"], history["eval_acc"])
    assert result.summary["failures_total"] == 0


def test_run_with_a_flower_app_as_learner_writes_no_log_lines_of_flower(project, tmp_path):
    logger, records = logging.getLogger("flwr"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run(project, tmp_path, "rounds=1")
    finally:
        logger.removeHandler(handler)
    assert not records
    assert logger.level == logging.INFO


def test_app_is_an_option_of_the_group_learner(project, tmp_path):
    words = f"{QUICK} learner=flower learner.folder={project} learner.run_config.lr=0.2"
    option = raysim.run(words, quiet=True, out=str(tmp_path / "option"))
    same = run(project, tmp_path, run_config={"lr": 0.2})
    assert option.summary["model_sha256"] == same.summary["model_sha256"]
    assert (
        option.summary["model_sha256"] != run(project, tmp_path, name="a").summary["model_sha256"]
    )


@pytest.mark.parametrize("words", ["method=fedavgm", "schedule=buffered fleet=lognormal"])
def test_interrupted_app_resumes_with_the_bits_of_an_uninterrupted_run(project, tmp_path, words):
    words = f"{words} checkpoint.every=1"
    usual = QUICK.replace(" schedule.cohort=3", "") if "buffered" in words else QUICK
    if "buffered" in words:
        words += " schedule.size=2 schedule.concurrency=4"
    folder = str(project)

    def start(rounds, name, **more):
        text = f"{usual} {words} learner=flower learner.folder={folder} rounds={rounds}"
        return raysim.run(text, quiet=True, out=str(tmp_path / name), **more)

    straight = start(4, "straight")
    start(2, "stopped")
    continued = start(4, "stopped", resume="latest")
    for key in ("model_sha256", "state_sha256"):
        assert continued.summary[key] == straight.summary[key]


def test_run_starts_from_parameters_of_the_numpy_client(project, tmp_path):
    initial = run(project, tmp_path, app="tiny_flower_app.numpy_client:client_fn", parameters=MADE)
    assert initial.summary["failures_total"] == 0
    assert initial.history["flower.num_examples"].between(10, 15).all()
    assert (initial.history["accuracy"] == 0.5).all()


MADE = "tiny_flower_app.broken:two_arrays"


@pytest.mark.parametrize("name", ["app", "client_fn", "Mean", "old_client_fn"])
def test_learner_accepts_apps_with_every_kind_of_client(project, tmp_path, name):
    settings = {"app": f"tiny_flower_app.numpy_client:{name}", "parameters": MADE}
    assert run(project, tmp_path, **settings).summary["failures_total"] == 0


def test_initial_parameters_come_from_get_parameters_if_no_server_app_exists(project, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    result = run(alone, tmp_path, app="tiny_flower_app.numpy_client:app")
    assert result.summary["failures_total"] == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raises", "KeyError.*no data here.*broken.py, line"),
        ("exits", r"sys\.exit\(3\).*broken.py, line"),
        ("shape", r"weight.*\[3, 3\]"),
        ("nan", "model.net.weight.*nan"),
        ("nothing", "NoneType"),
        ("no_samples", "examples=0.*no samples"),
        ("state", r"context\.state\['notes'\]\['seen'\].*object"),
        ("state_type", r"context\.state.*dict"),
        ("error", "my reason"),
    ],
)
def test_error_of_an_app_fails_only_the_client_with_the_error(
    project, tmp_path, capsys, kind, text
):
    words = "faults.tolerate=0.5 schedule.cohort=6 rounds=1"
    result = run(project, tmp_path, words, **broken(kind))
    assert list(result.history["failures"]) == [1]
    with pytest.raises(RunStoppedError, match=text):
        run(project, tmp_path, words + " faults.tolerate=0", name="strict", **broken(kind))


def test_error_of_an_app_shows_only_traceback_lines_of_the_app(project, tmp_path):
    words = "schedule.cohort=6 rounds=1"
    with pytest.raises(RunStoppedError) as caught:
        run(project, tmp_path, words, **broken("raises"))
    text = str(caught.value)
    assert "client 1" in text
    files = [line for line in text.splitlines() if line.startswith("  File ")]
    assert files
    assert all("broken.py" in file for file in files)


def test_output_of_an_app_goes_to_stderr(project, tmp_path, capsys):
    run(project, tmp_path, "schedule.cohort=6 rounds=1", **broken("prints"))
    captured = capsys.readouterr()
    assert "a line of the app" in captured.err
    assert "a line of the app" not in captured.out


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"app": "tiny_flower_app.broken:no_train"}, "learner.app"),
        ({"app": "tiny_flower_app.missing_package:app"}, "a_package_that_does_not_exist"),
        ({"app": "tiny_flower_app.broken"}, "learner.app"),
        ({"app": "tiny_flower_app.broken:non"}, "learner.app"),
        ({"app": "tiny_flower_app.broken:Error"}, "learner.app"),
        ({"run_config": {"learning-rate": 1}}, "learner.run_config.learning-rate"),
        ({"train_config": {"a": [1]}}, "learner.train_config.a"),
    ],
)
def test_app_that_cannot_be_used_is_refused(project, settings, key):
    with pytest.raises(RefusedError, match=key):
        FlowerLearner(folder=str(project), **settings)


def test_flower_app_loaded_twice_equals_the_app_loaded_once(project):
    loaded = load_client_app("tiny_flower_app.broken:no_train", project, "first")
    assert (loaded.can_train, loaded.can_evaluate) == (False, True)
    assert load_client_app("tiny_flower_app.broken:no_train", project, "second") == loaded


@pytest.mark.parametrize("app", ["client_app:app", "numpy_client:NoParameters"])
def test_app_without_parameters_is_refused(project, tmp_path, app):
    with pytest.raises(RefusedError, match=r"learner\.parameters"):
        run(tmp_path, tmp_path, app=f"tiny_flower_app.{app}")


def test_app_as_learner_is_bit_identical_on_ray_and_in_one_process(project, tmp_path, ray_session):
    words = f"learner=flower learner.folder={project}"
    here = raysim.run(f"{QUICK} {words}", quiet=True, out=str(tmp_path / "here"))
    there = f"{QUICK} {words}".replace("inprocess", "local") + " runtime.workers=2"
    result = raysim.run(there, quiet=True, out=str(tmp_path / "there"))
    for key in ("model_sha256", "state_sha256"):
        assert result.summary[key] == here.summary[key]
