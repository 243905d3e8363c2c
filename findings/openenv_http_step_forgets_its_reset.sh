#!/usr/bin/env bash
# openenv 0.10.0: a server of create_app makes a new environment for every HTTP request. POST /step is
# judged by an environment that was never reset, with status 200 and a reward, so that a client of the
# HTTP routes trains on rewards of a state that no one has seen. The WebSocket /ws keeps its environment.
# There, a step after the end of an episode is served, too, and pays its reward again.
#
# Seen (Python 3.11, an environment whose reset sets the secret 7, and 0 before): after POST /reset, the
# right answer 7 gets reward 0.0 and the answer 0 gets 1.0, from two more environments. Over /ws, 7 gets
# 1.0 with done=true, and 7 once more gets 1.0 again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openenv==0.10.0 fastapi==0.165.0 starlette==1.10.0
"$folder/venv/bin/python" - <<'PYTHON'
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State
from starlette.testclient import TestClient


class Guess(Action):
    number: int


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    made = 0

    def __init__(self):
        super().__init__()
        Game.made += 1
        self.secret, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, **_):
        self.secret, self.steps = 7, 0
        return Observation(done=False, reward=None)

    def step(self, action, timeout_s=None, **_):
        self.steps += 1
        right = action.number == self.secret
        return Observation(done=right, reward=float(right))

    @property
    def state(self):
        return State(episode_id="one", step_count=self.steps)


app = create_app(Game, Guess, Observation, env_name="game", max_concurrent_envs=2)
with TestClient(app) as client:
    client.post("/reset", json={})
    http = [client.post("/step", json={"action": {"number": n}}).json()["reward"] for n in (7, 0)]
    made = Game.made
    with client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", "data": {}})
        socket.receive_json()
        kept = []
        for _ in range(2):
            socket.send_json({"type": "step", "data": {"number": 7}})
            kept.append(socket.receive_json()["data"]["reward"])
print(f"HTTP: rewards of 7 and 0 are {http}, from {made} environments; WebSocket: 7 twice pays {kept}")
if (http, made, kept) != ([0.0, 1.0], 3, [1.0, 1.0]):
    raise SystemExit("CHANGED: these were [0.0, 1.0], 3 and [1.0, 1.0]")
print("still so: HTTP steps are judged by environments that were never reset")
PYTHON
