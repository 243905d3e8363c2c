"""Cut a batch into minibatches of whole groups, and these into micro-batches of whole trees.

    trajectories -> members of each minibatch -> omit A = 0 (PPO) -> groups of this rank
                                                                          |
                                          micro-batches <- trees <--------'

The counts that losses divide by are those of the whole minibatch, on every rank.

Tensors of a step on the trainer's device, without making the host wait for it.

Everything is computed on the host first (packing, counts) and copied. From pinned memory a copy to
a GPU does not wait; what comes back is read once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.control.microbatch import dynamic_batches
from areal_lab.data.batch import PackedBatch, PackedImages, input_tokens, pack, tree_rows
from areal_lab.data.prefix_tree import ForwardCost, PrefixTree, grow_trees
from areal_lab.data.trajectory import Trajectory
from areal_lab.models.copies import to_device
from areal_lab.training.ranks import Ranks

_T = TypeVar("_T")


class Minibatch(NamedTuple):
    """Work of one optimizer step on this rank, and the counts of the whole minibatch."""

    parts: list[PackedBatch]
    """Micro-batches of this rank, on the host."""
    token_count: int
    sequence_count: int
    groups: Tensor
    """Ids of the groups, ascending."""
    group_tokens: Tensor
    """Tokens that the policy chose in each group."""
    version: Version
    """Version of the parameters before the batch."""
    idle: list[PackedBatch]
    """Micro-batch to compute without effect while another rank has more micro-batches."""

    @property
    def passes(self) -> list[PackedBatch]:
        """The forward passes of every rank, equally many."""
        return [*self.parts, *self.idle]

    def on(self, device: torch.device) -> Minibatch:
        """The counts on `device`; micro-batches stay on the host until they are computed."""
        return self._replace(
            groups=to_device(self.groups, device),
            group_tokens=to_device(self.group_tokens, device),
        )


def split_by_group(trajectories: Sequence[Trajectory], parts: int) -> list[list[int]]:
    """Cut a batch into minibatches of whole groups, in batch order, with equal counts of groups if
    possible.
    """
    groups = list(dict.fromkeys(trajectory.group for trajectory in trajectories))
    if len(groups) < parts:
        raise ValueError(
            f"ppo_n_minibatches is {parts}, but must be <= {len(groups)}, the groups of the batch"
        )
    part_of = {group: rank * parts // len(groups) for rank, group in enumerate(groups)}
    split: list[list[int]] = [[] for _ in range(parts)]
    for index, trajectory in enumerate(trajectories):
        split[part_of[trajectory.group]].append(index)
    return split


def not_masked(
    trajectories: Sequence[Trajectory], members: list[int], *, mask_truncated: bool
) -> list[int]:
    """Members of a minibatch that are trained on, without masked (cut off) ones; these count in
    means.
    """
    if not mask_truncated:
        return members
    return [index for index in members if not trajectories[index].truncated]


def make_minibatch(
    trajectories: Sequence[Trajectory],
    members: list[int],
    *,
    version: Version,
    has_gradient: Callable[[int], bool],
    cost: ForwardCost,
    max_tokens: int,
    ranks: Ranks,
    whole_groups: bool = False,
) -> Minibatch:
    """Pack this rank's sequences with a gradient into micro-batches; count all of them.

    Args:
        whole_groups: keep each group in one micro-batch, for losses that compare its sequences.
    """
    pack_them = partial(pack_parts, cost=cost, max_tokens=max_tokens)
    tokens_of: dict[int, int] = {}
    for member in (trajectories[index] for index in members):
        tokens_of[member.group] = tokens_of.get(member.group, 0) + member.generated_tokens
    chosen = [index for index in members if has_gradient(index)]
    if ranks.data_count > 1:
        lengths: dict[int, int] = {}
        for index in chosen:
            group = trajectories[index].group
            lengths[group] = lengths.get(group, 0) + len(input_tokens(trajectories[index]))
        rank_of = deal_groups(lengths, ranks.data_count)
        chosen = [i for i in chosen if rank_of[trajectories[i].group] == ranks.data_rank]
    parts = pack_them(trajectories, chosen, whole_groups=whole_groups)
    missing = ranks.most(len(parts)) - len(parts)
    idle: list[PackedBatch] = []
    if missing:
        shortest = min(range(len(trajectories)), key=lambda i: len(input_tokens(trajectories[i])))
        idle = missing * pack_them(trajectories, [shortest])
    return Minibatch(
        parts=parts,
        token_count=sum(tokens_of.values()),
        sequence_count=len(members),
        groups=torch.tensor(sorted(tokens_of)),
        group_tokens=torch.tensor([tokens_of[group] for group in sorted(tokens_of)]),
        version=version,
        idle=idle,
    )


def deal_groups(tokens: Mapping[int, int], ranks: int) -> dict[int, int]:
    """The rank of each group, so that ranks get about equally many tokens.

    The longest group first, each to the rank with the fewest tokens. Groups stay whole: their
    samples share a prefix.
    """
    load = [0] * ranks
    rank_of = {}
    for group in sorted(tokens, key=lambda group: (-tokens[group], group)):
        rank = load.index(min(load))
        load[rank] += tokens[group]
        rank_of[group] = rank
    return rank_of


def pack_parts(
    trajectories: Sequence[Trajectory],
    members: list[int],
    *,
    cost: ForwardCost,
    max_tokens: int,
    whole_groups: bool = False,
) -> list[PackedBatch]:
    """Micro-batches of whole trees; `sequence_ids` index into the trajectories.

    Args:
        max_tokens: budget of a micro-batch; a sequence (group) above it gets its own.
        whole_groups: keep each group in one micro-batch; its sequences may be in several trees.
    """
    if not members:
        return []
    chosen = [trajectories[index] for index in members]
    grow = partial(grow_trees, cost=cost, max_tokens=max_tokens)
    rows = tree_rows(chosen)
    # A sequence longer than the budget cannot be split; it gets its own micro-batch.
    batches: list[list[PrefixTree]]
    if whole_groups:
        groups: dict[int, list[int]] = {}
        for index, trajectory in enumerate(chosen):
            groups.setdefault(trajectory.group, []).append(index)
        cut = [
            (together, sum(tree.tokens for tree in grow([rows[i] for i in together])))
            for together in groups.values()
        ]
        batches = [
            _trees_of([i for together, _ in batch for i in together], rows, grow)
            for batch in _batched(cut, max_tokens)
        ]
    else:
        batches = [
            [tree for tree, _ in batch]
            for batch in _batched([(tree, tree.tokens) for tree in grow(rows)], max_tokens)
        ]
    parts = []
    for batch in batches:
        packed = pack(chosen, batch)
        # Use ids of the whole batch, which index into the advantages.
        parts.append(packed._replace(sequence_ids=torch.tensor(members)[packed.sequence_ids]))
    return parts


def _batched(sized: Sequence[tuple[_T, int]], max_tokens: int) -> list[list[tuple[_T, int]]]:
    """Items by their tokens in micro-batches; an item above the budget is alone, and first."""
    small = [one for one in sized if one[1] <= max_tokens]
    batches = [[one] for one in sized if one[1] > max_tokens]
    for chosen in dynamic_batches([tokens for _, tokens in small], max_tokens=max_tokens):
        batches.append([small[index] for index in chosen])
    return batches


def _trees_of(
    members: list[int],
    rows: Sequence[tuple[int, ...]],
    grow: Callable[[Sequence[tuple[int, ...]]], list[PrefixTree]],
) -> list[PrefixTree]:
    """Trees over some of the rows, with the indices of all rows."""
    return [
        replace(tree, members=tuple(members[index] for index in tree.members))
        for tree in grow([rows[index] for index in members])
    ]


def on_device(packed: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its tensors on `device`."""
    moved = _moved(packed, device)
    if packed.images is not None:
        moved["images"] = packed.images._replace(**_moved(packed.images, device))
    return packed._replace(**moved)


def _moved(values: PackedBatch | PackedImages, device: torch.device) -> dict[str, Any]:
    return {
        name: to_device(value, device)
        for name, value in values._asdict().items()
        if isinstance(value, Tensor)
    }
