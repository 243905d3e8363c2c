"""What a GPU machine lacks: needs, minus what is there, in versions that are tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tools import gpu_pack
from tools.gpu_pack import Need, check_size, missing, needed, own_requirements, pins, tree_bytes

ROOT = Path(__file__).parents[2]


def test_what_is_not_there_is_missing_and_what_is_too_old() -> None:
    needs = {
        "absent": Need(),
        "there": Need(SpecifierSet(">=2")),
        "old": Need(SpecifierSet(">=2,<4")),
        "unknown": Need(SpecifierSet(">=2")),
    }
    has = {"there": "2.1", "old": "1.9", "unknown": "", "other": "1"}
    assert missing(needs, has) == ["absent", "old"]


def test_lists_may_have_versions_and_comments() -> None:
    assert pins("# a\nJinja2==3.1.6\n\ntyping_inspection\n") == {
        "jinja2": "3.1.6",
        "typing-inspection": "",
    }


def test_needs_are_followed_with_their_extras_and_markers() -> None:
    found = needed(["fastapi>=0.115", "peft"])
    assert {"starlette", "pydantic", "pydantic-core", "anyio", "torch"} <= set(found)
    assert "colorama" not in found, "for Windows only"
    assert found["peft"].needs_torch
    assert found["torch"].needs_torch
    assert not found["fastapi"].needs_torch
    assert not found["numpy"].needs_torch


def test_the_pack_has_what_was_missing_at_a_rehearsal() -> None:
    """The 22 packages of an installation by hand in Python 3.12, but for pip's own numbers."""
    there = pins(gpu_pack.IMAGE.read_text(encoding="utf-8"))
    names = missing(needed(own_requirements()), there)
    by_hand = {
        *("pydantic-core", "beartype", "datasets", "httptools", "pydantic", "omegaconf"),
        *("latex2sympy2-extended", "math-verify", "fastapi", "multiprocess"),
        *("antlr4-python3-runtime", "dill", "gguf", "httpx2", "uvicorn", "httpcore2"),
        *("starlette", "opentelemetry-api", "simpy", "truststore", "annotated-types"),
    }
    assert by_hand <= set(names)
    assert not {"torch", "numpy", "pytest", "triton"} & set(names)
    versions = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert all(versions.get(name) for name in names)


def test_a_pack_that_is_too_large_is_refused() -> None:
    check_size(20 << 20, 44 << 20)
    with pytest.raises(ValueError, match=r"tree has 20.0 MiB and the wheels 45.0, together more"):
        check_size(20 << 20, 45 << 20)


def test_the_tree_leaves_room_for_the_wheels() -> None:
    assert 1 << 20 < tree_bytes() < 40 << 20


def test_a_package_without_a_tested_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"constraints.txt has no version of simpy, which"):
        gpu_pack.download(["fastapi", "simpy"], {"fastapi": "1"}, tmp_path)


def test_only_the_list_is_printed_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has = tmp_path / "has.txt"
    has.write_text("\n".join(f"{name}==0" for name in needed(own_requirements())))
    assert gpu_pack.main(["--list", "--has", str(has), "--to", str(tmp_path / "w")]) == 0
    shown = capsys.readouterr().out
    assert "transformers 0 is there, but >=5.18 is needed" in shown
    assert not (tmp_path / "w").exists()
    assert gpu_pack.main(["--list", "--has", str(tmp_path / "none")]) == 1
