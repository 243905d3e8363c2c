"""Decode passes of fixed shapes, so that a GPU replays each as one captured CUDA graph.

    rows and pages of the batch --round up--> bucket: buffer of inputs, graph, buffer of logits

    buffer    one line per row    | token | length | positions, for M-RoPE | its pages |

A pass only reads its buffer, the weights and the pages, whose addresses never change, and nothing
of it depends on values that the host knows: two passes of a bucket run the same operations. Rows
that pad the batch have length 0 and write to `PADDING_PAGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.engines.embedded.attention import Chunk
from areal_lab.engines.embedded.cache import Cache, KVCache, PrefixCopy
from areal_lab.engines.embedded.paged_attention import (
    DecodeAttention,
    PagedPack,
    TailCopy,
    decode_function,
    gathered_attention,
)
from areal_lab.engines.embedded.pages import (
    PADDING_PAGE,
    PAGE_TOKENS,
    PagedCache,
    PageShape,
    pages_of,
)
from areal_lab.models.copies import copy_into, to_device

_LEAST_PAGES = 4
_GPU_SHARE = 0.7
"""Share of the free GPU memory that pages may take without a limit; the rest is for the passes."""

Pass: TypeAlias = Callable[[], Float[Tensor, "R V"]]
"""One pass over what is in its buffer."""
Capture: TypeAlias = Callable[[Pass], Pass]
"""Turns a pass into one that replays it."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Inputs of a pass, and the pass."""

    buffer: Int[Tensor, "R C"]
    run: Pass


class DecodeSteps:
    """Passes of an engine that only decode, by bucket."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        attention: DecodeAttention,
        *,
        capture: Capture | None,
        rope: bool,
    ) -> None:
        """Prepare no pass yet: each is captured when its bucket is first needed.

        Args:
            model: with the attention of `attention.IMPLEMENTATION`.
            cache: where the rows are.
            attention: for the rows that decode.
            capture: None runs the operations of a pass each time.
            rope: True if a token has three positions, which come with each pass.
        """
        self.attention = attention
        self._model = model
        self._cache = cache
        self._capture = capture
        self._rope = rope
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def __call__(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        positions: Int[np.ndarray, "3 R"] | None = None,
    ) -> Float[Tensor, "R V"]:
        """Logits behind the next token of each row.

        Args:
            tokens: the token to compute.
            lengths: tokens of each row, this one included.
            positions: of the tokens, for a model with M-RoPE.
        """
        pages = self._cache.pages
        used = pages_of(max(lengths), self._cache.shape.tokens)
        rows, width = row_bucket(len(tokens)), page_bucket(used, pages.table.shape[1])
        bucket = self._buckets.get((rows, width))
        if bucket is None:
            bucket = self._buckets[rows, width] = self._bucket(rows, width)
        inputs = np.full(bucket.buffer.shape, PADDING_PAGE, dtype=np.int32)
        here = inputs[: len(tokens)]
        here[:, 0], here[:, 1] = tokens, lengths
        if positions is not None:
            here[:, 2:5] = positions.T
        here[:, -width:] = pages.table[: len(tokens), :width]
        copy_into(bucket.buffer, torch.from_numpy(inputs))
        return bucket.run()[: len(tokens)]

    def forget(self) -> None:
        """Drop all captured passes: weights or pages moved."""
        self._buckets.clear()

    def pack(
        self, lengths: Sequence[int], chunks: Sequence[Chunk], copies: Sequence[PrefixCopy]
    ) -> PagedPack:
        """The work of a pass that also computes prompts.

        Args:
            lengths: tokens of each row that decodes, the new one included.
            chunks: new prompts behind them.
            copies: prefixes that rows get inside the pass.
        """
        cache, table = self._cache, self._cache.pages.table
        rows = np.arange(len(lengths))
        positions = np.asarray(lengths, dtype=np.int64) - 1
        for chunk in chunks:
            rows = np.concatenate((rows, np.full(chunk.count, chunk.row)))
            positions = np.concatenate((positions, np.arange(chunk.start, chunk.end)))
        page, slots = np.divmod(positions, cache.shape.tokens)
        width = pages_of(max(lengths, default=1), cache.shape.tokens)
        tails = []
        for copy in copies:
            tail = cache.tails(copy.source, range(copy.first, copy.last + 1), copy.tokens)
            if tail is not None:
                source, targets, count = tail
                tails.append(TailCopy(source, self._there(np.array(targets)), count))
        return PagedPack(
            layers=cache.layers,
            decode=self.attention,
            table=self._there(table[: len(lengths), :width]),
            lengths=self._there(np.asarray(lengths, dtype=np.int32)),
            pages=self._there(table[rows, page].astype(np.int64)),
            slots=self._there(slots),
            chunks=chunks,
            chunk_pages=[self._there(np.array(cache.pages.of_row(c.row))) for c in chunks],
            tails=tails,
        )

    def _bucket(self, rows: int, width: int) -> _Bucket:
        columns = (5 if self._rope else 2) + width
        buffer = torch.full(
            (rows, columns), PADDING_PAGE, dtype=torch.int32, device=self._model.device
        )
        layers = self._cache.layers  # allocated before a capture begins

        def run() -> Float[Tensor, "R V"]:
            return self._pass(buffer, width, layers)

        return _Bucket(buffer, run if self._capture is None else self._capture(run))

    def _pass(
        self, buffer: Int[Tensor, "R C"], width: int, layers: Float[Tensor, "L 2 P H C D"]
    ) -> Float[Tensor, "R V"]:
        tokens, lengths, table = buffer[:, 0].long(), buffer[:, 1], buffer[:, -width:]
        last = (lengths.long() - 1).clamp(min=0)
        page_tokens = self._cache.shape.tokens
        pack = PagedPack(
            layers=layers,
            decode=self.attention,
            table=table,
            lengths=lengths,
            pages=table.gather(1, (last // page_tokens)[:, None]).squeeze(1).long(),
            slots=last % page_tokens,
        )
        positions = buffer[:, 2:5].T[:, None].long() if self._rope else last[None]
        logits: Tensor = self._model(
            input_ids=tokens[None], position_ids=positions, use_cache=False, pack=pack
        ).logits[0]
        return logits

    def _there(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self._model.device)


def row_bucket(rows: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of the rows are padding."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def page_bucket(pages: int, most: int) -> int:
    """The next power of two, at most the pages of a whole context."""
    return min(max(_LEAST_PAGES, 1 << (pages - 1).bit_length()), most)


def graph_capture() -> Capture:
    """Captures passes as CUDA graphs. Not run on a GPU yet."""
    # One pool of memory for all: a step is over before the next one begins.
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Pass) -> Pass:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles kernels, which a capture must not. The replay writes the same once more.
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = run()

        def replay() -> Float[Tensor, "R V"]:
            graph.replay()
            return logits

        return replay

    return capture


def choose_cache(
    model: PreTrainedModel,
    *,
    rows: int,
    row_tokens: int,
    kept_bytes: int,
    limit_bytes: int | None,
    rope: bool,
    page_tokens: int = PAGE_TOKENS,
) -> tuple[Cache, DecodeSteps | None]:
    """The cache for a model on its device: pages on a GPU and with a limit, otherwise rows.

    Args:
        model: on its device.
        rows: most running requests.
        row_tokens: tokens of the longest context.
        kept_bytes: limit of kept prefixes, which are in the same pages.
        limit_bytes: memory of all pages; None takes `_GPU_SHARE` of a GPU's free memory.
        rope: True if a token has three positions.
        page_tokens: tokens of a page.

    Raises:
        ValueError: if the limit is too low for a page.
    """
    config, device = model.config.get_text_config(), model.device
    heads = config.num_attention_heads
    shape = PageShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        tokens=page_tokens,
    )
    kernel = decode_function(device)
    if kernel is None and limit_bytes is None:
        contiguous = KVCache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )
        return contiguous, None
    if limit_bytes is None:
        limit_bytes = round(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    # One page is for the rows that pad a batch.
    pages = limit_bytes // shape.page_bytes - 1
    if pages < 1:
        raise ValueError(
            f"the cache may use {limit_bytes} bytes, but must have at least "
            f"{2 * shape.page_bytes}, two pages of {shape.tokens} tokens; raise "
            "rollout.cache_gib (--cache-limit-bytes of a server)"
        )
    # Never more than all rows at their longest and all kept prefixes can use.
    most = rows * pages_of(row_tokens, shape.tokens) + 2 * -(-kept_bytes // shape.page_bytes)
    cache = PagedCache(shape, device, pages=min(pages, most), rows=rows, row_tokens=row_tokens)
    steps = DecodeSteps(
        model,
        cache,
        kernel or gathered_attention,
        capture=graph_capture() if device.type == "cuda" else None,
        rope=rope,
    )
    return cache, steps
