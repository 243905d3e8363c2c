"""Lower bound of the time of a training step, in closed form, without simulation.

    t_train    one batch, by the cost model
    t_work     all tokens of a batch, engines always full
    t_long     the longest response of a batch, alone on its engine
    latency    of a group: its longest response, alone on its engine; mean over groups

    synchronous         max(t_work, t_long) + t_train + update
    partial rollout     t_work + t_train + update
    asynchronous        max(t_train, t_work, (latency + t_train) / (eta + 1))
    minibatches that are streamed to the trainer, in k parts of which t_part is the shortest
      synchronous       max(max(t_work, t_long) + t_part, t_first + t_train) + update
      asynchronous      max(t_train, t_work, (latency + t_train / k) / (eta + 1))
    t_first    the longest response of the first part, if that is the part of the shortest groups

GPUs that switch (hybrid) add their switch to t_train and the update, and the next step begins after
both. The last terms are Little's law under the staleness rule (arXiv:2505.24298, eq. 3), which lets
at most eta + 1 batches be in progress; a group of a batch in parts is in training for its own part
at least. A part cannot be trained on before its groups finish, nor the last one before the longest
response. Prompts, preemptions, interruptions and waiting add to all of these.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulator.assembly.build import part_trainer
from simulator.assembly.engines import engines_of
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import LengthConfig, SimulationConfig, TrainerConfig
from simulator.costs.decode import DecodeCost
from simulator.costs.switch import switch_cost
from simulator.costs.training import training_cost
from simulator.costs.weight_sync import weight_update
from simulator.workload.lengths import lengths_from
from simulator.workload.randomness import LENGTHS, stream

_Fields: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values of a record: a key of a cache."""
_BATCHES = 3
"""Batches whose lengths are generated: the first ones of the simulation with this seed."""


def least_step_s(config: SimulationConfig) -> float:
    """Least seconds of a training step, up to random differences of the lengths."""
    cluster, workload, engines = config.cluster, config.workload, engines_of(config)
    gpu, model = find_gpu(cluster.gpu), engines.model
    lengths = _drawn(config)
    train_s, part_s = _train_s(config)
    decode = engines.decode()
    work_s = _work_s(decode, lengths, workload.prompt_tokens, engines.running) / engines.count
    switch = switch_cost(config, model, gpu) if cluster.switches else None
    export_s, load_s = 0.0, 0.0
    if cluster.sends_weights:
        sync = weight_update(config, model, gpu)
        export_s, load_s = sync.export_s, sync.load_s
    if switch is not None:
        load_s = max(load_s, switch.to_generation_s)
        train_s += switch.to_training_s
    update_s = export_s + load_s
    eta = config.schedule.versions_ahead
    if eta == 0:
        longest_s = float(
            np.mean([_alone_s(decode, workload.prompt_tokens, int(one.max())) for one in lengths])
        )
        if config.batch_parts == 1:
            return max(work_s, longest_s) + train_s + update_s
        first = workload.prompts_per_batch // config.batch_parts - 1
        ends = np.sort(lengths.max(axis=2), axis=1)[:, first]
        first_s = float(
            np.mean([_alone_s(decode, workload.prompt_tokens, int(one)) for one in ends])
        )
        return max(max(work_s, longest_s) + part_s, first_s + train_s) + update_s
    if config.schedule.name == "partial_rollout":
        return work_s + train_s + update_s
    slowest = float(lengths.max(axis=2).mean())
    latency_s = _alone_s(decode, workload.prompt_tokens, int(slowest))
    # Hybrid GPUs load weights before the next step begins.
    turn_s = train_s if switch is None else train_s + update_s
    return max(turn_s, work_s, (latency_s + train_s / config.batch_parts) / (eta + 1))


def _drawn(config: SimulationConfig) -> NDArray[np.int64]:
    """[batches, groups, samples] tokens."""
    workload = config.workload
    return _draw(
        tuple(workload.answers),
        workload.prompts_per_batch,
        workload.samples_per_prompt,
        config.seed,
    )


@lru_cache(maxsize=8)
def _draw(answers: _Fields, groups: int, samples: int, seed: int) -> NDArray[np.int64]:
    lengths = lengths_from(LengthConfig(**dict(answers)))
    return np.stack(
        [lengths.draw(stream(seed, LENGTHS, k), groups, samples) for k in range(_BATCHES)]
    )


def _work_s(
    decode: DecodeCost, lengths: NDArray[np.int64], prompt_tokens: int, running: int
) -> float:
    """Seconds of one always full engine for all tokens of a batch, mean over the batches.

    On average, a token attends to the prompt and half of its response; long responses count more.
    """
    tokens = float(lengths.sum(dtype=np.float64))
    context = prompt_tokens + float((lengths.astype(np.float64) ** 2).sum()) / tokens / 2
    # Smaller batches may be faster if reading the cache dominates.
    counts = {running, *(2**power for power in range(running.bit_length()))}
    per_token_s = min(decode.step_s(count, count * context) / count for count in counts)
    return float(tokens / len(lengths) * per_token_s)


def _alone_s(decode: DecodeCost, prompt_tokens: int, tokens: int) -> float:
    return decode.steps_s(1, prompt_tokens, tokens)


def _train_s(config: SimulationConfig) -> tuple[float, float]:
    workload, cluster = config.workload, config.cluster
    return _step_s(
        tuple(config.trainer),
        config.model,
        cluster.gpu,
        cluster.training_gpus,
        tuple(workload.answers),
        (workload.prompts_per_batch, workload.samples_per_prompt, config.seed),
        (workload.prompt_tokens, workload.minibatches, config.batch_parts),
    )


@cache
def _step_s(  # noqa: PLR0917 - a key of the cache
    trainer: _Fields,
    model: str,
    gpu: str,
    gpus: int,
    answers: _Fields,
    batch: tuple[int, int, int],
    rest: tuple[int, int, int],
) -> tuple[float, float]:
    """Seconds to train on the first batch; many candidates share a trainer."""
    layout = TrainerConfig(**dict(trainer))
    cost = training_cost(layout, find_model(model), find_gpu(gpu), gpus)
    prompt_tokens, minibatches, parts = rest
    groups = _draw(answers, *batch)[0] + prompt_tokens
    whole_s = cost.step(groups.ravel().tolist(), minibatches=minibatches).seconds
    if parts == 1:
        return whole_s, whole_s
    # Groups may come in any order. In that of their lengths, parts are as unequal as they can be.
    ordered = np.split(groups[np.argsort(groups.sum(axis=1), kind="stable")], parts)
    part_cost = training_cost(part_trainer(layout, parts), find_model(model), find_gpu(gpu), gpus)
    parts_s = [
        part_cost.step(part.ravel().tolist(), minibatches=minibatches // parts).seconds
        for part in ordered
    ]
    return min(whole_s, sum(parts_s)), min(parts_s)
