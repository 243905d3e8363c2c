"""Lower bound of the time of a training step, in closed form, without simulation.

    t_train    one batch, by the cost model
    t_work     all tokens of a batch, engines always full
    t_long     the longest response of a batch, alone on its engine
    latency    of a group: its longest response, alone on its engine; mean over groups

    synchronous         max(t_work, t_long) + t_train + update
    partial rollout     t_work + t_train + update
    asynchronous        max(t_train, t_work, (latency + t_train) / (eta + 1))

The last term is Little's law under the staleness rule (arXiv:2505.24298, eq. 3), which lets at most
eta + 1 batches be in progress. Prompts, preemptions, interruptions and waiting add to all of these.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulator.assembly.engines import engine_decode, running_sequences
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import LengthConfig, SimulationConfig, TrainerConfig
from simulator.costs.colocation.switch import switch_cost
from simulator.costs.decode import DecodeCost
from simulator.costs.lora.adapters import sent_weights
from simulator.costs.training import training_cost
from simulator.costs.weight_sync import weight_sync
from simulator.workload.lengths import lengths_from
from simulator.workload.streams import LENGTHS, stream

_Fields: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values of a record: a key of a cache."""
_BATCHES = 3
"""Batches whose lengths are drawn: the first ones of the simulation with this seed."""


def least_step_s(config: SimulationConfig) -> float:
    """Least seconds of a training step, up to random differences of the lengths."""
    cluster, rollout, workload = config.cluster, config.rollout, config.workload
    gpu = find_gpu(cluster.gpu)
    rollout_gpu = find_gpu(cluster.generating_gpu)
    model = find_model(config.model)
    lengths = _drawn(config)
    train_s = _train_s(config)
    decode = engine_decode(config, model, rollout_gpu)
    engines = cluster.generating_gpus // rollout.tensor_parallel
    running = running_sequences(config, model, rollout_gpu)
    work_s = _work_s(decode, lengths, workload.prompt_tokens, running) / engines
    if cluster.colocated:
        update_s = switch_cost(config, model, gpu).seconds
    else:
        sync = weight_sync(config.weights, model, gpu, sent_weights(config))
        update_s = sync.export_s + sync.load_s
    eta = config.schedule.versions_ahead
    if eta == 0:
        longest_s = float(
            np.mean([_alone_s(decode, workload.prompt_tokens, int(one.max())) for one in lengths])
        )
        return max(work_s, longest_s) + train_s + update_s
    if config.schedule.name == "partial_rollout":
        return work_s + train_s + update_s
    slowest = float(lengths.max(axis=2).mean())
    latency_s = _alone_s(decode, workload.prompt_tokens, int(slowest))
    return max(train_s, work_s, (latency_s + train_s) / (eta + 1))


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


def _train_s(config: SimulationConfig) -> float:
    workload, cluster = config.workload, config.cluster
    return _step_s(
        tuple(config.trainer),
        config.model,
        cluster.gpu,
        cluster.training_gpus,
        tuple(workload.answers),
        (workload.prompts_per_batch, workload.samples_per_prompt, config.seed),
        (workload.prompt_tokens, workload.minibatches),
    )


@cache
def _step_s(  # noqa: PLR0917 - a key of the cache
    trainer: _Fields,
    model: str,
    gpu: str,
    gpus: int,
    answers: _Fields,
    batch: tuple[int, int, int],
    rest: tuple[int, int],
) -> float:
    """Seconds to train on the first batch; many candidates share a trainer."""
    layout = TrainerConfig(**dict(trainer))
    cost = training_cost(layout, find_model(model), find_gpu(gpu), gpus)
    prompt_tokens, minibatches = rest
    lengths = _draw(answers, *batch)[0].ravel() + prompt_tokens
    return cost.step(lengths.tolist(), minibatches=minibatches).seconds
