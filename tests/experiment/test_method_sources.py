"""Test that a method's description is the same from its source file and from its class."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raysim.commands import methods
from raysim.experiment.describe import HOOKS
from raysim.experiment.groups import find_groups, load_option
from raysim.experiment.method_sources import hook_order, read_method, read_module
from raysim.methods import fedavg

NODES = {
    name: node
    for option, path in find_groups([]).files["method"].items()
    for name, node in load_option(path, "method").items()
}


@pytest.mark.parametrize("name", NODES)
def test_method_description_read_from_source_code_equals_that_of_the_class(name: str) -> None:
    source = read_method(NODES[name]["_target_"])
    assert source == methods._import_method(name, NODES[name], [])


def test_order_of_hooks_in_source_code_equals_that_of_the_imported_class() -> None:
    assert hook_order() == [hook for hook in HOOKS if hook != "settings"]


def test_fedavg_description_and_paper_are_read_from_its_source_code() -> None:
    text, paper = read_module("raysim.methods.fedavg", "PAPER")
    assert (text, paper) == ((fedavg.__doc__ or "").strip(), fedavg.PAPER)


@pytest.mark.parametrize("target", ["mine.method.Lasso", "raysim.methods.none.X", "None"])
def test_code_of_third_party_class_is_not_read(target: str) -> None:
    assert read_method(target) is None


def test_list_of_methods_imports_no_torch() -> None:
    code = (
        "import sys; from raysim import cli; status = cli.call(['methods', 'fedadam+fedld']); "
        "sys.exit(status or sum(name in sys.modules for name in ('torch', 'pandas', 'scipy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "method.fedadam.server_lr=0.1" in done.stdout
