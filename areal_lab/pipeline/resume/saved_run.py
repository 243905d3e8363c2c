"""The pipeline's files in a checkpoint: run.json, and tokens of open groups in groups.json.gz.

checkpoints/step-00012/   model.safetensors, config.json, tokenizer   the model (Hugging Face)
                          trainer/                                    `training.checkpoint`
                          run.json, groups.json.gz                    this module

The folder appears by one rename, so that all of it is of one version or nothing is there.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from areal_lab.agents.workflow import Episode
from areal_lab.control.events import GroupId
from areal_lab.control.frontier import Frontier
from areal_lab.data.images import PlacedImage
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.engines.client.resubmit import PartialSamples, token_count
from areal_lab.engines.protocol import Generated
from areal_lab.pipeline.rollout.scored import SampledTurn, ScoredGroup
from areal_lab.training.protocol import STATE_FOLDER

RUN_FILE: Final = "run.json"
GROUPS_FILE: Final = "groups.json.gz"
SCHEMA: Final = 2
"""Incremented when older programs would misread run.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What the pipeline knows at a checkpoint."""

    frontier: Frontier
    positions: dict[str, int]
    """Bytes of the growing files of the run folder."""
    training_s: float
    """Since training began; without the time in which the run did not run."""
    counts: dict[str, int]
    """Tokens, interruptions and incidents so far."""
    data: str
    """Digest of the problems (`ProblemSet.digest`)."""
    config: dict[str, Any]
    """Settings of the run."""
    finished_groups: tuple[GroupId, ...] = ()
    """Groups that wait for training, whole in `GROUPS_FILE`."""
    running_groups: tuple[GroupId, ...] = ()
    """Groups that ran, with their tokens so far in `GROUPS_FILE`."""
    running_tokens: int = 0
    """Tokens of the running groups."""
    held_out_before: tuple[float, ...] = ()
    """Mean held-out reward of each problem before training; empty if it was not measured."""
    unscored_before: int = 0
    """Held-out samples without a reward."""
    given: tuple[str, ...] = ()
    """Functions that a program gave instead of naming them in the settings: `reward_fn`, `loss`."""
    schema: int = field(default=SCHEMA)

    def to_json(self) -> bytes:
        """The content of run.json; infinity is written as `Infinity`."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def read_saved_run(checkpoint: Path) -> SavedRun:
    """What was saved in a checkpoint.

    Raises:
        ValueError: in one line: it cannot be read.
    """
    file = checkpoint / RUN_FILE
    try:
        value = json.loads(file.read_text())
        if value.get("schema") != SCHEMA:
            raise ValueError(f"it has schema {value.get('schema')!r}, but {SCHEMA} was expected")
        return TypeAdapter(SavedRun).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file} cannot be read: {where}: {first['msg']}") from error
    except (OSError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def is_resumable(checkpoint: Path) -> bool:
    """Whether a run can continue from it: others have the model alone."""
    return (checkpoint / RUN_FILE).is_file() and (checkpoint / STATE_FOLDER).is_dir()


# --- tokens of open groups -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTokens:
    """What was generated for groups that are not trained on yet."""

    finished: dict[GroupId, ScoredGroup] = field(default_factory=dict)
    running: dict[GroupId, PartialSamples] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished or self.running)

    @property
    def running_tokens(self) -> int:
        """Tokens of the groups that run."""
        return sum(token_count(one) for group in self.running.values() for one in group.values())


@dataclass(frozen=True, slots=True)
class _SavedImage:
    """A placed image by its hash: the problem has it."""

    digest: str
    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    """A scored group without its problem, which its number gives."""

    group: GroupId
    samples: tuple[Episode, ...]
    completions: tuple[tuple[str, ...], ...]
    prompt_tokens: tuple[int, ...]
    started_s: float
    generated_s: float
    scored_s: float
    turns: tuple[SampledTurn, ...]
    images: tuple[_SavedImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Content of groups.json.gz."""

    finished: tuple[_Finished, ...]
    running: dict[GroupId, tuple[Generated, ...]]


def open_tokens_to_bytes(tokens: OpenTokens) -> bytes:
    """The content of groups.json.gz. Log-probs keep all their digits."""
    content = _Content(
        finished=tuple(
            _Finished(
                group=group,
                samples=scored.samples,
                completions=scored.completions,
                prompt_tokens=scored.prompt_tokens,
                started_s=scored.started_s,
                generated_s=scored.generated_s,
                scored_s=scored.scored_s,
                turns=scored.turns,
                images=tuple(
                    _SavedImage(one.image.digest, one.start, one.rows, one.columns)
                    for one in scored.images
                ),
            )
            for group, scored in sorted(tokens.finished.items())
        ),
        running={group: tuple(samples.values()) for group, samples in tokens.running.items()},
    )
    return gzip.compress(json.dumps(asdict(content)).encode(), compresslevel=1)


def read_open_tokens(checkpoint: Path, source: PromptSource) -> OpenTokens:
    """The tokens of open groups in a checkpoint; none if it has no such file.

    Raises:
        ValueError: in one line: they cannot be read.
    """
    file = checkpoint / GROUPS_FILE
    if not file.is_file():
        return OpenTokens()
    try:
        value = json.loads(gzip.decompress(file.read_bytes()))
        content = TypeAdapter(_Content).validate_python(value)
        images = {one.group: _placed(one.images, source[one.group]) for one in content.finished}
    except (OSError, EOFError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{file} cannot be read: {reason}") from error
    return OpenTokens(
        finished={
            one.group: ScoredGroup(
                problem=source[one.group],
                samples=one.samples,
                completions=one.completions,
                prompt_tokens=one.prompt_tokens,
                started_s=one.started_s,
                generated_s=one.generated_s,
                scored_s=one.scored_s,
                turns=one.turns,
                images=images[one.group],
            )
            for one in content.finished
        },
        running={
            group: {one.request_id: one for one in samples}
            for group, samples in content.running.items()
        },
    )


def _placed(saved: tuple[_SavedImage, ...], problem: Problem) -> tuple[PlacedImage, ...]:
    """The images of a group, from those of its problem.

    Raises:
        ValueError: in one line: the problem does not have them.
    """
    there = {image.digest: image for image in problem.images}
    for one in saved:
        if one.digest not in there:
            raise ValueError(f"problem {problem.key[:40]!r} has no image {one.digest[:12]}")
    return tuple(PlacedImage(there[one.digest], one.start, one.rows, one.columns) for one in saved)
