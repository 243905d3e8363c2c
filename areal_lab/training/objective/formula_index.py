"""The functions of `areal_lab.functional` that a config can name, as an index, text and tables."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.training.objective.formulas import (
    PARTS,
    SUFFIXES,
    TAKEN,
    Formula,
    Keyword,
    Role,
    Value,
    facts_of,
    keyword_of,
)

_FOLDER: Final = Path(__file__).parents[2] / "functional"
_OF_SAMPLES: Final = ("group", "named", "multi_reward", "agent", "whitening")
"""Files whose functions of rewards return advantages; those of others return returns or
penalties."""
_NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "greedy_rewards": "the reward of a greedy response to each prompt, which no run has",
        "episode_rewards": "returns of the steps of an episode, but a response has one reward",
        "agents": "the agent of each sample and its running baseline",
        "log_ratio": "ratios of the policies, not available when advantages are computed",
        "logprobs": "log-probs before the update, not available when advantages are computed",
        "advantages": "other advantages to start from",
        "noise": "random numbers for each token; take the loss clip_cov, which draws them",
        "weight": "a tensor of weights; take a surrogate that has them",
        "kept": "a mask for each token; take `reject` or `mask_outside`, which compute one",
        "lengths": "lengths; take the advantages opo, which have this baseline",
        "weight_sum": "the sum of the weights over the whole batch, but a loss gets a part",
        "corrections": "several corrections: write them as a list, [{name: ...}, {name: ...}]",
        "components": "several rewards per sample, but a trajectory has their total",
        "token_rewards": "rewards of tokens, but a response has one reward",
    }
)
"""Requirements that no config can provide, by the parameter that shows them."""


@cache
def formulas(role: Role) -> Mapping[str, Formula]:
    """The public functions of a role, by name, in the order of the index."""
    return {one.name: one for one in _all() if one.role is role}


def find_formula(role: Role, name: str) -> Formula | None:
    """The function of this name, with or without the end that its role implies."""
    known = formulas(role)
    return known.get(name) or known.get(f"{name}{SUFFIXES.get(role, '')}")


def known_names(role: Role) -> list[str]:
    """The names of a role that a config may use, without their ends."""
    return [one.short_name for one in formulas(role).values() if not one.refusal]


@cache
def _all() -> tuple[Formula, ...]:
    return tuple(_read())


def _read() -> Iterator[Formula]:
    index = ast.parse((_FOLDER / "__init__.py").read_text(encoding="utf-8"))
    for imported in index.body:
        if not isinstance(imported, ast.ImportFrom) or imported.module is None:
            continue
        room = imported.module.removeprefix("areal_lab.functional.")
        if room == imported.module:
            continue
        file = _FOLDER / f"{room.replace('.', '/')}.py"
        text = file.read_text(encoding="utf-8")
        functions = {
            one.name: one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)
        }
        # `gae` of tokens has its name in a config from `gae_advantages` of responses.
        public = {alias.name for alias in imported.names}
        for name in public:
            if f"{name}{SUFFIXES[Role.ADVANTAGE]}" in public:
                functions.pop(name, None)
        for alias in imported.names:
            if alias.name in functions:
                made = _formula(functions[alias.name], imported.module, text)
                if made is not None:
                    yield made


def _formula(function: ast.FunctionDef, module: str, text: str) -> Formula | None:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [one.arg for one in positional]
    returns = "" if function.returns is None else ast.unparse(function.returns)
    annotations = {
        one.arg: "" if one.annotation is None else ast.unparse(one.annotation)
        for one in (*positional, *arguments.kwonlyargs)
    }
    role = _role(module, returns, names, annotations)
    if role is None:
        return None
    made = returns in PARTS
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    parameters = zip(
        (*positional, *arguments.kwonlyargs),
        (*defaults, *arguments.defaults, *arguments.kw_defaults),
        strict=True,
    )
    taken = () if made else TAKEN[role]
    facts = facts_of(role, makes=made)
    keywords = tuple(
        keyword_of(
            one.arg,
            annotations[one.arg],
            None if default is None else ast.get_source_segment(text, default),
            facts,
        )
        for one, default in parameters
        if one.arg not in taken
    )
    doc = ast.get_docstring(function) or ""
    lacking = [arguments.vararg.arg] if arguments.vararg else []
    if "N R" in annotations.get("rewards", ""):
        lacking.append("components")
    lacking += [k.name for k in keywords if k.name == "weight_sum"]
    lacking += [k.name for k in keywords if k.default is None and not _can_be_given(k)]
    return Formula(
        name=function.name,
        path=f"{module}:{function.name}",
        role=role,
        keywords=keywords,
        makes=made,
        one_old_policy="old_logprobs" in names,
        summary=doc.partition("\n")[0],
        source=_source(doc),
        refusal=_refusal(lacking),
    )


def _can_be_given(keyword: Keyword) -> bool:
    return keyword.filled or keyword.part is not None or keyword.value is not Value.CLOSED


def _refusal(lacking: Iterable[str]) -> str:
    for name in lacking:
        return f"needs {_NEEDS.get(name, f'`{name}`, which the trainer does not have')}"
    return ""


def _role(
    module: str, returns: str, names: Sequence[str], annotations: Mapping[str, str]
) -> Role | None:
    """Role of a signature; None if a config cannot name such a function."""
    role = PARTS.get(returns) or _BY_RESULT.get(returns)
    if role is None and module.endswith(".aggregate"):
        role = Role.AGGREGATE
    if role is None:
        role = next((one for end, one in _BY_FILE.items() if module.endswith(end)), None)
        if role is not None and tuple(names) != TAKEN[role]:
            role = None
    if role is None and ".advantages." in module:
        role = _advantage_role(module, returns, names, annotations)
    if role in (Role.CORRECTION, Role.RATIO, Role.SURROGATE) and returns not in PARTS:
        # Of corrections and ratios, only those that are used as they are.
        most = len(names) if role is Role.SURROGATE else len(TAKEN[role])
        if tuple(names[: len(TAKEN[role])]) != TAKEN[role] or len(names) > most:
            return None
    return role


_BY_RESULT: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "PolicyLossResult": Role.LOSS,
        "ConstrainedLossResult": Role.LOSS,
        "BehaviorWeight": Role.CORRECTION,
        "AnchoredPolicy": Role.RATIO,
        "Surrogate": Role.SURROGATE,
    }
)
_BY_FILE: Final[Mapping[str, Role]] = MappingProxyType(
    {".divergences.kl": Role.DIVERGENCE, ".corrections.sequence": Role.STATISTIC}
)


def _advantage_role(
    module: str, returns: str, names: Sequence[str], annotations: Mapping[str, str]
) -> Role | None:
    if tuple(names) == TAKEN[Role.SCALE]:
        return Role.SCALE
    if annotations.get("groups") == "GroupedRewards":
        return Role.BASELINE
    of_tokens = returns in ("AdvantagesAndReturns", "AgentAdvantages")
    of_samples = module.rpartition(".")[2] in _OF_SAMPLES and returns.startswith("Float")
    is_rule = bool(names) and names[0].endswith("rewards") and (of_tokens or of_samples)
    return Role.ADVANTAGE if is_rule else None


def _source(doc: str) -> str:
    lines = iter(doc.splitlines())
    for line in lines:
        start = line.find("Source: ")
        if start >= 0:
            found = [line[start + len("Source: ") :]]
            for more in lines:
                if not more.strip():
                    break
                found.append(more)
            return " ".join(" ".join(found).split()).removesuffix(".")
    return ""


_TITLES = {
    Role.LOSS: ("Policy losses", "`actor.loss`"),
    Role.ADVANTAGE: ("Advantages", "`actor.advantage`"),
    Role.SURROGATE: ("Surrogates", "`surrogate` of `policy_loss`"),
    Role.RATIO: ("Ratios", "`ratio` of `policy_loss`"),
    Role.CORRECTION: ("Corrections", "`correct` of a loss; a list is applied in order"),
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
    yield from ("| name | keywords and defaults | meaning | source |", "|---|---|---|---|")
    known = formulas(role).values()
    for one in known:
        if not one.refusal:
            cells = (f"`{one.short_name}`", _keywords(one, "`{}`"), one.summary, one.source)
            yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    refused = [one for one in known if one.refusal]
    if refused:
        yield from ("", "These functions of `areal_lab.functional` cannot be used in a config:", "")
        yield from (f"- `{one.short_name}` {_cell(one.refusal)}." for one in refused)


def _keywords(formula: Formula, form: str) -> str:
    """`clip_epsilon=0.2, correct=unbounded`; required ones without a default."""
    given = (
        f"{one.name}={_yaml(one.default)}" if one.default is not None else f"{one.name} (required)"
        for one in formula.settable.values()
    )
    return ", ".join(form.format(one) for one in given)


def _yaml(default: str) -> str:
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
