"""Test CONTRIBUTING.md: the order of the functions in a round, and the example method."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny_runs import run, run_spec

import raysim
from raysim import cli
from raysim.api.method import Method

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
STOPS = re.findall(r"^\d+\. `([a-z_/]+\.py)`, `([\w.]+)`:", TEXT, re.MULTILINE)
CODE = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


def test_functions_of_a_round_run_in_the_order_of_contributing_md() -> None:
    package, seen = Path(raysim.__file__).parent, list[tuple[str, str]]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(package)):
            seen.append((str(Path(code.co_filename).relative_to(package)), code.co_qualname))

    assert len(STOPS) == 10
    sys.setprofile(watch)
    try:
        run(run_spec(), rounds=1)
    finally:
        sys.setprofile(None)
    assert [stop for stop in dict.fromkeys(seen) if stop in STOPS] == STOPS


def lasso() -> type[Method]:
    names: dict[str, Any] = {}
    exec(CODE, names)
    found = names["Lasso"]
    assert issubclass(found, Method)
    return found


def test_example_method_shrinks_parameters() -> None:
    cls: Any = lasso()
    size = {
        lam: abs(run(run_spec(cls(lam))).coordinator.server.vector.numpy()).sum()
        for lam in (0.0, 0.05)
    }
    assert run(run_spec(cls(0.0))).bits == run(run_spec()).bits
    assert size[0.05] < 0.8 * size[0.0]
    with pytest.raises(ValueError, match=r"method\.lasso\.lam"):
        cls(-1.0)


def test_example_method_runs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("lasso_code.py").write_text(CODE)
    Path("conf/method").mkdir(parents=True)
    Path("conf/method/lasso.yaml").write_text("lasso: {_target_: lasso_code.Lasso}\n")
    words = "runtime=inprocess tracking=none data=synthetic data.samples=60 data.test_samples=10 "
    words += "partition.clients=3"
    small = [*words.split(), "schedule.cohort=2", "model=mlp", "rounds=1", "out=run"]
    assert (
        cli.call(["run", "--conf", "conf", "--allow", "lasso_code", "method=[lasso]", *small]) == 0
    )
    assert "lasso" in capsys.readouterr().out
