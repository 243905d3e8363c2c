"""Simulate the rows of Table 1 or Figure 5c once more, in this process, with progress.

    PROGRAMS[name].rows(seeds=1, on_run=bar.update) --> rows: paper, ours, gap

The packaged results (`reproductions.report.results`) come from the same presets, with more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from reproductions.calibration import parameters
from reproductions.figure_5c import BAR, FITTED_ETA
from reproductions.report.harness import expected, throughput_rows
from reproductions.report.records import Row
from reproductions.table_1 import rows_of
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.run.result import Replicated

_BRIEF: Final = ("workload.steps=24", "workload.warmup_steps=8")
_TABLE: Final = MappingProxyType(
    {kind: (f"table_1_1.5b_{kind}", "") for kind in ("synchronous", "asynchronous")}
)
_FIGURE: Final = MappingProxyType(
    {
        eta: ("figure_5c", f"eta={'.inf' if eta == 'inf' else eta}")
        for eta in ("0", "1", "2", "4", "8", "16", "inf")
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Some runs of the simulator, and the rows that they make."""

    title: str
    runs: Mapping[str, tuple[str, str]]
    """Preset and override of each run."""
    overrides: tuple[str, ...]
    make_rows: Callable[[Mapping[str, Replicated]], Sequence[Row]]
    cpu_s: float
    """About how many seconds of CPU one seed takes."""

    def count(self, seeds: int) -> int:
        """How often `on_run` is called."""
        return len(self.runs) * seeds

    def rows(self, *, seeds: int = 1, on_run: Callable[[], object] = lambda: None) -> list[Row]:
        """Simulate, one seed after the other.

        Args:
            seeds: from 1; one seed has no interval.
            on_run: called after each run of each seed.
        """
        calibrated = [parameter.override for parameter in parameters("1.5B")]
        found = {
            name: replicate(
                load_simulation(
                    preset,
                    [*calibrated, *self.overrides, *filter(None, [override]), f"seeds={seeds}"],
                ),
                processes=1,
                on_result=lambda _: on_run(),
            )
            for name, (preset, override) in self.runs.items()
        }
        return list(self.make_rows(found))


def _table_rows(found: Mapping[str, Replicated]) -> Sequence[Row]:
    return rows_of("1.5B", found["synchronous"], found["asynchronous"])


def _figure_rows(found: Mapping[str, Replicated]) -> Sequence[Row]:
    printed: dict[str, float] = expected("figure_5c")["tokens_per_s"]
    return throughput_rows(printed, found, bar=BAR, fitted=[FITTED_ETA])


PROGRAMS: Final[Mapping[str, Program]] = MappingProxyType(
    {
        program.title: program
        for program in (
            Program(
                title="Table 1, 1.5B: 24 steps",
                runs=_TABLE,
                overrides=_BRIEF,
                make_rows=_table_rows,
                cpu_s=2,
            ),
            Program(
                title="Figure 5c: 24 steps of each eta",
                runs=_FIGURE,
                overrides=_BRIEF,
                make_rows=_figure_rows,
                cpu_s=7,
            ),
            Program(
                title="Table 1, 1.5B: all 250 steps",
                runs=_TABLE,
                overrides=(),
                make_rows=_table_rows,
                cpu_s=15,
            ),
        )
    }
)
"""By title, the shortest first."""
