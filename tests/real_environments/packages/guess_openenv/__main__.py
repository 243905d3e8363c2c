"""Serve the environment with the real openenv.

python -m guess_openenv PORT SESSIONS
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """The number; one that is negative is an error of the environment."""

    guess: int


class Said(Observation):
    """The text that the player reads."""

    message: str = ""


class Numbers(Environment):
    """A right number gets 1, another one -0.25; the third one is the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = self._guesses = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Said:
        del episode_id
        self._number, self._guesses = (seed or 0) % 10, 0
        return Said(message="A number from 0 to 9? ")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        del timeout_s
        if action.guess < 0:
            raise RuntimeError("the numbers are lost")
        self._guesses += 1
        right = action.guess == self._number
        done = right or self._guesses == 3
        return Said(
            message="right" if right else "wrong", reward=1.0 if right else -0.25, done=done
        )

    @property
    def state(self) -> State:
        """Number of guesses."""
        return State(step_count=self._guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Said, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
