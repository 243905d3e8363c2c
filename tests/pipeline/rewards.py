"""The reward of tiny runs, in its own file so that a reward worker imports no torch."""

from __future__ import annotations

from typing import Any


def even_digits(completion: str, example: dict[str, Any]) -> float:
    """A reward that any model meets often, so that every group has differences to learn from."""
    del example
    return float(sum(character in "02468" for character in completion))


def even_digits_of_some(completion: str, example: dict[str, Any]) -> float:
    """The same for about half of the prompts; the others get 0 for every response."""
    first, _, second = str(example["prompt"]).strip().split("\n")[-1].rstrip("= ").partition("+")
    return even_digits(completion, example) * ((int(first) + int(second)) % 2)


def nothing(completion: str, example: dict[str, Any]) -> float:
    """No response is any better than another."""
    del completion, example
    return 0.0


def opposite_on_held_out(completion: str, example: dict[str, Any]) -> float:
    """Training raises the reward of its problems, and so lowers that of held-out ones."""
    reward = even_digits(completion, example)
    return 50.0 - reward if "held out" in example else reward


def fails_on_held_out(completion: str, example: dict[str, Any], *, sandbox: str) -> float:
    """A function that cannot score held-out problems; its error names the sandbox."""
    if "held out" in example:
        raise ValueError(f"this problem has no answer, and the sandbox is {sandbox}")
    return even_digits(completion, example)
