"""Both layouts hold the same sequences; in a tree, a token attends only to its ancestors."""

from __future__ import annotations

from itertools import compress

import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.batch import PackedBatch, ancestor_mask, input_tokens, pack, pad
from areal_lab.data.prefix_tree import ForwardCost, grow_trees
from areal_lab.data.trajectory import Observation, Segment, Trajectory

SHARE = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=0.0)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
SEGMENTS = st.builds(
    lambda tokens, value, version: Segment(tokens, (value,) * len(tokens), version),
    TOKENS,
    st.floats(-5, 0, width=32),
    st.integers(0, 4),
)
PARTS = st.tuples(
    st.lists(st.one_of(SEGMENTS, TOKENS.map(Observation)), max_size=2),
    SEGMENTS,
    st.lists(TOKENS.map(Observation), max_size=1),
).map(lambda parts: (*parts[0], parts[1], *parts[2]))
TRAJECTORIES = st.lists(
    st.builds(
        lambda group, prompt, parts: Trajectory(
            group=group,
            sample=0,
            prompt_tokens=prompt,
            parts=parts,
            finish_reason="stop",
            reward=0.0,
        ),
        st.integers(0, 3),
        TOKENS,
        PARTS,
    ),
    min_size=1,
    max_size=8,
)


def packed_from(trajectories: list[Trajectory], max_tokens: int = 10**6) -> PackedBatch:
    rows = [input_tokens(trajectory) for trajectory in trajectories]
    return pack(trajectories, grow_trees(rows, SHARE, max_tokens=max_tokens))


def seen_tokens(packed: PackedBatch) -> list[list[int]]:
    """What the token at each packed position attends to, in order, itself last."""
    tokens = packed.tokens.tolist()
    return [
        list(compress(tokens[span.start : span.end], seen))
        for span in packed.trees
        for seen in ancestor_mask(packed, span).tolist()
    ]


@given(TRAJECTORIES, st.integers(1, 40))
def test_every_prediction_sees_exactly_what_precedes_its_token(
    trajectories: list[Trajectory], max_tokens: int
) -> None:
    packed = packed_from(trajectories, max_tokens)
    seen = seen_tokens(packed)
    row = 0
    for index, trajectory in enumerate(trajectories):
        tokens = trajectory.prompt_tokens + trajectory.response_tokens
        for offset, by_policy in enumerate(trajectory.response_mask):
            if not by_policy:
                continue
            at = len(trajectory.prompt_tokens) + offset
            prediction = packed.prediction[row]
            position = int(packed.predict_from[prediction])
            assert packed.sequence_ids[row] == index
            assert packed.group_ids[row] == trajectory.group
            assert packed.targets[prediction] == tokens[at]
            assert seen[position] == list(tokens[:at])
            assert packed.positions[position] == at - 1
            row += 1
    assert row == len(packed.prediction)


@given(TRAJECTORIES)
def test_packed_rows_are_the_true_entries_of_the_padded_mask(
    trajectories: list[Trajectory],
) -> None:
    packed, padded = packed_from(trajectories), pad(trajectories, pad_token=99)
    mask = padded.response_mask
    assert torch.equal(packed.behavior_logprobs, padded.behavior_logprobs[mask])
    assert torch.equal(packed.versions, padded.versions[mask])
    assert torch.equal(packed.targets[packed.prediction], padded.tokens[mask])
    rows = mask.nonzero()[:, 0]
    assert torch.equal(packed.sequence_ids, rows)
    assert torch.equal(packed.group_ids, padded.group_ids[rows])


@given(TRAJECTORIES)
def test_nothing_is_laid_out_twice(trajectories: list[Trajectory]) -> None:
    packed = packed_from(trajectories)
    paths = {tuple(path) for path in seen_tokens(packed)}
    assert len(paths) == len(packed.tokens)
    pairs = list(zip(packed.predict_from.tolist(), packed.targets.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


@given(TRAJECTORIES)
def test_padding_is_outside_both_masks(trajectories: list[Trajectory]) -> None:
    padded = pad(trajectories, pad_token=99)
    assert torch.equal(padded.attention_mask, padded.tokens != 99)
    assert not bool((padded.response_mask & ~padded.attention_mask).any())
    lengths = [len(t.prompt_tokens) + len(t.response_tokens) for t in trajectories]
    assert padded.attention_mask.sum(1).tolist() == lengths
    assert padded.tokens.shape[1] == max(lengths)


def test_the_drawing_of_the_module() -> None:
    def sample(index: int, tokens: tuple[int, ...]) -> Trajectory:
        segment = Segment(tokens, (-1.0,) * len(tokens), 0)
        return Trajectory(
            group=0,
            sample=index,
            prompt_tokens=(10, 11, 12),
            parts=(segment,),
            finish_reason="stop",
            reward=0.0,
        )

    packed = packed_from([sample(0, (20, 21, 29)), sample(1, (30, 39))])
    assert packed.tokens.tolist() == [10, 11, 12, 20, 21, 30]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert packed.subtree_end.tolist() == [6, 6, 6, 5, 5, 6]
    assert packed.predict_from.tolist() == [2, 3, 4, 2, 5]
    assert packed.targets.tolist() == [20, 21, 29, 30, 39]


def test_tokens_after_the_last_chosen_one_are_not_computed() -> None:
    trajectory = Trajectory(
        group=0,
        sample=0,
        prompt_tokens=(1, 2),
        parts=(
            Segment((3,), (-1.0,), 0),
            Observation((4, 5)),
            Segment((6,), (-1.0,), 1),
            Observation((7,)),
        ),
        finish_reason="stop",
        reward=0.0,
    )
    assert input_tokens(trajectory) == (1, 2, 3, 4, 5)
    packed = packed_from([trajectory])
    assert packed.versions.tolist() == [0, 1]
    assert packed.predict_from.tolist() == [1, 4]


@given(TRAJECTORIES)
def test_a_turn_is_a_run_of_chosen_tokens_of_one_trajectory(trajectories: list[Trajectory]) -> None:
    """Packed tokens have no holes: turns say where they were."""
    packed = packed_from(trajectories)
    padded = pad(trajectories)
    runs: list[int] = []
    count = 0
    for row in padded.response_mask.tolist():
        for before, now in zip([False, *row], row, strict=False):
            count += now and not before
            runs += [count - 1] * now
    assert packed.turn_ids.tolist() == runs
    assert packed.turn_count == count


def test_two_segments_without_an_observation_between_them_are_one_turn() -> None:
    def answer(version: int, *tokens: int) -> Segment:
        return Segment(tokens, (-1.0,) * len(tokens), version)

    parts = (answer(1, 5, 6), answer(2, 7), Observation((8,)), answer(2, 9))
    one = Trajectory(
        group=0, sample=0, prompt_tokens=(1,), parts=parts, finish_reason="stop", reward=0.0
    )
    packed = packed_from([one, one])
    assert packed.turn_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert packed.turn_count == 4
