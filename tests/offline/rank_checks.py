"""Two ranks against one process, on fixed data: `python -m ... FOLDER RANK`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from areal_lab.offline.trainee import Trainee, evaluate, reference_logprobs, train_step
from areal_lab.training.lora import merged_tensors
from areal_lab.training.parallel import RankPlace, join, leave
from areal_lab.training.ranks import ALONE, Ranks
from tests.offline.test_trainee import make_items, references, trainee_of

RANKS = 2
STEPS = 5
CASES = {
    "sft": {"max_tokens_per_mb": 30},
    "rm": {"max_tokens_per_mb": 30},
    "dpo": {"max_tokens_per_mb": 30, "use_lora": True, "lora_rank": 2},
}


def trained(folder: Path, kind: str, ranks: Ranks) -> tuple[list[dict[str, float]], Trainee]:
    """Metrics of some steps and of an evaluation."""
    trainee = trainee_of(folder, kind, ranks, **CASES[kind])
    items = [make_items(kind, seed=step, count=5) for step in range(STEPS)]
    found = [train_step(trainee, batch, references(kind, batch)) for batch in items]
    # Fewer rows than ranks: one has nothing but passes without effect.
    few = items[0][:1]
    found.append(evaluate(trainee, few, references(kind, few), at_once=3))
    found.append(evaluate(trainee, items[1], references(kind, items[1]), at_once=2))
    return found, trainee


def check(folder: Path, kind: str, ranks: Ranks) -> None:
    """Metrics and weights are those of one process."""
    expected, alone = trained(folder, kind, ALONE)
    got, trainee = trained(folder, kind, ranks)
    for one, many in zip(expected, got, strict=True):
        for name in one.keys() - {"packed_tokens", "micro_batches"} if ranks.first else ():
            close = abs(one[name] - many[name]) <= 1e-5 * max(1.0, abs(one[name]))
            assert close, (kind, name, one[name], many[name])
    state = merged_tensors(trainee.network.model, ranks)
    if ranks.first:
        for name, tensor in merged_tensors(alone.network.model).items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)


def check_references(folder: Path, ranks: Ranks) -> None:
    """Every rank knows the log-probs of all pairs."""
    items = make_items("dpo", seed=7)
    found = []
    for group in (ALONE, ranks):
        trainee = trainee_of(folder, "dpo", group, **CASES["dpo"])
        objective = trainee.objective
        found.append(
            reference_logprobs(trainee.network, objective, items, at_once=4, done=lambda _: None)  # type: ignore[arg-type]
        )
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def main(folder: Path, rank: int) -> None:
    """All checks."""
    torch.set_num_threads(1)
    ranks = join(
        RankPlace(
            rank=rank, count=RANKS, shards=RANKS, device="cpu",
            rendezvous=str(folder / "meet"), timeout_s=40,
        )
    )  # fmt: skip
    for kind in CASES:
        check(folder / kind, kind, ranks)
    check_references(folder / "dpo", ranks)
    leave()
    print(f"rank {rank}: all checks passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
