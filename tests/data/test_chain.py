"""Chains of pages."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path

import pytest

from areal_lab.agents.tools.search import Search
from areal_lab.data.chain import (
    chain_pages,
    chain_problem,
    chain_problems,
    chains,
    words_of,
    write_chains,
)
from tests.agents.smollm2 import codec

WORDS = ["".join(letters) for letters in product("wxyz", "abcdefghijkl", "mnop", "qrst")]


def test_every_word_is_in_one_chain() -> None:
    made = chains(40, depth=10)
    words = [word for chain in made for word in chain.words]
    assert len(set(words)) == len(words) == 400
    assert made == chains(40, depth=10)
    assert made != chains(40, depth=10, seed=2)
    with pytest.raises(ValueError, match="must have 1 to"):
        chains(1000, depth=100)


@pytest.mark.parametrize("words", [None, WORDS])
@pytest.mark.parametrize("depth", [1, 3, 30])
def test_following_the_pages_finds_the_answer(
    tmp_path: Path, depth: int, words: list[str] | None
) -> None:
    write_chains(tmp_path, 20, depth=depth, words=words)
    search = Search(tmp_path / "corpus.jsonl")
    for line in (tmp_path / "problems.jsonl").read_text().splitlines():
        problem = json.loads(line)
        word = problem["question"].rstrip("\n").rpartition("Start: ")[2]
        for _ in range(depth - 1):
            kind, _, word = asyncio.run(search.call({"query": word})).partition(": ")
            assert kind == "Next"
        assert search.find(word) == f"Found: {problem['answer']}"


def test_examples_are_solved() -> None:
    (one,) = chains(1, depth=2)
    assert chain_problem(one).prompt == (
        "Start: hand\nOpen: hand\nNext: milk\nOpen: milk\nNext: door\nOpen: door\nFound: red\n"
        "Answer: red\nStart: gate\nOpen: gate\nNext: lamp\nOpen: lamp\nNext: rice\nOpen: rice\n"
        f"Next: boat\nOpen: boat\nFound: blue\nAnswer: blue\nStart: {one.words[0]}\n"
    )


def test_words_of_a_vocabulary_are_one_token_each() -> None:
    words = words_of(codec())
    assert {"milk", "garden"} <= set(words)
    assert not {"the", "zebrafish"} & set(words)
    assert all(len(codec().encode(f" {word}")) == 1 for word in words[::100])
    made = chains(64, depth=100, words=words)
    used = {word for chain in made for word in chain.words}
    assert len(used) == 6400
    assert not used & {"next", "found", "red", "milk"}


def test_problems_of_a_generated_corpus_are_found_in_it() -> None:
    search = Search({"chains": 40, "depth": 2})
    problems = chain_problems(40, depth=2, examples=3, eval_size=10)
    assert (len(problems.train), len(problems.held_out)) == (30, 10)
    words = {word for word, _ in chain_pages(40, depth=2)}
    for one in (*problems.train, *problems.held_out):
        *shown, asked = one.prompt.removesuffix("\n").split("Start: ")
        assert search.find(search.find(asked).removeprefix("Next: ")) == f"Found: {one.answer}"
        assert len(shown) == 4
        assert not any(example.split("\n")[0] in words for example in shown)
    with pytest.raises(ValueError, match="the corpus has chains, but a generated one has chains, "):
        Search({"chains": 40})
