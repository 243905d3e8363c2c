"""The program of a day on a GPU: each part measures, and what fails is one line."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_lab.training.step import train_batch
from simulator.catalogue.models import find_model
from tests.training.tiny import learner_for, save_model
from tools.gpu_day.__main__ import PARTS, main
from tools.gpu_day.record import Day, DeviceLost, host_waits
from tools.gpu_day.workload import SHAPES, config_of, random_batch, step_flops

CPU = torch.device("cpu")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def day(**changes: Any) -> Day:
    return Day("facts", **{"device": CPU, "tiny": True, "budget_s": 60.0, **changes})


@pytest.mark.parametrize("part", PARTS)
def test_each_part_measures(
    part: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part, "--device", device.type, "--tiny", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert (tmp_path / f"{part}.jsonl").read_text() == shown.out
    *found, end = lines(shown.out)
    assert {one["part"] for one in (*found, end)} == {part}
    assert end["fact"] == "end"
    assert (end["facts"], end["failed"], end["skipped"]) == (len(found), 0, 0)
    assert all(one.get("ok", True) for one in found)
    assert len(shown.err.splitlines()) == len(found), "one line of progress before each check"


def test_what_fails_is_named_and_the_part_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> dict[str, Any]:
        raise TypeError("unexpected\n keyword")

    told = io.StringIO()
    part = day(out=told)
    part.check("first", fails, rows=3)
    part.check("second", lambda: {"seconds": 1.0})
    first, second = lines(told.getvalue())
    assert told.getvalue() == capsys.readouterr().out
    assert (first["fact"], first["rows"], second["seconds"]) == ("first", 3, 1.0)
    assert first["failed"] == "TypeError: unexpected keyword"
    assert first["where"].startswith("tests/gpu/test_day.py:")
    assert (part.facts, part.failed, part.skipped) == (1, 1, 0)


def test_checks_beyond_the_budget_are_skipped_and_counted() -> None:
    told = io.StringIO()
    part = day(budget_s=-1.0, out=told)
    part.check("first", lambda: {"seconds": 1.0}, rows=3)
    assert lines(told.getvalue())[0]["skipped"] == "budget of -1 s"
    assert (part.facts, part.failed, part.skipped) == (0, 0, 1)


def test_a_failure_gives_the_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.gpu_day.hardware._software", lambda: 1 / 0)
    assert main(["facts", "--device", "cpu"]) == 1
    *_, end = lines(capsys.readouterr().out)
    assert (end["facts"], end["failed"]) == (1, 1)


def test_a_lost_device_ends_the_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(_: Day) -> None:
        raise DeviceLost("RuntimeError: CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("tools.gpu_day.__main__.PARTS", {"facts": lost})
    assert main(["facts", "--device", "cpu"]) == 1
    [end] = lines(capsys.readouterr().out)
    assert "illegal memory access" in end["device_lost"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["traim", "--device", "cpu"], "'traim' is no part; known are facts, parity, kernels"),
        (["facts", "--device", "cpu", "--budget", "0"], "--budget is 0, but must be > 0 seconds"),
        (["facts", "--device", "meta"], "--device is meta, but must be cuda or cpu"),
        pytest.param(
            ["facts"],
            "--device cpu --tiny",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_waits_are_listed_by_the_line_of_this_project() -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with host_waits() as found:
            at = sys._getframe().f_lineno + 1
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert found == [f"tests/gpu/test_day.py:{at}", f"tests/gpu/test_day.py:{at + 2}"]
    assert [str(one.message) for one in others] == ["something else"]


def test_flops_are_those_of_the_products(tmp_path: Path) -> None:
    """Those of the layers as torch counts them; it does not see those of the head and of attention,
    which have a size that the head can count."""
    learner = learner_for(save_model(tmp_path / "model"), max_tokens_per_mb=4096)
    request = random_batch(
        1, vocabulary=97, groups=2, samples=2, prompt_tokens=60, response_tokens=lambda _: 4
    )
    with FlopCounterMode(display=False) as counter:
        outcome = train_batch(learner, request)
    assert outcome.metrics["packed_tokens"] == 2 * (60 + 2 * 3), "each prompt once"
    head = 3 * 2 * 97 * 32 * (4 * 4)
    pairs = 2 * (60 * 61 / 2 + 2 * (3 * 60 + 3 * 4 / 2))
    attention = 3 * pairs * learner.cost.attention_flops_per_pair
    layers = step_flops(learner, request) - head - attention
    # Weights of norms, which are no products, are counted with the others.
    assert counter.get_total_flops() == pytest.approx(layers, rel=0.01)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_shapes_are_those_that_the_simulator_knows(name: str) -> None:
    config = config_of(name)
    known = find_model(name)
    assert (known.layers, known.hidden, known.heads, known.kv_heads) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert (known.intermediate, known.vocabulary) == (config.intermediate_size, config.vocab_size)
