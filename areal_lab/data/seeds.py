"""Seeds of samples: one for each purpose, group and sample of a run."""

from __future__ import annotations

import hashlib

from areal_lab.control.events import GroupId


def sample_seed(run_seed: int, stream: str, group: GroupId, sample: int, turn: str = "") -> int:
    """Seed of one sample: a 31-bit hash, so that neighboring groups share no random numbers.

    Args:
        run_seed: of the run.
        stream: purpose of the sample, such as "train"; each purpose has its own seeds.
        group: of the sample.
        sample: index inside its group.
        turn: name of a turn of it, if it has several.
    """
    text = f"{run_seed}/{stream}/{group}/{sample}{turn and '/'}{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
