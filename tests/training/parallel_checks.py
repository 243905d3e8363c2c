"""Ranks against one process; started once for all checks: `python -m ... FOLDER RANK`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten_with_path

from areal_lab.config.schema import OptimizerConfig
from areal_lab.training.checkpoint import load_state, state_of_learner
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, merged_tensors, target_modules
from areal_lab.training.minibatch import make_minibatch
from areal_lab.training.model import load_policy
from areal_lab.training.optimizer import NonFiniteStep
from areal_lab.training.parallel.group import RankPlace, another_group, join, leave
from areal_lab.training.process.output import export, prepare_save, save
from areal_lab.training.process.saving import BackgroundSaves
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.step import train_batch
from tests.training import live_bytes
from tests.training.live_bytes import measured_and_estimated
from tests.training.test_forward import SHARE
from tests.training.tiny import random_batch, save_model, settings_for

RANKS = 4
STEPS = 5
SAME = ("loss", "grad_norm", "entropy", "ratio_mean", "behavior_weight_max", "drift_max")
CLIPPED = OptimizerConfig(lr=1e-3, warmup_steps=0, gradient_clipping=0.05)
CASES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "llama", "tied": True, "max_tokens_per_mb": 20, "optimizer": CLIPPED},
    "untied, two minibatches": {"kind": "qwen2", "tied": False, "ppo_n_minibatches": 2},
    "LoRA": {"kind": "llama", "tied": True, "use_lora": True, "max_tokens_per_mb": 30},
    "reference": {"kind": "llama", "tied": True, "kl_loss_coef": 0.3, "max_tokens_per_mb": 20},
    "LoRA, reference": {
        "kind": "llama",
        "tied": False,
        "use_lora": True,
        "kl_loss_coef": 0.3,
        "max_tokens_per_mb": 30,
    },
    "critic": {
        "kind": "llama",
        "tied": True,
        "advantage": {"name": "gae", "lambda_": 0.9},
        "kl_ctl": 0.1,
        "kl_ctl_target": 0.2,
        "kl_ctl_horizon": 100.0,
        "ppo_n_minibatches": 2,
        "max_tokens_per_mb": 20,
    },
    "shared critic": {
        "kind": "llama",
        "tied": True,
        "advantage": {"name": "gae", "lambda_": 0.9},
        "ppo_n_minibatches": 2,
        "max_tokens_per_mb": 20,
        "more": {"critic.share_body": True, "critic.optimizer.lr": 1e-2},
    },
    "teacher": {"kind": "llama", "tied": True, "max_tokens_per_mb": 20, "teacher": "LoRA"},
    "offload": {"kind": "qwen2", "tied": True, "offload": True, "max_tokens_per_mb": 20},
    "compiled, selective": {
        "kind": "qwen2",
        "tied": True,
        "compile": True,
        "gradient_checkpointing": "selective",
        "max_tokens_per_mb": 20,
    },
    "entropy": {"kind": "llama", "tied": False, "entropy_coeff": 0.01, "max_tokens_per_mb": 25},
}


def learner_of(folder: Path, case: str, ranks: Ranks) -> Learner:
    """The case's learner, sharded by the ranks."""
    changes = {k: v for k, v in CASES[case].items() if k not in ("kind", "tied")}
    if teacher := changes.pop("teacher", None):
        path = str(folder / teacher)
        changes["more"] = {"teacher.path": path, "teacher.distill_loss_weight": 0.1}
    checkpointing = changes.get("gradient_checkpointing", False)
    model = load_policy(folder / case, gradient_checkpointing=checkpointing)
    if changes.get("use_lora"):
        torch.manual_seed(3)
        add_lora(model, rank=4, alpha=8, targets=target_modules(model, ["all-linear"]), merged=True)
    settings = settings_for(folder / case, weights_root=folder / f"w-{ranks.count}", **changes)
    return make_learner(model, settings, ranks, compile_backend="aot_eager")


def batches() -> list[Any]:
    """Groups of different sizes, some without a gradient; in the last, only one has one."""
    made = [random_batch(seed, groups=5, equal_groups=seed % 3) for seed in range(STEPS - 1)]
    return [*made, random_batch(9, groups=5, equal_groups=4)]


def run(folder: Path, case: str, ranks: Ranks) -> tuple[list[dict[str, float]], Learner]:
    """Metrics of some steps, and the learner after them."""
    learner = learner_of(folder, case, ranks)
    return [train_batch(learner, batch).metrics for batch in batches()], learner


def check_steps(folder: Path, case: str, ranks: Ranks) -> Learner:
    """Losses, norms, parameters and exports are those of one process."""
    expected, alone = run(folder, case, ALONE)
    got, learner = run(folder, case, ranks)
    for step, (one, many) in enumerate(zip(expected, got, strict=True)):
        critic = ("critic_loss", "critic_grad_norm", "value_mean", "kl_coefficient")
        names = SAME if ranks.first else ("loss", "grad_norm")
        for name in (*names, *(name for name in critic if name in one)):
            # The largest difference of any token moves more than sums over all of them.
            share = 1e-4 if name == "drift_max" else 1e-5
            close = abs(one[name] - many[name]) <= share * max(1.0, abs(one[name]))
            assert close, (case, ranks.count, step, name, one[name], many[name])
    state = merged_tensors(learner.model, ranks)
    if ranks.first:
        there = merged_tensors(alone.model)
        assert list(state) == list(there)
        for name, tensor in there.items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)
    return learner


def check_export(folder: Path, case: str, ranks: Ranks) -> None:
    """Before a step, the exported folder equals that of one process to the last bit."""
    learner = learner_of(folder, case, ranks)
    weights = export(learner, 0, None)
    if not ranks.first:
        assert weights is None
        return
    alone = dataclasses.replace(
        learner_of(folder, case, ALONE),
        settings=dataclasses.replace(learner.settings, weights_root=str(folder / "alone")),
    )
    assert weights is not None
    assert weights.checksum == export(alone, 0, None).checksum  # type: ignore[union-attr]


def check_saved(folder: Path, case: str, learner: Learner, ranks: Ranks) -> None:
    """A checkpoint of the ranks continues in one process, and its model is the gathered one."""
    path = folder / f"saved-{ranks.count}-{case}"
    save(learner, SaveRequest(path, state=True, files={"note": b"by the first rank"}))
    if not ranks.first:
        return
    assert (path / "note").read_bytes() == b"by the first rank"
    again = learner_of(folder, case, ALONE)
    load_state(again, path / STATE_FOLDER)
    saved = load_file(path / "model.safetensors")
    for name, tensor in merged_tensors(again.model).items():
        assert torch.equal(saved[name], tensor), name


def check_saved_later(folder: Path, case: str, learner: Learner, ranks: Ranks) -> None:
    """Written by threads while the ranks train on; the same as `check_saved`."""
    at_once, later = (folder / f"{name}-{ranks.count}-{case}" for name in ("saved", "later"))
    group = another_group(60.0)
    saves = BackgroundSaves(ranks=ranks, pipe=None, group=group, timeout_s=60.0)
    saves.start(prepare_save(learner, SaveRequest(later, state=True, asynchronous=True)), 1)
    for batch in batches():
        train_batch(learner, batch)
    saves.wait()
    ranks.collect(None)  # all of them have written
    if ranks.first:
        whole, other = (load_file(path / "model.safetensors") for path in (at_once, later))
        assert whole.keys() == other.keys()
        assert all(torch.equal(whole[name], other[name]) for name in whole)
        models = [learner_of(folder, case, ALONE) for _ in range(2)]
        for one, path in zip(models, (at_once, later), strict=True):
            load_state(one, path / STATE_FOLDER)
        states = [dict(tree_flatten_with_path(state_of_learner(one))[0]) for one in models]
        for name, value in states[0].items():
            other_value = states[1][name]
            same = torch.equal(value, other_value) if torch.is_tensor(value) else True
            assert same, name


def check_continued(folder: Path, case: str, ranks: Ranks) -> None:
    """What 2 ranks saved continues here as it does in one process."""
    results = []
    for group in (ALONE, ranks):
        learner = learner_of(folder, case, group)
        load_state(learner, folder / f"saved-2-{case}" / STATE_FOLDER)
        results.append(train_batch(learner, random_batch(20, groups=5)).metrics)
    for name in ("loss", "grad_norm", "lr"):
        assert abs(results[0][name] - results[1][name]) <= 1e-5, (name, results)


def check_non_finite(folder: Path, ranks: Ranks) -> None:
    """A loss that is not finite on one rank is refused by all."""
    learner = learner_of(folder, "tied", ranks)
    original = learner.loss.function

    def broken(logprobs: Any, *rest: Any, **facts: Any) -> Any:
        result = original(logprobs, *rest, **facts)
        scale = float("nan") if ranks.rank == 1 else 1.0
        return result._replace(loss=result.loss * scale)  # type: ignore[attr-defined]

    broken_loss = dataclasses.replace(learner.loss, function=broken)
    try:
        train_batch(dataclasses.replace(learner, loss=broken_loss), random_batch(groups=5))
    except NonFiniteStep:
        return
    raise AssertionError(f"rank {ranks.rank} went on")


def check_work(ranks: Ranks) -> None:
    """Groups are dealt whole and once, and all ranks have the same number of passes."""
    request = random_batch(groups=5)
    everyone = list(range(len(request.trajectories)))
    minibatch = make_minibatch(
        request.trajectories, everyone, version=0, has_gradient=lambda _: True,
        cost=SHARE, max_tokens=20, ranks=ranks,
    )  # fmt: skip
    here = sorted({i for part in minibatch.parts for i in part.sequence_ids.tolist()})
    found = ranks.collect((here, len(minibatch.passes)))
    if ranks.first:
        assert sorted(i for ids, _ in found for i in ids) == everyone
        assert len({passes for _, passes in found}) == 1
        groups = [{request.trajectories[i].group for i in ids} for ids, _ in found]
        assert sum(map(len, groups)) == 5


def check_memory(folder: Path, ranks: Ranks) -> None:
    """The tensors of a step on a rank are within 5 % of the estimate."""
    allocation = {"allocation_mode": f"embedded:d1+fsdp:d{ranks.count}"}
    for dtype, checkpointing in (("float32", False), ("bfloat16", True)):
        peak, estimated = measured_and_estimated(
            folder / "memory", 1024, ranks,
            dtype=dtype, gradient_checkpointing=checkpointing, more=allocation,
        )  # fmt: skip
        assert abs(estimated.tensors / peak - 1) < 0.05, (dtype, peak, estimated.parts)


def main(folder: Path, rank: int) -> None:
    """All checks with 2 ranks, then with 4, and with 2 copies of 2 shards."""
    torch.set_num_threads(1)
    for count, shards in ((2, 2), (4, 4), (4, 2)):
        if rank >= count:
            continue
        ranks = join(
            RankPlace(
                rank=rank, count=count, shards=shards, device="cpu",
                rendezvous=str(folder / f"meet-{count}-{shards}"), timeout_s=40,
            )
        )  # fmt: skip
        check_work(ranks)
        if count == 2:
            check_memory(folder, ranks)
        cases = CASES if count == 2 else ["tied", "LoRA"] if shards == 4 else ["tied"]
        for case in cases:
            learner = check_steps(folder, case, ranks)
            check_export(folder, case, ranks)
            if count == 2:
                check_saved(folder, case, learner, ranks)
                if case in ("tied", "LoRA"):
                    check_saved_later(folder, case, learner, ranks)
            else:
                check_continued(folder, case, ranks)
        check_non_finite(folder, ranks)
        leave()
    print(f"rank {rank}: all checks passed")


def prepare(folder: Path) -> None:
    """The models of the cases, and a larger one."""
    save_model(folder / "memory", **live_bytes.SHAPE)
    for name, case in CASES.items():
        save_model(folder / name, kind=case["kind"], tied=case["tied"], vocab_size=98)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
