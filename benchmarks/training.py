"""A training step by layout and setting: trained tokens per second, memory, time of each part.

packed         prefix trees: a common prefix is computed once
rows           one row per sequence, packed without padding
padded         rows padded to the longest of their micro-batch, and whole logits: plain transformers
lora           packed, low-rank adapters
checkpointing  packed, activations computed again
selective      packed, activations of attention and of half of the products kept
two_processes  packed, sharded over two processes (FSDP2) that share the threads of the others
offload        the same, with shards that leave the device between their uses (a CPU is the device)

Each case trains in processes of its own, in turns, on the same groups with a common prompt and
responses of long-tailed length. Tokens are those that the policy chose; prompts are work, but no
gain. The loss of the second step shows that they all learn the same, but for adapters and rounding.

python -m benchmarks.training --json [--quick]
python -m benchmarks.training --worker lora --tokens 4096    # one case, in this process
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from areal_lab.config.schema import TrainConfig
from areal_lab.data.batch import PaddedBatch, pad
from areal_lab.data.prefix_tree import ForwardCost, PrefixTree, grow_trees
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.functional.corrections.weights import truncate
from areal_lab.functional.losses.policy import decoupled_ppo
from areal_lab.host.memory import peak_rss_bytes
from areal_lab.models.locate import resolve_model_path
from areal_lab.training import minibatch
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.parallel import RankPlace, join, leave
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch
from benchmarks.harness import parse, report, spread

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "packed": {},
    "rows": {},
    "padded": {},
    "lora": {"actor.use_lora": True},
    "checkpointing": {"actor.gradient_checkpointing": True},
    "selective": {"actor.gradient_checkpointing": "selective"},
    "two_processes": {},
    "offload": {"actor.offload": True},
}
PROCESSES: Final[Mapping[str, int]] = {"two_processes": 2, "offload": 2}
"""Of the cases with more than one."""
MODEL: Final = "SmolLM2-135M-Instruct"
QUICK_MODEL: Final = "Adder-75K"
GROUPS, SAMPLES, PROMPT_TOKENS, MEDIAN_TOKENS, MAX_TOKENS = 4, 8, 64, 16, 96
"""Of a batch for micro-batches of `MICRO_BATCH_TOKENS`; for larger ones it has more groups."""
MICRO_BATCH_TOKENS: Final = 1024
STEPS: Final = 2
"""Measured steps of a process, after one that is not."""


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1, add_own=_worker_argument)
    model = QUICK_MODEL if arguments.quick else MODEL
    if case := arguments.own.worker:
        ranks = _join(case, arguments.own.rank, arguments.own.meet)
        print(json.dumps(measure(case, model, ranks, micro_batch_tokens=arguments.own.tokens)))
        if ranks.count > 1:
            leave()
        return
    measured: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for turn in range(arguments.repeats):
        for case in CASES:
            print(f"turn {turn + 1} of {arguments.repeats}: {case}", file=sys.stderr, flush=True)
            measured[case].append(
                in_a_process(case, quick=arguments.quick, tokens=arguments.own.tokens)
            )
    rows = [row_of(case, runs, measured["packed"]) for case, runs in measured.items()]
    speeds = {case: [run["tokens_per_s"] for run in runs] for case, runs in measured.items()}
    report(
        {
            "rows": rows,
            "ratio_to_rows": ratio(speeds, "packed", "rows"),
            "ratio_to_padded": ratio(speeds, "packed", "padded"),
            "spread": {case: spread(values) for case, values in speeds.items()},
        },
        arguments,
    )


def _worker_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", choices=list(CASES), help="measure one case in this process")
    parser.add_argument("--rank", type=int, default=0, help="of this process, with --meet")
    parser.add_argument("--meet", default="", metavar="FILE", help="where the processes meet")
    parser.add_argument(
        "--tokens",
        type=int,
        default=MICRO_BATCH_TOKENS,
        metavar="N",
        help=f"packed tokens of a micro-batch (default {MICRO_BATCH_TOKENS:,})",
    )


def in_a_process(case: str, *, quick: bool, tokens: int) -> dict[str, Any]:
    """`measure` in new processes, whose peak memory is then that of the case."""
    command = [sys.executable, "-m", "benchmarks.training", "--worker", case]
    command += ["--tokens", str(tokens)]
    command += ["--quick"] if quick else []
    with tempfile.TemporaryDirectory() as meet:
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--meet", f"{meet}/ranks"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(PROCESSES.get(case, 1))
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    for rank in ranks:
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, command)
    results: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in outputs]
    return {**results[0], "peak_mib": sum(result["peak_mib"] for result in results)}


def row_of(
    case: str, runs: Sequence[Mapping[str, Any]], packed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Medians of a case, and its speed relative to the packed case of the same turn."""
    relative = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs, packed, strict=True)]
    return {
        "case": case,
        "tokens_per_s": statistics.median(run["tokens_per_s"] for run in runs),
        "of_packed": statistics.median(relative),
        "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        "computed_tokens": runs[0]["computed_tokens"],
        "loss": runs[0]["loss"],
        **{
            f"{part}_s": statistics.median(run["parts"].get(part, 0.0) for run in runs)
            for part in ("packing", "forward_backward", "optimizer")
        },
    }


def ratio(speeds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> dict[str, float]:
    """How many times as fast, turn by turn."""
    pairs = zip(speeds[ours], speeds[theirs], strict=True)
    return spread([a / b for a, b in pairs])


def _join(case: str, rank: int, meet: str) -> Ranks:
    count = PROCESSES.get(case, 1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
    if count == 1:
        return ALONE
    return join(
        RankPlace(
            rank=rank, count=count, shards=count, device="cpu", rendezvous=meet, timeout_s=300.0
        )
    )


def measure(
    case: str, model: str, ranks: Ranks = ALONE, *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
) -> dict[str, Any]:
    """Train a few steps; speed, peak memory of this process, seconds of each part of a step."""
    folder = resolve_model_path(model)
    with tempfile.TemporaryDirectory() as weights:
        config = TrainConfig().with_settings(
            {"actor.max_tokens_per_mb": micro_batch_tokens, **CASES[case]}
        )
        settings = TrainerSettings(config=config, model_path=str(folder), weights_root=weights)
        learner = new_learner(settings, ranks)
        step = STEP_OF.get(case, packed_step)
        groups = math.ceil(GROUPS * micro_batch_tokens / MICRO_BATCH_TOKENS)
        vocabulary = learner.model.config.vocab_size
        batches = [batch(turn, vocabulary, groups=groups) for turn in range(STEPS + 1)]
        step(learner, batches[0])
        seconds, steps = 0.0, []
        for request in batches[1:]:
            start_s = time.perf_counter()
            steps.append(step(learner, request))
            seconds += time.perf_counter() - start_s
    tokens = sum(t.generated_tokens for request in batches[1:] for t in request.trajectories)
    return {
        "tokens_per_s": tokens / seconds,
        "peak_mib": peak_rss_bytes(os.getpid()) / 2**20,
        "computed_tokens": steps[-1].computed_tokens,
        "loss": steps[0].loss,
        "parts": {
            name: statistics.mean(one.parts[name] for one in steps) for name in steps[0].parts
        },
    }


def new_learner(settings: TrainerSettings, ranks: Ranks = ALONE) -> Learner:
    """The model as a process of the trainer loads it."""
    actor = settings.actor
    model = load_policy(
        Path(settings.model_path), gradient_checkpointing=actor.gradient_checkpointing
    )
    if actor.use_lora:
        targets = target_modules(model, actor.target_modules)
        rank, alpha = actor.lora_rank, actor.lora_alpha
        add_lora(model, rank=rank, alpha=alpha, targets=targets, merged=True)
    return make_learner(model, settings, ranks)


def batch(seed: int, vocabulary: int, *, groups: int) -> TrainBatchRequest:
    """Groups with a common prompt; lengths are log-normal and cut off."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    trajectories = []
    for group in range(groups):
        prompt = tokens(PROMPT_TOKENS)
        for sample in range(SAMPLES):
            length = min(MAX_TOKENS, max(2, round(draw.lognormvariate(0.0, 1.0) * MEDIAN_TOKENS)))
            trajectories.append(
                Trajectory(
                    group=group,
                    sample=sample,
                    prompt_tokens=prompt,
                    parts=(Segment(tokens(length), (-8.0,) * length, seed),),
                    finish_reason="stop",
                    reward=float(sample % 2),
                )
            )
    return TrainBatchRequest(seed, tuple(trajectories))


class Step(NamedTuple):
    """What a step took."""

    parts: dict[str, float]
    """Seconds by part."""
    computed_tokens: int
    loss: float


def packed_step(learner: Learner, request: TrainBatchRequest) -> Step:
    """The trainer's own step."""
    outcome = train_batch(learner, request)
    names = {"advantages and packing": "packing", "forward/backward": "forward_backward"}
    parts = dict.fromkeys(("packing", "forward_backward", "optimizer"), 0.0)
    for span in outcome.spans:
        name = names.get(span.name, span.name)
        if name in parts:
            parts[name] += span.end_s - span.start_s
    return Step(parts, int(outcome.metrics["packed_tokens"]), outcome.metrics["loss"])


def rows_step(learner: Learner, request: TrainBatchRequest) -> Step:
    """The same step with one tree per sequence, which shares nothing."""

    def separate(
        rows: Sequence[tuple[int, ...]], cost: ForwardCost, *, max_tokens: int
    ) -> list[PrefixTree]:
        trees = []
        for index, row in enumerate(rows):
            (tree,) = grow_trees([row], cost, max_tokens=max_tokens)
            trees.append(replace(tree, members=(index,)))
        return trees

    with patch.object(minibatch, "grow_trees", separate):
        return packed_step(learner, request)


def padded_step(learner: Learner, request: TrainBatchRequest) -> Step:
    """What a trainer without packing does, with the same objective: long rows together."""
    if learner.model.config._attn_implementation != "sdpa":
        learner.model.set_attn_implementation("sdpa")
    start_s = time.perf_counter()
    rewards = torch.tensor([t.reward for t in request.trajectories])
    advantages = learner.advantages(rewards, torch.tensor([t.group for t in request.trajectories]))
    order = sorted(
        range(len(request.trajectories)), key=lambda i: request.trajectories[i].generated_tokens
    )
    micro_batches: list[list[int]] = [[]]
    for index in order:
        tokens = PROMPT_TOKENS + request.trajectories[index].generated_tokens
        if tokens * (len(micro_batches[-1]) + 1) > learner.settings.actor.max_tokens_per_mb:
            micro_batches.append([])
        micro_batches[-1].append(index)
    padded = [
        (pad([request.trajectories[i] for i in part]), part) for part in micro_batches if part
    ]
    packed_s = time.perf_counter()
    count = sum(t.generated_tokens for t in request.trajectories)
    learner.optimizer.zero_grad()
    loss = 0.0
    for rows, part in padded:
        share = padded_loss(learner, rows, advantages[part], count)
        share.backward()
        loss += share.item()
    backward_s = time.perf_counter()
    learner.optimizer.step(torch.tensor(loss))
    ended_s = time.perf_counter()
    parts = {
        "packing": packed_s - start_s,
        "forward_backward": backward_s - packed_s,
        "optimizer": ended_s - backward_s,
    }
    return Step(parts, sum(rows.tokens.numel() for rows, _ in padded), loss)


def padded_loss(
    learner: Learner, rows: PaddedBatch, advantages: torch.Tensor, token_count: int
) -> torch.Tensor:
    """The decoupled objective over padded rows, from whole logits."""
    with torch.autocast("cpu", dtype=learner.dtype, enabled=learner.dtype != torch.float32):
        logits = learner.model(
            input_ids=rows.tokens, attention_mask=rows.attention_mask.long(), use_cache=False
        ).logits
    log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    logprobs = log_probs.gather(-1, rows.tokens[:, 1:, None])[..., 0]
    return decoupled_ppo(
        logprobs,
        logprobs.detach(),
        rows.behavior_logprobs[:, 1:],
        advantages[:, None].expand_as(logprobs),
        rows.response_mask[:, 1:],
        correct=truncate(5.0),
        token_count=token_count,
    ).loss


STEP_OF: Final[Mapping[str, Callable[[Learner, TrainBatchRequest], Step]]] = {
    "rows": rows_step,
    "padded": padded_step,
}


if __name__ == "__main__":
    main()
