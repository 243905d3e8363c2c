"""`areal-lab sft`, `rm` and `dpo`: a new run on fixed data, or one that continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_lab.config.offline import load_offline
from areal_lab.config.problem import ConfigError, problems_of, refusal
from areal_lab.offline.console import run_to_end
from areal_lab.offline.resume import find_resumable
from areal_lab.offline.start import prepare


def run_offline(command: str, arguments: Sequence[str], *, resume: Path | None) -> int:
    """Train to the end; returns the exit code.

    Args:
        command: `sft`, `rm` or `dpo`.
        arguments: configs and changed settings; with `resume` changed settings only.
        resume: the folder of a run to continue.

    Raises:
        ConfigError: one line per problem, before any process starts.
        Exception: whatever ended the run early.
    """
    configs = [one for one in arguments if "=" not in one]
    changes = [one for one in arguments if one not in configs]
    if resume is None:
        if not arguments:
            raise refusal(
                "CONFIG",
                f"give a CONFIG ({command}_adder, a file), settings (dataset.path=rows.jsonl), or "
                "--resume",
            )
        try:
            config = load_offline(command, configs, changes)
        except ValueError as error:
            raise ConfigError(*problems_of(error, "CONFIG", named=True)) from error
        return run_to_end(prepare(config))
    if configs:
        raise refusal(
            "CONFIG",
            f"{configs[0]!r} is a config, but --resume takes that of the run; give changed "
            "settings only, as total_train_steps=60",
        )
    found = find_resumable(command, resume, changes)
    return run_to_end(prepare(found.config), found)
