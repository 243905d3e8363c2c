#!/usr/bin/env bash
# reasoning-gym 0.1.25, game_of_life_halting: every text that is not empty scores 1.0. Gold answers are
# the strings "True" and "False", and the score compares bool(answer) with bool(gold): both are True
# for any string but the empty one. A policy that repeats one word gets the highest mean reward.
#
# Seen (Python 3.11): of 40 problems, 18 with the gold answer "True" and 22 with "False", each of the
# answers "True", "False" and "perhaps" scores 1.0 for all 40.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
"$folder/venv/bin/python" - <<'PYTHON'
from collections import Counter

import reasoning_gym

data = reasoning_gym.create_dataset("game_of_life_halting", size=40, seed=1)
print("gold answers", dict(Counter(str(one["answer"]) for one in data)))
means = {}
for answer in ("True", "False", "perhaps"):
    means[answer] = sum(data.score_answer(answer, one) for one in data) / len(data)
print("mean score of one answer to all problems", means)
if set(means.values()) != {1.0}:
    raise SystemExit("CHANGED: the answers no longer score 1.0 everywhere")
print("still so: any text scores 1.0")
PYTHON
