#!/usr/bin/env bash
# The interpreter of triton 3.6.0 (TRITON_INTERPRET=1, for tests of kernels without a GPU) keeps
# bfloat16 numbers in arrays of uint16, and `tl.dot` multiplies these bit patterns as integers. It
# raises no error and returns numbers near 1e9 where the products are near 1; float32 is right. A
# test of a bfloat16 kernel on a CPU therefore fails for a correct kernel, unless operands are
# converted to float32 before the product.
#
# Output seen (2026-11-28, CPython 3.11): the two lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 triton==3.6.0 numpy==2.4.6
cat > "$folder/product.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


for dtype in (torch.float32, torch.bfloat16):
    ones = torch.ones(16, 16, dtype=dtype)
    out = torch.zeros(16, 16)
    product[(1,)](ones, ones, out, N=16)
    print(dtype, "right" if (out == 16).all() else "wrong, above 1e9" if out.min() > 1e9 else out)
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/product.py" > "$folder/seen"
cat > "$folder/EXPECTED" <<'TEXT'
torch.float32 right
torch.bfloat16 wrong, above 1e9
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: triton 3.6.0 multiplies bit patterns of bfloat16 in its interpreter"
