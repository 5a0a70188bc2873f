"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster import Workers


# Ray gives up on its own processes after seconds, and a busy machine needs longer to start them.
RAY_TIMEOUTS = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_health_check_failure_threshold": "60",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # next to other work, a worker of lower priority hardly runs
}

MEMORY_DISK = Path("/dev/shm")  # a file system in memory, on Linux
NEEDED_BYTES = 4 * 2**30

NEW_MODULES = 100  # a large library has more

RAY_FIXTURES = ("ray_session", "cluster", "driver")  # each of them starts Ray
# Such a file may have slow tests. The fixture `workers` uses `ray_session`.
SLOW_FILE = re.compile(r"\bmark\.slow\b|\b(ray_session|workers|cluster|driver)\b")

# The files of slow tests that take the longest. They come first, so that none of several processes
# still works on one of them when the others have ended.
LONGEST = (
    "tools/test_network_cluster.py",
    "test_notebooks.py",
    "runtime/test_placement.py",
    "commands/test_submit.py",
    "tools/test_disturbed.py",
    "test_own_training_page.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of this process and of all processes that it starts."""
    os.environ.update(RAY_TIMEOUTS)
    # As raysim sets it, but before a test module imports Ray: otherwise each worker that Ray starts
    # under `uv run` builds the environment again.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Without stored byte code each process compiles torch and Ray again, which takes half of the
    # time of a slow test.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Tests read what they wrote through the same kernel, so none needs to wait for the disk.
    os.fsync = lambda fd: None
    # Removing the files of 8,000 tests takes a twentieth of the time on a disk.
    if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > NEEDED_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
    # The data sets that tests make are for subprocesses and Ray's workers, too. Some tests make
    # them when their module is imported.
    os.environ["RAYSIM_CACHE"] = tempfile.mkdtemp(prefix="raysim-tests-")
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        import torch  # a process that only distributes tests does not need it

        torch.set_num_threads(1)  # another process has the other core


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let pytest-xdist start two processes for quick tests, and none for slow tests.

    Slow tests share one Ray cluster, so they run in one process.
    """
    return 2 if config.getoption("markexpr") == "not slow" else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without slow tests if only slow tests run.

    A file has slow tests if it contains the mark `slow` or the name of a fixture that starts Ray.
    """
    is_test_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test_file or not config.getoption("markexpr").startswith("slow"):
        return None
    return SLOW_FILE.search(collection_path.read_text()) is None or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests that use Ray as `slow`.

    Tests that use the fixture `ray_session` also get the mark `shared_ray`, and run last.
    """

    def uses(item: pytest.Item, *fixtures: str) -> bool:
        return not {*fixtures}.isdisjoint(getattr(item, "fixturenames", ()))

    for item in items:
        if uses(item, *RAY_FIXTURES):
            item.add_marker(pytest.mark.slow)
        if uses(item, "ray_session"):
            item.add_marker(pytest.mark.shared_ray)
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
    # Tests with a Ray of their own come first, so that only one Ray exists at a time.
    items.sort(key=lambda item: uses(item, "ray_session"))


@pytest.fixture(scope="session")
def frozen_modules() -> list[int]:
    """Return a list of one number: how many modules were imported at the last `gc.freeze`."""
    return [0]


@pytest.fixture(scope="module", autouse=True)
def freeze_existing_objects(frozen_modules: list[int]) -> None:
    """Let the garbage collector ignore the objects of libraries.

    Garbage collection is faster without them. The objects that exist before a test module starts
    are frozen if at least `NEW_MODULES` modules have been imported since the last time.
    """
    gc.set_threshold(20_000, 20, 10)  # composing a configuration starts a dozen collections
    if len(sys.modules) >= frozen_modules[0] + NEW_MODULES:
        gc.collect()
        gc.freeze()
        frozen_modules[0] = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Remove the folder of built data sets. Then end this process if pytest-xdist started it."""
    shutil.rmtree(os.environ["RAYSIM_CACHE"], ignore_errors=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(0)  # a normal end takes seconds, because Python frees all objects
    gc.unfreeze()  # the last collection frees all objects in the order that libraries expect


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder with real data sets and reference values for tests.

    The environment variable RAYSIM_SHARED names it. Skip the test if there is no such folder.
    """
    folder = os.environ.get("RAYSIM_SHARED", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("RAYSIM_SHARED does not name a folder with the real data and the vectors")
    return Path(folder).resolve()


@pytest.fixture(autouse=True)
def restore_torch_settings() -> Iterator[None]:
    """Restore torch's global settings after a test: workers change them."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.fixture(autouse=True)
def restore_import_path() -> Iterator[None]:
    """Restore Python's import path after a test.

    A command with the option `--allow` loads a user's package. For this, the command adds the
    working directory to the import path.
    """
    path = [*sys.path]
    yield
    sys.path[:] = path


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw one point in place of a picture, unless a test is marked `pictures`."""
    if not request.node.get_closest_marker("pictures"):
        from one_point import replace_pictures

        replace_pictures(monkeypatch.setattr)


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty MLflow database, once for all tests; return the path of its file."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_database(empty_mlflow_database: Path, tmp_path: Path) -> Path:
    """Return an empty database of MLflow in the folder of the test."""
    return Path(shutil.copy(empty_mlflow_database, tmp_path))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start a Ray cluster of two CPUs, which all tests share.

    Its workers can import the test modules.
    """
    from tiny_runs import FOLDERS

    from raysim.runtime.ray import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDERS, prepend=os.pathsep)
        for can_retry in (True, True, False):
            try:
                ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
                break
            except Exception:  # Ray's timeout for the start of its node cannot be set
                ray.shutdown()
                if not can_retry:
                    raise
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def workers(ray_session: None) -> Iterator[Workers]:
    """Yield two Ray actors, which are the workers of many runs.

    Starting a process for each run would take longer than the run itself.
    """
    from cluster import Workers

    actors = Workers(2)
    yield actors
    actors.stop()
