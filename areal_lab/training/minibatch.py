"""Cut a batch into minibatches of whole groups, and these into micro-batches of whole trees.

    trajectories -> members of each minibatch -> omit A = 0 (PPO) -> groups of this rank
                                                                          |
                                          micro-batches <- trees <--------'

The counts that losses divide by are those of the whole minibatch, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.control.microbatch import dynamic_batches
from areal_lab.data.batch import PackedBatch, input_tokens, pack
from areal_lab.data.prefix_tree import ForwardCost, grow_trees
from areal_lab.data.trajectory import Trajectory
from areal_lab.training.device import to_device
from areal_lab.training.ranks import Ranks


class Minibatch(NamedTuple):
    """What one optimizer step computes here, and the counts of all of it."""

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
    """What this rank computes without effect, while another one has more micro-batches."""

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

    Raises:
        ValueError: if there are fewer groups than parts.
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
    """Those members of a minibatch that are trained on: without the masked ones, which were cut
    off. What is left counts for the means."""
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
) -> Minibatch:
    """Pack this rank's sequences with a gradient into micro-batches; count all of them.

    Args:
        trajectories: of the whole batch.
        members: indices of the minibatch.
        version: of the parameters.
        has_gradient: whether a member adds anything to the gradient.
        cost: of a forward pass.
        max_tokens: budget of a micro-batch.
        ranks: among which the groups are divided.
    """
    tokens_of: dict[int, int] = {}
    for member in (trajectories[index] for index in members):
        tokens_of[member.group] = tokens_of.get(member.group, 0) + member.generated_tokens
    chosen = [index for index in members if has_gradient(index)]
    if ranks.count > 1:
        lengths: dict[int, int] = {}
        for index in chosen:
            group = trajectories[index].group
            lengths[group] = lengths.get(group, 0) + len(input_tokens(trajectories[index]))
        rank_of = deal_groups(lengths, ranks.count)
        chosen = [i for i in chosen if rank_of[trajectories[i].group] == ranks.rank]
    parts = pack_parts(trajectories, chosen, cost=cost, max_tokens=max_tokens)
    missing = ranks.most(len(parts)) - len(parts)
    idle: list[PackedBatch] = []
    if missing:
        shortest = min(range(len(trajectories)), key=lambda i: len(input_tokens(trajectories[i])))
        idle = missing * pack_parts(trajectories, [shortest], cost=cost, max_tokens=max_tokens)
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

    Args:
        tokens: of each group.
        ranks: processes.
    """
    load = [0] * ranks
    rank_of = {}
    for group in sorted(tokens, key=lambda group: (-tokens[group], group)):
        rank = load.index(min(load))
        load[rank] += tokens[group]
        rank_of[group] = rank
    return rank_of


def pack_parts(
    trajectories: Sequence[Trajectory], members: list[int], *, cost: ForwardCost, max_tokens: int
) -> list[PackedBatch]:
    """Micro-batches of whole trees; `sequence_ids` index into the trajectories."""
    if not members:
        return []
    chosen = [trajectories[index] for index in members]
    trees = grow_trees([input_tokens(t) for t in chosen], cost, max_tokens=max_tokens)
    # A sequence longer than the budget cannot be split; it gets its own micro-batch.
    small = [tree for tree in trees if tree.tokens <= max_tokens]
    batches = [[tree] for tree in trees if tree.tokens > max_tokens]
    for chosen_trees in dynamic_batches([tree.tokens for tree in small], max_tokens=max_tokens):
        batches.append([small[index] for index in chosen_trees])
    parts = []
    for batch in batches:
        packed = pack(chosen, batch)
        # Use ids of the whole batch, which index into the advantages.
        parts.append(packed._replace(sequence_ids=torch.tensor(members)[packed.sequence_ids]))
    return parts
