"""Shared parts of all reproductions: the paper's numbers, simulated runs, and a command line.

reproduce(arguments) --> Reproduction --main--> table, JSON or picture
                                      --python -m reproductions--> a section of README.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Arguments, parse, report
from reproductions.records import Parameter, Reproduction, Row, to_json
from reproductions.show import draw, to_text
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.result import Replicated

EXPECTED = Path(__file__).parent / "expected"
SEEDS, QUICK_SEEDS = 3, 2


def expected(name: str) -> dict[str, Any]:
    """The paper's numbers for a reproduction."""
    with (EXPECTED / f"{name}.json").open(encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def configured(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> SimulationConfig:
    """A preset with the parameters of the reproduction and the requested number of seeds."""
    overrides = [parameter.override for parameter in parameters]
    return load_simulation(preset, [*overrides, *settings, f"seeds={arguments.repeats}"])


def run(
    preset: str, parameters: Iterable[Parameter], *settings: str, arguments: Arguments
) -> Replicated:
    """Simulate a configured preset with all seeds."""
    return replicate(configured(preset, parameters, *settings, arguments=arguments))


def throughput_rows(
    printed: Mapping[str, float],
    runs: Mapping[str, Replicated],
    *,
    bar: float,
    rate_bar: float | None = None,
    fitted: Collection[str] = (),
) -> list[Row]:
    """Rows of throughput against eta: as multiples of eta 0, then the rates themselves.

    Args:
        printed: trained tokens per second, by eta.
        runs: of the same.
        bar: largest gap of the multiples that was aimed at.
        rate_bar: the same of the rates; None has no aim.
        fitted: eta of the rates to which something was fitted.
    """
    multiples = [
        Row(
            name=f"eta {eta} / eta 0",
            paper=value / printed["0"],
            ours=runs[eta].ratio(runs["0"], lambda result: result.tokens_per_s),
            unit="times",
            bar=bar,
        )
        for eta, value in printed.items()
        if eta != "0"
    ]
    rates = [
        Row(
            name=f"eta {eta}",
            paper=value,
            ours=runs[eta].tokens_per_s,
            unit="trained tokens/s",
            bar=rate_bar,
            fitted=eta in fitted,
        )
        for eta, value in printed.items()
    ]
    return multiples + rates


def length(arguments: Arguments, *, steps: int, warmup: int, quick: tuple[int, int]) -> list[str]:
    """Settings of simulated and warm-up steps; fewer with `--quick`."""
    steps, warmup = quick if arguments.quick else (steps, warmup)
    return [f"workload.steps={steps}", f"workload.warmup_steps={warmup}"]


def main(
    reproduce: Callable[[Arguments], Reproduction],
    description: str | None,
    argv: Sequence[str] | None = None,
) -> None:
    """Command line of a reproduction: `--plot FILE`, and the options of `benchmarks.harness`."""
    words = list(sys.argv[1:] if argv is None else argv)
    plot = _take_option(words, "--plot")
    text = f"{description or ''}\n--plot FILE draws a picture; --repeats N is the number of seeds."
    arguments = parse(text, repeats=SEEDS, quick_repeats=QUICK_SEEDS, argv=words)

    result = reproduce(arguments)
    if plot:
        draw(result, Path(plot))
    if not arguments.json:
        print(to_text(result, arguments))
        return
    report(to_json(result), arguments)


def _take_option(words: list[str], name: str) -> str | None:
    """Remove `name VALUE` from the words and return the value."""
    if name not in words:
        return None
    at = words.index(name)
    if at + 1 == len(words):
        raise SystemExit(f"{name} needs a file name")
    _, value = words.pop(at), words.pop(at)
    return value
