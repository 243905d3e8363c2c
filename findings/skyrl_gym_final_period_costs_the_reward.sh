#!/usr/bin/env bash
# skyrl-gym 0.4.0: a right answer to GSM8K that ends its sentence with a period has reward 0, because
# the period is taken as a part of the number and the texts are compared. A dollar sign is taken off
# the number, but no text with one is ever found. With two answers the first one counts. The same
# period costs 2 points in the environment of AIME (-1 instead of 1).
#
# Seen (Python 3.11), gold answer 18: "#### 18" 1.0, "#### 18." 0.0, "#### 18.0" 0.0, "#### $18" 0;
# "#### 18" before "#### 19" 1.0, after it 0.0. Gold answer 73: "Answer: 73" 1.0, "Answer: 73." -1.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check skyrl-gym==0.4.0
cat > "$folder/period.py" <<'PYTHON'
import skyrl_gym


def reward(name, gold, text):
    spec = {"ground_truth": gold, "method": "rule"}
    extras = {"reward_spec": spec, "reward_model": spec}
    env = skyrl_gym.make(name, extras=extras)
    env.init([{"role": "user", "content": "?"}])
    return float(env.step(text)["reward"])


for text in ("18", "18.", "18.0", "$18", "18 ... #### 19", "19 ... #### 18"):
    print("gsm8k", text, reward("gsm8k", "18", f"#### {text}"))
for text in ("73", "73."):
    print("aime", text, reward("aime", "73", f"Answer: {text}"))
PYTHON
"$folder/venv/bin/python" "$folder/period.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
gsm8k 18 1.0
gsm8k 18. 0.0
gsm8k 18.0 0.0
gsm8k $18 0.0
gsm8k 18 ... #### 19 1.0
gsm8k 19 ... #### 18 0.0
aime 73 1.0
aime 73. -1.0
SEEN
echo "as stated: a final period costs the reward"
