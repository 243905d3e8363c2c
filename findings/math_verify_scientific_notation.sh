#!/usr/bin/env bash
# math-verify 0.9.0 does not read numbers in scientific notation: in LaTeX, `1e-3` is the
# expression E - 3 (Euler's number), and in plain text it is 1. So the correct completions
# "$1e-3$" and "1e-3" score 0 against the gold answer 0.001, and "1e-3" scores 1 against 1.
# A reward built on it punishes models that write small numbers as a calculator prints them.
#
# Output seen (2026-11-27, CPython 3.11): the five lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    math-verify==0.9.0 latex2sympy2-extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.13.2
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
from math_verify import parse, verify

print("latex", parse("$1e-3$"))
print("plain", parse("The result is 1e-3"))
print("0.001 against $1e-3$", verify(parse("$0.001$"), parse("$1e-3$")))
print("0.001 against 1e-3", verify(parse("$0.001$"), parse("The result is 1e-3")))
print("1 against 1e-3", verify(parse("$1$"), parse("The result is 1e-3")))
PYTHON
cat > "$folder/EXPECTED" <<'TEXT'
latex [-3 + 1*E, '1e-3']
plain [1, '1']
0.001 against $1e-3$ False
0.001 against 1e-3 False
1 against 1e-3 True
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: math-verify 0.9.0 reads no scientific notation"
