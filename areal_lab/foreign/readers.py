"""The readers, one a framework: how its lines look, what its keys mean.

A new framework is a module with `ANCHORS`, an extractor, `keyed` and `assemble`, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from areal_lab.foreign import (
    areal,
    megatron_rl,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    roll,
    skyrl,
    slime,
    tinker,
    torchforge,
    trl,
    verl,
)
from areal_lab.foreign.record import ImportedRun
from areal_lab.foreign.scan import Extractor, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader of one framework."""

    name: str
    anchors: tuple[bytes, ...]
    """Byte strings; the first line of each record has one."""
    extractor: Callable[[], Extractor]
    keyed: Callable[[Mapping[str, Any]], int]
    """How many keys of a record without a shape (CSV, JSON lines, trackers) are the framework's."""
    assemble: Callable[[Rows], ImportedRun]
    """Steps from records, both of console text and of files."""
    kind: Callable[[Mapping[str, Any]], str] = lambda _values: "train"
    """Kind of a record of a file."""
    step_keys: tuple[str, ...] = ()
    """Keys of the step's number in files, before those of `documents.STEP_KEYS`."""
    back: int = 0
    """Lines before that with an anchor which the extractor sees, such as a bar's."""
    also: tuple[str, ...] = ()
    """Frameworks with the same records, told apart by `assemble`."""


READERS: Final = (
    Reader(
        name="verl",
        anchors=verl.ANCHORS,
        extractor=verl.Extractor,
        keyed=verl.keyed,
        assemble=verl.assemble,
        kind=verl.row_of,
    ),
    Reader(
        name="trl",
        anchors=trl.ANCHORS,
        extractor=trl.Extractor,
        keyed=trl.keyed,
        assemble=trl.assemble,
        step_keys=("train/global_step", "global_step/max_steps"),
        back=3,
        also=("unsloth", "ms-swift", "verifiers"),
    ),
    Reader(
        name="prime-rl",
        anchors=prime_rl.ANCHORS,
        extractor=prime_rl.Extractor,
        keyed=prime_rl.keyed,
        assemble=prime_rl.assemble,
        step_keys=("step",),
    ),
    Reader(
        name="slime",
        anchors=slime.ANCHORS,
        extractor=slime.extractor,
        keyed=slime.keyed,
        assemble=slime.assemble,
        kind=slime.kind,
        back=1,
        also=("miles",),
    ),
    Reader(
        name="nemo-rl",
        anchors=nemo_rl.ANCHORS,
        extractor=nemo_rl.Extractor,
        keyed=nemo_rl.keyed,
        assemble=nemo_rl.assemble,
    ),
    Reader(
        name="openrlhf",
        anchors=openrlhf.ANCHORS,
        extractor=openrlhf.extractor,
        keyed=openrlhf.keyed,
        assemble=openrlhf.assemble,
        step_keys=("train/global_step",),
    ),
    Reader(
        name="skyrl",
        anchors=skyrl.ANCHORS,
        extractor=skyrl.extractor,
        keyed=skyrl.keyed,
        assemble=skyrl.assemble,
        step_keys=("trainer/global_step",),
    ),
    Reader(
        name="areal",
        anchors=areal.ANCHORS,
        extractor=areal.Extractor,
        keyed=areal.keyed,
        assemble=areal.assemble,
    ),
    Reader(
        name="roll",
        anchors=roll.ANCHORS,
        extractor=roll.extractor,
        keyed=roll.keyed,
        assemble=roll.assemble,
        step_keys=("system/global_step",),
    ),
    Reader(
        name="megatron-rl",
        anchors=megatron_rl.ANCHORS,
        extractor=megatron_rl.Extractor,
        keyed=megatron_rl.keyed,
        assemble=megatron_rl.assemble,
    ),
    Reader(
        name="tinker-cookbook",
        anchors=tinker.ANCHORS,
        extractor=tinker.Extractor,
        keyed=tinker.keyed,
        assemble=tinker.assemble,
        step_keys=("progress/batch",),
        back=4,
    ),
    Reader(
        name="open-instruct",
        anchors=open_instruct.ANCHORS,
        extractor=open_instruct.Extractor,
        keyed=open_instruct.keyed,
        assemble=open_instruct.assemble,
        step_keys=("training_step",),
    ),
    Reader(
        name="torchforge",
        anchors=torchforge.ANCHORS,
        extractor=torchforge.Extractor,
        keyed=torchforge.keyed,
        assemble=torchforge.assemble,
    ),
)


def named(name: str) -> Reader:
    """Find a reader by its name."""
    for one in READERS:
        if name in (one.name, *one.also):
            return one
    known = ", ".join(name for one in READERS for name in (one.name, *one.also))
    raise ValueError(f"--framework is {name}, but must be one of {known}")
