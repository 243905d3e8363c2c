"""Settings that are mappings of free names, such as `actor.loss`: gathered, then laid over others.

    actor.loss.name=gspo actor.loss.clip_epsilon=0.1     {name: gspo, clip_epsilon: 0.1}

What names a function starts afresh, as the keywords of another function mean nothing to it. What
names none changes keywords of the function that an earlier file named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from areal_lab.config.record import Record

NAME: Final = "name"
"""The entry that names a function; text in place of a mapping is short for it."""


def entered(known: Any, path: Sequence[str], value: Any) -> Any:
    """A mapping with the entry at a path set; what the same source said before stays beside it."""
    if path:
        inner = dict(named(known)) if isinstance(known, Mapping | str) else {}
        return {**inner, path[0]: entered(inner.get(path[0]), path[1:], value)}
    if isinstance(value, Mapping) and value and isinstance(known, Mapping):
        for key, one in value.items():
            known = entered(known, (str(key),), one)
        return known
    return value


def laid_over(known: Any, given: Any) -> Any:
    """The mapping of a later source over that of an earlier one."""
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
    """`gspo` as `{name: gspo}`; anything else as it is."""
    return {NAME: value} if isinstance(value, str) else value


def texts(value: Any) -> Iterator[str]:
    """All text in a value: of records, mappings and lists also that of what they contain."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Record):
        for name in type(value).model_fields:
            yield from texts(getattr(value, name))
    elif isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from texts(one)
