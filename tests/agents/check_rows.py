"""What holds for the rows of every session."""

from __future__ import annotations

from collections.abc import Sequence

from areal_lab.agents.session_tree import SessionTree
from areal_lab.data.trajectory import Observation, Segment, Trajectory


def check_rows(tree: SessionTree, prompts: Sequence[tuple[int, ...]]) -> None:
    """Every sampled token is trained once, behind the tokens that it was sampled behind.

    Args:
        tree: of the session.
        prompts: of each turn, as planned.
    """
    trained: list[int] = []
    for number, row in enumerate(tree.rows()):
        trajectory = Trajectory(
            group=0,
            sample=number,
            prompt_tokens=row.prompt_tokens,
            parts=row.parts,
            finish_reason=row.finish_reason,
            reward=0.0,
        )
        tokens = trajectory.response_tokens
        mask, versions = trajectory.response_mask, trajectory.versions
        assert len(tokens) == len(mask) == len(versions) == len(trajectory.behavior_logprobs)
        assert sum(mask) == len(row.token_turns) == trajectory.generated_tokens
        assert isinstance(row.parts[-1], Segment)
        before = row.prompt_tokens
        parts = list(row.parts)
        for turn, count in row.trained:
            if isinstance(parts[0], Observation):
                before += parts.pop(0).tokens
            assert before == prompts[turn]
            own = tree.turns[turn].generated.segments
            assert tuple(parts[: len(own)]) == own
            assert count == sum(len(segment.tokens) for segment in own)
            before += tree.turns[turn].tokens
            del parts[: len(own)]
            trained.append(turn)
        assert not parts
    assert sorted(trained) == [turn.number for turn in tree.turns if turn.tokens]
