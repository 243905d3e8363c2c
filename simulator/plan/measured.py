"""Check that measured times in a plan's base apply to all candidates.

A time measured on some GPUs is the same for every candidate, so that more or other GPUs would seem
to change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from simulator.catalogue.find_gpu import find_gpu
from simulator.plan.schema import PlanConfig
from simulator.plan.space import Candidate


def check_measured(plan: PlanConfig, candidates: Sequence[Candidate]) -> None:
    """Refuse candidates that differ in something that a measured number of the base depends on.

    Raises:
        ValueError: one line for each number, with the differences and a fix.
    """
    found = list(_differing(plan, candidates))
    if found:
        raise ValueError("\n".join(found))


def _differing(plan: PlanConfig, candidates: Sequence[Candidate]) -> Iterator[str]:
    rollout, trainer = plan.base.rollout, plan.base.trainer
    training = [_training_side(one) for one in candidates]
    engines = [_engine_side(one) for one in candidates]
    for name, seconds, sides, added in (
        ("trainer.step_s", trainer.step_s, training, {"trainer.token_s": trainer.token_s}),
        (
            "rollout.decode_step_s",
            rollout.decode_step_s,
            engines,
            {
                "rollout.decode_sequence_s": rollout.decode_sequence_s,
                "rollout.decode_context_token_s": rollout.decode_context_token_s,
            },
        ),
        (
            "rollout.prefill_pass_s",
            rollout.prefill_pass_s,
            engines,
            {
                "rollout.prefill_token_s": rollout.prefill_token_s,
                "rollout.prefill_pair_s": rollout.prefill_pair_s,
            },
        ),
    ):
        differ = _what_differs(sides)
        if seconds is None or not differ:
            continue
        fix = " ".join(
            [f"base.{name}=null", *(f"base.{other}=0" for other, value in added.items() if value)]
        )
        yield (
            f"base.{name} is {seconds:g}, measured on some GPUs, but candidates differ in "
            f"{'; '.join(differ)}; let the cost model compute it ({fix}), or use only candidates "
            "like those that were measured"
        )


def _training_side(one: Candidate) -> Mapping[str, object]:
    cluster, trainer = one.config.cluster, one.config.trainer
    return {
        "type of GPU that trains": find_gpu(cluster.gpu).name,
        "number of GPUs that train": cluster.training_gpus,
        "trainer.tensor_parallel": trainer.tensor_parallel,
        "trainer.pipeline_parallel": trainer.pipeline_parallel,
        "trainer.micro_batch_tokens": trainer.micro_batch_tokens,
    }


def _engine_side(one: Candidate) -> Mapping[str, object]:
    cluster = one.config.cluster
    return {
        "type of GPU that generates": find_gpu(cluster.generating_gpu).name,
        "rollout.tensor_parallel": one.config.rollout.tensor_parallel,
    }


def _what_differs(sides: Sequence[Mapping[str, object]]) -> list[str]:
    """Differences, such as `number of GPUs that train (8, 16, 32)`."""
    values = (
        {name: dict.fromkeys(side[name] for side in sides) for name in sides[0]} if sides else {}
    )
    return [
        f"{name} ({', '.join(map(str, sorted(some, key=_order)))})"
        for name, some in values.items()
        if len(some) > 1
    ]


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int) else (0.0, str(value))
