"""Recorded runs made from logs of simulations, with the counts of the embedded engine added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lab.runlog.records import GroupRecord, Record, RunHeader, SpanRecord, encode
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.one_seed import run_system

STEP_S, SEQUENCE_S, TOKEN_S = 0.02, 0.004, 1e-6
PASS_S, PROMPT_TOKEN_S, PAIR_S = 0.03, 5e-4, 1e-6
TRAIN_S, TRAIN_TOKEN_S = 1.5, 2e-3
KNOWN = (
    f"rollout.decode_step_s={STEP_S}",
    f"rollout.decode_sequence_s={SEQUENCE_S}",
    f"rollout.decode_context_token_s={TOKEN_S}",
    f"rollout.prefill_pass_s={PASS_S}",
    f"rollout.prefill_token_s={PROMPT_TOKEN_S}",
    f"rollout.prefill_pair_s={PAIR_S}",
    f"trainer.step_s={TRAIN_S}",
    f"trainer.token_s={TRAIN_TOKEN_S}",
    "weights.backend=disk",
    "weights.poll_s=0",
    "weights.export_s=0.2",
    "weights.load_s=0.3",
)


def known(*overrides: str) -> SimulationConfig:
    """One engine and one trainer whose costs are the constants above."""
    return load_simulation(
        "small",
        [
            *KNOWN,
            "cluster.gpus=2",
            "cluster.rollout_gpus=1",
            "workload.prompts_per_batch=4",
            "workload.samples_per_prompt=3",
            "workload.prompt_tokens=20",
            "workload.answers.mean_tokens=60",
            "workload.answers.max_tokens=200",
            "workload.steps=12",
            "workload.warmup_steps=2",
            "workload.whole_run=true",
            "schedule.name=synchronous",
            *overrides,
        ],
    )


def record(
    folder: Path,
    config: SimulationConfig,
    *,
    counted: bool = True,
    requests: Sequence[tuple[float, Any]] = (),
) -> Path:
    """Write the log of a simulation as a run folder.

    Args:
        requests: what a person asks of the run, and when.
        counted: put in spans of prefill and decode as the embedded engine counts them; they take
            what the constants above say. Without, the log is as a client of other engines sees it.
    """
    folder.mkdir(parents=True)
    records: list[Record] = []
    run_system(replace(build(config), requests=requests), config.seed, records.append)
    header = records[0]
    assert isinstance(header, RunHeader)
    kept = [r for r in records if not (isinstance(r, SpanRecord) and r.process != "trainer")]
    if counted:
        groups = [r for r in records if isinstance(r, GroupRecord)]
        tokens = config.workload.prompt_tokens
        kept += [span for group in groups for span in _spans(group, tokens)]
    (folder / "events.jsonl").write_text("".join(encode(one) + "\n" for one in kept))
    (folder / "config.yaml").write_text(
        "actor: {path: SmolLM2-135M-Instruct, ppo_n_minibatches: 1}\n"
        "gconfig: {max_new_tokens: 200}\n"
        "rollout: {backend: embedded, max_running_requests: 8}\n"
    )
    return folder


def _spans(group: GroupRecord, prompt_tokens: int) -> Sequence[SpanRecord]:
    """A prefill at the group's start, then decode steps of its responses, as if it were alone.

    Every other group is read together with another one, in one pass.
    """
    lengths = sorted(sum(tokens for _, tokens in sample) for sample in group.segments)
    size, groups = len(lengths), 1 + group.group % 2
    tokens = groups * prompt_tokens
    pairs = groups * prompt_tokens * (prompt_tokens + 1) // 2
    counts = {
        "steps": 1.0,
        "sequences": float(groups * size),
        "context_tokens": float(groups * size * prompt_tokens),
        "prompt_tokens": float(tokens),
        "prompt_pairs": float(pairs),
    }
    seconds = _step_s(counts) + PASS_S + PROMPT_TOKEN_S * tokens + PAIR_S * pairs
    spans = [_span("prefill", group.t_s, seconds, counts)]
    done = 1
    for position, length in enumerate(lengths):
        steps, running = length - done, size - position
        if steps < 1:
            continue
        context = running * sum(prompt_tokens + done + step for step in range(steps))
        counts = {
            "steps": float(steps),
            "sequences": float(running * steps),
            "context_tokens": float(context),
            "prompt_tokens": 0.0,
            "prompt_pairs": 0.0,
        }
        spans.append(_span("decode", spans[-1].end_s, _step_s(counts), counts))
        done = length
    return spans


def _step_s(counts: dict[str, float]) -> float:
    return (
        counts["steps"] * STEP_S
        + counts["sequences"] * SEQUENCE_S
        + counts["context_tokens"] * TOKEN_S
    )


def _span(name: str, begin_s: float, seconds: float, args: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        process="engine 0", name=name, t_s=begin_s, end_s=begin_s + seconds, args=args
    )
