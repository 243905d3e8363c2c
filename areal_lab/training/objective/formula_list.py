"""What a config can name, as text for a terminal and as tables for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from areal_lab.training.objective.formula_index import formulas
from areal_lab.training.objective.formulas import Formula, Role

_TITLES = {
    Role.LOSS: ("Policy losses", "`actor.loss`"),
    Role.ADVANTAGE: ("Advantages", "`actor.advantage`"),
    Role.SURROGATE: ("Surrogates", "`surrogate` of `policy_loss`"),
    Role.RATIO: ("Ratios", "`ratio` of `policy_loss`"),
    Role.CORRECTION: ("Corrections", "`correct` of a loss; a list applies one after the other"),
    Role.AGGREGATE: ("Aggregates", "`aggregate` of `policy_loss`"),
    Role.BASELINE: ("Baselines", "`baseline` of the advantages `group`"),
    Role.SCALE: ("Scales", "`scale` of the advantages `group`, `gpg` and `pass_at_k`"),
    Role.STATISTIC: ("Statistics of a sequence", "`statistic` of the correction `reject`"),
    Role.DIVERGENCE: ("Divergences", "`divergence` of the correction `reject`"),
}


def format_formulas(width: int = 100) -> str:
    """The losses and advantages of `areal-lab train`, with their keywords and defaults."""
    lines: list[str] = []
    for role in (Role.LOSS, Role.ADVANTAGE):
        title, where = _TITLES[role]
        lines += [f"{title}, for {where.strip('`')}={{name: ...}}, with their keywords", ""]
        for one in formulas(role).values():
            if not one.refusal:
                text = f"{one.short_name}  {_keywords(one, '{}')}".rstrip()
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
        lines.append("")
    lines.append("Surrogates, ratios, corrections and aggregates by name: docs/losses.md")
    return "\n".join(lines)


def markdown_lists() -> str:
    """A section per role: a table of what can be named, and what cannot and why."""
    return "\n\n".join("\n".join(_section(role)) for role in Role)


def _section(role: Role) -> Iterator[str]:
    title, where = _TITLES[role]
    yield from (f"## {title}", "", f"For {where}.", "")
    yield from ("| name | keywords and defaults | what it is | source |", "|---|---|---|---|")
    known = formulas(role).values()
    for one in known:
        if not one.refusal:
            cells = (f"`{one.short_name}`", _keywords(one, "`{}`"), one.summary, one.source)
            yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    refused = [one for one in known if one.refusal]
    if refused:
        yield from ("", "These are in `areal_lab.functional`, but not for a config:", "")
        yield from (f"- `{one.short_name}` {_cell(one.refusal)}." for one in refused)


def _keywords(formula: Formula, form: str) -> str:
    """`clip_epsilon=0.2, correct=unbounded`; required ones without a default."""
    given = (
        f"{one.name}={_yaml(one.default)}" if one.default is not None else f"{one.name} (required)"
        for one in formula.settable.values()
    )
    return ", ".join(form.format(one) for one in given)


def _yaml(default: str) -> str:
    """A default as it is written in YAML."""
    words = {
        "None": "null",
        "True": "true",
        "False": "false",
        "math.inf": "inf",
        '-float("inf")': "-inf",
    }
    if default.startswith("("):
        return f"[{default[1:-1]}]"
    return words.get(default, default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
