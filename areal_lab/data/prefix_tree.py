"""Prefix trees: which sequences to pack together, so that shared prefixes are computed once.

    2 + 3 = 5 \\n 4 + 1 = |  5 \\n         one row each:  3 x 14 tokens
    2 + 3 = 5 \\n 4 + 1 = |  6 \\n         one tree:     14 + 2 + 2 tokens
    2 + 3 = 5 \\n 4 + 1 = |  5 5

A tree with branches needs a dense attention mask over all its tokens; a chain uses the causal
kernel, which skips half of the pairs. So sharing pays while prefixes are long and responses short;
it does not when masked attention between branches costs more than the prefix saves. Lengths are in
tokens, work is in floating-point operations (FLOPs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Work of one forward pass of a decoder; both terms double in the backward pass."""

    linear_flops_per_token: float
    """2 FLOPs for each weight outside the embedding."""
    attention_flops_per_pair: float
    """For one query and one key: 4 * layers * heads * head_dim (scores and weighted sum)."""

    def tree_flops(self, tokens: int, *, branching: bool) -> float:
        """Work of one tree: causal attention for a chain, dense attention when it branches."""
        pairs = tokens * tokens if branching else tokens * (tokens + 1) / 2
        return tokens * self.linear_flops_per_token + pairs * self.attention_flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Sequences that are packed together."""

    members: tuple[int, ...]
    """Indices of the sequences, in lexicographic order of their tokens."""
    tokens: int
    """Number of distinct prefixes, which is the number of computed tokens."""
    longest: int
    """Tokens of the longest member; equal to `tokens` exactly when the tree is a chain."""

    @property
    def branching(self) -> bool:
        """True if attention needs a mask beyond the causal one."""
        return self.tokens > self.longest


def grow_trees(
    rows: Sequence[tuple[int, ...]], cost: ForwardCost, *, max_tokens: int
) -> list[PrefixTree]:
    """Partition sequences into trees, joining adjacent ones wherever that reduces the work.

    In lexicographic order, the tree of consecutive rows has `sum(len) - sum(shared prefix of
    neighbors)` tokens. Boundaries are visited from the longest shared prefix to the shortest; the
    two trees at a boundary are joined if the joint tree costs no more than both and stays within
    `max_tokens`; a single longer sequence stays whole. Samples of a group are therefore joined
    before groups are. Returns trees in the order of their smallest member.
    """
    if any(not row for row in rows):
        raise ValueError("a sequence has no tokens, but must have at least one")
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    shared = [common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    # Trees are slices of `order`; each is recorded at both ends, where adjacent trees find it.
    first = list(range(len(order)))
    last = list(range(len(order)))
    tokens = [len(rows[index]) for index in order]
    longest = list(tokens)
    for boundary in sorted(range(len(shared)), key=lambda b: (-shared[b], b)):
        if shared[boundary] == 0:
            break
        left, right = first[boundary], boundary + 1
        joint = tokens[left] + tokens[right] - shared[boundary]
        joint_longest = max(longest[left], longest[right])
        apart = cost.tree_flops(tokens[left], branching=tokens[left] > longest[left])
        apart += cost.tree_flops(tokens[right], branching=tokens[right] > longest[right])
        together = cost.tree_flops(joint, branching=joint > joint_longest)
        if together > apart or (joint > max_tokens and joint > joint_longest):
            continue
        tokens[left], longest[left] = joint, joint_longest
        last[left] = last[right]
        first[last[right]] = left
    trees = []
    start = 0
    while start < len(order):
        members = tuple(order[start : last[start] + 1])
        trees.append(PrefixTree(members=members, tokens=tokens[start], longest=longest[start]))
        start = last[start] + 1
    return sorted(trees, key=lambda tree: min(tree.members))


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix, by bisection on slices (which compare at the speed of C)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
