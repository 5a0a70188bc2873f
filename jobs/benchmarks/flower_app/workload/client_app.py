"""Train the benchmark's clients in Flower: one epoch of SGD on each client's samples."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from workload.task import build_model, client_samples, train

app = ClientApp()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train a client; return its parameters, its loss and its number of samples."""
    torch.set_num_threads(1)
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = client_samples(int(context.node_config["partition-id"]))
    loss = train(model, inputs, labels)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
