"""Suggest known names that are similar to a misspelled one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache


@lru_cache(maxsize=1024)  # the names of a catalogue are compared repeatedly
def plain(name: str) -> str:
    """A name without case, blanks and punctuation: `H100 SXM` and `h100-sxm` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that are similar to this one."""
    by_plain = {plain(one): one for one in known}
    return [by_plain[one] for one in difflib.get_close_matches(plain(name), by_plain, n=3)]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'a' or 'b'?`, or all known names if none is near; for error messages."""
    if near := near_names(name, known):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known are {', '.join(known)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known name is near; for error messages.

    For dotted names the last part decides: `lr` is near `actor.optimizer.lr`.
    """
    by_name = {full.lower(): full for full in known}
    by_leaf = {full.rsplit(".", 1)[-1].lower(): full for full in reversed(known)}
    leaf = name.rsplit(".", 1)[-1].lower()
    if leaf in by_leaf:  # in another group, or without one: `lr`, `rollout.n_samples`
        found = [by_leaf[leaf]]
    else:
        found = [by_name[near] for near in difflib.get_close_matches(name.lower(), by_name, n=1)]
        found = found or [by_leaf[near] for near in difflib.get_close_matches(leaf, by_leaf, n=1)]
    return f"; did you mean {found[0]!r}?" if found else ""
