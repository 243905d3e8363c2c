"""Description of a function that a config names: its role, its keywords, and their values.

    "clip_epsilon: ClipEpsilon = 0.2" --keyword_of--> Keyword(clip_epsilon, a number or two, 0.2)

`areal_lab.training.objective.formula_index` has those of the functional core. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

FACTS: Final = (
    *("token_count", "sequences", "sequence_count", "turns", "groups", "group_count"),
    *("group_tokens", "versions", "trainer_version", "dual_variable"),
)
"""Arguments that a trainer passes to a loss and its parts: the fields of `BatchFacts`."""
SAMPLE_FACTS: Final = (
    *("rewards", "groups", "length_tokens", "mask", "sequences"),
    *("token_rewards", "values", "bootstrap_values"),
)
"""Arguments that a trainer passes to advantages."""
SEGMENTS: Final = ("turns", "groups", "sequences")
"""Facts that a keyword of type `Segments` may take by name."""


class Role(StrEnum):
    """Use of a function; the text is for people."""

    LOSS = "policy loss"
    ADVANTAGE = "advantages"
    SURROGATE = "surrogate"
    RATIO = "ratio"
    CORRECTION = "correction"
    AGGREGATE = "aggregate"
    BASELINE = "baseline"
    SCALE = "scale"
    STATISTIC = "statistic of a sequence"
    DIVERGENCE = "divergence"


class Value(StrEnum):
    """Type of a keyword in YAML; the text is for people."""

    NUMBER = "a number"
    INTEGER = "an integer"
    TRUTH = "true or false"
    TEXT = "text"
    PAIR = "two numbers, as [0.5, 2]"
    NUMBER_OR_PAIR = "a number, or two, as [0.2, 0.28]"
    SEGMENTS = f"one of {', '.join(SEGMENTS)}"
    ANY = "a number, true or false, text, or a list of numbers"
    CLOSED = "a tensor, which YAML cannot hold"


_VALUES: Final[Mapping[str, Value]] = MappingProxyType(
    {
        "float": Value.NUMBER,
        "Count": Value.NUMBER,
        "Discount": Value.NUMBER,
        "int": Value.INTEGER,
        "bool": Value.TRUTH,
        "str": Value.TEXT,
        "tuple[float, float]": Value.PAIR,
        "ClipEpsilon": Value.NUMBER_OR_PAIR,
        "Segments": Value.SEGMENTS,
        "": Value.ANY,
    }
)
"""Annotations of keywords; other annotations are tensors, or a part."""
PARTS: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "Correction": Role.CORRECTION,
        "Aggregate": Role.AGGREGATE,
        "AnchorRatio": Role.RATIO,
        "SurrogateFunction": Role.SURROGATE,
        "Baseline": Role.BASELINE,
        "Scale": Role.SCALE,
        "SequenceStatistic": Role.STATISTIC,
        "Divergence": Role.DIVERGENCE,
        "KLEstimator": Role.DIVERGENCE,
    }
)
"""Annotations of keywords that take a function, and of what makes one, as `truncate` does."""
TAKEN: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.LOSS: (
            *("logprobs", "proximal_logprobs", "behavior_logprobs", "old_logprobs"),
            *("advantages", "mask"),
        ),
        Role.ADVANTAGE: (),
        Role.SURROGATE: ("policy", "advantages"),
        Role.RATIO: ("logprobs", "anchor_logprobs", "mask", "sequences"),
        Role.CORRECTION: ("weight",),
        Role.AGGREGATE: ("values", "mask", "sequences"),
        Role.BASELINE: ("groups",),
        Role.SCALE: ("centered", "groups", "unbiased"),
        Role.STATISTIC: ("values", "mask", "sequences"),
        Role.DIVERGENCE: ("log_ratio",),
    }
)
"""Parameters that the caller of each role fills by position."""
SUFFIXES: Final[Mapping[Role, str]] = MappingProxyType(
    {Role.ADVANTAGE: "_advantages", Role.SURROGATE: "_surrogate", Role.RATIO: "_ratio"}
)
"""Ends of names that a config may leave out."""


@dataclass(frozen=True, slots=True)
class Keyword:
    """One parameter that a config may set, or that the trainer fills."""

    name: str
    value: Value = Value.ANY
    part: Role | None = None
    """The role of the function that it takes; None if it takes a value."""
    default: str | None = None
    """Default in the source; None if it is required."""
    optional: bool = False
    """True if it may be null."""
    filled: bool = False
    """True if the trainer fills it."""

    @property
    def allowed(self) -> str:
        """Allowed values, in words."""
        null = ", or null" * self.optional
        if self.part is None:
            return f"{self.value}{null}"
        many = ", or a list of them" * (self.part is Role.CORRECTION)
        return f"a {self.part} by name, as {{name: {EXAMPLES[self.part]}}}{many}{null}"


EXAMPLES: Final[Mapping[Role, str]] = MappingProxyType(
    {
        Role.LOSS: "gspo",
        Role.ADVANTAGE: "rloo",
        Role.SURROGATE: "clip, clip_epsilon: 0.2",
        Role.RATIO: "sequence",
        Role.CORRECTION: "truncate, cap: 5.0",
        Role.AGGREGATE: "sequence_mean",
        Role.BASELINE: "mean_of_others",
        Role.SCALE: "no_scale",
        Role.STATISTIC: "mean_of_sequence",
        Role.DIVERGENCE: "k3",
    }
)
"""The inside of a mapping that names a function of each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A function that a config can name."""

    name: str
    path: str
    """`module:function`."""
    role: Role
    keywords: tuple[Keyword, ...] = ()
    makes: bool = False
    """True if a call with the keywords gives the function, as `truncate(5.0)` does."""
    takes_any: bool = False
    """True if it may have keywords that are not listed here."""
    one_old_policy: bool = False
    """True if it is a loss of four tensors, such as `ppo`."""
    summary: str = ""
    """First line of its docstring."""
    source: str = ""
    """Its paper."""
    refusal: str = ""
    """Why a trainer cannot call it today; empty if it can."""

    @property
    def settable(self) -> dict[str, Keyword]:
        """The keywords that a config may set."""
        closed = (one for one in self.keywords if one.value is Value.CLOSED and one.part is None)
        left_out = {one.name for one in closed}
        return {k.name: k for k in self.keywords if not k.filled and k.name not in left_out}

    @property
    def facts(self) -> list[str]:
        """The keywords that the trainer fills."""
        return [one.name for one in self.keywords if one.filled]

    @property
    def short_name(self) -> str:
        """The name without the end that a config may leave out."""
        return self.name.removesuffix(SUFFIXES.get(self.role, ""))


def facts_of(role: Role, *, makes: bool) -> Sequence[str]:
    """Arguments that the trainer passes by name to a function of a role."""
    return SAMPLE_FACTS if role is Role.ADVANTAGE else () if makes else FACTS


def keyword_of(name: str, annotation: str, default: str | None, facts: Sequence[str]) -> Keyword:
    """Return a keyword from its signature.

    Args:
        default: as in the source; None without one.
    """
    kinds = [part.strip() for part in annotation.split("|")]
    bare = kinds[0]
    part = PARTS.get(bare)
    value = Value.CLOSED if part else _VALUES.get(bare, Value.CLOSED)
    optional = "None" in kinds[1:]
    return Keyword(name, value, part, default, optional, filled=name in facts)
