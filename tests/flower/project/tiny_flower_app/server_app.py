"""Define a ServerApp with FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    arrays = ArrayRecord(torch.nn.Linear(3, 1).state_dict())
    FedAvg(fraction_train=0.6).start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"from-server": 7}),
    )
