"""Report a calibration: a table, one JSON object, and the YAML file for `areal-lab simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_lab.runlog.records import finite_json
from simulator.calibrate.fit import PartFit
from simulator.calibrate.fit_run import Calibration
from simulator.calibrate.settings import Value
from simulator.config.schema import SimulationConfig
from simulator.stats.format import number, short_time

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100


def configuration(calibration: Calibration) -> SimulationConfig:
    """The settings as a simulation config."""
    named = SimulationConfig().with_settings(calibration.settings)
    if named.name == SimulationConfig().name:
        named.name = _title(calibration)
    return named


def to_json(calibration: Calibration) -> dict[str, Any]:
    """The calibration as one JSON object; errors are relative."""
    lengths = calibration.lengths
    told = {
        "source": str(calibration.source),
        "parts": [_part_json(part) for part in calibration.parts],
        "lengths": None
        if lengths is None
        else {
            "settings": lengths.settings(),
            "answers": lengths.answers,
            "held_out_answers": lengths.held_out_answers,
            "held_out_distance": lengths.distance,
        },
        "settings": dict(calibration.settings),
        "notes": list(calibration.notes),
    }
    return dict(finite_json(told))


def show(console: Console, calibration: Calibration) -> None:
    """Print the fits and notes."""
    from rich import box
    from rich.table import Table

    console.print(f"{_title(calibration)}: {calibration.about}", highlight=False)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("part")
    for title in ("fitted", "error", "held out", "error", "bias"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("coefficients", overflow="fold")
    for part in calibration.parts:
        out = int(part.held_out.sum())
        table.add_row(
            part.name,
            str(len(part.places) - out),
            f"{part.fit_error:.1%}",
            str(out),
            f"{part.held_out_error:.1%}",
            f"{part.bias:+.1%}",
            f"{_found(part.settings)}; {part.note}",
        )
    console.print(table)
    for line in (*_more_lines(calibration), *_held_out_lines(calibration)):
        console.print(line, highlight=False)
    for note in calibration.notes:
        console.print(f"[yellow]note:[/] {note}", highlight=False)


def to_yaml(calibration: Calibration) -> str:
    """A file for `areal-lab simulate`: settings, below comments with their source."""
    from omegaconf import OmegaConf

    lines = [f"{_title(calibration)}: {calibration.about}"]
    for part in calibration.parts:
        lines.append(
            f"{part.name}: {part.held_out_error:.1%} error on {int(part.held_out.sum())} held-out "
            f"points; {part.note}"
        )
    lines += [*_more_lines(calibration), *_held_out_lines(calibration), *calibration.notes]
    nested: dict[str, Any] = {}
    for name, value in calibration.settings.items():
        *path, last = name.split(".")
        place = nested
        for one in path:
            place = place.setdefault(one, {})
        place[last] = _rounded(value)
    body = OmegaConf.to_yaml(OmegaConf.create(nested))
    return "".join(f"# {line}\n" for line in _wrapped(lines)) + body


def _more_lines(calibration: Calibration) -> Iterator[str]:
    settings, lengths = calibration.settings, calibration.lengths
    if "weights.export_s" in settings:
        yield (
            f"weight update: export {_seconds(settings['weights.export_s'])}, load "
            f"{_seconds(settings.get('weights.load_s', 0.0))}; scoring a group "
            f"{_seconds(settings['workload.reward.mean_s'])}; means over all steps but the first"
        )
    if lengths is not None:
        kind = f"{lengths.kind}, {number(lengths.mean_tokens)} tokens on average"
        if lengths.kind == "lognormal":
            correlation = lengths.group_correlation
            kind += (
                f", sigma {lengths.sigma:.3g}, cut off at {lengths.max_tokens:,}, correlation in a "
                f"group {'unknown' if correlation is None else f'{correlation:.2f}'}"
            )
        yield (
            f"lengths: {kind}; fitted to {lengths.answers} responses; Kolmogorov-Smirnov distance "
            f"to {lengths.held_out_answers} held-out responses {lengths.distance:.0%}"
        )


def _held_out_lines(calibration: Calibration) -> Iterator[str]:
    """The places of held-out points."""
    places = sorted(
        {
            place
            for part in calibration.parts
            for place, out in zip(part.places, part.held_out, strict=True)
            if out
        }
    )
    what = "rows" if calibration.run is None else "training steps"
    shown = ", ".join(map(str, places[:12])) + (", ..." if len(places) > 12 else "")
    yield f"held out: {what} {shown}"


def _part_json(part: PartFit) -> dict[str, Any]:
    out = int(part.held_out.sum())
    return {
        "name": part.name,
        "settings": dict(part.settings),
        "points": len(part.places) - out,
        "error": part.fit_error,
        "held_out": out,
        "held_out_error": part.held_out_error,
        "held_out_bias": part.bias,
        "held_out_places": sorted(
            {p for p, o in zip(part.places, part.held_out, strict=True) if o}
        ),
        "note": part.note,
    }


def _found(settings: Mapping[str, float]) -> str:
    """Coefficients in readable units."""
    told = []
    for name, value in settings.items():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("knee"):
            told += [f"knee {value:g}"] if value > 1 else []
        elif value:
            told.append(f"{leaf.removesuffix('_s').replace('_', ' ')} {_seconds(value)}")
    return ", ".join(told)


def _seconds(value: Value) -> str:
    return short_time(float(value))


def _rounded(value: Value) -> Value:
    """Round to six digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _title(calibration: Calibration) -> str:
    source = calibration.source
    if source.name.startswith("events."):
        source = source.resolve().parent
    return source.resolve().name if source.is_dir() else source.stem


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    import textwrap

    for line in lines:
        yield from textwrap.wrap(line, _WIDTH - 2, subsequent_indent="  ")
