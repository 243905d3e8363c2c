"""The attention that the shim gives to SGLang on a CPU, against one query at a time."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.engines.launch.backends import SHIM

Sizes = list[tuple[int, int]]
"""By request: tokens in the cache, and new ones."""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "batched_attention", SHIM / "batched_attention.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shim = _load()


class Batch(SimpleNamespace):
    """A batch of requests with random queries and a cache whose places are shuffled."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(len(sizes) + sum(map(sum, sizes)))
        new = torch.tensor([some for _, some in sizes])
        lengths = torch.tensor([sum(size) for size in sizes])
        places = torch.randperm(int(lengths.sum())) + 1
        table = torch.zeros(len(sizes) + 3, int(lengths.max()) + 2, dtype=torch.int32)
        requests = torch.randperm(len(sizes) + 3)[: len(sizes)]
        for row, start, length in zip(requests, lengths.cumsum(0) - lengths, lengths, strict=True):
            table[row, :length] = places[start : start + length].int()
        super().__init__(
            new=new,
            lengths=lengths,
            requests=requests,
            table=table,
            query=torch.randn(int(new.sum()), 6, 8),
            keys=torch.randn(len(places) + 1, 2, 8),
            values=torch.randn(len(places) + 1, 2, 4),
        )

    def one_at_a_time(self, scaling: float) -> torch.Tensor:
        """Softmax of the products with all tokens up to its own, for each query and head."""
        rows = []
        shared = self.query.shape[1] // self.keys.shape[1]
        for request, some, length in zip(self.requests, self.new, self.lengths, strict=True):
            for position in range(int(length - some), int(length)):
                query = self.query[len(rows)]
                slots = self.table[request, : position + 1].long()
                keys = self.keys[slots].repeat_interleave(shared, dim=1)
                values = self.values[slots].repeat_interleave(shared, dim=1)
                weights = torch.einsum("hd,khd->hk", query, keys).mul(scaling).softmax(-1)
                rows.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(rows)


SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8)


@given(SIZES)
def test_it_equals_one_query_at_a_time(sizes: Sizes) -> None:
    batch = Batch(sizes)
    parts = shim.plan(batch.new, batch.lengths, batch.requests, batch.table)
    output = torch.full((len(batch.query), 6, 4), math.nan)
    shim.attend(parts, batch.query, output, batch.keys, batch.values, scaling=0.3)
    torch.testing.assert_close(output, batch.one_at_a_time(0.3))


@given(SIZES)
def test_padding_at_most_doubles_tokens_and_context(sizes: Sizes) -> None:
    batch = Batch(sizes)
    for part in shim.plan(batch.new, batch.lengths, batch.requests, batch.table):
        lengths = part.visible.any(1).sum(-1)
        assert (2 * part.real.sum(-1) >= part.queries.shape[1]).all()
        assert (2 * lengths >= part.slots.shape[1]).all()


class Loops:
    """SGLang's class, as far as the shim knows it; its loops only say that they were called."""

    def __init__(self, batch: Batch) -> None:
        self.req_to_token_pool = SimpleNamespace(req_to_token=batch.table)

    def init_forward_metadata(self, batch: Any) -> None:
        self.prepared = batch

    def _run_sdpa_forward_extend(self, *_: Any, **__: Any) -> str:
        return "loop over extending requests"

    def _run_sdpa_forward_decode(self, *_: Any, **__: Any) -> str:
        return "loop over decoding requests"


def _run(batch: Batch, phase: str, *, encoder_lens: object = None, **options: Any) -> Any:
    backend = type("Backend", (Loops,), {})
    shim.replace_loops(SimpleNamespace(TorchNativeAttnBackend=backend))
    decodes = phase == "decode"
    attention = backend(batch)
    attention.init_forward_metadata(
        SimpleNamespace(
            extend_seq_lens=None if decodes else batch.new,
            forward_mode=SimpleNamespace(is_decode=lambda: decodes),
            seq_lens=batch.lengths,
            req_pool_indices=batch.requests,
            encoder_lens=encoder_lens,
        )
    )
    output = torch.full((len(batch.query), 6, 4), math.nan)
    named = {"scaling": 0.5, "is_cross_attn": False, "sliding_window_size": None}
    run = getattr(attention, f"_run_sdpa_forward_{phase}")
    tensors = (batch.query, output, batch.keys, batch.values, batch.table)
    return run(*tensors, **{**named, "causal": not decodes, **options})


def test_it_takes_the_place_of_the_loops() -> None:
    extending, decoding = Batch([(0, 7), (9, 2), (30, 1)]), Batch([(0, 1), (9, 1), (30, 1)])
    expected = extending.one_at_a_time(0.5)
    torch.testing.assert_close(_run(extending, "extend"), expected)
    torch.testing.assert_close(_run(decoding, "decode"), decoding.one_at_a_time(0.5))


@pytest.mark.parametrize(
    "options",
    [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"encoder_lens": torch.tensor([3])}],
)
def test_other_attention_stays_with_the_loops(options: dict[str, Any]) -> None:
    batch = Batch([(3, 1)])
    assert _run(batch, "decode", **options) == "loop over decoding requests"
    assert _run(batch, "extend", **options) == "loop over extending requests"
    assert _run(batch, "extend", causal=False) == "loop over extending requests"
