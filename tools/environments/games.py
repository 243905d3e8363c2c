"""Check games of TextArena: which can be played, what a constant answer gets, what the winner gets.

Every game is played through the product's adapter, so that its corrections count.
"""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from areal_lab.agents.environments.textarena import Game

SEEDS: Final = 5
_MOVES: Final = 40
_BUDGET_S: Final = 30
"""Time for one game; above it the rest is not measured."""
_CONSTANTS: Final = (
    *("", "hello", "[0]", "[1]", "[2]", "[5]", "[10]", "[A]", "[E]", "[up]", "[down]", "[left]"),
    *("[right]", "[yes]", "[no]", "[0 0]", "[1 1]", "[0 1]", "[1 1 1]", "[0 1 +]", "[0 1 *]"),
    *("[1 2 3 4]", "[1 1 2 2]", "[accept]", "[continue]", "[stand]", "[hit]", "[reveal 0 0]"),
    *(
        "[A B]",
        "[A C]",
        "[crane]",
        "[0 1 2]",
        "[h 0 0]",
        "[v 0 0]",
        "[check]",
        "[9" + "9" * 5000 + "]",
    ),
)
_SHORT: Final = ("[0]", "[5]", "[0 0]", "[1 2 3 4]", "[right]")
"""Answers that some games respond to by what is hidden."""


def _secretary(game: Any) -> list[str]:
    values = game.state.game_state["draws"]
    return ["[continue]"] * values.index(max(values)) + ["[accept]"]


_WINNERS: Final[Mapping[str, Callable[[Any], Sequence[str]]]] = {
    "GuessTheNumber": lambda game: [f"[{game.game_number}]"],
    "Hangman": lambda game: [f"[{game.state.game_state['target_word']}]"],
    "Mastermind": lambda game: [f"[{' '.join(map(str, game.state.game_state['secret_code']))}]"],
    "Secretary": _secretary,
    "ThreeCardMonte": lambda game: [f"[{game.ball_pos}]"],
    "Wordle": lambda game: [f"[{game.state.game_state['secret_word']}]"],
}
"""Moves of a player who sees what is hidden, by the kind of game."""


class _Late(Exception):
    """A game took too long."""


def names() -> list[str]:
    """All games of the installed package."""
    from textarena.envs.registration import ENV_REGISTRY

    return sorted(name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw"))


def digests(games: Sequence[str]) -> dict[str, str]:
    """Digest of some plays of each game that can be played, as they are in this process."""
    found = {}
    for name in games:
        try:
            with_limit(partial(Game.check, game=name))
            plays = repr(with_limit(partial(_plays, name)))
        except (ValueError, _Late):
            continue
        found[name] = hashlib.sha256(plays.encode()).hexdigest()
    return found


def check(games: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and facts of each game."""
    for name in games:
        try:
            with_limit(partial(Game.check, game=name))
        except ValueError as error:
            # Without the folder of the package.
            yield name, {"refused": re.sub(r"/\S*?/(?=textarena/)", "", str(error))}
            continue
        except _Late:
            yield name, {"late": True}
            continue
        yield name, _facts(name)


def _facts(name: str) -> dict[str, Any]:
    started_s = time.monotonic()
    facts: dict[str, Any] = {"late": False, "constant": None, "constant_answer": "", "winner": None}
    try:
        plays = with_limit(lambda: _plays(name))
        facts["different"] = max(len(set(seeds)) for seeds in plays)
        if winner := _WINNERS.get(name.split("-v", maxsplit=1)[0]):
            won = with_limit(lambda: [_won(name, winner, seed) for seed in range(SEEDS)])
            facts["winner"] = min(reward for reward, _ in won)
            facts["different"] = max(facts["different"], len({moves for _, moves in won}))
        for constant in _CONSTANTS:
            rewards = with_limit(partial(_rewards, name, [constant] * _MOVES))
            mean = sum(rewards) / SEEDS
            if facts["constant"] is None or mean > facts["constant"]:
                facts["constant"], facts["constant_answer"] = round(mean, 3), constant[:20]
            if time.monotonic() - started_s > _BUDGET_S:
                facts["late"] = True
                break
    except _Late:
        facts["late"] = True
    return facts


def _plays(name: str) -> list[list[str]]:
    """What a game says to some constant answers, one list of seeds for each."""
    return [[_played(name, seed, [one] * 3)[1] for seed in range(SEEDS)] for one in _SHORT]


def _rewards(name: str, moves: Sequence[str]) -> list[float]:
    return [_played(name, seed, moves)[0] for seed in range(SEEDS)]


def _won(name: str, winner: Callable[[Any], Sequence[str]], seed: int) -> tuple[float, str]:
    """Reward and moves of a player who sees what is hidden."""
    game = Game(game=name)
    game.reset({"seed": seed})
    moves = winner(game._game)
    return _moves(game, moves)[0], " ".join(moves)


def _played(name: str, seed: int, moves: Sequence[str]) -> tuple[float, str]:
    """Reward of some moves (0 if the game is not over), and all that the game said."""
    game = Game(game=name)
    first = game.reset({"seed": seed})
    reward, said = _moves(game, moves)
    return reward, first + said


def _moves(game: Game, moves: Sequence[str]) -> tuple[float, str]:
    said = ""
    for move in moves:
        step = game.step(move)
        said += step.text
        if step.done:
            return step.reward or 0.0, said
    return 0.0, said


def with_limit(function: Callable[[], Any]) -> Any:
    """Call a function within the budget; generators of some games search without an end."""

    def late(*_: object) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(_BUDGET_S)
    try:
        return function()
    finally:
        signal.alarm(0)
