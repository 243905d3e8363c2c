"""pass@k, against all subsets of k samples."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
import torch

from areal_lab.functional import pass_at_k


def by_enumeration(n: int, c: int, k: int) -> float:
    samples = [1] * c + [0] * (n - c)
    return fmean(max(chosen) for chosen in combinations(samples, k))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_it_is_the_share_of_subsets_with_a_correct_sample(k: int) -> None:
    pairs = [(n, c) for n in range(k, 9) for c in range(n + 1)]
    samples, correct = torch.tensor(pairs).unbind(1)
    expected = [by_enumeration(n, c, k) for n, c in pairs]
    torch.testing.assert_close(
        pass_at_k(samples, correct, k=k),
        torch.tensor(expected, dtype=torch.double),
        rtol=0,
        atol=1e-12,
    )


def test_pass_at_1_is_the_share_of_correct_samples() -> None:
    values = pass_at_k(torch.tensor([4, 8]), torch.tensor([1, 6]), k=1)
    assert values.tolist() == pytest.approx([0.25, 0.75])


def test_many_samples_do_not_overflow() -> None:
    value = pass_at_k(torch.tensor([10_000]), torch.tensor([1]), k=100)
    assert value.tolist() == pytest.approx([0.01])


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (3, 1, 0, "k is 0, but must be >= 1"),
        (3, 1, 4, "1 problems have fewer than k=4 samples"),
        (3, 4, 2, "correct is outside 0 .. samples for 1 problems"),
        (3, -1, 2, "correct is outside"),
    ],
)
def test_impossible_counts_are_refused(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(torch.tensor([n]), torch.tensor([c]), k=k)
