"""Chains of pages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from areal_lab.agents.tools.search import Search
from areal_lab.data.chain import chain_problem, chains, write_chains


def test_every_word_is_in_one_chain() -> None:
    made = chains(40, depth=10)
    words = [word for chain in made for word in chain.words]
    assert len(set(words)) == len(words) == 400
    assert made == chains(40, depth=10)
    assert made != chains(40, depth=10, seed=2)
    with pytest.raises(ValueError, match="must have 1 to"):
        chains(1000, depth=100)


@pytest.mark.parametrize("depth", [1, 3, 30])
def test_following_the_pages_finds_the_answer(tmp_path: Path, depth: int) -> None:
    write_chains(tmp_path, 20, depth=depth)
    search = Search(tmp_path / "corpus.jsonl")
    for line in (tmp_path / "problems.jsonl").read_text().splitlines():
        problem = json.loads(line)
        word = problem["question"].rstrip("\n").rpartition("Start: ")[2]
        for _ in range(depth - 1):
            kind, _, word = asyncio.run(search.call({"query": word})).partition(": ")
            assert kind == "Next"
        assert search.find(word) == f"Found: {problem['answer']}"


def test_the_example_is_solved() -> None:
    (one,) = chains(1, depth=2)
    assert chain_problem(one).prompt == (
        "Start: hand\nOpen: hand\nNext: milk\nOpen: milk\nNext: door\nOpen: door\nFound: red\n"
        f"Answer: red\nStart: {one.words[0]}\n"
    )
