"""File of sessions in the format of a run's `trajectories/`, with one line per session.

{"step": 0, "group": 3, "prompt": ..., "samples": [a row each], "session": {"session_id": ...}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.sessions import Session
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import SamplingParams
from areal_lab.host.durable import append_lines
from areal_lab.runlog.folder import SampleText, group_line

FILE: Final = "sessions.jsonl"


class SessionLines:
    """Writer of `sessions.jsonl`; the first session creates the folder and the file."""

    def __init__(self, folder: Path, codec: TextCodec, *, discount: float) -> None:
        """Make the writer without writing.

        Args:
            folder: folder of the file.
            codec: tokenizer of the model.
            discount: discount of rewards from a turn to the one before it.
        """
        self.file = folder / FILE
        self.written = 0
        """Number of sessions in the file."""
        self._codec = codec
        self._discount = discount

    def write(self, session: Session) -> None:
        """Append a session whose calls have ended; a session without tokens is left out.

        Raises:
            OSError: the file cannot be written; it is unchanged, so the call can be repeated.
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
        append_lines(self.file, text)
        self.written += 1

    def _line(self, session: Session) -> dict[str, object] | None:
        conversation = session.conversation
        assert isinstance(conversation, TreeConversation), "of this gateway"
        scores = session.scores(style="concat", discount=self._discount)
        returns = conversation.returns(scores)
        of_turns = bool(scores.rewards) or self._discount < 1
        rows = [
            Trajectory(
                group=self.written,
                sample=0,
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
    """Return the sampling of a turn, which defines the distribution of its log-probs."""
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
