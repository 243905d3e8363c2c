"""CPU that an environment's own process adds to an agent: the same one in process and in a runner.

Both ask the gateway of a run over HTTP, with the same code (`benchmarks.runner_agent`): a function
on threads of the run's process (`inline`), and an environment in a runner (`runner`). A fixed
response takes the place of the engines. `cpu_ms_per_turn` is the time of this process and of all
processes that it has started, so the gateway, the conversations in tokens and chat templates are in
both. The two alternate in one run; `ratio` is that of each pair, runner over inline. The start of
the runner is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from areal_lab.agents.agent import Agent
from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.template import load_template
from areal_lab.agents.workflow import opened
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.tokenize import TextCodec
from areal_lab.pipeline.environment_check import FixedResponse, byte_model
from benchmarks import runner_agent
from benchmarks.harness import Arguments, parse, report, spread

SAMPLES: Final = 64
"""Samples at once."""
TURNS: Final = 8
RESPONSE: Final = "one reply of the model, which is the same in every turn"
INLINE, RUNNER = "inline", "runner"


async def run(repeats: int, *, samples: int, turns: int) -> dict[str, Any]:
    """Measure both agents, in turns; the first pair warms up."""
    environment = EnvironmentConfig(
        name="benchmark", standard=str(runner_agent.__file__), python=sys.executable,
        args={"turns": turns},
    )  # fmt: skip
    agents = {
        INLINE: Agent(fn=f"{runner_agent.__name__}:play"),
        RUNNER: Agent(mode="environment", environment=environment),
    }
    found: dict[str, list[float]] = {name: [] for name in agents}
    with tempfile.TemporaryDirectory() as folder:
        model = byte_model(Path(folder))
        codec = TextCodec.load(model)
        form = ChatFormat(load_template(model), codec)
        async with opened(agents[INLINE], model), opened(agents[RUNNER], model):
            for number in range(repeats + 1):
                for name in (INLINE, RUNNER) if number % 2 else (RUNNER, INLINE):
                    engines = [FixedResponse(RESPONSE, form, codec) for _ in range(samples)]
                    found[name].append(await measure(agents[name], engines, turns=turns))
    return figures({name: values[1:] for name, values in found.items()}, samples * turns)


async def measure(agent: Agent, engines: Sequence[FixedResponse], *, turns: int) -> float:
    """CPU of one turn in milliseconds; samples of all engines at once.

    Raises:
        RuntimeError: a sample did not end as it should.
    """
    data = {"task": runner_agent.TASK, "turns": turns}
    before_s = cpu_s()
    episodes = await asyncio.gather(*(agent.run(engine, data) for engine in engines))
    used_s = cpu_s() - before_s
    for one in episodes:
        if one.outcome.status != "ok" or len(one.turns) != turns:
            raise RuntimeError(f"a sample had {len(one.turns)} turns: {one.outcome}")
    return 1000 * used_s / (len(engines) * turns)


def cpu_s() -> float:
    """CPU time of this process and of those below it, in seconds."""
    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def figures(cpu_ms: Mapping[str, Sequence[float]], turns: int) -> dict[str, Any]:
    """The report of CPU per turn, in milliseconds, by agent; `turns` of one measurement."""
    ratio = spread([b / a for a, b in zip(cpu_ms[INLINE], cpu_ms[RUNNER], strict=True)])
    spreads = {f"cpu_ms_per_turn_{name}": spread(values) for name, values in cpu_ms.items()}
    rows = [
        {"case": name, "turns": turns, "cpu_ms_per_turn": one["median"]}
        for name, one in zip(cpu_ms, spreads.values(), strict=True)
    ]
    return {"ratio": ratio["median"], "rows": rows, "spread": {"ratio": ratio, **spreads}}


def main() -> None:
    """Measure and report."""

    def add_own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--samples", type=int, help=f"samples at once (default {SAMPLES})")
        parser.add_argument("--turns", type=int, help=f"turns of a sample (default {TURNS})")

    arguments: Arguments = parse(__doc__, repeats=10, quick_repeats=2, add_own=add_own)
    samples = arguments.own.samples or (4 if arguments.quick else SAMPLES)
    turns = arguments.own.turns or TURNS
    report(asyncio.run(run(arguments.repeats, samples=samples, turns=turns)), arguments)


if __name__ == "__main__":
    main()
