"""The three ways of responses from engines to the trainer, as costs of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import ControllerKind, SimulationConfig
from simulator.costs.controller import terms
from simulator.costs.controller.measured import ControllerInputs, load_inputs
from simulator.costs.layers.groups import groups_of


class Handled(NamedTuple):
    """What passing something on takes of the controller."""

    seconds: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0


class Fetched(NamedTuple):
    """What the trainer fetches from the hosts of the engines."""

    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerCost:
    """Cost of one of the ways; sizes in responses and generated tokens."""

    kind: ControllerKind
    inputs: ControllerInputs = field(default_factory=ControllerInputs)
    network_bytes_per_s: float = 12.5e9
    """Of each host, in one direction."""
    readers: int = 0
    """Processes beside the engines, each of which reads the replies of an equal part of them; 0:
    the controller reads."""
    receivers: int = 1
    """Ranks of the trainer that train on different sequences."""
    receiving_hosts: int = 1
    sending_hosts: int = 1

    @property
    def handles(self) -> bool:
        """Whether there is a controller."""
        return self.kind != "spmd"

    def read_s(self, tokens: int) -> float:
        """Seconds of a reader for the replies of a prompt."""
        return terms.read_s(tokens, self.inputs) if self.readers else 0.0

    def reply(self, responses: int, tokens: int) -> Handled:
        """The controller's part once the responses to a prompt are generated."""
        inputs = self.inputs
        if self.kind == "single":
            seconds = terms.messages_s(responses, inputs) + terms.read_s(tokens, inputs)
            return Handled(seconds, received_bytes=terms.reply_bytes(tokens, inputs))
        if self.kind == "metadata":
            told = responses * inputs.metadata_bytes
            return Handled(terms.messages_s(responses, inputs), received_bytes=told)
        return Handled()

    def batch(self, responses: int, tokens: int) -> Handled:
        """The controller's part before a training step on these responses."""
        inputs = self.inputs
        if self.kind == "single":
            sent = terms.packed_bytes(tokens, inputs)
        elif self.kind == "metadata":
            sent = responses * inputs.metadata_bytes
        else:
            return Handled()
        seconds = terms.messages_s(self.receivers, inputs)
        seconds += terms.send_s(sent, self.network_bytes_per_s, inputs)
        return Handled(seconds, sent_bytes=sent)

    def fetch(self, responses: int, tokens: int) -> Fetched:
        """What the trainer fetches after that."""
        if self.kind != "metadata":
            return Fetched()
        fetched = terms.packed_bytes(tokens, self.inputs)
        seconds = terms.fetch_s(
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
        """Where the largest term comes from."""
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


def training_ranks(config: SimulationConfig) -> int:
    """Ranks of the trainer that train on different sequences.

    Raises:
        ConfigError: the layout does not divide the GPUs or the model.
    """
    model = find_model(config.model)
    return groups_of(config.trainer, model, config.cluster.training_gpus).data


def spmd_ranks(config: SimulationConfig) -> int:
    """Programs of a run: 1 unless each rank runs its own.

    Raises:
        ConfigError: as for `training_ranks`.
    """
    if config.controller.kind != "spmd":
        return 1
    return config.controller.ranks or training_ranks(config)


def controller_cost(config: SimulationConfig) -> ControllerCost | None:
    """The cost of a config; None if nothing of it is modeled.

    Raises:
        ConfigError: the file of inputs is wrong, or the layout of the trainer.
    """
    controller, cluster = config.controller, config.cluster
    if controller.kind == "none":
        return None
    gpu, rollout_gpu = find_gpu(cluster.gpu), find_gpu(cluster.generating_gpu)
    hosts = math.ceil(cluster.generating_gpus / rollout_gpu.node_gpus)
    readers = {"single": 0, "metadata": hosts, "spmd": spmd_ranks(config)}
    return ControllerCost(
        kind=controller.kind,
        inputs=load_inputs(controller.inputs),
        network_bytes_per_s=controller.network_bytes_per_s,
        readers=readers[controller.kind],
        receivers=training_ranks(config),
        receiving_hosts=math.ceil(cluster.training_gpus / gpu.node_gpus),
        sending_hosts=hosts,
    )
