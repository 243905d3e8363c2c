"""Which sequences to lay out as one prefix tree, so that what they share is computed once.

    2 + 3 = 5 \\n 4 + 1 = |  5 \\n         one row each:  3 x 14 tokens
    2 + 3 = 5 \\n 4 + 1 = |  6 \\n         one tree:     14 + 2 + 2 tokens
    2 + 3 = 5 \\n 4 + 1 = |  5 5

A tree with branches needs a dense attention mask over all its tokens; a plain chain uses the causal
kernel, which skips half of the pairs. So sharing pays while prefixes are long and answers short,
and stops paying when attention between tokens that do not see each other costs more than the
prefix saves. Lengths are in tokens, work is in floating-point operations (FLOPs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Work of one forward pass of a decoder; the backward pass is twice that, to both terms."""

    linear_flops_per_token: float
    """2 FLOPs for each weight outside the embedding."""
    attention_flops_per_pair: float
    """Of one query and one key: 4 * layers * heads * head_dim (scores and weighted sum)."""

    def tree_flops(self, tokens: int, *, branching: bool) -> float:
        """Work of one tree: causal attention for a chain, dense attention when it branches."""
        pairs = tokens * tokens if branching else tokens * (tokens + 1) / 2
        return tokens * self.linear_flops_per_token + pairs * self.attention_flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Sequences that are laid out together."""

    members: tuple[int, ...]
    """Indices of the sequences, in lexicographic order of their tokens."""
    tokens: int
    """Distinct prefixes, which is the number of tokens computed."""
    longest: int
    """Tokens of the longest member; equal to `tokens` exactly when the tree is a chain."""

    @property
    def branching(self) -> bool:
        """Whether attention needs a mask beyond the causal one."""
        return self.tokens > self.longest


def grow_trees(
    rows: Sequence[tuple[int, ...]], cost: ForwardCost, *, max_tokens: int
) -> list[PrefixTree]:
    """Partition sequences into trees, joining neighbors wherever that makes the work smaller.

    In lexicographic order the tree of a run of rows has `sum(len) - sum(shared prefix of
    neighbors)` tokens. Boundaries are visited from the longest shared prefix to the shortest; the
    two trees at a boundary are joined if the joint tree costs no more than both and stays within
    `max_tokens`. Prompts of a group therefore join before groups do.

    Args:
        rows: tokens of each sequence, none empty.
        cost: work of a tree.
        max_tokens: largest tree to build by joining; a single longer sequence stays whole.

    Returns:
        Trees in the order of their smallest member.
    """
    if any(not row for row in rows):
        raise ValueError("a sequence without tokens cannot be laid out")
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    shared = [common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    # Trees are runs of `order`; each is kept at both its ends, where neighbors look for it.
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
    """Tokens that both begin with, by bisection on slices (which compare at the speed of C)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
