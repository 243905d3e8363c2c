"""The generated parts of `docs/simulator.md`.

They are tables of settings (from the records and docstrings of `simulator.config`), the list of
presets, and the output of two examples, one of which is a YAML file in the page. A test compares.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from areal_lab.cli.outputs import WIDTH
from areal_lab.cli.simulate import Options, run_command
from areal_lab.config.dump import markdown_tables
from simulator.assembly.simulate import replicate
from simulator.config.load import ALIASES, load_simulation, presets
from simulator.config.schema import SimulationConfig
from simulator.costs.trainers import SPEEDS
from simulator.report.tables import show_report
from simulator.report.to_json import report

PAGE: Final = Path(__file__).parents[2] / "docs" / "simulator.md"
PICTURE: Final = PAGE.parent / "images" / "simulator_small.png"


def presets_table() -> str:
    """Names and titles of presets, as Markdown."""
    rows = [f"| `{name}` | {title} |" for name, title in presets().items()]
    return "\n".join(["| preset | |", "|---|---|", *rows])


def trainers_table() -> str:
    """Named trainers with errors and sources, as Markdown."""
    rows = ["| `trainer.kind` | error | mixtures | source |", "|---|---|---|---|"]
    for kind, speed in SPEEDS.items():
        mixture = speed.error if speed.mixture_error is None else speed.mixture_error
        rows.append(f"| `{kind}` | {speed.error:.0%} | {mixture:.0%} | {speed.provenance} |")
    return "\n".join(rows)


def own_file(page: str) -> str:
    """The YAML file that the page shows as an example."""
    _, inside, _ = _around(page, "own-file")
    return inside.strip().removeprefix("```yaml\n").removesuffix("```")


def example_output(source: str | Path) -> str:
    """The output of `areal-lab simulate`, as Markdown."""
    from rich.console import Console

    config = load_simulation(source)
    text = StringIO()
    console = Console(file=text, width=WIDTH, color_system=None)
    show_report(console, report(replicate(config), config))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(["```", *lines, "```"])


def page() -> str:
    """The page with all generated parts regenerated.

    Raises:
        ValueError: a marker is missing.
    """
    text = PAGE.read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        own = Path(folder) / "my_cluster.yaml"
        own.write_text(own_file(text), encoding="utf-8")
        made = {
            "settings": markdown_tables(SimulationConfig, ALIASES),
            "presets": presets_table(),
            "trainers": trainers_table(),
            "small": example_output("small"),
            "own": example_output(own),
        }
    for section, inside in made.items():
        before, _, after = _around(text, section)
        text = f"{before}\n\n{inside}\n\n{after}"
    return text


def draw_picture() -> None:
    """Draw the timeline of the first example."""
    with redirect_stdout(StringIO()):
        run_command(Options(sources=("small",), gantt=PICTURE, as_json=True))


def _around(page: str, section: str) -> tuple[str, str, str]:
    """The text before, between and after the markers of a section."""
    begin, end = (f"<!-- {word} {section} -->" for word in ("begin", "end"))
    before, found, rest = page.partition(begin)
    inside, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page has no {begin} .. {end}")
    return before + begin, inside, end + after
