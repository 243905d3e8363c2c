"""Costs of moving responses from engines to the trainer, one function per term.

Sources and errors of the inputs are in `measured`. Prompts are not counted: the trainer has them.
"""

from __future__ import annotations

import math

from simulator.costs.controller.measured import ControllerInputs


def read_s(tokens: float, inputs: ControllerInputs) -> float:
    """CPU seconds of one core to read replies of `tokens` generated tokens into arrays."""
    return tokens * inputs.read_token_s


def reply_bytes(tokens: float, inputs: ControllerInputs) -> float:
    """Bytes of these replies as engines send them."""
    return tokens * inputs.reply_token_bytes


def packed_bytes(tokens: float, inputs: ControllerInputs) -> float:
    """Bytes of the same as arrays."""
    return tokens * inputs.packed_token_bytes


def messages_s(messages: float, inputs: ControllerInputs) -> float:
    """Seconds of the controller for messages, one after the other."""
    return messages * inputs.message_s


def send_s(sent_bytes: float, network_bytes_per_s: float, inputs: ControllerInputs) -> float:
    """Seconds for one process to send: a stream, or the network if it is slower."""
    return sent_bytes / min(network_bytes_per_s, inputs.stream_bytes_per_s)


def fetch_s(
    responses: int,
    fetched_bytes: float,
    network_bytes_per_s: float,
    inputs: ControllerInputs,
    *,
    receivers: int,
    receiving_hosts: int,
    sending_hosts: int,
) -> float:
    """Seconds until ranks have fetched equal shares of a batch from the hosts that made it.

    Each has one stream, and asks for one response at a time. The slowest of the streams, the
    network of the hosts that receive, and that of those that send, bounds the bytes.
    """
    slowest_s = max(
        fetched_bytes / (receivers * inputs.stream_bytes_per_s),
        fetched_bytes / (receiving_hosts * network_bytes_per_s),
        fetched_bytes / (sending_hosts * network_bytes_per_s),
    )
    return slowest_s + math.ceil(responses / receivers) * inputs.request_s
