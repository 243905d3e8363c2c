"""Costs of bringing responses from the engines to the trainer: inputs, terms, and the three ways.

Measured inputs of the controller's costs, and a file that replaces them.

    {"controller_inputs": {"read_token_s": 3.0e-7, "read_error": 0.02}, ...}   JSON

A benchmark may print other keys beside `controller_inputs`. Inputs that it leaves out keep the
packaged figures.

Costs of moving responses from engines to the trainer, one function per term.

Sources and errors of the inputs are in `measured`. Prompts are not counted: the trainer has them.

Training step of ranks that keep the sequences they generated (SPMD).

Sequences are not exchanged, so ranks get unequal numbers of tokens, and all wait for the rank with
the most: the step takes as long as if every rank had its sequences.

The three ways of responses from engines to the trainer, as costs of a simulated run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np

from areal_lab.config.problem import ConfigError, Problem, refusal
from areal_lab.config.record import About, NonNegative, Positive, Record
from areal_lab.host.foreign import parse_json, read_text
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import ControllerKind, SimulationConfig
from simulator.costs.training_layout import groups_of
from simulator.costs.training_timing import SLOWEST_RANK, Sizes, Training, TrainTiming

KEY: Final = "controller_inputs"
_ERRORS: Final = {"read_token_s": "read_error", "message_s": "message_error"}
"""Inputs, and the names of their errors."""


class ControllerInputs(Record):
    """What reading, packing, telling and moving responses takes; measured on 2 cores, 2026-11."""

    reply_token_bytes: Annotated[NonNegative, About(unit="bytes")] = 43.0
    """JSON of one generated token in a reply of SGLang, with its log-prob."""
    read_token_s: NonNegative = 0.38e-6
    """CPU time of one core to read it into arrays: `json.loads`, then numpy. 0.40 on a quiet
    machine; orjson takes 0.30."""
    read_error: NonNegative = 0.05
    """Relative difference between the two. Other processors differ by more."""
    packed_token_bytes: Annotated[NonNegative, About(unit="bytes")] = 8.0
    """The same packed: int32 and float32; versions are spans."""
    message_s: NonNegative = 0.16e-3
    """The controller's time for one message: a call of Ray 2.60 among 3,000 at a time."""
    message_error: NonNegative = 2.75
    """The same for one call at a time, 0.6 ms."""
    metadata_bytes: Annotated[NonNegative, About(unit="bytes")] = 211.0
    """JSON about one packed response: host, place, length, spans of versions, reward."""
    stream_bytes_per_s: Annotated[Positive, About(unit="bytes/s")] = 200e6 / 0.38
    """One HTTP stream into memory (`readinto`), on a machine under load; 2.4e9 on a quiet one."""
    request_s: NonNegative = 0.35e-3
    """One HTTP range request on a connection that is kept, without the bytes."""
    source: str = (
        "json.loads, Ray 2.60 calls and HTTP range requests measured on 2 cores (Python 3.11, "
        "2026-11)"
    )
    """Origin of the figures, for reports."""


def load_inputs(path: str | Path) -> ControllerInputs:
    """Read a file as in the module docstring; the packaged inputs if `path` is empty."""
    if not str(path):
        return ControllerInputs()
    try:
        told: Any = parse_json(read_text(Path(path)))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _wrong(path, f"is not JSON: {error}") from None
    given = told.get(KEY) if isinstance(told, dict) else None
    if not isinstance(given, dict):
        raise _wrong(path, f"has no object {KEY!r}, as benchmarks print it")
    measured = {error: 0.0 for name, error in _ERRORS.items() if name in given}
    try:
        return ControllerInputs(**{"source": f"measured: {path}", **measured, **given})
    except ConfigError as error:
        found = (Problem(p.kind, "controller.inputs", f"{path}: {p}") for p in error.problems)
        raise ConfigError(*found) from None


def _wrong(path: str | Path, text: str) -> ConfigError:
    return refusal(
        "controller.inputs",
        f"controller.inputs is {str(path)!r}, but it {text}; leave it empty for the packaged ones",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatches:
    """Steps of `ranks` programs, each with its own sequences."""

    training: Training
    """Divides the sequences of a step evenly among its ranks."""
    ranks: int

    def step(self, lengths: Sizes, *, minibatches: int) -> TrainTiming:
        """One step."""
        sizes = np.asarray(lengths, np.int64)
        own = sizes.reshape(self.ranks, -1)
        slowest = np.tile(own[int(own.sum(axis=1).argmax())], self.ranks)
        even = self.training.step(sizes, minibatches=minibatches)
        slow_s = self.training.step(slowest, minibatches=minibatches).seconds
        # Even shares of the batch may need a micro-batch more.
        waits_s = max(0.0, slow_s - even.seconds)
        if not waits_s:
            return even
        parts = {**even.parts, SLOWEST_RANK: even.parts.get(SLOWEST_RANK, 0.0) + waits_s}
        return replace(even, seconds=sum(parts.values()), parts=parts)


class Handled(NamedTuple):
    """Time and bytes of the controller for passing something on."""

    seconds: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0


class Fetched(NamedTuple):
    """Time and bytes of the trainer for fetching from the hosts of the engines."""

    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerCost:
    """Cost of one of the ways; sizes in responses and generated tokens."""

    kind: ControllerKind
    inputs: ControllerInputs = field(default_factory=ControllerInputs)
    network_bytes_per_s: float = 12.5e9
    """Rate of each host, in one direction."""
    readers: int = 0
    """Processes beside the engines, each of which reads the replies of an equal part of them; 0:
    the controller reads."""
    receivers: int = 1
    """Ranks of the trainer that train on different sequences."""
    receiving_hosts: int = 1
    sending_hosts: int = 1

    @property
    def handles(self) -> bool:
        """True if there is a controller."""
        return self.kind != "spmd"

    @property
    def programs(self) -> int:
        """Programs that each decide for themselves: 1, or the ranks of `spmd`."""
        return self.readers if self.kind == "spmd" else 1

    def read_s(self, tokens: int) -> float:
        """Seconds of a reader for the replies of a prompt."""
        return read_s(tokens, self.inputs) if self.readers else 0.0

    def reply(self, responses: int, tokens: int) -> Handled:
        """The controller's part once the responses to a prompt are generated."""
        inputs = self.inputs
        if self.kind == "single":
            seconds = messages_s(responses, inputs) + read_s(tokens, inputs)
            return Handled(seconds, received_bytes=reply_bytes(tokens, inputs))
        if self.kind == "metadata":
            told = responses * inputs.metadata_bytes
            return Handled(messages_s(responses, inputs), received_bytes=told)
        return Handled()

    def batch(self, responses: int, tokens: int) -> Handled:
        """The controller's part before a training step on these responses."""
        inputs = self.inputs
        if self.kind == "single":
            sent = packed_bytes(tokens, inputs)
        elif self.kind == "metadata":
            sent = responses * inputs.metadata_bytes
        else:
            return Handled()
        seconds = messages_s(self.receivers, inputs)
        seconds += send_s(sent, self.network_bytes_per_s, inputs)
        return Handled(seconds, sent_bytes=sent)

    def fetch(self, responses: int, tokens: int) -> Fetched:
        """Time and bytes that the trainer then fetches."""
        if self.kind != "metadata":
            return Fetched()
        fetched = packed_bytes(tokens, self.inputs)
        seconds = fetch_s(
            responses,
            fetched,
            self.network_bytes_per_s,
            self.inputs,
            receivers=self.receivers,
            receiving_hosts=self.receiving_hosts,
            sending_hosts=self.sending_hosts,
        )
        return Fetched(seconds, fetched)

    @property
    def provenance(self) -> str:
        """Source of the largest term."""
        inputs = self.inputs
        reads = f"{1e6 * inputs.read_token_s:.3g} us of CPU to read a token"
        if self.kind == "spmd":
            return f"{reads}, by each rank; no controller; {inputs.source}"
        who = "by the controller" if self.kind == "single" else "beside the engines"
        message = f"{1e3 * inputs.message_s:.3g} ms for a message to the controller"
        return f"{reads}, {who}; {message}; {inputs.source}"

    @property
    def error(self) -> float:
        """Relative error of the largest term."""
        return self.inputs.message_error if self.kind == "metadata" else self.inputs.read_error


def controller_cost(config: SimulationConfig) -> ControllerCost | None:
    """The cost of a config; None if nothing of it is modeled."""
    controller, cluster = config.controller, config.cluster
    if controller.kind == "none":
        return None
    inputs = load_inputs(controller.inputs)
    ranks = groups_of(config.trainer, find_model(config.model), cluster.training_gpus).data
    hosts = math.ceil(cluster.generating_gpus / find_gpu(cluster.generating_gpu).node_gpus)
    readers = {"single": 0, "metadata": hosts, "spmd": controller.ranks or ranks}
    return ControllerCost(
        kind=controller.kind,
        inputs=inputs,
        network_bytes_per_s=controller.network_bytes_per_s,
        readers=readers[controller.kind],
        receivers=ranks,
        receiving_hosts=math.ceil(cluster.training_gpus / find_gpu(cluster.gpu).node_gpus),
        sending_hosts=hosts,
    )
