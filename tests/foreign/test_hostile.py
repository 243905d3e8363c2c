"""Logs of strangers: mutations, huge values, escapes. Each ends with a run or one error."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_lab.foreign.literal import DEPTH, read_dict
from areal_lab.foreign.quantities import UNREAD, known, number, resolution, seconds, whole_ratio
from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json
from areal_lab.foreign.scan import ROWS_KEPT
from tests.foreign.damage import DAMAGES
from tests.foreign.expected import SPECIMENS
from tests.fuzz import damaged_bytes, refused

LONGEST_S = 20.0
"""CPU seconds of one mutated log of a few kilobytes, on any machine."""


def imported(content: bytes, framework: str = "") -> dict[str, Any]:
    return as_json(read_run([Path("-")], framework=framework, stdin=io.BytesIO(content)))


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]
)
def test_mutations_end_in_a_run_or_one_error(count: int) -> None:
    rng = random.Random(11)
    sources = [path.read_bytes() for path in SPECIMENS]
    changes = list(DAMAGES.values())
    for turn in range(count):
        content = rng.choice(sources)
        if rng.random() < 0.3:
            content = rng.choice(changes)(content.decode()).encode()
        if rng.random() < 0.2:
            other = rng.choice(sources)
            at = rng.randrange(len(content))
            content = content[:at] + other[rng.randrange(len(other)) :] + content[at:]
        for _ in range(rng.randint(1, 6)):
            content = damaged_bytes(rng, content)
        began = time.process_time()
        refused(lambda: json.dumps(imported(content), allow_nan=False))  # noqa: B023  # called at once
        assert time.process_time() - began < LONGEST_S, turn


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': " + "{'a': " * 5000 + "1" + "}" * 5000 + ", 'reward': 1.0}",
        "{'loss': 0.1, 'reward': " + "9" * 100_000 + ", 'step_time': 1e999, 'epoch': 0.1}",
        "{'loss': 0.1, 'reward': " + "(" * 50_000 + "}",
        "{'loss': " + "'" * 100_001,
        "step:1 - " + "timing_s/gen:" * 50_000,
        "step:" + "9" * 5000 + " - timing_s/gen:1.0",
        "step:1 - timing_s/gen:" + "1" * 100_000,
        '{"step": 1, "data": ' + "[" * 100_000,
        "Step 1 | " + "|" * 100_000,
        "Step 1 | Time: " + "1m " * 50_000 + " | Reward: 0.5",
        "=" * 100_000 + " Step 1/2 " + "=" * 100_000,
        "perf 0: {'rollout/response_len/mean': np.float64(" * 2000,
        " iteration 1/ 2 | " + "elapsed time per iteration (ms): 1.0 | " * 5000,
        "│ timeperf/rollout │ " * 20_000,
        "> " * 50_000 + "step:1 - timing_s/gen:1.0",
        "(A pid=1) " * 20_000 + "step:1 - timing_s/gen:1.0",
        "\x1b[" + "3" * 100_000 + "m",
        "_step," * 30_000 + "\n" + "1," * 30_000,
    ],
    ids=lambda line: repr(line[:24]),
)
def test_huge_values_and_deep_nesting_take_seconds_and_no_stack(line: str) -> None:
    began = time.process_time()
    refused(lambda: json.dumps(imported(f"{line}\n{line}\n".encode()), allow_nan=False))
    assert time.process_time() - began < LONGEST_S


def test_huge_numbers_are_missing_and_not_infinite() -> None:
    found = imported(
        b"step:1 - timing_s/gen:1e999 - timing_s/step:-1e999 - critic/score/mean:1.5\n"
    )
    (step,) = found["steps"]
    assert (step["generation_s"], step["step_time_s"], step["reward_mean"]) == (None, None, 1.5)


def test_nothing_of_a_dictionary_is_evaluated() -> None:
    text = (
        "{'completions/mean_length': 5.0, 'loss': __import__('os').getcwd(), "
        "'reward': (lambda: 1)(), 'step_time': 2.5, 'kl': 1+1}"
    )
    found = imported(f"{text}\n".encode())
    (step,) = found["steps"]
    assert step["step_time_s"] == 2.5
    assert step.get("reward_mean") is None
    assert step.get("reference_kl") is None


def test_depth_is_bounded() -> None:
    deep = "{'a': " * (DEPTH + 9) + "1" + "}" * (DEPTH + 9)
    assert read_dict(deep).lost > 0


def test_texts_and_secrets_of_a_configuration_do_not_reach_the_result() -> None:
    log = (
        "(TaskRunner pid=1) {'actor_rollout_ref': {'model': {'path': '/home/jane/Qwen3-4B'},\n"
        "(TaskRunner pid=1)   'key': 'sk-0123'}, 'trainer': {'wandb_key': 'abcdef', 'nnodes': 1,\n"
        "(TaskRunner pid=1)   'n_gpus_per_node': 8}}\n"
        "(TaskRunner pid=1) step:1 - timing_s/gen:1.5 - timing_s/step:2.5\n"
    )
    found = imported(log.encode())
    text = json.dumps(found)
    assert (found["model"], found["gpus"]) == ("Qwen3-4B", 8)
    assert not any(word in text for word in ("jane", "sk-0123", "abcdef"))


def test_a_large_log_is_read_in_bounded_memory() -> None:
    rows = 40
    noise = b"(WorkerDict pid=3) INFO nothing of interest in this line\n" * 4000

    def pieces() -> Iterator[bytes]:
        for step in range(1, rows + 1):
            yield noise
            yield b"step:%d - timing_s/gen:1.5 - timing_s/step:2.5\n" % step

    class Stream(io.RawIOBase):
        largest = 0
        source = pieces()

        def read(self, size: int = -1) -> bytes:
            assert size > 0  # never the whole file
            return next(self.source, b"")

    found = read_run([Path("-")], stdin=Stream())  # type: ignore[arg-type]  # it reads, which is all
    assert len(found.steps) == rows


def test_records_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROWS_KEPT > 10
    monkeypatch.setattr("areal_lab.foreign.scan.ROWS_KEPT", 10)
    log = b"".join(b"step:%d - timing_s/gen:1.5\n" % one for one in range(1, 31))
    found = imported(log)
    assert len(found["steps"]) == 10
    assert found["unread_by_kind"]["records beyond the bound"] == 20


def test_two_frameworks_in_one_log_are_an_error_that_names_them() -> None:
    content = b"".join(
        path.read_bytes() for path in SPECIMENS if path.stem in ("verl_one_step_off", "trl_console")
    )
    with pytest.raises(ValueError, match=r"verl .* and trl|trl .* and verl"):
        imported(content)
    assert imported(content, "trl")["framework"] == "trl"
    assert imported(content, "verl")["framework"] == "verl"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "{'loss': 1.2, 'grad_norm': 0.5, 'mean_token_accuracy': 0.7, 'epoch': 0.1}",
            "fine-tuning",
        ),
        (
            "{'loss': 0.7, 'rewards/chosen': 0.1, 'rewards/margins': 0.1, 'epoch': 0.1}",
            "preference",
        ),
        ("{'eval_loss': 0.7, 'eval_reward': 0.1, 'epoch': 0.1}", "no training step"),
        ("step:1 - train/loss:1.2 - train/lr(1e-3):0.01", "fine-tuning"),
        ("step:0 - val-core/toy/acc/mean@1:0.5", "validations only"),
        (
            " iteration 5/ 200 | elapsed time per iteration (ms): 98.5 | global batch size: 128 | "
            "lm loss: 2.1E+00 |",
            "pretraining",
        ),
        (
            "10:01:00 SUCCESS Step 1 |  58.4s | Loss 1.2030 | LR 1.00e-05 | Throughput 9000 "
            "tokens/s | MFU 20.0% | Peak Mem. 60.0 GiB",
            "fine-tuning",
        ),
        ("wandb: timing_s/step ▁▂▃▅\nwandb: Run summary:\nwandb: timing_s/step 91.2", "No line"),
        ("| metric | run A | run B |\n| timing_s/step | 100 | 80 |", "No line"),
        ("Train epoch [1/1]: 100%|#| 16/16 [00:41<00:00, 2s/it, act_loss=0.1, reward=0.3]", "bars"),
        (
            '{"_wandb": {"runtime": 5}, "_step": 9, "timing_s/step": 4.0, "timing_s/gen": 3}',
            "No line",
        ),
        ("Step,one - critic/score/mean,two - critic/score/mean\n1,0.5,0.6\n", "2 runs"),
        ("", "No line"),
    ],
)
def test_what_is_no_run_is_refused_with_a_reason(log: str, reason: str) -> None:
    found = imported(f"{log}\n".encode())
    assert reason in found["refused"]
    assert found["steps"] == []


def test_numbers_in_all_spellings() -> None:
    assert [
        number(one) for one in ("1e-06", "np.float64(0.5)", "-0.000", "_0.31", "'4.1e+04'")
    ] == [
        1e-06,
        0.5,
        0.0,
        0.31,
        41000.0,
    ]
    missing = (
        "nan",
        "NaN",
        "-nan",
        "None",
        "null",
        "np.float64(nan)",
        "inf",
        "-inf",
        "",
        "No log",
        "1e999",
    )
    assert [number(one) for one in missing] == [None] * len(missing)
    assert all(number(one) is UNREAD for one in ("1.03e", "12abc", "0,31", "1" * 500, [], True))
    assert known("1.03e") is None


def test_durations_and_their_resolution() -> None:
    assert seconds("1m 12s") == (72, 1)
    assert seconds("850ms") == pytest.approx((0.85, 0.001))
    assert seconds("58.4s") == pytest.approx((58.4, 0.1))
    assert seconds("2h 3m") == (7380, 60)
    assert seconds("12") is None


def test_a_whole_quotient_needs_enough_digits() -> None:
    assert whole_ratio("3650", "456") == 8
    assert whole_ratio("20227.16", "1264.20") == 16
    assert whole_ratio("10", "3") is None
    assert whole_ratio("8e2", "1e2") is None  # 7.5 to 8.9... has two whole numbers or none
    assert resolution("12.50") == 0.005
