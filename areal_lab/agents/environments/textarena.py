"""Games of TextArena for one player: `{name: textarena, game: GuessTheNumber-v0}`.

Needs `pip install 'areal_lab[textarena]'`. Games for two or more players are refused: an opponent
would have to be another model, and its turns are not the policy's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from areal_lab.agents.environments.protocol import Step
from areal_lab.extras import require

require("areal_lab.agents.environments.textarena", "textarena")

import textarena  # noqa: E402 - only if it is there

_RANDOM: Final = threading.Lock()
_ME: Final = 0


class Game:
    """One game; the problem's `seed` is that of the game, so a group plays the same one.

    Games draw from Python's global random numbers, which are put back after each call. A lock keeps
    games of this process apart, and nothing else: other threads that draw from the global numbers
    during a call of a game get the game's, and change it. Draw from a `random.Random` there.

    Args:
        game: its id, as `GuessTheNumber-v0`.
        options: of the game, instead of those of its id: `{max_number: 9}`.

    Raises:
        ValueError: there is no such game.
    """

    def __init__(self, *, game: str, options: Mapping[str, Any] | None = None) -> None:
        # Without the library's wrappers: they repeat the whole game in each observation.
        name = game if game.endswith("-raw") else f"{game}-raw"
        try:
            self._game = textarena.make(name, **(options or {}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the game {game!r} cannot be made: {error}") from error
        self._random = random.getstate()

    @classmethod
    def check(cls, *, game: str, options: Mapping[str, Any] | None = None) -> None:
        """Begin a game; preflight does.

        Raises:
            ValueError: in one line: there is no such game, or it needs opponents.
        """
        one = cls(game=game, options=options)
        try:
            one.reset({"seed": 0})
        except AssertionError as error:
            raise ValueError(
                f"the game {game!r} has opponents, which are not supported ({error}); choose a "
                "game for one player"
            ) from error
        one.close()

    def reset(self, data: Mapping[str, Any]) -> str:
        """The rules of the game.

        Raises:
            ValueError: the problem has no seed.
        """
        if "seed" not in data:
            raise ValueError("the problem has no field 'seed'; use dataset.type=numbered")
        with self._own_random():
            self._game.reset(num_players=1, seed=int(data["seed"]))
        return self._said()

    def step(self, completion: str) -> Step:
        """Make a move; the reward comes with the last one."""
        with self._own_random():
            done, _ = self._game.step(action=completion)
        if not done:
            return Step(text=self._said())
        rewards, _ = self._game.close()
        return Step(done=True, reward=float(rewards[_ME]) if rewards else None)

    def close(self) -> None:
        """Forget the game."""
        self._game = None

    def _said(self) -> str:
        """What the game said since, without the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages or () if sender != _ME)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Python's global random numbers are this game's, and ours afterwards."""
        with _RANDOM:
            ours = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(ours)
