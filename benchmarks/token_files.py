"""Files of trained tokens: bytes a token, CPU seconds to write and read them, cost in a step.

layout           bytes a token of the demo's responses (4 tokens) and of long ones, for the
                 layout of older versions (a line per sample, with its prompt), for today's, and
                 for the training fields (`token_fields=true`)
write_us         CPU microseconds a token: texts of tokens, and the file
read             CPU seconds and megabytes to read 500,000 tokens with their fields
step             CPU seconds of a training step of the demo's size, with fields and without them
                 in turns; fields_s is what writing them takes of it

python -m benchmarks.token_files --json [--quick]
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from areal_lab.config.load import load_config
from areal_lab.data.problems import Problem
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.models.locate import resolve_model_path
from areal_lab.runlog.folder import RunFolder, SampleText
from areal_lab.runlog.token_columns import fields_path, write_fields
from areal_lab.runlog.token_files import read_samples
from areal_lab.training.learner import make_learner
from areal_lab.training.metrics import TokenRecord, token_fields
from areal_lab.training.model import load_policy
from areal_lab.training.process.serve import train
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.settings import TrainerSettings
from benchmarks.harness import parse, report, spread
from benchmarks.large_run import RECORDED, tile_run

DEMO_TOKENS, LONG_TOKENS = 4, 250
GROUPS, SAMPLES = 8, 8
"""Of the demo's batches."""
READ_TOKENS = 500_000


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=5, quick_repeats=1)
    torch.set_num_threads(1)
    config = load_config("arithmetic")
    model = resolve_model_path(config.actor.path)
    codec = TextCodec.load(model)
    problems = load_problems(config.dataset, seed=1).train
    rows = [
        layout(codec, problems, tokens, model_words(codec, 400))
        for tokens in (DEMO_TOKENS, LONG_TOKENS)
    ]
    read_tokens = READ_TOKENS // 10 if arguments.quick else READ_TOKENS
    settings = TrainerSettings(config=config, model_path=str(model), weights_root="")
    steps = step_costs(settings, codec, problems, arguments.repeats)
    report(
        {
            "rows": rows,
            **read_costs(read_tokens),
            **{name: statistics.median(values) for name, values in steps.items()},
            "spread": {name: spread(values) for name, values in steps.items()},
        },
        arguments,
    )


def model_words(codec: TextCodec, characters: int) -> tuple[int, ...]:
    """Tokens of a long text, to take responses from."""
    return codec.encode(
        "The tide — 4 + 38 = 42 — returns; naïve crabs 🦀 hurry. " * (characters // 8)
    )


def trajectories(
    codec: TextCodec, problems: Sequence[Problem], tokens: int, words: Sequence[int], seed: int
) -> tuple[list[Trajectory], list[str]]:
    """A batch of the demo's size, and the prompt of each trajectory."""
    draw = random.Random(seed)
    found, prompts = [], []
    for group in range(GROUPS):
        problem = draw.choice(problems)
        prompt_tokens = codec.encode(problem.prompt)
        for sample in range(SAMPLES):
            at = draw.randrange(len(words) - tokens)
            # As an engine reports them: doubles that are float32.
            logprobs = torch.empty(tokens).exponential_(generator=_generator(draw)).neg().tolist()
            found.append(
                Trajectory(
                    group=seed * GROUPS + group,
                    sample=sample,
                    prompt_tokens=prompt_tokens,
                    parts=(Segment(tuple(words[at : at + tokens]), tuple(logprobs), seed),),
                    finish_reason="stop",
                    reward=float(sample % 2),
                )
            )
            prompts.append(problem.prompt)
    return found, prompts


def layout(
    codec: TextCodec, problems: Sequence[Problem], tokens: int, words: Sequence[int]
) -> dict[str, Any]:
    """Bytes a token in each layout, and the time that today's takes."""
    batch, prompts = trajectories(codec, problems, tokens, words, seed=1)
    count = tokens * len(batch)
    completions = [codec.decode(one.response_tokens) for one in batch]
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(folder)
        begin_s = time.process_time()
        texts = [
            SampleText(prompt, completion, codec.characters(one.response_tokens, completion))
            for one, prompt, completion in zip(batch, prompts, completions, strict=True)
        ]
        run.write_trajectories(2, batch, texts, special=codec.special_tokens)
        write_s = time.process_time() - begin_s
        today = (run.path / "trajectories" / "step-00002.jsonl").stat().st_size
        write_fields(fields_path(run.path, 2), made_up_fields(batch))
        fields = fields_path(run.path, 2).stat().st_size
    older = sum(
        len(json.dumps(older_line(one, prompt, completion))) + 1
        for one, prompt, completion in zip(batch, prompts, completions, strict=True)
    )
    return {
        "response_tokens": tokens,
        "older_bytes": older / count,
        "bytes": today / count,
        "fields_bytes": fields / count,
        "write_us": 1e6 * write_s / count,
    }


def older_line(trajectory: Trajectory, prompt: str, completion: str) -> dict[str, Any]:
    """A sample as versions wrote it that had no texts of tokens."""
    return {
        "step": 2,
        "group": trajectory.group,
        "sample": trajectory.sample,
        "prompt": prompt,
        "completion": completion,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "finish_reason": trajectory.finish_reason,
        "prompt_tokens": trajectory.prompt_tokens,
        "parts": [
            {"version": part.version, "tokens": part.tokens, "logprobs": part.logprobs}
            for part in trajectory.segments
        ],
    }


def made_up_fields(batch: Sequence[Trajectory]) -> Any:
    """Training fields with noise in every float, which no compression makes smaller."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(len(batch)).repeat_interleave(batch[0].generated_tokens)
    behavior = torch.tensor([value for one in batch for value in one.behavior_logprobs])

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(ids), generator=generator)

    proximal = behavior + noise(0.1)
    ratio_log = noise(0.02)
    record = TokenRecord(
        sequence_ids=ids,
        entropy=noise(1.0).abs(),
        logprobs=proximal + ratio_log,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        versions=torch.ones_like(ids),
        diagnostics={
            "ratio": ratio_log.exp(),
            "behavior_weight": (proximal - behavior).exp(),
            "clipped": (ratio_log.exp() - 1).abs() > 0.05,
        },
    )
    return token_fields(torch.ones(len(batch)), [record])


def read_costs(tokens: int) -> dict[str, float]:
    """Reading a run of that many tokens with their fields, and one step that was appended to it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        tile_run(RECORDED, run, tokens=tokens)
        last = max((run / "trajectories").iterdir()).name.split(".")[0]
        away = [file.rename(run / file.name) for file in (run / "trajectories").glob(f"{last}.*")]
        before_bytes = psutil.Process().memory_info().rss
        first, read_s = cpu_s(lambda: read_samples(run))
        rss_bytes = psutil.Process().memory_info().rss - before_bytes
        for file in away:
            file.rename(run / "trajectories" / file.name)
        everything, append_s = cpu_s(lambda: read_samples(run, first))
    return {
        "read_tokens": float(len(first.tokens)),
        "read_s": read_s,
        "columns_mb": first.tokens.bytes / 1e6,
        "rss_growth_mb": rss_bytes / 1e6,
        "appended_tokens": float(len(everything.tokens) - len(first.tokens)),
        "read_appended_s": append_s,
    }


def step_costs(
    settings: TrainerSettings, codec: TextCodec, problems: Sequence[Problem], repeats: int
) -> dict[str, list[float]]:
    """CPU seconds of steps with and without fields, in turns, and what the fields take of it."""
    words = model_words(codec, 400)
    learner = make_learner(load_policy(Path(settings.model_path)), settings)
    costs: dict[str, list[float]] = {"step_off_s": [], "step_on_s": [], "fields_s": []}
    with tempfile.TemporaryDirectory() as folder:
        on = replace(learner, settings=replace(settings, fields_folder=folder))
        for turn in range(2 * repeats + 1):
            batch, _ = trajectories(codec, problems, DEMO_TOKENS, words, seed=turn)
            request = TrainBatchRequest(turn, tuple(batch))
            chosen = on if turn % 2 else learner
            result, step_s = cpu_s(partial(train, chosen, request, turn))
            if turn == 0:
                continue  # a warm-up
            costs["step_on_s" if turn % 2 else "step_off_s"].append(step_s)
            if turn % 2:
                span = result.spans[-1]
                costs["fields_s"].append(span.end_s - span.start_s)
    return costs


def new_run(folder: str) -> RunFolder:
    """An empty run folder."""
    (Path(folder) / "trajectories").mkdir()
    return RunFolder(Path(folder))


def cpu_s(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the CPU seconds of all threads until it was there."""
    begin_s = time.process_time()
    result = call()
    return result, time.process_time() - begin_s


def _generator(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.getrandbits(31))


if __name__ == "__main__":
    main()
