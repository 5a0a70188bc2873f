"""Define a NumPyClient and two functions that make it.

The argument of `client_fn` is a Flower context. The argument of `old_client_fn` is the number of a
client as text, which older versions of Flower pass.
"""

import numpy as np
from flwr.client import ClientApp, NumPyClient


class Mean(NumPyClient):
    def __init__(self, context=None):
        self.client = context.node_config["partition-id"] if context else 0

    def get_parameters(self, config):
        return [np.zeros((2, 2), np.float32), np.zeros(2)]

    def fit(self, parameters, config):
        noise = np.random.normal(size=(2, 2)).astype(np.float32)  # noqa: NPY002
        weight, bias = parameters
        return [weight + noise, bias + self.client], 10 + self.client, {"loss": float(noise[0, 0])}

    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0]).sum()), 5, {"accuracy": 0.5}


class NoParameters(NumPyClient):
    def fit(self, parameters, config):
        return parameters, 10, {}


def client_fn(context):
    return Mean(context).to_client()


def old_client_fn(cid: str):
    client = Mean()
    client.client = int(cid)
    return client.to_client()


app = ClientApp(client_fn=client_fn)
