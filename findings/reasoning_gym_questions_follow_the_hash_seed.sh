#!/usr/bin/env bash
# reasoning-gym 0.1.25, Python 3.11: a data set with a fixed seed has other questions in a process with
# another PYTHONHASHSEED, for some tasks. Python draws that seed at random for each process by default,
# so that a resumed training, or an evaluation in another process, gets other problems than before.
#
# Seen: of isomorphic_strings, polynomial_multiplication and ransom_note the questions of seed 1 differ
# between PYTHONHASHSEED=1 and 2, and are equal for two processes with 1. Those of gcd and leg_counting
# are always equal. isomorphic_strings and ransom_note draw letters from a Python set.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25

cat > "$folder/questions.py" <<'PYTHON'
import hashlib
import sys

import reasoning_gym

for task in sys.argv[1:]:
    data = reasoning_gym.create_dataset(task, size=5, seed=1)
    text = "\n".join(one["question"] for one in data)
    print(task, hashlib.sha256(text.encode()).hexdigest()[:12])
PYTHON

tasks=(isomorphic_strings polynomial_multiplication ransom_note gcd leg_counting)
asked() { PYTHONHASHSEED=$1 "$folder/venv/bin/python" "$folder/questions.py" "${tasks[@]}"; }
first=$(asked 1) again=$(asked 1) other=$(asked 2)
echo "$first"
[ "$first" = "$again" ] || { echo "CHANGED: one hash seed gives two sets of questions"; exit 1; }
changed=$(comm -23 <(sort <<<"$first") <(sort <<<"$other") | cut -d ' ' -f 1 | xargs)
echo "questions that changed with PYTHONHASHSEED: $changed"
if [ "$changed" != "isomorphic_strings polynomial_multiplication ransom_note" ]; then
	echo "CHANGED: these were isomorphic_strings polynomial_multiplication ransom_note"
	exit 1
fi
