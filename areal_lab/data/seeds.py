"""Seeds of samples: one for each purpose, group and sample of a run."""

from __future__ import annotations

import hashlib

from areal_lab.control.events import GroupId


def sample_seed(run_seed: int, stream: str, group: GroupId, sample: int) -> int:
    """Seed of one sample: a 31-bit hash, so that neighboring groups share no random numbers.

    Args:
        stream: purpose of the sample, such as "train"; each purpose has its own seeds.
    """
    text = f"{run_seed}/{stream}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
