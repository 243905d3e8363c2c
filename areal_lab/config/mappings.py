"""Merge settings that are mappings of free names, such as `actor.loss`.

    actor.loss.name=gspo actor.loss.clip_epsilon=0.1     {name: gspo, clip_epsilon: 0.1}

A mapping with a `name` replaces an earlier one, because the keywords of another function mean
nothing to it. A mapping without a `name` changes keywords of the function named earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from areal_lab.config.record import Record

NAME: Final = "name"
"""Entry that names a function; text instead of a mapping is short for it."""


def entered(known: Any, path: Sequence[str], value: Any) -> Any:
    """Return a mapping with the entry at a path set; other entries from the same source are
    kept.
    """
    if path:
        inner = dict(named(known)) if isinstance(known, Mapping | str) else {}
        return {**inner, path[0]: entered(inner.get(path[0]), path[1:], value)}
    if isinstance(value, Mapping) and value and isinstance(known, Mapping):
        for key, one in value.items():
            known = entered(known, (str(key),), one)
        return known
    return value


def laid_over(known: Any, given: Any) -> Any:
    """Merge the mapping of a later source over that of an earlier one."""
    given = named(given)
    if not isinstance(given, Mapping) or not given or NAME in given:
        return given
    under = named(known)
    if not isinstance(under, Mapping):
        return given
    changed = {
        key: laid_over(under.get(key), one) if isinstance(one, Mapping) else one
        for key, one in given.items()
    }
    return {**under, **changed}


def named(value: Any) -> Any:
    """Return `gspo` as `{name: gspo}`, and any other value unchanged."""
    return {NAME: value} if isinstance(value, str) else value


def texts(value: Any) -> Iterator[str]:
    """Return all text in a value, including text inside its records, mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Record):
        for name in type(value).model_fields:
            yield from texts(getattr(value, name))
    elif isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from texts(one)
