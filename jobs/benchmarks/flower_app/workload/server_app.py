"""Run FedAvg in Flower, and write the time at the end of each round to a file.

The environment variable ROUNDS is the number of rounds. The environment variable TIMES is the path
of the file. The file begins with the time before the first round.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from workload.task import WORKLOAD, build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg in Flower, without evaluation on clients; write the end time of each round.

    The environment variable ROUNDS is the number of rounds. The environment variable TIMES is the
    path of the JSON file. The file begins with the time before the first round, and all times are
    in seconds.
    """
    file = Path(os.environ["TIMES"])
    times: list[float] = []

    def note_time(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.monotonic())
        file.write_text(json.dumps(times))
        return MetricRecord({"round": server_round})

    strategy = FedAvg(
        fraction_train=WORKLOAD.cohort / WORKLOAD.clients,
        fraction_evaluate=0.0,
        min_train_nodes=WORKLOAD.cohort,
        min_available_nodes=WORKLOAD.clients,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(build_model().state_dict()),
        num_rounds=int(os.environ["ROUNDS"]),
        evaluate_fn=note_time,
    )
