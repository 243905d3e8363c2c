"""The decode kernel: equal to attention over contiguous rows, and compiled for an H100.

Without a GPU, Triton's interpreter runs it; tests/conftest.py asks for that.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_lab.engines.embedded.paged_attention import (
    DecodeAttention,
    decode_function,
    gathered_attention,
)
from tests.kernels import compiled_for_h100, lines_of, require_interpreter

PAGE = 16
MOST = 10 * PAGE - 3
"""Tokens of the longest row: two splits of eight pages, or ten of one."""
EDGES = (1, PAGE - 1, PAGE, PAGE + 1, 0, 8 * PAGE, 8 * PAGE + 1, MOST)
SHAPES = [(3, 1, 8), (2, 3, 64), (1, 7, 80), (1, 20, 16), (1, 4, 128)]
"""KV heads, query heads of each, head dimension; most are padded to powers of two."""
CASES = [*((shape, torch.float32) for shape in SHAPES), *((s, torch.bfloat16) for s in SHAPES[1:3])]
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference for values of size 1. The interpreter cuts weights to bfloat16, where a GPU
rounds them."""


def interpreted() -> ModuleType:
    """The module of the kernel, interpreted."""
    require_interpreter()
    from areal_lab.engines.embedded import decode_kernel

    return decode_kernel


@pytest.fixture(params=["long splits", "short splits", "torch"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecodeAttention:
    """All ways to compute it: the kernel, interpreted, and the gathered pages."""
    if request.param == "torch":
        return gathered_attention
    kernel = interpreted()
    if request.param == "long splits":
        monkeypatch.setattr(kernel, "_PROGRAMS", 1)
    found: DecodeAttention = kernel.decode_attention
    return found


class Rows:
    """Rows of random keys and values, contiguous and in pages in random order."""

    def __init__(
        self, lengths: tuple[int, ...], shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        torch.manual_seed(sum(lengths))
        self.kv_heads, self.group, self.head_dim = shape
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        width = -(-max(lengths) // PAGE)
        rows = len(lengths)
        self.query = torch.randn(rows, self.kv_heads * self.group, self.head_dim).to(dtype)
        self.whole = torch.randn(2, rows, self.kv_heads, width * PAGE, self.head_dim).to(dtype)
        self.table = 1 + torch.randperm(rows * width).view(rows, width).int()
        # What no row owns is NaN: pages, and slots beyond the end.
        self.pages = torch.full(
            (2, 1 + rows * width, self.kv_heads, PAGE, self.head_dim), torch.nan, dtype=dtype
        )
        for row, length in enumerate(lengths):
            for at in range(length):
                page, slot = int(self.table[row, at // PAGE]), at % PAGE
                self.pages[:, page, :, slot] = self.whole[:, row, :, at]
            self.table[row, -(-length // PAGE) :] = 0

    def attended(self, attention: DecodeAttention, scale: float = 0.3) -> Tensor:
        """What the function says."""
        keys, values = self.pages
        return attention(self.query, keys, values, self.table, self.lengths, scale=scale)

    def expected(self, scale: float = 0.3) -> Float[Tensor, "R Hq D"]:
        """Row by row, over contiguous keys and values, in float64."""
        out = torch.zeros_like(self.query, dtype=torch.float64)
        for row, length in enumerate(self.lengths.tolist()):
            if length:
                keys, values = self.whole[:, row, :, :length].double()
                queries = self.query[row].double().unflatten(0, (self.kv_heads, -1))
                out[row] = scaled_dot_product_attention(queries, keys, values, scale=scale).flatten(
                    0, 1
                )
        return out

    def error(self, attention: DecodeAttention) -> float:
        """Largest difference of the two."""
        return float((self.attended(attention).double() - self.expected()).abs().max())


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_rows_attend_to_their_own_tokens(
    attention: DecodeAttention, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Rows that end at the edges of pages and splits, and rows that pad a batch."""
    rows = Rows(EDGES, shape, dtype)
    assert rows.error(attention) < ERRORS[dtype]
    empty = rows.attended(attention)[rows.lengths == 0]
    assert torch.equal(empty, torch.zeros_like(empty))


def test_256_ragged_rows_attend_in_one_call(attention: DecodeAttention) -> None:
    lengths = tuple(1 + (7 * index * index) % 60 for index in range(256))
    assert Rows(lengths, (1, 3, 16), torch.float32).error(attention) < ERRORS[torch.float32]


def test_a_few_very_large_scores_do_not_overflow(attention: DecodeAttention) -> None:
    """Also where they are in one split only, so the others weigh nothing."""
    rows = Rows((MOST, 5), (1, 2, 16), torch.float32)
    for at in (3, 100):
        rows.whole[0, 0, :, at] *= 1000
        rows.pages[0, int(rows.table[0, at // PAGE]), :, at % PAGE] *= 1000
    assert rows.error(attention) < ERRORS[torch.float32]


def test_inputs_may_be_views(attention: DecodeAttention) -> None:
    """As in the engine: queries [heads, tokens, head_dim]; lengths and table in one buffer."""
    rows = Rows((5, 40), (2, 3, 16), torch.float32)
    rows.query = rows.query.transpose(0, 1).contiguous().transpose(0, 1)
    buffer = torch.cat((rows.lengths[:, None], torch.ones_like(rows.table), rows.table), dim=1)
    rows.lengths, rows.table = buffer[:, 0], buffer[:, -rows.table.shape[1] :]
    for tensor in (rows.query, rows.lengths, rows.table):
        assert not tensor.is_contiguous()
    assert rows.error(attention) < ERRORS[torch.float32]


@pytest.mark.parametrize("rows", [1, 3, 8, 64, 256])
@pytest.mark.parametrize("width", [1, 4, 5, 256, 4096])
def test_splits_cover_the_table_and_are_few(rows: int, width: int) -> None:
    pages = interpreted().pages_per_split(rows, 2, width)
    splits = -(-width // pages)
    assert pages & (pages - 1) == 0
    assert (splits - 1) * pages < width <= splits * pages
    assert splits <= 128
    if width <= 8 * 128:
        assert pages <= 8, "a long row must be divided also among many"
    if rows == 1:
        assert splits == min(width, 128), "a single row needs all the programs it can get"


def test_a_gpu_without_triton_is_served_without_the_kernel_and_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert decode_function(torch.device("cpu")) is None
    assert not capsys.readouterr().err
    assert decode_function(torch.device("cuda")) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: triton is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_the_kernel_on_a_gpu_attends_as_gathered_pages(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Never run so far: no GPU was at hand."""
    rows = Rows(EDGES, shape, dtype)
    kernel = decode_function(torch.device("cuda"))
    assert kernel is not None
    tensors = (rows.query, *rows.pages.unbind(0), rows.table, rows.lengths)
    found = kernel(*(tensor.cuda() for tensor in tensors), scale=0.3).cpu()
    assert float((found.double() - rows.expected()).abs().max()) < ERRORS[dtype]


COMPILED = [("bf16", 3, 64), ("bf16", 6, 128), ("fp32", 6, 128)]
"""Type, query heads of a KV head, head dimension."""


def test_it_compiles_for_an_h100_without_spilled_registers(tmp_path: Path) -> None:
    lines = lines_of("tests.engines.embedded.test_decode_kernel", tmp_path)
    assert len(lines) == len(COMPILED) + 1
    for line in lines:
        _, dtype, *numbers = line.split()
        registers, spilled, shared = map(int, numbers)
        assert spilled == 0, line
        assert shared <= 227 * 1024, line
        # A multiprocessor has 65,536 registers: four programs of 128 threads at a time.
        assert registers <= 128 or dtype == "fp32", line


def main() -> None:
    """Compile both passes for an H100; print registers, bytes spilled and bytes shared of each."""
    from areal_lab.engines.embedded import decode_kernel as kernel

    def report(function: Any, dtype: str, constants: dict[str, int], **options: int) -> None:
        pointers = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
        pointers |= {"table": "*i32", "lengths": "*i32", "partial": "*fp32", "masses": "*fp32"}
        types = {name: pointers.get(name, "i32") for name in function.arg_names}
        types["scale_log2"] = "fp32"
        found = compiled_for_h100(function, types, constants, **options)
        print(
            function.__name__, dtype, found.registers, found.spilled_bytes, found.shared_bytes,
            flush=True,
        )  # fmt: skip

    for dtype, group, head_dim in COMPILED:
        sizes = {"GROUP": group, "GROUP_PAD": 16, "HEAD_DIM": head_dim,
                 "HEAD_PAD": 1 << (head_dim - 1).bit_length(), "PAGE_TOKENS": 64}  # fmt: skip
        of_type = torch.float32 if dtype == "fp32" else torch.bfloat16
        report(kernel.attend_split, dtype, sizes, **kernel.launch_options(of_type))
    sizes = {"HEAD_DIM": 128, "HEAD_PAD": 128, "SPLITS_PAD": kernel.MOST_SPLITS}
    report(kernel.add_splits, "bf16", sizes)


if __name__ == "__main__":
    main()
