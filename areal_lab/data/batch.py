"""Trajectories as tensors: packed along prefix trees, or padded to a rectangle.

    tree      p0 p1 p2 -+- a0 a1          packed tokens   p0 p1 p2 a0 a1 b0
                        '- b0             positions        0  1  2  3  4  3
                                          subtree_end      6  6  6  5  5  6

Token `i` attends to token `j` exactly when `j <= i < subtree_end[j]`. The last token of a sequence
predicts nothing and is omitted. Axes: `P` packed tokens, `U` distinct predictions (a position and
the token to predict), `R` sampled tokens, in sequence order, `N` sequences, `T` tokens of the
longest sequence.

Both layouts have the same numbers: packed row `r` is the `r`-th True of the padded mask.

Prompts share a prefix only up to the first image that differs, whatever their tokens: in the trees
the placeholders of an image are its number, which is negative. `K` placeholders of a packed batch.

A part of every packed row, where several processes divide its tokens among them.

    tokens [P] --own--> [p]    all of a layer but attention, and the output layer
    heads, tokens of this rank --to_heads--> its heads, all tokens --to_tokens--> back

Rows are padded to a multiple of the processes: P' tokens, p = P' / count of them here. Padding is
in no tree: nothing attends to it. `H` heads, `D` head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.data.images import PlacedImage, rope_positions
from areal_lab.data.prefix_tree import PrefixTree, common_prefix
from areal_lab.data.trajectory import Trajectory


class TreeSpan(NamedTuple):
    """Packed tokens from `start` up to, not including, `end`, which attend only to each other."""

    start: int
    end: int
    branching: bool


class PackedImages(NamedTuple):
    """Images of a packed batch, each once, and the positions that they change."""

    images: tuple[PlacedImage, ...]
    """Placed in one of their prompts; others have the same rows and columns."""
    features: Int[Tensor, " K"]
    """For each placeholder, in packed order: index among the features of all images."""
    positions: Int[Tensor, "3 P"]
    """Positions of M-RoPE."""


class PackedBatch(NamedTuple):
    """Sequences packed along their prefix trees; every shared prefix is stored once."""

    tokens: Int[Tensor, " P"]
    positions: Int[Tensor, " P"]
    subtree_end: Int[Tensor, " P"]
    trees: tuple[TreeSpan, ...]
    predict_from: Int[Tensor, " U"]
    """Packed position whose hidden state predicts the target."""
    targets: Int[Tensor, " U"]
    prediction: Int[Tensor, " R"]
    """Index into `U`: two samples that chose the same token after the same prefix share it."""
    behavior_logprobs: Float[Tensor, " R"]
    versions: Int[Tensor, " R"]
    sequence_ids: Int[Tensor, " R"]
    """Index into the trajectories that were packed."""
    group_ids: Int[Tensor, " R"]
    turn_ids: Int[Tensor, " R"]
    """Index of the turn: adjacent chosen tokens of one trajectory."""
    turn_count: int
    images: PackedImages | None = None
    """None if no prompt has an image."""


class SampleTokens(NamedTuple):
    """Positions of the sampled tokens of each sample in one row of all `T` tokens."""

    lengths: Int[Tensor, " N"]
    first: Int[Tensor, " N"]
    """Position of the first token of each sample."""

    def ids(self) -> Int[Tensor, " T"]:
        """Sample of each token."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    def rows(self, packed: PackedBatch) -> Int[Tensor, " R"]:
        """Position of each sampled token of a packed batch, on the host."""
        ids = packed.sequence_ids
        # Ascending, and the tokens of a sample are complete and in order.
        within = torch.arange(len(ids)) - torch.searchsorted(ids, ids)
        return self.first[ids] + within


def sample_tokens(trajectories: Sequence[Trajectory]) -> SampleTokens:
    """Positions of the sampled tokens, sample after sample."""
    lengths = _ints([trajectory.generated_tokens for trajectory in trajectories])
    return SampleTokens(lengths, lengths.cumsum(0) - lengths)


class Compared(NamedTuple):
    """Units that advantages compare, `C` of them: samples, or turns if these have separate returns.

    Tokens of a unit are adjacent, in the order of `sample_tokens`.
    """

    rewards: Float[Tensor, " C"]
    groups: Int[Tensor, " C"]
    lengths: Int[Tensor, " C"]
    """Sampled tokens of each unit, over all rows of a sample."""

    def ids(self) -> Int[Tensor, " T"]:
        """Unit of each token."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)


def compared(trajectories: Sequence[Trajectory], *, rows_apart: bool = False) -> Compared:
    """Turns of a batch if all have returns, else its samples.

    With `rows_apart`, units are rows, each with its sample's reward, for functions that follow the
    tokens of a sequence.
    """
    of_turns = [bool(trajectory.turn_returns) for trajectory in trajectories]
    if any(of_turns) and not all(of_turns):
        raise ValueError(
            f"{sum(of_turns)} of {len(of_turns)} trajectories have turn_returns, but all must have "
            "them or none"
        )
    found: list[tuple[float | None, int, int]] = []
    last: tuple[int, int] | None = None
    for one in trajectories:
        name = one.group, one.sample
        if one.turn_returns and not rows_apart:
            found.extend(
                (value, one.group, sum(len(segment.tokens) for segment in turn))
                for value, turn in zip(one.turn_returns, one.turns, strict=True)
            )
        elif one.row and not rows_apart:
            if name != last:
                raise ValueError(
                    f"row {one.row} of trajectory {one.group}/{one.sample} follows another sample, "
                    "but the rows of a sample must be neighbors"
                )
            reward, group, length = found[-1]
            found[-1] = reward, group, length + one.generated_tokens
        else:
            found.append((one.reward, one.group, one.generated_tokens))
        last = name
    rewards = [reward for reward, _, _ in found if reward is not None]
    if len(rewards) < len(found):
        raise ValueError(
            f"{len(found) - len(rewards)} of {len(found)} samples or turns have no reward, but all "
            "must have one to be trained on"
        )
    return Compared(
        torch.tensor(rewards),
        torch.tensor([group for _, group, _ in found]),
        _ints([length for _, _, length in found]),
    )


class PaddedBatch(NamedTuple):
    """One row per sequence, padded on the right."""

    tokens: Int[Tensor, "N T"]
    attention_mask: Bool[Tensor, "N T"]
    """True on tokens, False on padding."""
    response_mask: Bool[Tensor, "N T"]
    """True for sampled tokens."""
    behavior_logprobs: Float[Tensor, "N T"]
    versions: Int[Tensor, "N T"]
    group_ids: Int[Tensor, " N"]


def input_tokens(trajectory: Trajectory) -> tuple[int, ...]:
    """Tokens that a forward pass needs to predict every sampled token."""
    mask = trajectory.response_mask
    last_chosen = max(index for index, chosen in enumerate(mask) if chosen)
    return trajectory.prompt_tokens + trajectory.response_tokens[:last_chosen]


def tree_rows(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    """`input_tokens` of each trajectory, with the numbers of images instead of their
    placeholders, for `grow_trees`.
    """
    numbers = _image_numbers(trajectories)
    return [_tree_row(trajectory, numbers) for trajectory in trajectories]


def _image_numbers(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Negative numbers of the images, by their digests."""
    numbers: dict[str, int] = {}
    for trajectory in trajectories:
        for placed in trajectory.images:
            numbers.setdefault(placed.image.digest, -1 - len(numbers))
    return numbers


def _tree_row(trajectory: Trajectory, numbers: Mapping[str, int]) -> tuple[int, ...]:
    row = input_tokens(trajectory)
    for placed in trajectory.images:
        number = numbers[placed.image.digest]
        row = (*row[: placed.start], *[number] * placed.tokens, *row[placed.end :])
    return row


def pack(trajectories: Sequence[Trajectory], trees: Sequence[PrefixTree]) -> PackedBatch:
    """Pack the members of the trees, one tree after the other.

    Members and the returned `sequence_ids` are indices into `trajectories`. Sequences in no tree
    are omitted.
    """
    numbers = _image_numbers(trajectories)
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[TreeSpan] = []
    paths: dict[int, list[int]] = {}
    for tree in trees:
        start = len(tokens)
        before: tuple[int, ...] = ()
        path: list[int] = []
        for member in tree.members:
            row = _tree_row(trajectories[member], numbers)
            shared = common_prefix(before, row)
            path = path[:shared] + list(range(len(tokens), len(tokens) + len(row) - shared))
            own = trajectories[member]
            tokens.extend((input_tokens(own) if own.images else row)[shared:])
            positions.extend(range(shared, len(row)))
            paths[member] = path
            before = row
        spans.append(TreeSpan(start, len(tokens), tree.branching))

    predictions: dict[tuple[int, int], int] = {}
    prediction: list[int] = []
    rows: list[tuple[float, int, int, int, int]] = []
    turns = 0
    for member in sorted(paths):
        trajectory, path = trajectories[member], paths[member]
        before_first = len(trajectory.prompt_tokens) - 1
        chosen = zip(
            trajectory.response_tokens,
            trajectory.response_mask,
            trajectory.behavior_logprobs,
            trajectory.versions,
            strict=True,
        )
        in_turn = False
        for offset, (token, by_policy, logprob, version) in enumerate(chosen):
            turns += by_policy and not in_turn
            in_turn = by_policy
            if by_policy:
                key = (path[before_first + offset], token)
                prediction.append(predictions.setdefault(key, len(predictions)))
                rows.append((logprob, version, member, trajectory.group, turns - 1))
    return PackedBatch(
        tokens=_ints(tokens),
        positions=_ints(positions),
        subtree_end=_ints(_subtree_ends(positions, spans)),
        trees=tuple(spans),
        predict_from=_ints([position for position, _ in predictions]),
        targets=_ints([token for _, token in predictions]),
        prediction=_ints(prediction),
        behavior_logprobs=torch.tensor([row[0] for row in rows], dtype=torch.float32),
        versions=_ints([row[1] for row in rows]),
        sequence_ids=_ints([row[2] for row in rows]),
        group_ids=_ints([row[3] for row in rows]),
        turn_ids=_ints([row[4] for row in rows]),
        turn_count=turns,
        images=_images(trajectories, paths, positions),
    )


def _images(
    trajectories: Sequence[Trajectory], paths: Mapping[int, Sequence[int]], depths: Sequence[int]
) -> PackedImages | None:
    """Images of the packed trajectories."""
    members = [member for member in paths if trajectories[member].images]
    if not members:
        return None
    images: dict[str, PlacedImage] = {}
    for member in members:
        for placed in trajectories[member].images:
            images.setdefault(placed.image.digest, placed)
    starts = accumulate((placed.tokens for placed in images.values()), initial=0)
    first = dict(zip(images, starts, strict=False))
    features: dict[int, int] = {}
    rope = torch.tensor(depths).repeat(3, 1)
    for member in members:
        path, placed_here = paths[member], trajectories[member].images
        for placed in placed_here:
            known = first[placed.image.digest]
            for index in range(placed.tokens):
                features[path[placed.start + index]] = known + index
        rope[:, list(path)] = torch.tensor(rope_positions(len(path), placed_here))
    return PackedImages(
        tuple(images.values()), _ints([features[at] for at in sorted(features)]), rope
    )


def pad(trajectories: Sequence[Trajectory], *, pad_token: int = 0) -> PaddedBatch:
    """Build one row per trajectory, prompt and response, padded on the right."""
    shape = (
        len(trajectories),
        max(len(t.prompt_tokens) + len(t.response_tokens) for t in trajectories),
    )
    batch = PaddedBatch(
        tokens=torch.full(shape, pad_token),
        attention_mask=torch.zeros(shape, dtype=torch.bool),
        response_mask=torch.zeros(shape, dtype=torch.bool),
        behavior_logprobs=torch.zeros(shape),
        versions=torch.full(shape, PROMPT_VERSION),
        group_ids=_ints([trajectory.group for trajectory in trajectories]),
    )
    for row, trajectory in enumerate(trajectories):
        prompt = len(trajectory.prompt_tokens)
        end = prompt + len(trajectory.response_tokens)
        batch.tokens[row, :prompt] = _ints(trajectory.prompt_tokens)
        batch.tokens[row, prompt:end] = _ints(trajectory.response_tokens)
        batch.attention_mask[row, :end] = True
        batch.response_mask[row, prompt:end] = torch.tensor(trajectory.response_mask)
        batch.behavior_logprobs[row, prompt:end] = torch.tensor(trajectory.behavior_logprobs)
        batch.versions[row, prompt:end] = _ints(trajectory.versions)
    return batch


def ancestor_mask(packed: PackedBatch, span: TreeSpan) -> Bool[Tensor, "S S"]:
    """True where the row's token attends to the column's: itself and its ancestors in the tree."""
    index = torch.arange(span.start, span.end, device=packed.tokens.device)
    ends = packed.subtree_end[span.start : span.end]
    return (index[:, None] >= index[None, :]) & (index[:, None] < ends[None, :])


def _subtree_ends(positions: Sequence[int], spans: Sequence[TreeSpan]) -> list[int]:
    """First packed index after each token's subtree, where the depth is no longer larger."""
    ends = [0] * len(positions)
    for span in spans:
        open_tokens: list[int] = []
        for index in range(span.start, span.end):
            while open_tokens and positions[open_tokens[-1]] >= positions[index]:
                ends[open_tokens.pop()] = index
            open_tokens.append(index)
        for index in open_tokens:
            ends[index] = span.end
    return ends


def _ints(values: Sequence[int]) -> Int[Tensor, " ..."]:
    return torch.tensor(values, dtype=torch.int64)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """Local part of a sequence, and the communication with the processes that have the other parts.

    All of them compute the same loss from the gathered values, and the gradients of shared values
    are summed: each parameter gets `count` times its gradient, over all processes.
    """

    rank: int = 0
    count: int = 1
    exchange: Callable[[Tensor], Tensor] = _same
    """Send the i-th piece along the first axis to process i; the i-th piece of the result comes
    from process i. Differentiable."""

    def own(self, values: Shaped[Tensor, " N"]) -> Shaped[Tensor, " n"]:
        """Local part of the values of the whole row, padded with zeros to equal parts."""
        if self.count == 1:
            return values
        padded = functional.pad(values, (0, -len(values) % self.count))
        return padded.chunk(self.count)[self.rank]

    def gather(self, values: Shaped[Tensor, "n *rest"]) -> Shaped[Tensor, "N *rest"]:
        """Concatenated values of all processes, on each of them; padded."""
        if self.count == 1:
            return values
        return self.exchange(values.expand(self.count, *values.shape)).flatten(0, 1)

    def to_heads(
        self, query: Float[Tensor, "1 H p D"], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens, for this process's share of the heads.

        Key heads are repeated if there are too few to share. One exchange for all. Returns
        (1, H / count, P', D), and keys and values with a number of heads that divides H / count.
        """
        times = self._repeats(query.shape[1], key.shape[1])
        repeated = (x if times == 1 else x.repeat_interleave(times, dim=1) for x in (key, value))
        pieces = [x[0].unflatten(0, (self.count, -1)) for x in (query, *repeated)]
        received = self.exchange(torch.cat(pieces, dim=1))
        rows = received.transpose(0, 1).flatten(1, 2)[None]
        q, k, v = rows.split([piece.shape[1] for piece in pieces], dim=1)
        return q, k, v

    def to_tokens(self, output: Float[Tensor, "1 h P D"]) -> Float[Tensor, "1 H p D"]:
        """Inverse of `to_heads`, for the output of attention, padded."""
        pieces = output[0].unflatten(1, (self.count, -1)).transpose(0, 1)
        return self.exchange(pieces).flatten(0, 1)[None]

    def _repeats(self, heads: int, key_heads: int) -> int:
        """Fewest copies of each key head that can be shared evenly."""
        times = self.count // math.gcd(self.count, key_heads)
        assert heads % self.count == 0, (heads, self.count)
        # Whole groups of queries remain, because both K and the processes divide H.
        return times


WHOLE: Final = SequencePart()
"""One process has all tokens."""
