"""Search over a local corpus: BM25, no network. Needs `pip install 'areal_lab[search]'`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_lab.data.chain import chain_pages
from areal_lab.extras import require

require("areal_lab.agents.tools.search", "search")

import bm25s  # noqa: E402 - only if it is there

_ON_THE_LOOP: Final = 10_000
"""Maximum documents for queries on the event loop, which then take less than a handover to a
thread: 2 ms."""


@dataclass(frozen=True, slots=True)
class Document:
    """An indexed document."""

    text: str
    title: str = ""
    """Indexed with double weight, and hidden from results."""


class Search:
    """Find the documents that match a query best.

    Source of the ranking: Okapi BM25 (Robertson and Zaragoza, 2009), as implemented by bm25s.

    Args:
        corpus: a JSONL file, whose lines are strings, or have a field `text` and optionally a
            `title`, which counts twice and is hidden; or the texts; or `{chains: 400, depth: 3}`,
            the pages of 400 problems of `dataset.type=chain`.
        results: number of documents in a result, one per line.
        nothing: result of a query without a match.

    Raises:
        ValueError: in one line: the file cannot be read, or a number is out of its bounds.
    """

    name = "search"
    description = "Search the documents for a query; returns the best ones."
    parameters: Final[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(
        self,
        corpus: str | Path | Sequence[str] | Mapping[str, int],
        *,
        results: int = 1,
        nothing: str = "nothing found",
    ) -> None:
        documents = _documents(corpus)
        if not documents:
            raise ValueError("the corpus is empty, but must have at least one document")
        if results < 1:
            raise ValueError(f"results is {results}, but must be >= 1")
        self._texts = [one.text for one in documents]
        self._results = min(results, len(documents))
        self._nothing = nothing
        # No stop words: in a small corpus a common word may be the whole query.
        self._tokens = partial(bm25s.tokenize, stopwords=None, show_progress=False)
        self._index = bm25s.BM25()
        # A page about a word precedes one that mentions it.
        searched = [f"{one.title} {one.title} {one.text}" for one in documents]
        self._index.index(self._tokens(searched), show_progress=False)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Best documents for `query`."""
        query = str(arguments["query"])
        if len(self._texts) <= _ON_THE_LOOP:
            return self.find(query)
        return await asyncio.to_thread(self.find, query)

    def find(self, query: str) -> str:
        """Best documents for a query, one per line."""
        words = self._tokens([query], return_ids=False)
        if not words[0]:
            return self._nothing
        found, scores = self._index.retrieve(words, k=self._results, show_progress=False)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return "\n".join(self._texts[at] for at, score in pairs if score > 0) or self._nothing


def _documents(corpus: str | Path | Sequence[str] | Mapping[str, int]) -> list[Document]:
    if isinstance(corpus, str | Path):
        return read_corpus(Path(corpus))
    if not isinstance(corpus, Mapping):
        return [Document(text) for text in corpus]
    if corpus.keys() != {"chains", "depth"}:
        names = ", ".join(corpus)
        raise ValueError(f"the corpus has {names}, but a generated one has chains, depth")
    pages = chain_pages(corpus["chains"], depth=corpus["depth"])
    return [Document(text, word) for word, text in pages]


def read_corpus(path: Path) -> list[Document]:
    """Read the documents of a JSONL file."""
    try:
        # Not `splitlines`: JSON may have U+2028 and its like inside a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the corpus {path} cannot be read: {error}") from error
    documents = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            row = value if isinstance(value, dict) else {"text": value}
            text, title = row["text"], row.get("title", "")
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} has no text: {error}") from error
        if not isinstance(text, str) or not isinstance(title, str):
            raise ValueError(f"line {number} of {path} has a text or title that is not a string")
        documents.append(Document(text, title))
    return documents
