"""docs/glossary.md explains the abbreviations and the words of the pages that one reads first."""

from __future__ import annotations

import re

import pytest

from tests.environments import ROOT

START = ("README.md", "docs/index.md", "docs/notebooks.md", "docs/plan.md", "docs/reproduce.md")
COMMON = {
    *("AMD", "CPU", "CSV", "CUDA", "EPYC", "GB", "GPU", "GiB", "HTML", "HTTP", "JSON", "LFS", "MB"),
    *("MiB", "NVIDIA", "NaN", "PDF", "PNG", "RAM", "SIGTERM", "SSH", "SVG", "TSV", "URL", "YAML"),
}
"""Not of this field."""
NAMES = {
    *("AReaL", "DataFrame", "DeepSeekMath", "FlashAttention", "FlexAttention", "HumanEval"),
    *("InstructGPT", "MATH", "MBPP", "MiniLLM", "NeMo", "PyPI", "SGLang", "VL", "WebAssembly"),
    *("SmolLM", "vLLM"),
}
WORDS = {
    *("drift", "recipe", "cell", "row", "critic", "held-out problem", "lag", "staleness", "group"),
    *("engine", "trainer", "version", "schedule", "interruption", "micro-batch", "minibatch"),
    *("dual variable", "gradient alignment", "colocated", "adapter", "frontier"),
}
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]*>", re.DOTALL)
_SHORT = re.compile(r"\b[A-Za-z]*[A-Z][a-z]*[A-Z][A-Za-z]*\b")


def entries() -> set[str]:
    """What has a row, each of several names of one."""
    page = (ROOT / "docs" / "glossary.md").read_text()
    first = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    return {name for cell in first for name in (cell, *cell.split(", "))}


@pytest.mark.parametrize("page", [*START, "docs/train.md"])
def test_every_abbreviation_of_a_first_page_has_an_entry(page: str) -> None:
    text = _CODE.sub(" ", (ROOT / page).read_text())
    used = {word.removesuffix("s") if word != "FLOPs" else word for word in _SHORT.findall(text)}
    assert used - entries() - COMMON - NAMES == set()


def test_the_words_of_the_first_pages_have_entries() -> None:
    assert entries() >= WORDS
