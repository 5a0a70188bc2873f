"""Fixtures that every test may ask for."""

from __future__ import annotations

import base64
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cluster import Workers
    from matplotlib.figure import Figure


# Ray gives its own processes up after seconds, which a busy machine needs for starting them.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_health_check_failure_threshold": "60",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # beside other work, a worker of lower priority hardly runs
}


def pytest_configure(config: pytest.Config) -> None:
    """For this process and all that it starts."""
    os.environ.update(PATIENCE)
    # Where byte code is not kept, each process compiles torch and Ray anew: half of the time of a slow test.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Data sets that the tests make, some of them when a module is imported, for subprocesses and Ray's workers too.
    os.environ["RAYSIM_CACHE"] = tempfile.mkdtemp(prefix="raysim-tests-")
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        import torch  # who only hands tests out needs none of it

        torch.set_num_threads(1)  # another process has the other core


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers for quick tests; one process for slow ones, so that one Ray exists at a time."""
    return 2 if config.getoption("markexpr") == "not slow" else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for a Ray is slow."""

    def uses(item: pytest.Item, *fixtures: str) -> bool:
        return not {*fixtures}.isdisjoint(getattr(item, "fixturenames", ()))

    for item in items:
        if uses(item, "ray_session", "cluster", "driver"):
            item.add_marker(pytest.mark.slow)
    items.sort(
        key=lambda item: uses(item, "ray_session")
    )  # Rays of a test's own end before it begins


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    """What is there by now, mostly libraries, stays: collections of garbage look at what comes after it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A worker has told everything, and leaves without collecting for seconds what goes with it."""
    shutil.rmtree(os.environ["RAYSIM_CACHE"], ignore_errors=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(0)
    gc.unfreeze()  # the last collection frees all, in an order that the libraries expect


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data sets and test vectors; tests that need it are skipped without it."""
    folder = os.environ.get("RAYSIM_SHARED", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("RAYSIM_SHARED does not name a folder with the real data and the vectors")
    return Path(folder).resolve()


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A worker pins torch's global settings; the next test finds them as they were."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.fixture(autouse=True)
def import_path_as_it_was() -> Iterator[None]:
    """`--allow` puts the current folder on the import path; the next test does not find it there."""
    path = [*sys.path]
    yield
    sys.path[:] = path


POINTS = {
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    ),
    "svg": '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"></svg>',
}


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's end is mostly drawing: a picture is a point, except where a test is marked `pictures`."""
    if request.node.get_closest_marker("pictures"):
        return
    from matplotlib.figure import Figure

    def savefig(figure: Figure, file: Any, format: str, **_: object) -> None:
        with nullcontext(file) if hasattr(file, "write") else open(file, "wb") as stream:
            stream.write(POINTS[format])

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """The one Ray of the whole suite, of two (declared) cores, whose workers find the modules of the tests."""
    from tiny_runs import FOLDERS

    from raysim.runtime.ray import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDERS, prepend=os.pathsep)
        for again in (True, True, False):
            try:
                ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
                break
            except Exception:  # the time that Ray gives its node to start cannot be set
                ray.shutdown()
                if not again:
                    raise
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def workers(ray_session: None) -> Iterator[Workers]:
    """Two actors that one study after another moves into: starting a process takes longer than a tiny study."""
    from cluster import Workers

    found = Workers(2)
    yield found
    found.stop()
