"""Define ClientApps that fail, each in another way."""

import sys

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

no_train = ClientApp()


@no_train.evaluate()
def _evaluate(message, context):
    return Message(RecordDict(), reply_to=message)


def parameters():
    return {"weight": np.zeros((2, 3), np.float32)}


def _app(train):
    app = ClientApp()
    app.train()(train)
    return app


def _records(weight, **metrics):
    arrays = ArrayRecord({"weight": Array(weight)})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"loss": 0.0, **metrics})})


def _for_client_1(fail):
    """Return an app whose client 1 calls `fail`, and whose other clients add 1 to their weight."""

    def train(message, context):
        if context.node_config["partition-id"] == 1:
            return fail(message, context)
        weight = message.content["arrays"]["weight"].numpy() + 1
        return Message(_records(weight), reply_to=message)

    return _app(train)


def _raise(message, context):
    raise KeyError("no data here")


def _exit(message, context):
    sys.exit(3)


def _print(message, context):
    print("a line of the app")
    return Message(_records(np.ones((2, 3), np.float32)), reply_to=message)


def _keep_object(message, context):
    notes = ConfigRecord({"seen": ["a text"]})
    notes["seen"].append(object())  # Flower does not check what is appended
    context.state["notes"] = notes
    return Message(_records(np.ones((2, 3), np.float32)), reply_to=message)


def _replace_state(message, context):
    context.state = {"seen": 1}
    return Message(_records(np.ones((2, 3), np.float32)), reply_to=message)


def _leave_out_loss(message, context):
    records = _records(np.ones((2, 3), np.float32))
    del records["metrics"]["loss"]
    return Message(records, reply_to=message)


raises = _for_client_1(_raise)
exits = _for_client_1(_exit)
prints = _for_client_1(_print)
state = _for_client_1(_keep_object)
state_type = _for_client_1(_replace_state)
no_samples = _for_client_1(
    lambda message, context: Message(
        _records(np.ones((2, 3), np.float32), **{"num-examples": 0}), reply_to=message
    )
)
shape = _for_client_1(
    lambda message, context: Message(_records(np.ones((3, 3), np.float32)), reply_to=message)
)
nan = _for_client_1(
    lambda message, context: Message(
        _records(np.full((2, 3), np.nan, np.float32)), reply_to=message
    )
)
no_loss = _for_client_1(_leave_out_loss)
nothing = _for_client_1(lambda message, context: None)
error = _for_client_1(lambda message, context: Message(Error(7, "my reason"), reply_to=message))


def two_arrays():
    return [np.zeros((2, 2), np.float32), np.zeros(2)]
