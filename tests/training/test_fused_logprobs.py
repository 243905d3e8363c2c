"""The Triton kernels of log-probs against their torch version, interpreted and compiled ahead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from areal_lab.functional.logprobs import chunked, tiles
from areal_lab.functional.logprobs.cutoff import top_p
from areal_lab.functional.logprobs.tiles import (
    Restriction,
    Scratch,
    VocabularyPart,
    tile_shape,
    token_gradients,
)
from areal_lab.functional.logprobs.token_logprobs import (
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
)
from tests.kernels import lines_of, require_interpreter
from tests.training.traffic import KernelTraffic, Traffic

TYPES = [torch.float32, torch.bfloat16]
MASK_SHARE = 0.6


@pytest.fixture
def fused() -> Any:
    """The module of the kernels, interpreted."""
    require_interpreter()
    from areal_lab.functional.logprobs import fused

    return fused


class OnGPU(Tensor):
    """What is asked of a tensor before it is chosen where it is computed."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: str = "cuda") -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, (2, 3), dtype=dtype, device=torch.device(device)
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} is not computed")


def restriction_of(kind: str, rows: int, vocab: int) -> Restriction:
    if kind == "mask":
        return Restriction(torch.rand(rows, vocab) < MASK_SHARE, None)
    if kind == "one mask of all rows":
        return Restriction((torch.rand(vocab) < MASK_SHARE).expand(rows, -1), None)
    if kind == "cutoff":
        return Restriction(None, torch.linspace(-3, 3, rows))
    return Restriction(None, None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["all", "mask", "one mask of all rows", "cutoff"])
@pytest.mark.parametrize("columns", [slice(0, 1), slice(3, 130), slice(5, 4101), slice(0, 8200)])
def test_kernels_equal_the_torch_version(
    fused: Any, dtype: torch.dtype, kind: str, columns: slice
) -> None:
    """A tile that is part of a wider matrix, whose gradient is written over it."""
    torch.manual_seed(0)
    vocab, rows = 8200, slice(1, 6)
    whole = torch.randn(6, vocab).mul(5).to(dtype)
    logits = whole[rows, columns]
    restriction = restriction_of(kind, 6, vocab)
    if kind == "mask":
        restriction.mask[2] = False
    scratch = Scratch(whole, logits.numel(), logits.shape[1])
    expected = tiles.sums(logits, restriction, rows, columns, scratch)
    found = fused.sums(logits, restriction, rows, columns, scratch)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)
    for entropy_gradient in (torch.randn(6), None):
        of_tokens = token_gradients(
            torch.ones(()).expand(6),  # of a sum: one number
            entropy_gradient,
            logprobs=-torch.rand(6),
            entropy=torch.rand(6),
            normalizer=torch.full((6,), float(whole.float().logsumexp(1).max())),
        )
        there, here = logits.clone(), whole.clone()
        tiles.logits_gradient(
            there, restriction, rows, columns, scratch, of_tokens=of_tokens, out=there
        )
        tile = here[rows, columns]
        fused.logits_gradient(
            tile, restriction, rows, columns, scratch, of_tokens=of_tokens, out=tile
        )
        # Where they differ in the last bit of float32, bfloat16 may round another way.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(tile, there, atol=1e-6, rtol=tolerance)
        tile.copy_(logits)
        assert torch.equal(here, whole), "the kernel wrote beside its tile"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keep", ["all", "mask", "padded vocabulary", "rule"])
def test_log_probs_and_gradients_equal_those_of_whole_logits(
    fused: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keep: str
) -> None:
    """Several tiles in both directions, some of them kept."""
    torch.manual_seed(1)
    tokens, vocab = 37, 301
    hidden = torch.randn(tokens, 16).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16).to(dtype).requires_grad_()
    targets = torch.randint(vocab - 5, (tokens,))
    kept: Any = {
        "all": None,
        "mask": (torch.rand(tokens, vocab) < MASK_SHARE).scatter(1, targets[:, None], value=True),
        "padded vocabulary": (torch.arange(vocab) < vocab - 5).expand(tokens, -1),
        "rule": top_p(0.9),
    }[keep]
    if keep == "rule":
        targets = (hidden @ weight.T).argmax(1)
    along, further = torch.randn(2, tokens)

    def scored(function: Any, *inputs: Any, **options: Any) -> list[Tensor]:
        found = function(*inputs, targets, temperature=0.6, keep=kept, **options)
        loss = (found.logprobs * along + found.entropy * further).sum()
        return [*found, *torch.autograd.grad(loss, (hidden, weight))]

    plain = scored(logprobs_and_entropy, hidden, weight, chunk_tokens=9, cache_bytes=8 * vocab)
    calls = []
    monkeypatch.setattr(chunked, "passes", lambda like: calls.append(like) or fused)
    found = scored(logprobs_and_entropy, hidden, weight, chunk_tokens=9, cache_bytes=8 * vocab)
    assert len(calls) == 2
    exact = 1e-5 if dtype == torch.float32 else 2**-5
    for one, other in zip(found[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for one, other in zip(found[2:], plain[2:], strict=True):
        torch.testing.assert_close(one, other, atol=exact, rtol=exact)
    if dtype == torch.float32:
        logits = hidden @ weight.T
        whole = scored(logprobs_and_entropy_from_logits, logits)
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_the_vocabulary_give_what_the_whole_one_gives(
    fused: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(9, 8).to(dtype)
    weight = torch.randn(34, 8).to(dtype)
    targets = torch.randint(34, (9,))
    whole = scored_with(hidden, weight, targets)
    one_at_a_time = threading.Lock()  # the interpreter replaces functions of Triton's language

    class Passes:
        @staticmethod
        def sums(*given: Any) -> Any:
            with one_at_a_time:
                return fused.sums(*given)

        @staticmethod
        def logits_gradient(*given: Any, **named: Any) -> None:
            with one_at_a_time:
                fused.logits_gradient(*given, **named)

    monkeypatch.setattr(chunked, "passes", lambda _: Passes)
    barrier, shared = threading.Barrier(2, timeout=30), [hidden, hidden]

    def exchange(rank: int, own: Tensor) -> list[Tensor]:
        shared[rank] = own.clone()
        barrier.wait()
        both = list(shared)
        barrier.wait()
        return both

    def compute(rank: int) -> list[Tensor]:
        part = VocabularyPart(
            first=17 * rank,
            vocabulary=34,
            gather=lambda own: torch.stack(exchange(rank, own)),
            add_up=lambda own: own.copy_(torch.stack(exchange(rank, own)).sum(0)),
        )
        return scored_with(hidden, weight[17 * rank :][:17], targets, part=part)

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(compute, range(2)))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    for rank, (logprobs, entropy, to_hidden, to_weight) in enumerate(parts):
        torch.testing.assert_close((logprobs, entropy), tuple(whole[:2]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(to_hidden, whole[2], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            to_weight, whole[3].chunk(2)[rank], atol=tolerance, rtol=tolerance
        )


def scored_with(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    hidden, weight = (one.detach().requires_grad_() for one in (hidden, weight))
    found = logprobs_and_entropy(hidden, weight, targets, chunk_tokens=4, **options)
    loss = (found.logprobs - 0.3 * found.entropy).sum()
    return [*(one.detach() for one in found), *torch.autograd.grad(loss, (hidden, weight))]


def bytes_per_logit(passes: Any, traffic: Any, *, entropy_gradient: bool) -> float:
    """Bytes that both passes over a bfloat16 tile move, for each of its logits."""
    torch.manual_seed(3)
    rows, vocab = 4, 20_000
    logits = torch.randn(rows, vocab).bfloat16()
    everywhere = (Restriction(None, None), slice(0, rows), slice(0, vocab))
    scratch = Scratch(logits, logits.numel(), vocab)
    of_tokens = token_gradients(
        torch.ones(rows),
        torch.ones(rows) if entropy_gradient else None,
        logprobs=-torch.ones(rows),
        entropy=torch.ones(rows),
        normalizer=torch.full((rows,), 10.0),
    )
    before = traffic.bytes
    passes.sums(logits, *everywhere, scratch)
    passes.logits_gradient(logits, *everywhere, scratch, of_tokens=of_tokens, out=logits)
    return float(traffic.bytes - before) / logits.numel()


@pytest.mark.parametrize(("entropy_gradient", "expected"), [(False, 64), (True, 84)])
def test_operations_of_torch_move_64_bytes_per_logit(entropy_gradient: bool, expected: int) -> None:
    with Traffic() as traffic:
        moved = bytes_per_logit(tiles, traffic, entropy_gradient=entropy_gradient)
    assert moved == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_kernels_move_6_bytes_per_logit(
    fused: Any, monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool
) -> None:
    traffic = KernelTraffic(monkeypatch)
    moved = bytes_per_logit(fused, traffic, entropy_gradient=entropy_gradient)
    assert moved == pytest.approx(6, rel=0.01)
    assert traffic.stored / traffic.loaded == pytest.approx(0.5, rel=0.01)


def test_kernels_leave_no_wide_copy_of_a_tile(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(chunked, "passes", lambda _: fused)
    monkeypatch.setattr(Scratch, "pair", lambda *_: made.append(1))
    scored_with(torch.randn(6, 8).bfloat16(), torch.randn(40, 8).bfloat16(), torch.arange(6))
    assert not made


@pytest.mark.skipif(not chunked._has_triton(), reason="no Triton, so nothing to choose")
@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
def test_a_gpu_computes_with_kernels(fused: Any, dtype: torch.dtype) -> None:
    assert chunked.passes(OnGPU(dtype)) is fused
    assert chunked.passes(OnGPU(torch.float64)) is tiles
    assert chunked.passes(OnGPU(dtype, device="cpu")) is tiles


def test_without_triton_a_gpu_computes_with_operations_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "_has_triton", lambda: False)
    assert chunked.passes(OnGPU(torch.bfloat16)) is tiles


def test_fake_tensors_are_computed_with_operations_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "_has_triton", lambda: True)
    with FakeTensorMode():
        assert chunked.passes(torch.empty(2, device="cuda")) is tiles


@pytest.mark.parametrize(
    ("tokens", "vocab", "entries"),
    [(8192, 151_936, 1 << 26), (64, 151_936, 1 << 26), (700, 49_152, 1 << 26), (9, 300, 400)],
)
def test_tiles_on_a_gpu_start_at_multiples(tokens: int, vocab: int, entries: int) -> None:
    rows, columns = tile_shape(tokens, vocab, entries, 128)
    assert columns == vocab or columns % 128 == 0 or columns < 128
    assert 1 <= rows <= tokens
    assert rows * columns <= entries
    count = -(-vocab // columns) * -(-tokens // rows)
    plain_rows, plain_columns = tile_shape(tokens, vocab, entries)
    assert count <= 1.1 * -(-vocab // plain_columns) * -(-tokens // plain_rows)


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    """Without a GPU: registers and spills as ptxas reports them, and 16 bytes per load."""
    lines = lines_of("tests.training.compile_ahead", tmp_path)
    assert len(lines) == 10
    for line in lines:
        name, *numbers = line.split()
        registers, spilled, shared, narrow = map(int, numbers)
        # 2,048 threads of an SM share 65,536 registers: at 32 all of them fit, at 40 six programs
        # of 256 threads. These share 227 KiB: more than a mask of bytes takes.
        assert registers <= 40, line
        assert spilled == 0, line
        assert shared <= 8192, line
        assert narrow == 0, f"{name} loads logits in less than 16 bytes"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keep", ["all", "mask"])
def test_a_gpu_gives_what_torch_gives(dtype: torch.dtype, keep: str) -> None:
    """Compiled kernels against the operations that they replace, on the same tile."""
    pytest.importorskip("triton")
    from areal_lab.functional.logprobs import fused

    torch.manual_seed(4)
    rows, vocab = 300, 20_000
    logits = torch.randn(rows, vocab, device="cuda").mul(5).to(dtype)
    mask = torch.rand(rows, vocab, device="cuda") < MASK_SHARE if keep == "mask" else None
    everywhere = (Restriction(mask, None), slice(0, rows), slice(0, vocab))
    scratch = Scratch(logits, logits.numel(), vocab)
    expected = tiles.sums(logits, *everywhere, scratch)
    found = fused.sums(logits, *everywhere, scratch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    g, k = torch.randn(2, rows, device="cuda")
    of_tokens = token_gradients(
        g, k, logprobs=-g.abs(), entropy=found.entropy, normalizer=found.peak + found.log_mass
    )
    there, here = logits.clone(), logits.clone()
    for module, out in ((tiles, there), (fused, here)):
        module.logits_gradient(out, *everywhere, scratch, of_tokens=of_tokens, out=out)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(here, there, atol=1e-6, rtol=tolerance)
