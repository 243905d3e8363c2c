"""Keys and values in pages: the pages of each row, pages that rows share, and the free ones.

    row 0     [7][2][9]         7 and 2 are full, so they never change and many may read them;
    row 1     [7][2][4]         9 and 4 have room: one row writes to each of them
    kept      [7][5]            a page with room may be shared for the tokens that it has
    free      [1][3][6][8]      0 is no row's: the rows that pad a batch write there

A page has `PAGE_TOKENS` tokens of all layers. A row needs memory for its own tokens only, whatever
the others need, and the storage never moves, which a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.engines.embedded.cache import PrefixCopy
from areal_lab.models.copies import to_device

PAGE_TOKENS: Final = 64
"""Tokens of a page. A row wastes half a page on average."""
PADDING_PAGE: Final = 0


class Pages:
    """Page numbers and their owners, without storage."""

    def __init__(self, count: int, *, rows: int, row_pages: int) -> None:
        """Start with the pages 1 .. `count` free, for `rows` rows of at most `row_pages`."""
        self.count = count
        self.table = np.full((rows, row_pages), PADDING_PAGE, dtype=np.int32)
        """Pages of each row, in order; `PADDING_PAGE` beyond its end."""
        self.clear()

    @property
    def free(self) -> int:
        """Pages that nothing uses."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return sum(owners > 0 for owners in self._owners)

    @property
    def rows(self) -> int:
        """Rows with pages: the first ones."""
        return len(self._sizes)

    def of_row(self, row: int) -> list[int]:
        """Pages of a row."""
        pages: list[int] = self.table[row, : self._sizes[row]].tolist()
        return pages

    def clear(self) -> None:
        """Free all pages of rows and of kept prefixes."""
        self._free = list(range(self.count, 0, -1))
        self._owners = [0] * (self.count + 1)
        self._sizes = list[int]()
        self.table[:] = PADDING_PAGE

    def add_row(self, shared: Sequence[int], size: int, *, spare: int) -> bool:
        """Add a row of `size` pages, of which the first are these.

        False, without a change, if fewer than `spare` pages would be left.
        """
        if size - len(shared) + spare > len(self._free):
            return False
        self._sizes.append(0)
        for page in shared:
            self._owners[page] += 1
        for page in (*shared, *(self._take() for _ in range(size - len(shared)))):
            self._append(self.rows - 1, page)
        return True

    def grow(self, row: int, size: int) -> bool:
        """Give a row up to `size` pages; False, without a change, if too few are free."""
        if size - self._sizes[row] > len(self._free):
            return False
        for _ in range(size - self._sizes[row]):
            self._append(row, self._take())
        return True

    def remove_row(self, row: int) -> None:
        """Free the pages of a row, whose place the last row takes."""
        self.give_back(self.of_row(row))
        last = self.rows - 1
        self.table[row] = self.table[last]
        self.table[last] = PADDING_PAGE
        self._sizes[row] = self._sizes[last]
        self._sizes.pop()

    def keep(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that have one."""
        for page in pages:
            assert self._owners[page], f"page {page} is free"
            self._owners[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove an owner from each of these pages; pages without owners are free."""
        for page in pages:
            self._owners[page] -= 1
            assert self._owners[page] >= 0, f"page {page} is free already"
            if not self._owners[page]:
                self._free.append(page)

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _append(self, row: int, page: int) -> None:
        self.table[row, self._sizes[row]] = page
        self._sizes[row] += 1


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages of an ended request, in order."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """What a page holds."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tokens: int = PAGE_TOKENS

    @property
    def token_bytes(self) -> int:
        """Memory of the keys and values of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Memory of a page."""
        return self.tokens * self.token_bytes


class PagedCache:
    """Storage of pages and their owners; the batcher knows which request is in which row."""

    def __init__(
        self, shape: PageShape, device: torch.device, *, pages: int, rows: int, row_tokens: int
    ) -> None:
        """Start empty, for `rows` rows of at most `row_tokens` tokens in `pages` pages.

        Memory is allocated for all pages at once, when the first row needs it.
        """
        self.shape = shape
        self.pages = Pages(pages, rows=rows, row_pages=pages_of(row_tokens, shape.tokens))
        self._device = device
        self._layers: Float[Tensor, "L 2 P H C D"] | None = None

    @property
    def layers(self) -> Float[Tensor, "L 2 P H C D"]:
        """Keys and values by layer and page."""
        if self._layers is None:
            s = self.shape
            # Not zeroed: slots beyond the end of a row are never read.
            self._layers = torch.empty(
                (s.layers, 2, self.pages.count + 1, s.kv_heads, s.tokens, s.head_dim),
                dtype=s.dtype,
                device=self._device,
            )
        return self._layers

    @property
    def size_bytes(self) -> int:
        """Memory of the pages in use, those of kept prefixes included."""
        return self.pages.used * self.shape.page_bytes

    @property
    def token_bytes(self) -> int:
        """Memory of the keys and values of one token."""
        return self.shape.token_bytes

    @property
    def limit_bytes(self) -> int:
        """Memory of all pages."""
        return self.pages.count * self.shape.page_bytes

    @property
    def most_tokens(self) -> int:
        """Longest row that fits if nothing else is in the cache."""
        return self.pages.count * self.shape.tokens

    def admit(
        self, tokens: int, *, shared: int, source: int | None, kept: KeptPages | None, spare: int
    ) -> bool:
        """Add a row for `tokens` tokens; False, without a change, if there are too few pages.

        The first `shared` tokens are those of row `source` or of a kept prefix. The row shares
        their full pages; the tokens of a page that is not full must be copied (`tails`, `fan_out`,
        `restore`). `spare` pages stay free, one for each running request, so that none is retracted
        at once.
        """
        full = shared // self.shape.tokens
        of_source = () if source is None else self.pages.of_row(source)
        pages = of_source if kept is None else kept.pages
        size = pages_of(tokens, self.shape.tokens)
        return self.pages.add_row(pages[:full], size, spare=spare)

    def can_split(self, requests: int) -> bool:
        """Return whether there is a page for each of these requests."""
        return self.pages.free >= requests

    def extend(self, lengths: Sequence[int]) -> bool:
        """Make room for one more token in each row of these lengths; False if there are too few
        pages. Rows that got one keep it.
        """
        return all(
            length % self.shape.tokens
            or self.pages.grow(row, pages_of(length + 1, self.shape.tokens))
            for row, length in enumerate(lengths)
        )

    def reserve(
        self,
        rows: int,  # noqa: ARG002 - of `cache.Cache`
        tokens: int,  # noqa: ARG002 - as `rows`
        *,
        live: int,  # noqa: ARG002 - as `rows`
        longest: int,  # noqa: ARG002 - as `rows`
    ) -> None:
        """Allocate the memory of all pages, unless it is there."""
        _ = self.layers

    @torch.inference_mode()
    def fan_out(self, copies: Iterable[PrefixCopy]) -> None:
        """Copy the tokens of pages that rows cannot share with the row they were split from."""
        for one in copies:
            tail = self.tails(one.source, range(one.first, one.last + 1), one.tokens)
            if tail is not None:
                self._copy_slots(*tail)

    def remove(self, row: int, last: int, tokens: int) -> None:  # noqa: ARG002 - of `cache.Cache`
        """Free the pages of a row; row `last` takes its place."""
        assert last == self.pages.rows - 1
        self.pages.remove_row(row)

    def retract(self) -> None:
        """Free the pages of all rows."""
        while self.pages.rows:
            self.pages.remove_row(self.pages.rows - 1)

    def tails(
        self, source: int, targets: Sequence[int], tokens: int
    ) -> tuple[int, list[int], int] | None:
        """How rows get those of a row's first `tokens` whose page they do not share.

        Source page, target pages and slots to copy; None if the last page is full.
        """
        page, slots = divmod(tokens, self.shape.tokens)
        if not slots:
            return None
        table = self.pages.table
        return int(table[source, page]), table[list(targets), page].tolist(), slots

    @torch.inference_mode()
    def restore(self, kept: KeptPages, row: int, tokens: int) -> None:
        """Copy those of the first `tokens` kept tokens whose page row `row` does not share."""
        page, slots = divmod(tokens, self.shape.tokens)
        if slots:
            self._copy_slots(kept.pages[page], [int(self.pages.table[row, page])], slots)

    def _copy_slots(self, source: int, targets: Sequence[int], slots: int) -> None:
        """Copy the first slots of a page to other ones, in all layers."""
        pages = to_device(torch.tensor(targets), self._device)
        copied = self.layers[:, :, source, :, :slots].unsqueeze(2)
        self.layers[:, :, pages, :, :slots] = copied.expand(-1, -1, len(targets), -1, -1, -1)

    def keep(self, row: int, tokens: int) -> KeptPages:
        """Keep the pages of a row's first `tokens` after its end, until `drop`."""
        kept = KeptPages(tuple(self.pages.of_row(row)[: pages_of(tokens, self.shape.tokens)]))
        self.pages.keep(kept.pages)
        return kept

    def drop(self, kept: KeptPages) -> None:
        """Free kept pages."""
        self.pages.give_back(kept.pages)

    def clear(self) -> None:
        """Free all pages; their memory stays."""
        self.pages.clear()

    def idle(self) -> None:
        """Nothing to do: the memory of free pages stays."""

    def release(self) -> None:
        """Free all pages and their memory."""
        self.pages.clear()
        self._layers = None


def pages_of(tokens: int, page_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_tokens)
