#!/usr/bin/env bash
# tinker-cookbook 0.6.1, the grader of its recipe for mathematics: names of units and times are taken
# out of both answers, also out of the middle of words, so an answer in another unit is right. A
# percent sign is taken off without dividing, so 50 is 50 % and 0.5 is not.
#
# Seen (Python 3.11), answer and gold answer: "2 hours" and "2 minutes" right, "5 cm" and "5 inches"
# right, "sunday" and "sun" right, "50" and "50\%" right, "0.5" and "50\%" wrong, "5 kg" and "5 g" wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# The grader is one file that imports sympy and pylatexenc; the rest of the package is not loaded.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sympy==1.14.0 pylatexenc==2.10
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
cat > "$folder/units.py" <<'PYTHON'
import runpy
import sysconfig

place = "tinker_cookbook/recipes/math_rl/math_grading.py"
grade = runpy.run_path(f"{sysconfig.get_path('purelib')}/{place}")["grade_answer"]
pairs = (
    ("2 hours", "2 minutes"),
    ("5 cm", "5 inches"),
    ("sunday", "sun"),
    ("50", "50\\%"),
    ("0.5", "50\\%"),
    ("5 kg", "5 g"),
)
for answer, gold in pairs:
    print(answer, "|", gold, "|", grade(answer, gold))
PYTHON
"$folder/venv/bin/python" "$folder/units.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
2 hours | 2 minutes | True
5 cm | 5 inches | True
sunday | sun | True
50 | 50\% | True
0.5 | 50\% | False
5 kg | 5 g | False
SEEN
echo "as stated: an answer in another unit is graded as right"
