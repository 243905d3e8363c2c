#!/usr/bin/env bash
# math-verify 0.9.0 parses four notations of answers without the part that distinguishes them, so that a
# wrong completion equals the gold answer:
#   - bases: 101 in base 2 equals 101 in base 3 and plain 101, and not 5, which it is;
#   - times and ratios of clock form: 2:30 equals 1:15 (both become 1/15);
#   - the case of symbols: R - r is 0, so that 0 is right where two radii are subtracted;
#   - small decimals: they are compared after rounding to six places, whatever their size, so that
#     0.0000001 equals 0.0000004; the same numbers as fractions or powers of ten differ.
#
# Output seen (2026-11-29, CPython 3.11): the lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    math-verify==0.9.0 latex2sympy2-extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.13.2
"$folder/venv/bin/python" - > "$folder/seen" <<'PYTHON'
from math_verify import parse, verify

PAIRS = (
    *(("101_2", "101_3"), ("101_2", "101"), ("101_2", "5")),
    ("2:30", "1:15"),
    *(("R - r", "0"), ("AB", "ab")),
    *(("0.0000001", "0.0000004"), ("10^{-7}", r"4 \times 10^{-7}")),
)
for gold, answer in PAIRS:
    print(f"{gold} against {answer}: {verify(parse(f'${gold}$'), parse(f'${answer}$'))}")
PYTHON
cat > "$folder/EXPECTED" <<'TEXT'
101_2 against 101_3: True
101_2 against 101: True
101_2 against 5: False
2:30 against 1:15: True
R - r against 0: True
AB against ab: True
0.0000001 against 0.0000004: True
10^{-7} against 4 \times 10^{-7}: False
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: math-verify 0.9.0 loses bases, clock times, case and small decimals"
