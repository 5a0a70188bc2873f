"""Test the data, the commands and the reading of logs in the comparison with Flower's engine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.benchmarks.flower_programs import (
    PROGRAMS,
    CpuClock,
    Measured,
    Program,
    app_commands,
    copy_data,
    cut_idx,
    older_commands,
    programs_table,
    read_accuracy,
)
from raysim.primitives.errors import RefusedError

APP = Path(__file__).parents[2] / "flower" / "project"


def idx_file(array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.tobytes()


def test_accuracy_read_from_a_log_is_the_mean_of_its_last_five_rounds():
    lines = [f"MetricRecord: {{'accuracy': {value}, 'loss': 2.0}}" for value in range(7)]
    assert read_accuracy("\n".join(lines)) == 4.0


def test_accuracy_of_the_server_is_read_even_if_clients_log_an_accuracy():
    log = "{'eval_acc': 0.5}\n{'accuracy': 0.25}"
    assert read_accuracy(log) == 0.25
    assert read_accuracy("{'eval_acc': 0.5}") == 0.5


def test_accuracy_is_read_from_a_history_that_flower_has_logged():
    log = "{'accuracy': [(0, 0.25),\n INFO:  (1, 5e-01)],\n 'auc': [(0, 0.9)]}"
    assert read_accuracy(log) == 0.375


def test_log_without_an_accuracy_is_refused():
    with pytest.raises(RefusedError, match="accuracy"):
        read_accuracy("{'train_accuracy': 0.5}")


def test_shortened_idx_file_has_only_its_first_images():
    images = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    assert cut_idx(idx_file(images), 0.6) == idx_file(images[:3])


def test_copied_data_have_fewer_rows_unless_a_parquet_file_is_small(tmp_path):
    import pandas as pd

    source, target = tmp_path / "source", tmp_path / "target"
    (source / "owner" / "large").mkdir(parents=True)
    (source / "MNIST" / "raw").mkdir(parents=True)
    pd.DataFrame({"label": range(2000)}).to_parquet(source / "owner" / "large" / "train.parquet")
    pd.DataFrame({"label": range(20)}).to_parquet(source / "test.parquet")
    labels = np.arange(10, dtype=np.uint8)
    (source / "MNIST" / "raw" / "labels-ubyte").write_bytes(idx_file(labels))
    copy_data(source, target, 0.1)
    for name in ("owner/large", "large"):
        assert len(pd.read_parquet(target / name / "train.parquet")) == 200
    assert len(pd.read_parquet(target / "test.parquet")) == 20
    stored = (target / "data" / "mnist" / "MNIST" / "raw" / "labels-ubyte").read_bytes()
    assert stored == idx_file(labels[:1])


def test_flower_and_raysim_run_an_app_with_equal_settings():
    program = Program("project", 7, ("num-server-rounds=9",))
    commands = app_commands(program, APP, "python", 2)
    settings = json.loads(commands["flower"][-1])
    assert settings["clients"] == 7
    assert settings["run_config"]["num-server-rounds"] == 9
    assert {"clients=7", "seed=2", "num-server-rounds=9"} <= set(commands["raysim"])


def test_benchmark_starts_a_program_with_the_same_seed_in_flower_and_raysim():
    commands = older_commands(PROGRAMS["fedpara"], "python", 2)
    assert all("seed=2" in command for command in commands.values())


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_cpu_clock_counts_processes_whose_exit_the_parent_process_ignores():
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    parent = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # as Ray's raylet does
        f"subprocess.Popen([sys.executable, '-c', {burn!r}]).wait()"
    )
    clock = CpuClock()
    clock.start()
    subprocess.run([sys.executable, "-c", parent], check=True)
    assert clock.stop() > 0.3


def test_table_compares_times_of_both_programs_by_the_ratio_of_medians():
    ours = [Measured(0.5, 1.0, 3.0), Measured(0.7, 2.0, 3.0), Measured(0.6, 3.0, 3.0)]
    theirs = [Measured(0.5, 4.0, 4.0)] * 3
    table = programs_table({"fedprox": {"raysim": ours, "flower": theirs}})
    *_, row = table.splitlines()
    expected = "fedprox 0.600 0.500 to 0.700 0.500 0.500 to 0.500 0.50 0.75"
    assert " ".join(row.split()) == expected
