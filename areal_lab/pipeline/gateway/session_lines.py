"""Sessions in a file, in the form of a run's `trajectories/`: a line for each session.

{"step": 0, "group": 3, "prompt": ..., "samples": [a row each], "session": {"session_id": ...}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.sessions import Session
from areal_lab.data.images import PlacedImage
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Observation, Segment
from areal_lab.engines.protocol import SamplingParams
from areal_lab.runlog.folder import SampleText, group_line

FILE: Final = "sessions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A row of a session; its reward may be missing, which is no reward of 0."""

    group: int
    row: int
    prompt_tokens: tuple[int, ...]
    parts: tuple[Segment | Observation, ...]
    finish_reason: str
    reward: float | None
    rewards: Mapping[str, float]
    turn_returns: tuple[float | None, ...]
    sample: int = 0
    images: tuple[PlacedImage, ...] = ()

    @property
    def response_tokens(self) -> tuple[int, ...]:
        """Tokens of all parts."""
        return tuple(token for part in self.parts for token in part.tokens)


class SessionLines:
    """Appends sessions to `sessions.jsonl` of a folder, which the first one makes."""

    def __init__(self, folder: Path, codec: TextCodec, *, discount: float) -> None:
        """Write nothing yet.

        Args:
            folder: for the file.
            codec: of the model.
            discount: of rewards, from a turn to the one before it.
        """
        self.file = folder / FILE
        self.written = 0
        """Sessions in the file."""
        self._codec = codec
        self._discount = discount

    def write(self, session: Session) -> None:
        """Append a session that samples nothing any more; one without a token is left out.

        Raises:
            OSError: the file cannot be written; it is as before, so that this can be repeated.
            ValueError: the session has a number that is not finite.
        """
        try:
            line = self._line(session)
            text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        except ValueError as error:
            raise ValueError(f"session {session.session_id} cannot be written: {error}") from error
        if line is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        size = None
        try:
            with self.file.open("a", encoding="utf-8") as file:
                size = file.tell()
                file.write(text)
        except OSError:
            if size is not None:  # a part of the line may be there, such as on a full disk
                with suppress(OSError):
                    os.truncate(self.file, size)
            raise
        self.written += 1

    def _line(self, session: Session) -> dict[str, object] | None:
        conversation = session.conversation
        assert isinstance(conversation, TreeConversation), "of this gateway"
        scores = session.scores(style="concat", discount=self._discount)
        returns = conversation.returns(scores)
        of_turns = bool(scores.rewards) or self._discount < 1
        rows = [
            SessionRow(
                group=self.written,
                row=number,
                prompt_tokens=row.prompt_tokens,
                parts=row.parts,
                finish_reason=row.finish_reason,
                reward=session.total_reward(),
                rewards=session.rewards_by_name(),
                turn_returns=tuple(returns[turn] for turn, _ in row.trained) if of_turns else (),
            )
            for number, row in enumerate(conversation.tree.rows())
        ]
        if not rows:
            return None
        turns = conversation.notes(scores)
        samples = []
        for row in rows:
            completion = self._codec.decode(row.response_tokens)
            text = SampleText(
                self._codec.decode(row.prompt_tokens),
                completion,
                self._codec.characters(row.response_tokens, completion),
                turns,
            )
            samples.append((row, text))
        return {
            **group_line(0, samples, self._codec.special_tokens),
            "session": {
                "session_id": session.session_id,
                "task_id": session.task_id,
                "outcome": session.outcome,
                "ended_by": session.ended_by,
                "sampling": [_sampling(one) for one in conversation.samplings],
            },
        }


def _sampling(params: SamplingParams) -> dict[str, float]:
    """How a turn was sampled: its log-probs are of this distribution."""
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
