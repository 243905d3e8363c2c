"""Shared parts of all reproductions: the paper's numbers, simulated runs, and a command line.

reproduce(arguments) --> Reproduction --main--> table, JSON or picture
                                      --python -m reproductions--> a section of README.md
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Arguments, parse, report
from reproductions.report.records import Parameter, Reproduction, Row, to_json
from reproductions.report.results import save
from reproductions.report.show import draw, to_text
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.run.result import Replicated

EXPECTED = Path(__file__).parents[1] / "expected"
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
    """Settings of simulated and warm-up steps: fewer with `--quick`, the preset's with `--full`."""
    if getattr(arguments.own, "full", False):
        return []
    steps, warmup = quick if arguments.quick else (steps, warmup)
    return [f"workload.steps={steps}", f"workload.warmup_steps={warmup}"]


def main(
    reproduce: Callable[[Arguments], Reproduction],
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    seeds: int = SEEDS,
) -> None:
    """Command line of a reproduction: its own options, and those of `benchmarks.harness`."""
    text = f"{description or ''}\n--repeats N is the number of seeds."
    arguments = parse(
        text, repeats=seeds, quick_repeats=QUICK_SEEDS, argv=argv, add_own=_add_options
    )
    if arguments.quick and arguments.own.save:
        raise SystemExit("--save keeps no results of --quick; leave one of them out")
    result = reproduce(arguments)
    if arguments.own.plot:
        draw(result, Path(arguments.own.plot))
    if arguments.own.save:
        print(save(result, arguments), file=sys.stderr)
    if not arguments.json:
        print(to_text(result, arguments))
        return
    report(to_json(result), arguments)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="draw a picture")
    parser.add_argument("--full", action="store_true", help="all steps of the preset, not some 20")
    parser.add_argument(
        "--save", action="store_true", help="write reproductions/results/NAME.json, for notebooks"
    )
