"""Games of TextArena for one player: `{name: textarena, game: GuessTheNumber-v0}`.

Needs `pip install 'areal_lab[textarena]'`. Games for several players are refused: the opponent
would be another model, whose turns are not the policy's. So are the games of `LEFT_OUT`, whose
rewards or seeds are wrong; docs/environments_checked.md has what was checked.
"""

from __future__ import annotations

import logging
import math
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from areal_lab.agents.environments.protocol import Step
from areal_lab.extras import require

require("areal_lab.agents.environments.textarena", "textarena")

import textarena  # noqa: E402 - only if it is there

LEFT_OUT: Final[Mapping[str, str]] = {
    "Bandit": "it pays the regret, so that a worse button gets more",
    "Cryptarithm": "it is one puzzle for all seeds",
    "PegJump": "it is one puzzle for all seeds",
    "TowerOfHanoi": "it is one puzzle for all seeds",
}
"""Games that are refused, by the part of their id before `-v`, with the reason (0.7.4)."""
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Registered with one puzzle. Without a puzzle it makes one from the seed.
    "Countdown": {"numbers": None, "target": None},
}
_RANDOM: Final = threading.Lock()
_ME: Final = 0
_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
_NLTK: Final = re.compile(r"nltk\.download\('([\w.-]+)'\)")

_log = logging.getLogger(__name__)


class Game:
    """One game, seeded with the problem's `seed`, so a group plays the same one.

    Games use Python's global random numbers, whose state is restored after each call. A lock
    separates games of this process, but no other code: threads that use the global numbers during a
    call get the game's and change them. Use a `random.Random` in such threads.

    Args:
        game: id of the game, such as `GuessTheNumber-v0`.
        options: options of the game, instead of those of its id: `{max_number: 9}`.

    Raises:
        ValueError: the game is left out.
    """

    def __init__(self, *, game: str, options: Mapping[str, Any] | None = None) -> None:
        kind = re.split(r"-v\d", game)[0]
        if kind in LEFT_OUT:
            raise ValueError(
                f"the game {game!r} is refused: {LEFT_OUT[kind]} (textarena 0.7.4); choose another"
            )
        self._name = game
        self._options = {**_OPTIONS.get(kind, {}), **(options or {})}
        self._game: Any = None
        self._random = random.getstate()

    @classmethod
    def check(cls, *, game: str, options: Mapping[str, Any] | None = None) -> None:
        """Start a game once; `areal_lab.resolve` calls this."""
        one = cls(game=game, options=options)
        one.reset({"seed": 0})
        one.close()

    def reset(self, data: Mapping[str, Any]) -> str:
        """Return the rules of the game.

        Raises:
            ValueError: the problem has no seed, or the game does not exist, needs something that is
                missing, or has opponents.
        """
        if "seed" not in data:
            raise ValueError("the problem has no field 'seed'; use dataset.type=numbered")
        seed = int(data["seed"])
        with self._own_random():
            random.seed(seed)  # some games make their puzzle before they are seeded
            self._game = _made(self._name, self._options)
            try:
                self._game.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError, OSError) as error:
                raise ValueError(_not_started(self._name, error)) from error
        if not isinstance(self._game.state, textarena.SinglePlayerState):
            # Some games for several players start with one.
            kind = type(self._game.state).__name__
            raise ValueError(_opponents(self._name, f"its state is a {kind}"))
        return self._said()

    def step(self, completion: str) -> Step:
        """Make a move; the last one returns the reward.

        A move that makes the game raise is an invalid move, by the game's own rule: a message, or
        the end with a reward of -1.
        """
        with self._own_random():
            try:
                done, _ = self._game.step(action=completion)
            except Exception as error:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                _log.info("a move raised in %s: %s", self._name, reason)
                self._game.state.set_invalid_move(reason="The action could not be read.")
                done, _ = self._game.state.step()
        if not done:
            return Step(text=self._said())
        rewards, facts = self._game.close()
        if not rewards:
            return Step(done=True)
        return Step(done=True, reward=_reward(rewards[_ME], facts[_ME].get("reason")))

    def close(self) -> None:
        """Drop the game."""
        self._game = None

    def _said(self) -> str:
        """Output of the game since the last call, without the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages or () if sender != _ME)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Swap Python's global random state for that of this game, and restore it afterwards."""
        with _RANDOM:
            ours = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(ours)


def _made(name: str, options: Mapping[str, Any]) -> Any:
    """Create a game without the library's wrappers, which repeat it all in each observation."""
    raw = name if name.endswith("-raw") else f"{name}-raw"
    try:
        return textarena.make(raw, **options)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        needed = f"it needs a newer Python than {version} (textarena 0.7.4: 3.12)"
        raise ValueError(f"the game {name!r} cannot be made: {needed}") from error
    except LookupError as error:
        found = _NLTK.search(str(error))
        needed = (
            f"it needs a list of nltk; run: python -m nltk.downloader {found[1]}" if found else ""
        )
        reason = needed or _line(error)
        raise ValueError(f"the game {name!r} cannot be made: {reason}") from error
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ValueError(f"the game {name!r} cannot be made: {_line(error)}") from error


def _not_started(name: str, error: Exception) -> str:
    """Why a game could not start with one player."""
    if isinstance(error, OSError):
        return f"the game {name!r} cannot be started: {_line(error)} (missing in the package)"
    return _opponents(name, _line(error))


def _opponents(name: str, reason: str) -> str:
    return (
        f"the game {name!r} has opponents, which are not supported ({reason}); choose a game for "
        "one player"
    )


def _line(error: Exception) -> str:
    """The message of an error in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _reward(reward: Any, reason: Any) -> float:
    """The reward as a number. Some games swap it with the reason of an invalid move."""
    if isinstance(reward, str):
        found = _NUMBER.search(reason if isinstance(reason, str) else str(reason))
        reward = float(found[0]) if found else 0.0
    return float(reward) if reward is not None and math.isfinite(reward) else 0.0
