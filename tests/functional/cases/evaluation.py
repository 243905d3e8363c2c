"""Row of the table: pass@k."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.pass_at_k import pass_at_k
from tests.functional.case import Case

COUNTS = dict.fromkeys(("grad", "jacrev", "double backward"), "a function of counts: no gradient")


def counts(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randint(3, 12, (6,), generator=generator)
    return samples, (torch.rand(6, generator=generator) * (samples + 1)).long()


CASES = [
    Case(
        name="pass_at_k",
        function=partial(pass_at_k, k=3),
        sample=counts,
        reasons={**COUNTS, "packed = padded": "one number per problem: no token layout"},
    ),
]
