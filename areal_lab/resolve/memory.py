"""How much memory the trainer of a config takes, by part, before it starts.

    ModelShape, ActorConfig --trainer_memory--> [weights, gradients, moments, activations, ...]
                            --Estimate--------> lines that name the largest part and its knob

Decoders of transformers whose layers are Llama's or Qwen's. Widths below are those of `ModelShape`;
`b` is the number of bytes of the compute type, 4 for float32 and 2 for bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from areal_lab.config.schema import ActorConfig, TrainConfig
from areal_lab.data.problems import ProblemSet
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.weights.verify_folder import adapter_parameters
from areal_lab.logit_tiles import logit_tiles
from areal_lab.models.folder import (
    ModelShape,
    dtype_name,
    has_bfloat16,
    read_model_facts,
    read_model_shape,
)
from areal_lab.models.locate import resolve_model_path
from areal_lab.models.vision import read_vision_facts
from areal_lab.resolve.allocation import UNDIVIDED, Sizes
from areal_lab.resolve.limits import lora_of
from areal_lab.resolve.trainer import asks_for_values

_FLOAT32: Final = 4
_PROCESS_BYTES: Final = 375 << 20
"""Resident memory of the trainer process without a model: torch 2.13 (CPU build), transformers
5.23 and what they load, measured on x86-64."""
_HEAP_SHARES: Final = (0.2, 0.8)
"""Least and most memory that is free but not returned, as a share of all tensors, on a CPU: the
trainer keeps what it frees (`host.processes.MEMORY_FOR_TRAINING`), and longer-lived tensors lie
between. 18 runs of SmolLM2-135M; more tokens and fewer weights have the larger shares."""
_LOOKED_AT: Final = 64
"""Prompts whose length is measured."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory."""

    name: str
    bytes: int
    knob: str = ""
    """Settings that make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How much of a model is trained."""

    parameters: int
    """Of the model, without adapters."""
    adapter_parameters: int = 0
    """Trained instead of the model, if there are any."""
    frozen: Mapping[str, int] = field(default_factory=dict[str, int])
    """Parameters of each model beside it that is not trained, by what it is for."""
    critic_parameters: int = 0
    """Of a critic, which is trained whole."""
    shards: int = 1
    """Processes that divide all of these among them, or the parts of these that they have."""
    tensor: int = 1
    """Processes that divide each layer: parameters, and the outputs of its matrices."""
    context: int = 1
    """Processes that divide the tokens of a micro-batch."""

    @property
    def trained(self) -> int:
        """Numbers with a gradient."""
        return self.adapter_parameters or self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of a trainer."""

    parts: Sequence[Part]
    tokens: int
    """Of a micro-batch."""
    processes: int = 1
    """Of the trainer, each of which has these parts."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    once_bytes: int = 0
    """Of the first of several processes alone: the models that it copies for checkpoints."""

    @property
    def tensors(self) -> int:
        """Bytes of all parts, which is what a GPU needs beside its context."""
        return sum(part.bytes for part in self.parts)

    @property
    def resident(self) -> tuple[int, int]:
        """Least and most resident memory of all processes of a trainer on a CPU, in bytes."""
        least, most = (
            self.processes * (int(self.tensors * (1 + share)) + _PROCESS_BYTES) + self.once_bytes
            for share in _HEAP_SHARES
        )
        return least, most

    def lines(self, machine_bytes: int) -> list[str]:
        """The parts, the knobs of the largest one that has any, and what the machine has."""
        parts = sorted(self.parts, key=_size)
        least, most = self.resident
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        lines = [
            f"trainer memory, estimated for micro-batches of {self.tokens:,} tokens: "
            f"{_text(self.tensors)} of tensors{each}",
            "    " + ", ".join(f"{part.name} {_text(part.bytes)}" for part in parts),
            f"    {_text(least)} to {_text(most)} resident on a CPU; this machine has "
            f"{_text(machine_bytes)}"
            if self.device == "cpu"
            else "    on a GPU, besides its context and free blocks; never compared with a GPU",
        ]
        if self.once_bytes:
            copied = _text(self.once_bytes)
            lines.append(f"    of these, {copied} are models that the first process copies")
        adjustable = [part for part in parts if part.knob]
        if adjustable:
            lines.append(f"    {adjustable[0].name} take less with {adjustable[0].knob}")
        return lines

    def note(self, machine_bytes: int) -> str | None:
        """A warning, if not even the least estimate fits into the machine's memory."""
        least, most = self.resident
        if least <= machine_bytes:
            return None
        knobs = "; ".join(
            dict.fromkeys(part.knob for part in sorted(self.parts, key=_size) if part.knob)
        )
        return (
            f"the trainer may need {_text(least)} to {_text(most)} of memory, but this machine has "
            f"{_text(machine_bytes)}; take {knobs}"
        )


def estimate(
    config: TrainConfig,
    folder: Path,
    sizes: Sizes = UNDIVIDED,
    problems: ProblemSet | None = None,
    *,
    device: str = "cpu",
) -> Estimate | None:
    """Memory of the trainer of a config, of each of its processes; None for a model whose layers
    are unknown.

    Args:
        folder: of the model.
        sizes: how the trainer's processes divide it.
        problems: bound the tokens of a minibatch by their prompts and `gconfig.max_new_tokens`;
            None takes full micro-batches.
        device: where the trainer computes, without `actor.offload`.

    Raises:
        ValueError: the model folder is broken.
    """
    shape = read_model_shape(folder)
    if shape is None or not shape.dense:
        return None
    actor = config.actor
    tokens = actor.max_tokens_per_mb
    if problems is not None:
        tokens = min(tokens, _minibatch_tokens(config, problems, folder))
    adapters = (adapter_parameters(folder, lora_of(config)) or 0) if actor.use_lora else 0
    parameters = read_model_facts(folder).parameters
    size = Trained(
        parameters=parameters,
        adapter_parameters=adapters,
        frozen=_frozen(config, parameters),
        critic_parameters=_critic_parameters(config, folder, shape),
        shards=actor.shard_ranks or sizes.data * sizes.context,
        tensor=sizes.tensor,
        context=sizes.context,
    )
    dtype = dtype_name(actor.dtype, native=has_bfloat16(device))
    number_bytes = 2 if dtype == "bfloat16" else _FLOAT32
    parts = trainer_memory(
        shape, size, actor, number_bytes=number_bytes, tokens=tokens, cpu=device == "cpu"
    )
    once = 0
    if config.checkpoint.asynchronous and device == "cpu":  # the copy is in main memory
        models = _FLOAT32 * (size.parameters + size.critic_parameters)
        state = 3 * (size.trained + size.critic_parameters) / (size.shards * size.tensor)
        copy = int(_FLOAT32 * state) if config.checkpoint.resumable else 0
        if sizes.devices == 1:
            copy += models
        else:
            once = models
        parts.append(Part("copy for checkpoints", copy, "checkpoint.asynchronous=false"))
    return Estimate(
        parts=parts, tokens=tokens, processes=sizes.devices, device=device, once_bytes=once
    )


def _frozen(config: TrainConfig, parameters: int) -> dict[str, int]:
    """Parameters of the reference and the teacher, if they are copies or other models."""
    actor, found = config.actor, {}
    if actor.kl_loss_coef or actor.kl_ctl:
        if config.ref.path:
            found["reference model"] = _parameters_of(config.ref.path)
        elif not actor.use_lora:
            found["reference model"] = parameters
    if config.teacher.path:
        found["teacher"] = _parameters_of(config.teacher.path)
    return found


def _critic_parameters(config: TrainConfig, folder: Path, shape: ModelShape) -> int:
    """A body and one output per token, without the policy's output layer."""
    if not asks_for_values(config.actor) or config.critic.share_body:
        return 0
    if config.critic.path:
        return _parameters_of(config.critic.path)
    parameters, embedding = read_model_facts(folder).parameters, shape.vocab * shape.hidden
    outside = parameters - shape.layers * _linear_numbers(shape)
    # The output layer has weights of its own if they are there twice.
    head = embedding if outside >= 2 * embedding else 0
    return parameters - head + shape.hidden


def _parameters_of(model: str) -> int:
    return read_model_facts(resolve_model_path(model)).parameters


def trainer_memory(
    shape: ModelShape,
    size: Trained,
    actor: ActorConfig,
    *,
    number_bytes: int,
    tokens: int,
    cpu: bool = True,
) -> list[Part]:
    """Tensors of a process of the trainer at the peak of a step that has several micro-batches.

    The peak is in the backward pass of the second one, when gradients exist: at the output layer,
    or in a decoder layer whose activations are computed again.

    Processes that divide layers have a model whose heads, feed-forward network and vocabulary are
    smaller by their number, and hidden states as wide as before; those that divide sequences have
    fewer tokens.

    Args:
        shape: of the whole model.
        size: of it.
        number_bytes: of the compute type.
        tokens: of a micro-batch; all of them are taken to be predicted.
        cpu: whether it computes on a CPU, where tiles of logits are smaller.
    """
    name_of_activations = f"activations of {tokens:,} tokens"
    shape, size = _divided(shape, size)
    tokens = math.ceil(tokens / size.context)
    lora = bool(size.adapter_parameters)
    copies = actor.param_dtype != "float32"
    between = number_bytes if copies else _FLOAT32  # of hidden states between layers
    budget = "actor.max_tokens_per_mb"
    train_less = "" if lora else "actor.use_lora=true"
    layer = tokens * (
        copies_bytes_per_token(shape, number_bytes=number_bytes, cpu=cpu)
        if copies
        else layer_bytes_per_token(shape, number_bytes=number_bytes, lora=lora)
    )
    head = _head_bytes(
        shape, tokens=tokens, number_bytes=number_bytes, lora=lora, copies=copies, cpu=cpu
    )
    mixed = number_bytes < _FLOAT32 and not lora and not copies
    casts = number_bytes * shape.layers * _linear_numbers(shape) if mixed else 0
    if actor.gradient_checkpointing:
        # Beside the logits there are only the inputs of the layers, and what `selective` keeps;
        # later, the logits are gone.
        kept = tokens * number_bytes * _selective_numbers(shape)
        kept *= actor.gradient_checkpointing == "selective"
        stored = shape.layers * (tokens * shape.hidden * between + kept)
        casts_of_layer = casts // max(1, shape.layers)
        largest = max(head, 2 * layer - kept + casts_of_layer, casts)
        name = "logits" if largest == head else "recomputed activations"
        if largest == casts:
            name = "weights in bfloat16"
        working = [Part(name, largest, f"a lower {budget}")]
        knob = (
            f"actor.gradient_checkpointing=true, or a lower {budget}"
            if kept
            else f"a lower {budget}"
        )
    else:
        stored = shape.layers * layer
        working = [
            Part("weights in bfloat16", casts, "actor.gradient_checkpointing=true"),
            Part("logits", head, f"a lower {budget}"),
        ]
        knob = f"actor.gradient_checkpointing=true, or a lower {budget}"
    ends = (
        5 * between * tokens * shape.hidden
    )  # final norm, hidden states at the predictions, gradients
    shard = _FLOAT32 / size.shards
    fewer = {
        "reference model": "actor.use_lora=true without ref.path, which needs no copy",
        "teacher": "a smaller teacher",
    }
    here = size.parameters + size.adapter_parameters
    parts = [
        Part("weights", int(shard * here), "a smaller model"),
        Part("gradients", int(shard * size.trained), train_less),
        Part("AdamW moments", int(2 * shard * size.trained), train_less),
        Part(
            "previous gradient",
            int(shard * size.trained) if actor.max_gradient_cosine < 1 else 0,
            "actor.max_gradient_cosine=1",
        ),
        *(Part(name, int(shard * count), fewer[name]) for name, count in size.frozen.items()),
        # Weights, gradients and moments; its activations are no larger than the policy's.
        Part("critic", int(4 * shard * size.critic_parameters), "advantages without a critic"),
        Part("gathered weights", _gathered_bytes(shape, size, between, copies=copies)),
        Part(name_of_activations, stored + ends, knob),
        *working,
    ]
    return [part for part in parts if part.bytes]


def _divided(shape: ModelShape, size: Trained) -> tuple[ModelShape, Trained]:
    """What each of the processes that divide layers has of a model."""
    by = size.tensor
    return replace(
        shape,
        intermediate=shape.intermediate // by,
        query_width=shape.query_width // by,
        kv_width=shape.kv_width // by,
        vocab=shape.vocab // by,
    ), replace(
        size,
        parameters=size.parameters // by,
        frozen={name: count // by for name, count in size.frozen.items()},
        critic_parameters=size.critic_parameters // by,
    )


def _gathered_bytes(
    shape: ModelShape, size: Trained, number_bytes: int, *, copies: bool = False
) -> int:
    """Of sharded weights, and of working copies, those that are whole at the peak: a layer, the
    next one, and all that lies outside of the layers."""
    if size.shards == size.tensor == 1 and not copies:
        return 0
    layers = shape.layers * _linear_numbers(shape)
    return number_bytes * (max(0, size.parameters - layers) + 2 * _linear_numbers(shape))


def _minibatch_tokens(config: TrainConfig, problems: ProblemSet, folder: Path) -> int:
    """Tokens of a minibatch whose responses are as long as they may be; prompts are shared."""
    every = max(1, len(problems.train) // _LOOKED_AT)
    prompts = problems.train[::every]
    lengths = [len(one) for one in TextCodec.load(folder).encode_all([p.prompt for p in prompts])]
    if any(one.images for one in prompts) and (vision := read_vision_facts(folder)) is not None:
        grids = (vision.grid(i.width, i.height) for one in prompts for i in one.images)
        lengths.append(sum(rows * columns for rows, columns in grids))
    prompt_tokens = math.ceil(sum(lengths) / max(1, len(prompts)))
    groups = math.ceil(config.dataset.batch_size / config.actor.ppo_n_minibatches)
    return groups * (prompt_tokens + config.gconfig.n_samples * config.gconfig.max_new_tokens)


def _size(part: Part) -> int:
    return -part.bytes


def _text(size_bytes: int) -> str:
    """In GiB, or MiB where that would be below 1."""
    gib = size_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def layer_bytes_per_token(shape: ModelShape, *, number_bytes: int, lora: bool) -> int:
    r"""Bytes that one decoder layer keeps for its backward pass, per token.

        feed-forward: gate, up, silu(gate), their product                       4 b I
        attention: rotated queries, the outputs of the trees and these joined   3 b Q
                   rotated keys, values                                         2 b K
        two norms: input, normalized, output; in float32                        24 h
                   the outputs in bfloat16, once for each reader but the last   2 h
                   of frozen norms only what the next product needs         less 8 h
        norms of heads: input in float32, and normalized if trained       (4 + b) (Q + K)

    Counted by watching every tensor of a step, for all four combinations of type and adapters.
    """
    feed_forward = 4 * shape.intermediate
    attention = 3 * shape.query_width + 2 * shape.kv_width
    norms = 6 * shape.hidden * _FLOAT32 - 8 * shape.hidden * lora
    casts = 2 * shape.hidden if number_bytes < _FLOAT32 else 0
    per_head = shape.head_norms * (_FLOAT32 + number_bytes * (not lora))
    head_norms = per_head * (shape.query_width + shape.kv_width)
    return number_bytes * (feed_forward + attention) + norms + casts + head_norms


def copies_bytes_per_token(shape: ModelShape, *, number_bytes: int, cpu: bool) -> int:
    r"""As `layer_bytes_per_token`, with hidden states in the type of the weights (`param_dtype`).

    feed-forward, attention                        as there
    two norms on a GPU: input, output              4 b h
    on a CPU: float32 of both, and the output      (16 + 2 b) h
    norms of heads                                 b (Q + K), or 8 (Q + K) on a CPU
    """
    feed_forward = 4 * shape.intermediate
    attention = 3 * shape.query_width + 2 * shape.kv_width
    norms = (16 + 2 * number_bytes if cpu else 4 * number_bytes) * shape.hidden
    of_heads = shape.head_norms * (8 if cpu else number_bytes)
    head_norms = of_heads * (shape.query_width + shape.kv_width)
    return number_bytes * (feed_forward + attention) + norms + head_norms


def _selective_numbers(shape: ModelShape) -> int:
    """What a layer keeps with `selective` besides its input, per token: the outputs of attention,
    k, o and up (`training.decoder_layers`)."""
    return shape.query_width + shape.kv_width + shape.hidden + shape.intermediate


def _linear_numbers(shape: ModelShape) -> int:
    """Weights of the matrices of one layer."""
    attention = 2 * shape.hidden * (shape.query_width + shape.kv_width)
    return attention + 3 * shape.hidden * shape.intermediate


def _head_bytes(
    shape: ModelShape, *, tokens: int, number_bytes: int, lora: bool, copies: bool, cpu: bool
) -> int:
    """Of the output layer: logits, its weight in the compute type, and the weight's gradient."""
    weight = shape.vocab * shape.hidden
    tiles = logit_tiles(tokens, weight, number_bytes, cpu=cpu)
    total = tiles.bytes(tokens, shape.vocab, number_bytes)
    if number_bytes < _FLOAT32 and not copies:
        total += number_bytes * weight
    if not lora:
        total += number_bytes * weight
    return total
