"""Files of the pipeline in a checkpoint: run.json, and tokens of open groups in groups.json.gz.

checkpoints/step-00012/   model.safetensors, config.json, tokenizer   the model (Hugging Face)
                          trainer/                                    `training.checkpoint`
                          run.json, groups.json.gz                    this module

The folder is renamed into place once it is complete, so all of its files have one version.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from annotated_types import Ge
from pydantic import AllowInfNan, TypeAdapter, ValidationError

from areal_lab.control.events import GroupId, Version
from areal_lab.control.frontier import Frontier
from areal_lab.data.images import PlacedImage
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.engines.client.resubmit import PartialSamples
from areal_lab.engines.protocol import Generated
from areal_lab.models.checkpoint_files import step_of
from areal_lab.pipeline.resume.positions import GROWING
from areal_lab.pipeline.rollout.scored import ScoredGroup

Saved = TypeVar("Saved")

RUN_FILE: Final = "run.json"
GROUPS_FILE: Final = "groups.json.gz"
SCHEMA: Final = 2
"""Version of the format, incremented when older programs would misread run.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """State of the pipeline at a checkpoint."""

    frontier: Frontier
    positions: dict[str, Annotated[int, Ge(0)]]
    """Sizes of the growing files of the run folder, in bytes."""
    training_s: Annotated[float, Ge(0), AllowInfNan(False)]
    """Seconds of training so far, without the time between an end and a restart."""
    counts: dict[str, int]
    """Tokens, interruptions and incidents so far."""
    data: str
    """Digest of the problems (`ProblemSet.digest`)."""
    config: dict[str, Any]
    """Settings of the run."""
    finished_groups: tuple[GroupId, ...] = ()
    """Groups that wait for training, complete in `GROUPS_FILE`."""
    running_groups: tuple[GroupId, ...] = ()
    """Groups in generation, with their tokens so far in `GROUPS_FILE`."""
    running_tokens: int = 0
    """Tokens of the running groups."""
    held_out_before: tuple[float, ...] = ()
    """Mean held-out reward of each problem before training; empty if it was not measured."""
    unscored_before: int = 0
    """Held-out samples without a reward."""
    given: tuple[str, ...] = ()
    """Names of functions that a program passed instead of naming them in the settings."""
    schema: int = field(default=SCHEMA)

    def to_json(self) -> bytes:
        """Return the content of run.json; infinity is written as `Infinity`."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Read run.json of a checkpoint.

    Raises:
        ValueError: the file cannot be read; in one line.
    """
    return read_saved(checkpoint / RUN_FILE, TypeAdapter(SavedRun), _checked)


def saved_version(checkpoint: Path) -> Version:
    """Read the version in run.json of a checkpoint; raises as `read_saved_run`."""
    return read_saved_run(checkpoint).frontier.version


def read_saved(file: Path, adapter: TypeAdapter[Saved], check: Callable[[Any], None]) -> Saved:
    """Read a JSON file of a checkpoint into its record.

    Args:
        file: path of the file.
        adapter: type of the record.
        check: raises ValueError for an invalid object.

    Raises:
        ValueError: the file cannot be read; in one line.
    """
    try:
        value = json.loads(file.read_bytes())
        check(value)
        return adapter.validate_python(value)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason of a read error on one line."""
    reason = str(error) or "it is nested too deeply"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(reason.split())[:500]


def check_step(file_step: int, checkpoint: Path) -> None:
    """Compare the step in a file of a checkpoint with the name of its folder.

    Raises:
        ValueError: they differ.
    """
    named = step_of(checkpoint.name)
    if named is not None and file_step != named:
        raise ValueError(f"{checkpoint} is damaged: its file names step {file_step}")


def _checked(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"it has schema {value.get('schema')!r}, but {SCHEMA} was expected")
    check_positions(value.get("positions"))


def check_positions(value: Any) -> None:
    """Refuse positions of files that a run does not append to.

    Raises:
        ValueError: there is such a file.
    """
    if isinstance(value, dict) and (unknown := sorted(value.keys() - set(GROWING))):
        raise ValueError(f"positions names {unknown[0][:40]!r}, which a run does not append to")


# --- tokens of open groups -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTokens:
    """Generated tokens of groups that are not trained on yet."""

    finished: dict[GroupId, ScoredGroup] = field(default_factory=dict)
    running: dict[GroupId, PartialSamples] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished or self.running)

    @property
    def running_tokens(self) -> int:
        """Number of tokens of the running groups."""
        return sum(len(one.tokens) for group in self.running.values() for one in group.values())


@dataclass(frozen=True, slots=True)
class _SavedImage:
    """Hash and place of an image, whose content is in the problem."""

    digest: str
    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FromProblem:
    """Fields of a finished group that refer to its problem, which is not saved."""

    group: GroupId
    images: tuple[_SavedImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Content of groups.json.gz."""

    finished: tuple[dict[str, Any], ...]
    """Fields of `ScoredGroup`, with those of `_FromProblem` instead of its problem."""
    running: dict[GroupId, tuple[Generated, ...]]


def open_tokens_to_bytes(tokens: OpenTokens) -> bytes:
    """Return the content of groups.json.gz; log-probs keep all digits."""
    content = _Content(
        finished=tuple(_saved(group, scored) for group, scored in sorted(tokens.finished.items())),
        running={group: tuple(samples.values()) for group, samples in tokens.running.items()},
    )
    return gzip.compress(json.dumps(asdict(content)).encode(), compresslevel=1)


def _saved(group: GroupId, scored: ScoredGroup) -> dict[str, Any]:
    """Return the fields of a finished group to save."""
    known = {one.name: getattr(scored, one.name) for one in fields(scored) if one.name != "problem"}
    images = [
        _SavedImage(one.image.digest, one.start, one.rows, one.columns) for one in scored.images
    ]
    turns = [one._asdict() for one in scored.turns]
    return {"group": group, **known, "turns": turns, "images": images}


def read_open_tokens(checkpoint: Path, source: PromptSource) -> OpenTokens:
    """Read the tokens of open groups in a checkpoint; none if it has no groups.json.gz.

    Raises:
        ValueError: the file cannot be read; in one line.
    """
    file = checkpoint / GROUPS_FILE
    if not file.is_file():
        return OpenTokens()
    try:
        value = json.loads(gzip.decompress(file.read_bytes()))
        content = TypeAdapter(_Content).validate_python(value)
        finished = dict(_finished(saved, source) for saved in content.finished)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {_reason(error)}") from error
    return OpenTokens(
        finished=finished,
        running={
            group: {one.request_id: one for one in samples}
            for group, samples in content.running.items()
        },
    )


def _finished(saved: dict[str, Any], source: PromptSource) -> tuple[GroupId, ScoredGroup]:
    known = TypeAdapter(_FromProblem).validate_python(saved)
    problem = source[known.group]
    given = {"problem": problem, "images": _placed(known.images, problem)}
    return known.group, TypeAdapter(ScoredGroup).validate_python({**saved, **given})


def _placed(saved: tuple[_SavedImage, ...], problem: Problem) -> tuple[PlacedImage, ...]:
    """Take the images of a group from its problem.

    Raises:
        ValueError: the problem does not have an image.
    """
    there = {image.digest: image for image in problem.images}
    for one in saved:
        if one.digest not in there:
            raise ValueError(f"problem {problem.key[:40]!r} has no image {one.digest[:12]}")
    return tuple(PlacedImage(there[one.digest], one.start, one.rows, one.columns) for one in saved)
