"""Triton kernels without a GPU: in its interpreter, and compiled ahead for an H100."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def require_interpreter() -> None:
    """Skip the test unless kernels run in Triton's interpreter, on tensors of the CPU."""
    triton = pytest.importorskip("triton", reason="only the CUDA builds of torch bring Triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton reads TRITON_INTERPRET=1 when it is loaded; make test-oldest sets it")
    _multiply_bfloat16()


def _multiply_bfloat16() -> None:
    """Make the interpreter multiply bfloat16 numbers; it multiplies their bits as integers.

    Triton 3.6 keeps bfloat16 in arrays of uint16, which `create_dot` gives to `numpy.matmul`.
    """
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot
    if getattr(original, "multiplies_bfloat16", False):
        return

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original(self, widened(a), widened(b), *others)

    create_dot.multiplies_bfloat16 = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_dot = create_dot


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a program of a kernel needs on an H100."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Memory for registers: stack frame, stores and loads."""
    shared_bytes: int
    narrow: int
    """Vector loads and stores of less than 16 bytes."""


def compiled_for_h100(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Compiled:
    """Compile a kernel; in a process without TRITON_INTERPRET.

    Args:
        types: of the arguments that are no constants. Pointers, and integers that are not in the
            kernel's `do_not_specialize`, are multiples of 16.
        constants: None for a pointer that this variant does not have.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        signature[argument] = "constexpr" if argument in constants else types[argument]
        any_number = argument in (kernel.do_not_specialize or ())
        if signature[argument].startswith(("*", "i")) and not any_number:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(text)
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        target = re.findall(r"\.target (\w+)", text)[0]
        said = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target}", file, "-o", Path(folder, "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    vectors = re.findall(r"(?:ld|st)\.global\S*\.(v\d)\.(b\d+)", text)
    return Compiled(
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", said))),
        shared_bytes=compiled.metadata.shared,
        narrow=sum(int(count[1:]) * int(kind[1:]) < 128 for count, kind in vectors),
    )


def lines_of(module: str, cache: Path) -> list[str]:
    """Run a module of tests that compiles kernels; the lines that it prints."""
    pytest.importorskip("triton", reason="only the CUDA builds of torch bring Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[1],
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()
