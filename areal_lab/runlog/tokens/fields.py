"""Training fields of tokens: one .npz a step, beside its trajectories; a column per field.

member                      type      one value per
samples, tokens             int32     sample in the forward pass: its place in the step, its tokens
advantages                  float32   sample of the step
proximal_minus_behavior     float16   token: log pi_prox - log pi_behav
logprob_minus_proximal      float16   token: log pi_theta - log pi_prox
entropy                     float16   token: nats
loss.NAME                   float16   token: a field of the loss's result, such as behavior_weight;
                                      bool if the loss returns flags, such as clipped

Tokens are those that the policy chose, in the order of the step's samples. For PPO, samples of
advantage 0 are not in the forward pass and have no values but their advantage.

float16 has a relative error of at most 2^-11. So differences of log-probs are stored: they are near
0, where it is fine, and log-probs near -10, where it is coarse (0.004), are not. The behavior
log-probs are in the step's .jsonl. A column that float16 cannot hold (65504) is float32. Members
are deflated: flags that are never set, and ratios that are all 1, take next to nothing. With
decoupled PPO that makes 8 to 10 bytes a token, and 2 kB a file (`benchmarks.token_files`).

npz and not safetensors, since numpy alone reads it, column by column, and deflates.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from areal_lab.runlog.tokens.columns import Column

_LOSS: Final = "loss."
_LEVEL: Final = 1
"""Of the compression: higher ones save little, because mantissas of floats are noise."""
_LARGEST: Final = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFields:
    """The fields of one step; `R` tokens in the forward pass, of `M` of the step's `N` samples."""

    samples: Column
    """`[M]`: places in the step, ascending."""
    tokens: Column
    """`[M]`: tokens of each that the policy chose; their sum is `R`."""
    advantages: Column
    """`[N]`."""
    proximal_minus_behavior: Column
    logprob_minus_proximal: Column
    """pi_theta is the policy in the training forward of the token's minibatch, before its update;
    in the first minibatch it is pi_prox."""
    entropy: Column
    loss: Mapping[str, Column]
    """Per-token fields of the loss's result, by name."""


def fields_path(trajectories: Path, step: int) -> Path:
    """The file of a step."""
    return trajectories / f"step-{step:05d}.npz"


def write_fields(path: Path, fields: TokenFields) -> None:
    """Write the file of one step; it appears complete or not at all."""
    members: dict[str, Column] = {
        "samples": fields.samples.astype(np.int32),
        "tokens": fields.tokens.astype(np.int32),
        "advantages": fields.advantages.astype(np.float32),
        "proximal_minus_behavior": _compact(fields.proximal_minus_behavior),
        "logprob_minus_proximal": _compact(fields.logprob_minus_proximal),
        "entropy": _compact(fields.entropy),
        **{_LOSS + name: _compact(column) for name, column in fields.loss.items()},
    }
    temporary = path.with_name(f".{path.name}.tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        for name, values in members.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, values, allow_pickle=False)
    os.replace(temporary, path)


def read_fields(path: Path) -> TokenFields:
    """Read the file of one step; floats as float32.

    Raises:
        ValueError: naming the file, if it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: _wide(archive[name]) for name in archive.files}
        known = {name: members.pop(name) for name in list(members) if not name.startswith(_LOSS)}
        loss = {name.removeprefix(_LOSS): column for name, column in members.items()}
        return TokenFields(**known, loss=loss)
    except (OSError, TypeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _compact(values: Column) -> Column:
    if values.dtype == np.bool_:
        return values
    finite = values[np.isfinite(values)]
    fits = not len(finite) or float(np.abs(finite).max()) <= _LARGEST
    return values.astype(np.float16 if fits else np.float32)


def _wide(values: Column) -> Column:
    return values.astype(np.float32) if values.dtype == np.float16 else values
