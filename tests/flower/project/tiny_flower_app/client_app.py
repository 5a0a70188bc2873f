"""Define a ClientApp that fits a linear model.

It keeps a record in the state of its client. It draws from the global random generators of Python,
NumPy and torch.
"""

import random

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def load_data(context):
    generator = np.random.default_rng(context.node_config["partition-id"])
    inputs = generator.normal(size=(context.run_config["data.rows"], 3)).astype(np.float32)
    return torch.tensor(inputs), torch.tensor(inputs @ np.arange(3, dtype=np.float32))


def receive(message):
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(message, context):
    model = receive(message)
    inputs, targets = load_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=context.run_config["lr"])
    rows = torch.randperm(len(inputs))[:10]
    loss = ((model(inputs[rows])[:, 0] - targets[rows]) ** 2).mean()
    loss.backward()
    optimizer.step()
    seen = context.state["count"]["seen"] if "count" in context.state else 0
    context.state["count"] = MetricRecord({"seen": seen + 1})
    metrics = {
        "train_loss": loss.item(),
        "num-examples": len(inputs),
        "seen": seen,
        "drawn": random.random() + np.random.rand(),  # noqa: NPY002
        "round": message.content["config"]["server-round"],
    }
    records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model = receive(message)
    inputs, targets = load_data(context)
    loss = ((model(inputs)[:, 0] - targets) ** 2).mean().item()
    metrics = {"eval_loss": loss, "eval_acc": 1 / (1 + loss), "num-examples": len(inputs)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@app.query()
def query(message, context):
    return Message(RecordDict({"client": MetricRecord({"id": context.node_id})}), reply_to=message)
