"""Ranks against one process; started once for all checks: `python -m ... FOLDER RANK`."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from areal_lab.config.schema import OptimizerConfig
from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.training.checkpoint import load_state, state_of_learner
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, merged_tensors, target_modules
from areal_lab.training.minibatch import make_minibatch
from areal_lab.training.model import load_policy
from areal_lab.training.optimizer import NonFiniteStep
from areal_lab.training.parallel import RankPlace, another_group, join, leave
from areal_lab.training.process.output import export, prepare_save, save
from areal_lab.training.process.threads import BackgroundSaves
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest, TrainBatchRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.step import train_batch
from tests.training import live_bytes
from tests.training.live_bytes import measured_and_estimated
from tests.training.test_forward import SHARE
from tests.training.tiny import random_batch, save_model, settings_for
from tests.vision_folder import FACTS, batch_with_pictures, write_vision_model

RANKS = 4
STEPS = 5
LONG = ("tied", "untied, two minibatches", "LoRA")
"""Cases with all of these steps; the others have the last two."""
CONTROLS = ("gradient_cosine", "aligned_steps", "sequence_effective_share", "dual_variable")
SAME = ("loss", "grad_norm", "entropy", "ratio_mean", "behavior_weight_max", "drift_max")
CLIPPED = OptimizerConfig(lr=1e-3, warmup_steps=0, gradient_clipping=0.05)
CASES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "llama", "tied": True, "max_tokens_per_mb": 20, "optimizer": CLIPPED},
    "untied, two minibatches": {"kind": "qwen2", "tied": False, "ppo_n_minibatches": 2},
    "LoRA": {"kind": "llama", "tied": True, "use_lora": True, "max_tokens_per_mb": 30},
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
    "controls": {
        "kind": "llama",
        "tied": True,
        "max_tokens_per_mb": 20,
        "ppo_n_minibatches": 2,
        "age_half_life": 2.0,
        "lr_ess_share": 1.0,
        "max_gradient_cosine": 0.01,
        "loss": {"name": "r2vpo", "variance": 0.1, "rate": 0.01},
    },
    "reference": {"kind": "llama", "tied": True, "kl_loss_coef": 0.3, "max_tokens_per_mb": 20},
    "LoRA, reference": {
        "kind": "llama",
        "tied": False,
        "use_lora": True,
        "kl_loss_coef": 0.3,
        "max_tokens_per_mb": 30,
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
    "head norms": {
        "kind": "qwen3",
        "tied": True,
        "max_tokens_per_mb": 25,
        "gradient_checkpointing": True,
    },
    "pictures": {"kind": "qwen2_vl", "tied": True, "max_tokens_per_mb": 20},
    "pictures, LoRA": {
        "kind": "qwen3_vl",
        "tied": False,
        "use_lora": True,
        "kl_loss_coef": 0.3,
        "max_tokens_per_mb": 25,
        "gradient_checkpointing": True,
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


def batches(case: str) -> list[Any]:
    """Groups of different sizes, some without a gradient; in the last, only one has one.

    Those with pictures have one group that has none, which is alone on its rank.
    """
    if case.startswith("pictures"):
        return [random_pictures(seed) for seed in range(2)]
    made = [random_batch(seed, groups=5, equal_groups=seed % 3) for seed in range(STEPS - 1)]
    made.append(random_batch(9, groups=5, equal_groups=4))
    return made if case in LONG else made[-2:]


class Alone(NamedTuple):
    """What one process does in a case."""

    metrics: list[dict[str, float]]
    checksum: str
    """Of the weights that it exports before the first step."""
    tensors: dict[str, Any]
    """Of the model after the last step."""
    names: list[str]
    """Of its parameters, tied ones once."""
    next_step: dict[str, float]
    """Metrics of one more step, after the checkpoint in `saved-alone-CASE`."""


@cache
def alone(folder: Path, case: str) -> Alone:
    """The reference that all layouts of ranks are compared with; computed by the first rank."""
    learner = learner_of(folder, case, ALONE)
    weights = export(learner, 0, None)
    assert isinstance(weights, WeightsFolder)
    metrics = [train_batch(learner, batch).metrics for batch in batches(case)]
    tensors = {name: tensor.clone() for name, tensor in merged_tensors(learner.model).items()}
    names = [name for name, _ in learner.model.named_parameters()]
    save(learner, SaveRequest(folder / f"saved-alone-{case}", state=True))
    return Alone(metrics, weights.checksum, tensors, names, one_more_step(learner, case))


def one_more_step(learner: Learner, case: str) -> dict[str, float]:
    """Metrics of a step after the others."""
    more = random_pictures(20) if case.startswith("pictures") else random_batch(20, groups=5)
    return train_batch(learner, more).metrics


def random_pictures(seed: int) -> TrainBatchRequest:
    """Groups with pictures, and a long one without, which is alone on its rank."""
    rng = random.Random(seed)
    made = []
    for trajectory in batch_with_pictures(FACTS, seed=seed):
        behavior = tuple(-rng.uniform(3.0, 6.0) for _ in trajectory.response_tokens)
        part = Segment(trajectory.response_tokens, behavior, 3)
        prompt = trajectory.prompt_tokens * (1 if trajectory.images else 20)
        made.append(dataclasses.replace(trajectory, prompt_tokens=prompt, parts=(part,)))
    return TrainBatchRequest(3, tuple(made))


def compare(
    case: str, ranks: Ranks, step: int, one: dict[str, float], many: dict[str, float]
) -> None:
    """Metrics of a step of one process and of several."""
    critic = [
        name
        for name in ("critic_loss", "critic_grad_norm", "value_mean", "kl_coefficient", *CONTROLS)
        # A mean over records of tokens, as the loss of a shared critic, is the first rank's.
        if name in one and (ranks.first or name in many)
    ]
    names = SAME if ranks.first else ("loss", "grad_norm", "lr")
    for name in (*names, *critic):
        # The largest difference of any token moves more than sums over all of them.
        share = 1e-4 if name == "drift_max" else 1e-5
        close = abs(one[name] - many[name]) <= share * max(1.0, abs(one[name]))
        assert close, (case, ranks.count, step, name, one[name], many[name])


def check_steps(folder: Path, case: str, ranks: Ranks) -> Learner:
    """Exports, losses, norms and parameters are those of one process."""
    one = alone(folder, case) if ranks.first else None
    expected = ranks.announce(None if one is None else one._replace(tensors={}))
    learner = learner_of(folder, case, ranks)
    assert [name for name, _ in learner.model.named_parameters()] == expected.names
    weights = export(learner, 0, None)
    # To the last bit, before a step.
    assert weights is None if one is None else weights.checksum == one.checksum  # type: ignore[union-attr]
    for step, (batch, metrics) in enumerate(zip(batches(case), expected.metrics, strict=True)):
        compare(case, ranks, step, metrics, train_batch(learner, batch).metrics)
    state = merged_tensors(learner.model, ranks)
    if one is not None:
        assert list(state) == list(one.tensors)
        for name, tensor in one.tensors.items():
            # AdamW makes of a gradient that is rounding alone a part of a step, which is 1e-3.
            torch.testing.assert_close(state[name], tensor, atol=1e-4, rtol=1e-4)
    return learner


def check_saved(folder: Path, case: str, learner: Learner, ranks: Ranks) -> None:
    """A checkpoint of the ranks continues in one process, and its model is the gathered one."""
    path = folder / f"saved-{case}"
    save(learner, SaveRequest(path, state=True, files={"note": b"by the first rank"}))
    many = one_more_step(learner, case)
    if not ranks.first:
        return
    assert (path / "note").read_bytes() == b"by the first rank"
    again = learner_of(folder, case, ALONE)
    load_state(again, path / STATE_FOLDER)
    saved = load_file(path / "model.safetensors")
    for name, tensor in merged_tensors(again.model).items():
        assert torch.equal(saved[name], tensor), name
    compare(case, ranks, STEPS, one_more_step(again, case), many)


def check_saved_later(folder: Path, case: str, learner: Learner, ranks: Ranks) -> None:
    """Written by threads while the ranks train on; the same as `check_saved`."""
    at_once, later = (folder / f"{name}-{case}" for name in ("at-once", "later"))
    save(learner, SaveRequest(at_once, state=True))
    group = another_group(60.0)
    saves = BackgroundSaves(ranks=ranks, pipe=None, group=group, timeout_s=60.0)
    saves.start(prepare_save(learner, SaveRequest(later, state=True, asynchronous=True)), 1)
    for batch in batches(case):
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
    """What one process saved continues in the ranks as it does in one process."""
    expected = ranks.announce(alone(folder, case).next_step if ranks.first else None)
    learner = learner_of(folder, case, ranks)
    load_state(learner, folder / f"saved-alone-{case}" / STATE_FOLDER)
    compare(case, ranks, STEPS, expected, one_more_step(learner, case))


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
    """Groups are dealt whole and once, and all ranks have the same number of passes; ranks that
    divide layers or sequences have the same groups."""
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


def check_working_copies(folder: Path, ranks: Ranks) -> None:
    """Layers that compute with copies in bfloat16 do about what one process does that casts the
    inputs of products alone; masters are float32."""
    model = folder / "tied"
    changes: dict[str, Any] = {"dtype": "bfloat16", "max_tokens_per_mb": 20}
    settings = settings_for(model, param_dtype="bfloat16", **changes)
    learner = make_learner(load_policy(model), settings, ranks)
    many = [train_batch(learner, random_batch(seed, groups=5)).metrics for seed in range(2)]
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    if ranks.data_count > 1:
        # Each rank has a gradient in bfloat16 of its one pass; their sum is not.
        once = settings_for(model, param_dtype="bfloat16", dtype="bfloat16")
        summed = make_learner(load_policy(model), once, ranks)
        train_batch(summed, random_batch(groups=5))
        for name, parameter in summed.model.named_parameters():
            found = ranks.whole(parameter.grad)  # type: ignore[arg-type]
            assert not torch.equal(found, found.bfloat16().float()), name
    if ranks.first:
        here = make_learner(load_policy(model), settings_for(model, **changes))
        for seed, found in enumerate(many):
            one = train_batch(here, random_batch(seed, groups=5)).metrics
            for name, share in (("loss", 0.05), ("grad_norm", 0.1), ("entropy", 0.01)):
                close = abs(one[name] - found[name]) <= share * abs(one[name])
                assert close, (name, one[name], found[name])


def check_memory(folder: Path, ranks: Ranks, allocation: str) -> None:
    """The tensors of a step on a rank are within 6 % of the estimate."""
    kinds = (("float32", False), ("bfloat16", True))
    for dtype, checkpointing in kinds if allocation == "d2" else kinds[1:]:
        peak, estimated = measured_and_estimated(
            folder / "memory", 1024, ranks,
            dtype=dtype, gradient_checkpointing=checkpointing,
            more={"allocation_mode": f"embedded:d1+fsdp:{allocation}"},
        )  # fmt: skip
        assert abs(estimated.tensors / peak - 1) < 0.06, (dtype, peak, estimated.parts)


class Layout(NamedTuple):
    """Ranks, how they divide a model, and what is checked of them."""

    count: int
    shards: int
    cases: Sequence[str]
    tensor: int = 1
    context: int = 1
    saves: int = 1
    """How many of the cases write a checkpoint and continue from one."""


LAYOUTS = {
    "d2": Layout(2, 2, tuple(CASES), saves=6),
    "d4": Layout(4, 4, ("tied", "LoRA", "pictures")),
    "d4, copies": Layout(4, 2, ("tied", "controls")),
    "d1t2": Layout(2, 1, ("tied", "head norms", "critic", "shared critic", "controls"), tensor=2),
    "d2t2": Layout(4, 2, ("untied, two minibatches",), tensor=2),
    "d2t2, copies": Layout(4, 1, ("reference",), tensor=2, saves=0),
    "d1c2": Layout(2, 2, ("tied", "critic", "shared critic", "controls"), context=2),
    "d2c2": Layout(4, 4, ("untied, two minibatches", "LoRA"), context=2),
    "d1c4": Layout(4, 4, ("head norms",), context=4),  # with two key-value heads
}


def forget_groups() -> None:
    """Clear torch's caches of how distributed tensors are computed: they name groups that are no
    longer there, and an equal mesh of the next layout would get these."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def main(folder: Path, rank: int) -> None:
    """All checks of all layouts."""
    torch.set_num_threads(1)
    for name, layout in LAYOUTS.items():
        if rank >= layout.count:
            continue
        start_s = time.monotonic()
        ranks = join(
            RankPlace(
                rank=rank, count=layout.count, shards=layout.shards, tensor=layout.tensor,
                context=layout.context, device="cpu",
                rendezvous=str(folder / f"meet-{name}"), timeout_s=60,
            )
        )  # fmt: skip
        check_work(ranks)
        if layout.count == 2:
            check_memory(folder, ranks, name)
            check_working_copies(folder, ranks)
        for number, case in enumerate(layout.cases):
            learner = check_steps(folder, case, ranks)
            if number < layout.saves:
                check_saved(folder, case, learner, ranks)
                check_continued(folder, case, ranks)
            if layout.count == 2 and case in ("tied", "LoRA"):
                check_saved_later(folder, case, learner, ranks)
        check_non_finite(folder, ranks)
        leave()
        forget_groups()
        print(f"rank {rank}: {name} in {time.monotonic() - start_s:.1f} s")


def prepare(folder: Path) -> None:
    """The models of the cases, and a larger one."""
    save_model(folder / "memory", **live_bytes.SHAPE)
    for name, case in CASES.items():
        if name.startswith("pictures"):
            write_vision_model(folder / name, case["kind"], tied=case["tied"])
            continue
        save_model(folder / name, kind=case["kind"], tied=case["tied"], vocab_size=98)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
