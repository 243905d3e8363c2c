"""Kernels of attention over prefix trees: which one is taken, and what each computes."""

from __future__ import annotations

import random
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask

from areal_lab.data.batch import PackedBatch, ancestor_mask, input_tokens, pack
from areal_lab.data.prefix_tree import ForwardCost, grow_trees
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.training.attention import (
    TreeLayout,
    choose_kernel,
    tree_attention,
    tree_block_mask,
    tree_layout,
)
from areal_lab.training.minibatch import on_device
from tests.warm import run_forked

SHARE = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=0.0)
ALONE = ForwardCost(linear_flops_per_token=0.0, attention_flops_per_pair=1.0)
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def packed_trees(seed: int, *, rows: int, longest: int, cost: ForwardCost = SHARE) -> PackedBatch:
    """Rows of few tokens, so that they have common prefixes of every length."""
    draw = random.Random(seed)
    trajectories = [
        Trajectory(
            group=draw.randrange(3),
            sample=index,
            prompt_tokens=tuple(draw.randrange(2) for _ in range(draw.randint(1, longest))),
            parts=(Segment(tuple(draw.randrange(2) for _ in range(4)), (-1.0,) * 4, 0),),
            finish_reason="stop",
            reward=0.0,
        )
        for index in range(rows)
    ]
    trees = grow_trees([input_tokens(t) for t in trajectories], cost, max_tokens=60)
    return pack(trajectories, trees)


def states(packed: PackedBatch, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = len(packed.tokens)
    return [
        torch.randn(1, heads, tokens, WIDTH, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def attended(layout: TreeLayout, given_states: list[torch.Tensor], **options: Any) -> torch.Tensor:
    query, key, value = given_states
    return tree_attention(
        nn.Identity(), query, key, value, None, tree_layout=layout, scaling=0.3, **options
    )[0]


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("branching", [True, False])
def test_a_gpu_in_16_bits_has_kernels_of_its_own(*, branching: bool, compiles: bool) -> None:
    def chosen(asked: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
        return choose_kernel(
            asked, device=device, dtype=dtype, branching=branching, compiles=compiles
        )

    for device, dtype in product(("cpu", "cuda"), (torch.float32, torch.bfloat16, torch.float16)):
        if device == "cpu" or dtype == torch.float32:
            assert chosen("auto", device, dtype) == "sdpa"
        elif branching:
            assert chosen("auto", device, dtype) == ("flex" if compiles else "sdpa")
        else:
            assert chosen("auto", device, dtype) == "varlen"
    assert chosen("sdpa") == "sdpa"
    assert chosen("flex") == "flex"
    assert chosen("varlen") == ("sdpa" if branching else "varlen")


@given(
    seed=st.integers(0, 1000), rows=st.integers(1, 12), longest=st.integers(1, 30),
    block=st.sampled_from([2, 4, 16, 128]),
)  # fmt: skip
def test_blocks_and_mask_are_those_of_the_ancestors(
    seed: int, rows: int, longest: int, block: int
) -> None:
    packed = packed_trees(seed, rows=rows, longest=longest)
    tokens = len(packed.tokens)
    ours = tree_block_mask(packed.subtree_end, block_tokens=block)
    index = torch.arange(tokens)
    none = torch.zeros(())
    seen = ours.mask_mod(none, none, index[:, None], index[None, :])
    expected = torch.zeros(tokens, tokens, dtype=torch.bool)
    for span in packed.trees:
        part = slice(span.start, span.end)
        expected[part, part] = ancestor_mask(packed, span)
    assert torch.equal(seen, expected)
    # torch's own way makes the whole matrix.
    theirs = create_block_mask(ours.mask_mod, None, None, tokens, tokens, "cpu", BLOCK_SIZE=block)
    for which in ("kv", "full_kv", "q", "full_q"):
        counts, others = (getattr(mask, f"{which}_num_blocks") for mask in (ours, theirs))
        if others is None:
            assert not counts.any()
            continue
        assert torch.equal(counts, others)
        indices, other_indices = (getattr(mask, f"{which}_indices") for mask in (ours, theirs))
        for row, count in enumerate(counts[0, 0].tolist()):
            mine = indices[0, 0, row, :count]
            assert torch.equal(mine, other_indices[0, 0, row, :count])
    assert ours.seq_lengths == (tokens, tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cost", [SHARE, ALONE])
def test_flex_attention_is_that_of_the_trees(seed: int, cost: ForwardCost) -> None:
    packed = packed_trees(seed, rows=9, longest=20, cost=cost)
    assert any(span.branching for span in packed.trees) == (cost is SHARE)
    given_states = states(packed, seed)
    expected = attended(tree_layout(packed, asked="sdpa"), given_states)
    flex = tree_layout(packed, asked="flex")
    assert flex.kernel == "flex"
    with torch.no_grad():
        found = attended(flex, given_states)
    assert found.shape == expected.shape == (1, len(packed.tokens), HEADS, WIDTH)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = attended(flex, [given_states[0], given_states[1], given_states[2].bfloat16()])
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, atol=0.05, rtol=0.05)


def test_trees_without_branches_start_where_the_others_end() -> None:
    packed = packed_trees(0, rows=5, longest=9, cost=ALONE)
    layout = tree_layout(packed, asked="varlen")
    assert layout.kernel == "varlen"
    assert layout.starts is not None
    assert layout.starts.dtype == torch.int32
    assert layout.starts.tolist() == [0, *(span.end for span in packed.trees)]
    assert tree_layout(packed_trees(0, rows=5, longest=9), asked="varlen").kernel == "sdpa"


@pytest.mark.parametrize("asked", ["varlen", "flex"])
def test_dropout_is_refused(asked: str) -> None:
    packed = packed_trees(0, rows=5, longest=9, cost=ALONE)
    with pytest.raises(ValueError, match=f"{asked} attention has no dropout, but it is 0.1"):
        attended(tree_layout(packed, asked=asked), states(packed), dropout=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "cost"), [("varlen", ALONE), ("flex", ALONE), ("flex", SHARE)])
def test_kernels_of_a_gpu_train_as_the_calls_by_tree_do(asked: str, cost: ForwardCost) -> None:
    """Not run on a GPU yet (docs/gpu.md)."""
    packed = on_device(packed_trees(3, rows=30, longest=40, cost=cost), torch.device("cuda"))
    found: dict[str, list[torch.Tensor]] = {}
    for kernel in ("sdpa", asked):
        low = [
            one.repeat(1, 1, 1, 4).to("cuda", torch.bfloat16).requires_grad_()
            for one in states(packed)
        ]
        out = attended(tree_layout(packed, asked=kernel, dtype=torch.bfloat16), low)
        out.float().square().sum().backward()
        found[kernel] = [out, *(one.grad for one in low if one.grad is not None)]
    for expected, got in zip(found["sdpa"], found[asked], strict=True):
        torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def main() -> None:
    """Shapes and types of `varlen`, forward and backward, where it has no kernels; in a process of
    its own, for the registration of the device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.training import pretend

    device = pretend.register_fake()
    layout = tree_layout(packed_trees(0, rows=5, longest=9, cost=ALONE), asked="varlen")
    assert layout.starts is not None
    tokens = layout.spans[-1].end
    cases = [
        (device, torch.bfloat16, False, torch.bfloat16),
        (device, torch.float16, False, torch.float16),
        # As in training: rotated queries and keys are in float32, inside autocast.
        (torch.device("cpu"), torch.float32, True, torch.bfloat16),
    ]
    for where, dtype, autocast, computed in cases:
        with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            made: list[Any] = [
                torch.empty(1, heads, tokens, 16, dtype=dtype, device=where, requires_grad=True)
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            starts = torch.empty(layout.starts.shape, dtype=torch.int32, device=where)
            out = attended(layout._replace(starts=starts), made)
            assert out.shape == (1, tokens, HEADS, 16)
            assert out.dtype == computed
            assert out.device == where
            out.float().sum().backward()
            for one in made:
                assert one.grad.shape == one.shape
                assert one.grad.dtype == dtype


def by_sequence(*given_values: Any, scale: float, enable_gqa: bool, **more: Any) -> torch.Tensor:
    """What torch documents of `varlen_attn`, for causal attention: [T, H, D] in and out."""
    query, key, value, starts, other_starts, longest, other_longest = given_values
    assert more == {"window_size": (-1, 0)}  # causal
    assert starts is other_starts
    assert longest == other_longest == int(starts.diff().max())
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one[first:end].transpose(0, 1) for one in (query, key, value)),
            is_causal=True, scale=scale, enable_gqa=enable_gqa,
        ).transpose(0, 1)
        for first, end in pairwise(starts.tolist())
    ]  # fmt: skip
    return torch.cat(outputs)


def in_older_torch(*given_values: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    """The same before torch 2.13, whose kernel is not told of grouped heads."""
    assert len({one.shape[1] for one in given_values[:3]}) == 1
    return by_sequence(*given_values, scale=scale, enable_gqa=False, window_size=window_size)


@pytest.mark.parametrize("kernel", [by_sequence, in_older_torch])
def test_varlen_is_called_so_that_it_gives_the_attention_of_the_trees(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    packed = packed_trees(3, rows=7, longest=9, cost=ALONE)
    given_states = states(packed)
    expected = attended(tree_layout(packed, asked="sdpa"), given_states)
    found = attended(tree_layout(packed, asked="varlen"), given_states)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_varlen_keeps_shapes_and_types_forward_and_backward() -> None:
    ended = run_forked(
        [sys.executable, "-m", "tests.training.test_attention"], cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


if __name__ == "__main__":
    main()
