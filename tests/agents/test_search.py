"""Search over a local corpus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from areal_lab.agents.tool_use import ToolUse
from areal_lab.agents.tools.search import Search, read_corpus
from tests.agents.scripted import Scripted
from tests.agents.test_workflows import play

PAGES = ["The color of the hand is red.", "the milk\nis white", "A garden has a gate; a gate!"]


def test_the_best_document_comes_first() -> None:
    assert Search(PAGES).find("gate") == PAGES[2]
    assert Search(PAGES).find("MILK of the") == PAGES[1]
    assert Search(PAGES, results=2).find("hand gate gate").splitlines()[0] == PAGES[2]
    assert Search(PAGES, results=9).find("the").count("is") == 2


@pytest.mark.parametrize("query", ["", "zebra", "?!", "\x00"])
def test_a_query_that_fits_to_nothing_says_so(query: str) -> None:
    assert asyncio.run(Search(PAGES).call({"query": query})) == "nothing found"


def test_a_corpus_is_a_file_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    rows = [PAGES[0], {"text": PAGES[1], "id": 7}, {"text": "Next: door", "title": "gate"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert Search(file).find("milk") == PAGES[1]
    assert Search(file).find("gate") == "Next: door"
    file.write_bytes('\n"one\u2028line\x85of milk"\r\n\n"a gate"\n'.encode())
    assert Search(file).find("milk") == "one\u2028line\x85of milk"
    file.write_text("7")
    with pytest.raises(ValueError, match=r"line 1 of .*corpus\.jsonl has a text or title that"):
        Search(file)
    file.write_text('{"title": "no text"}')
    with pytest.raises(ValueError, match=r"line 1 of .*corpus\.jsonl has no text"):
        Search(file)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"line 1 of .*corpus\.jsonl has no text"):
        Search(file)
    file.write_bytes(b'\xef\xbb\xbf"a page"\n')
    assert read_corpus(file)[0].text == "a page"
    file.write_text("")
    with pytest.raises(ValueError, match="empty"):
        Search(file)
    with pytest.raises(ValueError, match="results is 0"):
        Search(PAGES, results=0)


def test_pages_lead_to_the_next_one() -> None:
    hops = ["hand", "milk", "gate"]
    pages = ["hand: Next: milk", "milk: Next: gate", "gate: Found: red"]
    script = [*(f"Open: {hop}\n" for hop in hops), "Answer: red\n"]
    workflow = ToolUse(
        max_turns=9,
        tool={"name": "search", "corpus": pages},
        call="Open:",
        result="",
    )
    engine = Scripted(script, {"Answer: red\n": 1.0})
    episode = play(workflow, engine)
    assert episode.outcome.reward == 1.0
    assert engine.prompts[-1].endswith("Open: gate\ngate: Found: red\n")
