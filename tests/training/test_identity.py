"""Test the identity of processes: what bits depend on, and how processes are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.experiment.plugins import used_packages
from raysim.training.identity import (
    INSTRUCTIONS,
    MISSING,
    Identity,
    Participants,
    UnequalWorkersError,
    are_equal,
    code_checksum,
    describe_processes,
    identify,
)

FACTS = {
    "CPU capability": "AVX512",
    INSTRUCTIONS: "avx avx2 avx512_f",
    "torch": "2.9",
    "code of raysim": "abc",
}
DRIVER = Identity("driver", "node-a", FACTS)


def worker(number: int, node: str = "node-a", **changes: str) -> Identity:
    """Return a worker's identity.

    changes: facts that differ from `FACTS`; an underscore in a keyword stands for a space in the
    fact's name.
    """
    facts = {
        "device": "cpu",
        **FACTS,
        **{key.replace("_", " "): value for key, value in changes.items()},
    }
    return Identity(f"worker-{number}", node, facts)


def test_identity_of_a_process_is_the_same_if_computed_twice() -> None:
    identity = identify("driver", ["torchvision"])
    expected = {
        "CPU capability",
        INSTRUCTIONS,
        "Python",
        "torch",
        "NumPy",
        "raysim",
        "code of raysim",
    }
    assert expected | {"ONEDNN_MAX_CPU_ISA", "code of torchvision"} <= identity.facts.keys()
    assert (
        "device" not in identity.facts
        and identify("worker-0", device="cpu").facts["device"] == "cpu"
    )
    assert are_equal([identity, identify("worker-0", device="cpu")])


def test_process_with_other_cpu_instructions_has_other_identity() -> None:
    program = "from raysim.training.identity import identify; print(dict(identify('x').facts))"
    others = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | others,
        capture_output=True,
        text=True,
        check=True,
    )
    other = Identity("worker-0", "node-b", eval(ended.stdout))
    mine = identify("driver")
    different = {key for key in mine.facts if mine.facts[key] != other.facts[key]}
    assert different == {"CPU capability", "ONEDNN_MAX_CPU_ISA"}
    with pytest.raises(UnequalWorkersError, match=r"^runtime.mixed=false: .*worker-0 on node-b"):
        Participants(mine).add(other)


def test_workers_with_equal_identities_are_accepted() -> None:
    participants = Participants(DRIVER)
    participants.add(worker(0), worker(1, "node-b"))
    participants.add(worker(1, "node-c"))
    assert [str(each) for each in participants.all] == [
        "driver on node-a",
        "worker-0 on node-a",
        "worker-1 on node-b",
        "worker-1 on node-c",
    ]


def test_error_lists_node_and_differences_of_each_worker_with_another_identity() -> None:
    slow = {"CPU_capability": "AVX2", INSTRUCTIONS.replace(" ", "_"): "avx avx2"}
    with pytest.raises(UnequalWorkersError) as refused:
        Participants(DRIVER).add(
            worker(0), worker(1, "node-b", **slow), worker(2, "node-b", **slow)
        )
    text = str(refused.value)
    for part in ("worker-1 on node-b", "worker-2 on node-b", "AVX2", "AVX512", "driver on node-a"):
        assert part in text
    assert f"{INSTRUCTIONS} without avx512_f" in text
    assert "worker-0" not in text and "runtime.mixed=true" in text


@pytest.mark.parametrize("fact", ["torch", "code of raysim"])
def test_worker_that_joins_with_other_code_is_refused(fact: str) -> None:
    participants = Participants(DRIVER)
    participants.add(worker(0))
    with pytest.raises(
        UnequalWorkersError, match=rf"^runtime\.mixed=false: .*worker-1 on node-b.* {fact} "
    ):
        participants.add(worker(1, "node-b", **{fact.replace(" ", "_"): "other"}))
    assert len(participants.all) == 2, "a process that is refused takes no part"


def test_workers_must_have_equal_devices_but_the_driver_may_differ() -> None:
    Participants(DRIVER).add(worker(0, device="H100"), worker(1, device="H100"))
    with pytest.raises(UnequalWorkersError, match=r"worker-1 on node-b.* A100 .*H100.*worker-0"):
        Participants(DRIVER).add(worker(0, device="H100"), worker(1, "node-b", device="A100"))


def test_unequal_processes_can_be_allowed_and_are_listed_in_results() -> None:
    participants = Participants(DRIVER, mixed=True)
    participants.add(worker(0), worker(1, "node-b", CPU_capability="AVX2"), worker(2, "node-c"))
    assert not are_equal(participants.all)
    groups = describe_processes(participants.all)
    assert [group["names"] for group in groups] == [
        ["driver"],
        ["worker-0", "worker-2"],
        ["worker-1"],
    ]
    assert groups[1]["nodes"] == ["node-a", "node-c"] and groups[2]["CPU capability"] == "AVX2"


def test_identity_error_contains_the_number_of_differences_it_omits() -> None:
    facts = {f"fact {number}": "a" for number in range(7)}
    other = Identity("worker-0", "node-b", dict.fromkeys(facts, "b"))
    with pytest.raises(UnequalWorkersError, match=r"fact 3 .*, 3 more"):
        Participants(Identity("driver", "node-a", facts)).add(other)


def test_checksum_changes_with_any_file_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_package_of_parts"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "part.py").write_text("x = 1\n")
    (tmp_path / "my_module_of_parts.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def checksum(name: str) -> str:
        code_checksum.cache_clear()
        return code_checksum(name)

    before, module = checksum(package.name), checksum("my_module_of_parts")
    assert checksum(package.name) == before and MISSING not in (before, module)
    (package / "inner" / "part.py").write_text("x = 2\n")
    changed = checksum(package.name)
    (package / "inner" / "part.py").rename(package / "inner" / "other.py")
    assert len({before, changed, checksum(package.name)}) == 3
    (package / "notes.txt").write_text("not code")
    assert checksum(package.name) == checksum(package.name)
    assert checksum("no_such_package_of_parts") == MISSING
    code_checksum.cache_clear()


def test_used_packages_are_the_allowed_ones_and_those_of_configured_classes() -> None:
    node = {
        "method": {
            "fedprox": {"_target_": "raysim.methods.fedprox.FedProx"},
            "mine": {"_target_": "mine.Mine"},
        }
    }
    assert used_packages(node | {"list": [{"_target_": "other.sub.Thing"}]}, ["allowed.part"]) == (
        "allowed",
        "mine",
        "other",
    )
