"""What the CPU is, and the compute type that follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_lab.host.cpu import native_bfloat16, processor_name
from areal_lab.models import dtypes
from areal_lab.models.dtypes import compute_dtype


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx512f amx_bf16", True),
        ("flags\t\t: fpu avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("", False),
    ],
)
def test_bfloat16_is_native_where_the_cpu_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, native: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A: B 3000\n{line}\n")
    assert native_bfloat16(cpuinfo) == native
    assert processor_name(cpuinfo) == "A: B 3000"
    monkeypatch.setattr(dtypes, "native_bfloat16", lambda: native)
    assert compute_dtype("auto") == (torch.bfloat16 if native else torch.float32)


def test_a_named_type_is_taken_and_an_unknown_one_refused() -> None:
    assert compute_dtype("float32") is torch.float32
    assert compute_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="'float16', but must be auto, float32 or bfloat16"):
        compute_dtype("float16")


def test_a_system_that_tells_nothing_has_a_name_all_the_same(tmp_path: Path) -> None:
    assert processor_name(tmp_path / "none")
    assert not native_bfloat16(tmp_path / "none")
