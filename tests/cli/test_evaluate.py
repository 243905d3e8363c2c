"""`areal-lab eval`, called as by a user: a real engine and a real model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *arguments])


def fails_on_even_sums(completion: str, example: dict[str, str], *, sandbox: str) -> float:
    if int(example["answer"]) % 2 == 0:
        raise RuntimeError(f"an even sum, and the sandbox is {sandbox}")
    return float(completion.strip() == example["answer"])


def test_sampled_responses_with_rewards_that_fail(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call(
        *("Adder-75K", "tiny", "--samples", "3", "--k", "2", "--limit", "12", "--seed", "5"),
        *("--out", str(out), f"reward.fn={__name__}:fails_on_even_sums", "rollout.threads=1"),
        "reward.sandbox=unsafe",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(out)
    found = json.loads((out / "results.json").read_text())
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert sorted((one["problem"], one["sample"]) for one in lines) == [
        (problem, sample) for problem in range(12) for sample in range(3)
    ]
    failed = [one for one in lines if one["status"] == "error"]
    assert failed
    assert all(one["reward"] is None and "the sandbox is unsafe" in one["detail"] for one in failed)
    assert found["rewards"] == {"ok": 36 - len(failed), "error": len(failed)}
    assert f"{len(failed)} error" in result.stdout
    rewards = {one["problem"]: [] for one in lines if one["status"] == "ok"}
    for one in lines:
        if one["status"] == "ok":
            rewards[one["problem"]].append(one["reward"])
    of_problems = [1 - (len(r) - sum(r)) * (len(r) - sum(r) - 1) / 6 for r in rewards.values()]
    assert found["pass_at"]["2"]["mean"] == pytest.approx(fmean(of_problems))
    assert found["temperature"] == 1
    assert found["seed"] == 5


def test_a_greedy_response_and_json(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "12+34=", "answer": "#### 46"}) + "\n")
    result = call(
        *("Adder-75K", "gsm8k", f"dataset.path={file}", "dataset.prompt_template={prompt} "),
        *("gconfig.max_new_tokens=4", "rollout.threads=1", "--json"),
        *("--out", str(tmp_path / "out")),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["temperature"], found["samples"], found["problems"]) == (0, 1, 1)
    assert found["reward_fn"] == "areal_lab.rewards.exact:gsm8k"
    assert list(found["pass_at"]) == ["1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("tiny", "--samples", "2", "--temperature", "0"),
            "samples at temperature 0 are all equal",
        ),
        (("tiny", "--k", "2"), "k is 2, but must be from 1 to samples=1"),
        (("tiny", "--out", "."), ". exists; name a new folder"),
        (("gsm8k",), "dataset.path is empty, but gsm8k needs a file"),
        (("gsm8k", "dataset.path=none.jsonl"), "none.jsonl does not exist"),
        (("tiny", "rollout.addresses=[http://localhost:1]"), "starts its own servers"),
        (("tiny", "gconfig.max_new_tokens=100000"), "the model's context"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("Adder-75K", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "no-model").symlink_to("no-model")
    for model in ("no-model", str(tmp_path / "no-model")):
        result = call(model, "tiny", "--out", str(tmp_path / "out"))
        assert result.exit_code == 2
        assert "no-model" in result.stderr
        assert "Traceback" not in result.stderr
