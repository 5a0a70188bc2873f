"""Make Flower's messages between the ServerApp and clients, and the content that clients get.

raysim sets the metadata of the messages, such as the receiver and the virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import (
    DEFAULT_TTL,
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    RecordDict,
)

RUN_ID = 1
SERVER_NODE_ID = 1
FIRST_NODE_ID = 0  # node id of client 0; older programs expect the cids "0" to "N-1"
# Names of the records of a message, as Flower's strategies set them.
ARRAYS, CONFIG = "arrays", "config"
# Names of the records that Flower makes for a Client or NumPyClient, by the type of the message.
LEGACY_NAMES = {"train": "fitins", "evaluate": "evaluateins"}


def node_id(client: int) -> int:
    """Return Flower's node id of the client with this number."""
    return FIRST_NODE_ID + client


def client_number(node: int) -> int:
    """Return the number of the client that has this node id of Flower."""
    return node - FIRST_NODE_ID


class GridMessage(Message):
    """A Flower message that a process can create without calling `set_identity` first.

    metadata: the sender, the receiver, the type and the times.
    content: the records; None if the message has an error.
    error: None if the message has content.
    """

    def __init__(
        self, metadata: Metadata, content: RecordDict | None = None, error: Error | None = None
    ):
        metadata.delivered_at = ""
        self.__dict__.update(own_metadata=metadata, own_content=content, own_error=error)

    @property
    def metadata(self) -> Metadata:
        """The sender, the receiver, the type and the times of the message."""
        metadata: Metadata = self.__dict__["own_metadata"]
        return metadata

    @property
    def content(self) -> RecordDict:
        """The records of the message. Raises ValueError if the message has an error instead."""
        content: RecordDict | None = self.__dict__["own_content"]
        if content is None:
            raise ValueError("the message has an error and no content. Call has_content() first.")
        return content

    @content.setter
    def content(self, value: RecordDict) -> None:
        """Replace the records of the message."""
        self.__dict__["own_content"] = value

    @property
    def error(self) -> Error:
        """The error of the message. Raises ValueError if the message has content instead."""
        error: Error | None = self.__dict__["own_error"]
        if error is None:
            raise ValueError("the message has content and no error. Call has_error() first.")
        return error

    @error.setter
    def error(self, value: Error) -> None:
        """Set the error of the message."""
        self.__dict__["own_error"] = value

    def has_content(self) -> bool:
        """Return True if the message has records."""
        return self.__dict__["own_content"] is not None

    def has_error(self) -> bool:
        """Return True if the message has an error."""
        return self.__dict__["own_error"] is not None


def instruction(
    client: int,
    content: RecordDict,
    message_type: str,
    message_id: str,
    *,
    group_id: str = "",
    created_at: float = 0.0,
    ttl: float = DEFAULT_TTL,
) -> GridMessage:
    """Return a message from the server to a client.

    message_type: Flower's type, such as "train" or "evaluate".
    group_id: the app's name for a group of messages, such as the number of the round; "" for none.
    created_at: the virtual time of sending, in seconds.
    ttl: the virtual seconds after which the message expires.
    """
    metadata = Metadata(
        run_id=RUN_ID,
        message_id=message_id,
        src_node_id=SERVER_NODE_ID,
        dst_node_id=node_id(client),
        reply_to_message_id="",
        group_id=group_id,
        created_at=created_at,
        ttl=ttl,
        message_type=message_type,
    )
    return GridMessage(metadata, content)


def reply(
    to: Message, created_at: float, content: RecordDict | None = None, error: Error | None = None
) -> GridMessage:
    """Return the reply to a message; it has either `content` or `error`.

    to: the message that is answered.
    created_at: the virtual time at which the ServerApp gets the reply, in seconds.
    error: why the client gives no records.
    """
    request = to.metadata
    metadata = Metadata(
        run_id=request.run_id,
        message_id=f"{request.message_id}-reply",
        src_node_id=request.dst_node_id,
        dst_node_id=request.src_node_id,
        reply_to_message_id=request.message_id,
        group_id=request.group_id,
        created_at=created_at,
        ttl=request.ttl,
        message_type=request.message_type,
    )
    return GridMessage(metadata, content, error)


def model_records(
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    message_type: str,
    uses_client_fn: bool,
) -> RecordDict:
    """Return the content of a message to a client: model parameters and a config.

    message_type: "train" or "evaluate".
    uses_client_fn: True for a `Client` or `NumPyClient`, for which Flower names records
    differently.
    """
    values = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    names = (ARRAYS, CONFIG)
    if uses_client_fn:
        prefix = LEGACY_NAMES[message_type]
        names = (f"{prefix}.parameters", f"{prefix}.config")
    return RecordDict({names[0]: values, names[1]: ConfigRecord(dict(config))})
