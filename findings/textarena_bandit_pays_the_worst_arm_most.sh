#!/usr/bin/env bash
# textarena 0.7.4, Bandit-v0: the answer with the best arm gets the lowest reward, 0, and the worst arm
# gets the highest. The last choice is compared with the table of all means instead of the best arm's
# name, so that it is never right, and a wrong choice gets its regret (best mean - chosen mean) as a
# positive reward. A policy that is trained on it learns to choose the worst arm.
#
# Seen (Python 3.11, seed 0 of random, 20 presses of one arm and the same arm as the answer): the order
# of rewards is the reverse of the order of means, and the best arm gets 0.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check textarena==0.7.4
"$folder/venv/bin/python" - <<'PYTHON'
import random

import textarena

found = {}
for arm in ("red", "blue", "green", "yellow", "purple"):
    random.seed(0)  # the game draws its means from it, whatever the seed of reset
    game = textarena.make("Bandit-v0")
    game.reset(num_players=1, seed=0)
    inner = game
    while hasattr(inner, "env"):
        inner = inner.env
    mean = inner.state.game_state["ground_truth"][arm]
    done = False
    while not done:
        done, _ = game.step(f"[{arm}]")
    rewards, _ = game.close()
    found[arm] = (mean, rewards[0])
for arm, (mean, reward) in sorted(found.items(), key=lambda one: -one[1][0]):
    print(f"{arm:8} mean {mean:.2f}  reward of choosing it {reward:.2f}")
by_mean = sorted(found, key=lambda arm: found[arm][0])
by_reward = sorted(found, key=lambda arm: -found[arm][1])
best = found[by_mean[-1]]
if by_mean != by_reward or best[1] != 0.0:
    raise SystemExit("CHANGED: the worst arm no longer pays most")
print("still so: the best arm pays 0, and the worst arm pays most")
PYTHON
