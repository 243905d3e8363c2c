"""Parse `allocation_mode` and `rollout.backend`: `sglang:d2t1`, `sglang:d4+fsdp:d2`.

    text --parse_allocation--> Allocation --layout_of--> servers to start, processes that train
                                   |
                                   +--str--> the same text in canonical form

The grammar is AReaL's `allocation_mode`:

    allocation  part | part + part | part + eval          (+ separate, | the same devices)
    part        [backend (: or .)] sizes | [backend (: or .)] ( attn:sizes | ffn:sizes )
    sizes       d4 data, t2 tensor, p2 pipeline, c2 context, e2 expert; in any order, each once

A part without a name is a trainer: fsdp, or megatron if it has pipeline or expert sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from areal_lab.config.schema import TrainConfig
from areal_lab.config.unknown import nearest
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.options import Device

ENGINES: Final = tuple(BACKENDS)
"""Backends that generate."""
TRAINERS: Final = ("fsdp", "megatron", "archon")
"""Backends that train in AReaL."""
TORCH_TRAINERS: Final = ("fsdp", "archon")
"""Those that are the trainer of this project, under either name: FSDP2 with divided layers."""
_EXAMPLE: Final = "for example sglang:d2+fsdp:d1"
_DIGITS: Final = 6
"""Maximum digits of a size: no cluster has a million devices."""
_NAMES: Final[Mapping[str, str]] = {
    "d": "data",
    "t": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Degrees of parallelism; 1 is none."""

    data: int = 1
    """Copies of the model; for an engine, servers."""
    tensor: int = 1
    """Devices that share every layer."""
    pipeline: int = 1
    """Groups of devices that hold some of the layers each."""
    context: int = 1
    """Devices that share a sequence."""
    expert: int = 1
    """Devices that share the experts; a subset of the others."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}, but must be >= 1")

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        """`d4t2`: data always, the others if greater than 1."""
        sizes = {letter: getattr(self, name) for letter, name in _NAMES.items()}
        return "".join(f"{k}{n}" for k, n in sizes.items() if k == "d" or n > 1)


UNDIVIDED: Final = Sizes()
"""One process."""


@dataclass(frozen=True, slots=True)
class Part:
    """One backend and its sizes."""

    backend: str
    sizes: Sizes
    expert_layers: Sizes | None = None
    """Sizes of the layers with experts, if they differ."""

    def __str__(self) -> str:
        """`fsdp:d2`."""
        if self.expert_layers is None:
            return f"{self.backend}:{self.sizes}"
        return f"{self.backend}:(attn:{self.sizes}|ffn:{self.expert_layers})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A parsed `allocation_mode`."""

    engines: Part | None = None
    trainer: Part | None = None
    evaluation_only: bool = False
    """`+eval`: there is no training."""
    shared: bool = False
    """`|`: engines and trainer take turns on the same devices."""

    def __post_init__(self) -> None:
        if self.engines is None and self.trainer is None:
            raise ValueError("an allocation needs engines or a trainer")
        if self.evaluation_only and (self.engines is None or self.trainer is not None):
            raise ValueError("an allocation for evaluation has engines and no trainer")
        if self.shared and (self.engines is None or self.trainer is None):
            raise ValueError("devices are shared by engines and a trainer")

    def __str__(self) -> str:
        """The canonical text of this allocation."""
        parts = [str(part) for part in (self.engines, self.trainer) if part is not None]
        if self.evaluation_only:
            parts.append("eval")
        return ("|" if self.shared else "+").join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The servers that a run starts."""

    backend: str
    servers: int
    tensor_parallel: int = 1
    """Devices of each server."""
    shared: bool = False
    """Whether the trainer takes turns with them on these devices."""
    together: bool = False
    """Whether the trainer computes on these devices at the same time (`rollout.share_gpu`)."""
    device: Device = "cpu"
    """Once they are placed, as `gpus`. Attached servers count as on the CPU."""
    gpus: tuple[tuple[str, ...], ...] = ()
    """GPUs of each server, as `CUDA_VISIBLE_DEVICES` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The engines and the trainer that a config asks for."""

    engines: EnginePlan
    sizes: Sizes
    """Of the engines."""
    setting: str
    """The one that names the engines: `rollout.backend` or `allocation_mode`."""
    allocation: Allocation | None
    """Of `allocation_mode`, if it is set."""

    @property
    def trainer(self) -> Sizes:
        """How the processes of the trainer divide the model and its work."""
        part = None if self.allocation is None else self.allocation.trainer
        return UNDIVIDED if part is None else part.sizes


def parse_allocation(text: str) -> Allocation:
    """Parse an `allocation_mode`.

    Raises:
        ValueError: in one line, with what is wrong and what is allowed.
    """
    compact = "".join(text.split())
    pieces, shared = _split(compact, text)
    if len(pieces) > 2:
        raise _wrong(text, "has more than two parts: engines, trainer")
    evaluation_only = len(pieces) == 2 and pieces[1] == "eval"
    parts = [_part(piece, text) for piece in (pieces[:1] if evaluation_only else pieces)]
    if len(parts) == 2 and (parts[0].backend not in ENGINES or parts[1].backend not in TRAINERS):
        raise _wrong(text, "must name an engine first and a trainer second")
    engines = next((part for part in parts if part.backend in ENGINES), None)
    trainer = next((part for part in parts if part.backend in TRAINERS), None)
    if evaluation_only and engines is None:
        raise _wrong(text, "must name an engine before +eval")
    return Allocation(
        engines=engines, trainer=trainer, evaluation_only=evaluation_only, shared=shared
    )


def parse_backend(text: str) -> tuple[str, Sizes | None]:
    """Parse a `rollout.backend`: a name, optionally with sizes.

    Raises:
        ValueError: in one line, with the nearest name.
    """
    name = re.split("[:.]", text, maxsplit=1)[0]
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise ValueError(f"{text!r} is not an engine; known are {known}{nearest(name, ENGINES)}")
    if name == text:
        return name, None
    return name, _part(text, text).sizes


def layout_of(config: TrainConfig) -> Layout:
    """The engines and the trainer that a config asks for.

    Raises:
        ValueError: in one line, if settings contradict each other or cannot be parsed.
    """
    rollout, mode = config.rollout, config.allocation_mode
    try:
        backend, sizes = parse_backend(rollout.backend)
    except ValueError as error:
        raise ValueError(f"rollout.backend: {error}") from error
    try:
        allocation = parse_allocation(mode) if mode else None
    except ValueError as error:
        raise ValueError(f"allocation_mode: {error}") from error
    setting, text, shared = "rollout.backend", rollout.backend, False
    if allocation is not None and (engines := allocation.engines) is not None:
        if rollout.backend not in (_DEFAULT_BACKEND, engines.backend, str(engines)):
            raise ValueError(
                f"allocation_mode={mode} and rollout.backend={rollout.backend} are different "
                "engines; remove one of the settings"
            )
        backend, sizes, shared = engines.backend, engines.sizes, allocation.shared
        setting, text = "allocation_mode", mode
    if sizes is not None and rollout.engines not in (1, sizes.data):
        raise ValueError(
            f"{setting}={text} asks for {sizes.data} servers, but rollout.engines is "
            f"{rollout.engines}; remove rollout.engines"
        )
    sizes = sizes or Sizes(data=rollout.engines)
    plan = EnginePlan(
        backend=backend,
        servers=sizes.data,
        tensor_parallel=sizes.tensor,
        shared=shared,
        together=rollout.share_gpu,
    )
    return Layout(engines=plan, sizes=sizes, setting=setting, allocation=allocation)


_DEFAULT_BACKEND: Final = TrainConfig().rollout.backend


def _split(compact: str, text: str) -> tuple[list[str], bool]:
    """The parts, and whether they share devices; parentheses enclose one part."""
    bare = re.sub(r"\([^()]*\)", lambda found: "x" * len(found.group()), compact)
    if "(" in bare or ")" in bare:
        raise _wrong(text, "has an unbalanced parenthesis")
    marks = [i for i, letter in enumerate(bare) if letter in "+|"]
    # AReaL also takes `attn:d4|ffn:d2` without parentheses.
    if "+" not in bare and re.fullmatch(r"attn:[^|]*\|ffn:[^|]*", compact):
        return [f"({compact})"], False
    edges = [-1, *marks, len(compact)]
    pieces = [compact[a + 1 : b] for a, b in pairwise(edges)]
    shared = any(compact[i] == "|" for i in marks)
    if shared and len(marks) > 1:
        raise _wrong(text, "has more than two parts: engines, trainer")
    return pieces, shared


def _part(piece: str, text: str) -> Part:
    found = re.fullmatch(r"(?:([a-z_]+)[:.])?(\(.*\)|[a-z0-9]*)", piece, re.IGNORECASE)
    if found is None:
        raise _wrong(text, f"has a part {piece!r} that is not backend:sizes")
    name, body = found.groups()
    if name is not None and name not in (*ENGINES, *TRAINERS):
        known = (*ENGINES, *TRAINERS)
        raise _wrong(
            text,
            f"has an unknown backend {name!r}; known are {', '.join(known)}{nearest(name, known)}",
            end="",
        )
    if body.startswith("("):
        layers = re.fullmatch(r"\(attn:([a-z0-9]+)\|ffn:([a-z0-9]+)\)", body)
        if layers is None:
            raise _wrong(text, f"has {body!r}, which is not (attn:sizes|ffn:sizes)")
        if name not in (None, "megatron"):
            raise _wrong(
                text, f"has separate sizes for experts in {name}; only megatron supports them"
            )
        sizes, experts = (_sizes(one, text) for one in layers.groups())
        return Part("megatron", sizes, experts)
    sizes = _sizes(body, text)
    if name is None:
        name = "megatron" if sizes.pipeline > 1 or sizes.expert > 1 else "fsdp"
    return Part(name, sizes)


def _sizes(body: str, text: str) -> Sizes:
    """`d4t2` as sizes."""
    if not re.fullmatch(r"(?:[a-z]\d+)+", body):
        raise _wrong(text, f"has sizes {body!r}, but each size must be a letter and a number")
    sizes: dict[str, int] = {}
    for letter, digits in re.findall(r"([a-z])(\d+)", body):
        if letter not in _NAMES:
            known = ", ".join(f"{k} ({name})" for k, name in _NAMES.items())
            raise _wrong(text, f"has {letter}{digits}; sizes are {known}")
        if _NAMES[letter] in sizes:
            raise _wrong(text, f"has {letter} twice in {body!r}")
        if len(digits.lstrip("0")) > _DIGITS:
            raise _wrong(text, f"has {letter}{digits}, but sizes have at most {_DIGITS} digits")
        if int(digits) < 1:
            raise _wrong(text, f"has {letter}{digits}, but sizes are >= 1")
        sizes[_NAMES[letter]] = int(digits)
    return Sizes(**sizes)


def _wrong(text: str, what: str, end: str = f", {_EXAMPLE}") -> ValueError:
    return ValueError(f"{text!r} {what}{end}")
