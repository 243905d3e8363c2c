"""trajectories/ written and read back: the same tokens, texts and rewards, in old files too."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.functional import anchored_at_behavior, decoupled_ppo, ppo
from areal_lab.runlog.folder import RunFolder, SampleText
from areal_lab.runlog.token_columns import Tokens, clipped_by_lag
from areal_lab.runlog.token_files import read_samples
from tests.data.byte_tokenizer import END, byte_tokenizer
from tests.training.tiny import random_batch

CODEC = TextCodec(byte_tokenizer())
TEXTS = st.text("aé€😀 \n", min_size=1, max_size=12)


def written(
    folder: Path, step: int, trajectories: tuple[Trajectory, ...], prompt: str = "2 + 2 ="
) -> None:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    texts = []
    for one in trajectories:
        completion = CODEC.decode(one.response_tokens)
        texts.append(
            SampleText(prompt, completion, CODEC.characters(one.response_tokens, completion))
        )
    RunFolder(folder).write_trajectories(step, trajectories, texts, special=CODEC.special_tokens)


def with_text(text: str, *, cuts: list[int], version: int = 3) -> Trajectory:
    """One sample: the bytes of a text and an end token, in segments that end at `cuts`."""
    tokens = (*CODEC.encode(text), END)
    edges = sorted({0, len(tokens), *(cut % len(tokens) for cut in cuts)})
    parts = tuple(
        Segment(tokens[a:b], tuple(-0.1 * (a + 1) for _ in range(b - a)), version + index)
        for index, (a, b) in enumerate(pairwise(edges))
    )
    return Trajectory(
        group=1,
        sample=0,
        prompt_tokens=(1, 2),
        parts=parts,
        finish_reason="stop",
        reward=1.0,
        rewards={"digits": 1.0},
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_columns_are_those_of_the_trajectories(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    batches = [random_batch(seed + step, version=step - 1).trajectories for step in (3, 4)]
    for step, batch in enumerate(batches, start=3):
        written(folder, step, batch)
    samples = read_samples(folder)
    tokens = samples.tokens
    everything = [t for batch in batches for t in batch]
    assert len(samples.rows) == len(everything)
    for row, (sample, trajectory) in enumerate(zip(samples.rows, everything, strict=True)):
        own = tokens.of(row)
        generated = np.array(trajectory.response_mask)
        versions = np.array(trajectory.versions)
        logprobs = pytest.approx(np.array(trajectory.behavior_logprobs)[generated], rel=1e-7)
        assert tokens["ids"][own].tolist() == list(trajectory.response_tokens)
        assert tokens["versions"][own].tolist() == list(trajectory.versions)
        assert tokens["position"][own].tolist() == list(range(len(generated)))
        assert (tokens["sample"][own] == row).all()
        assert tokens["behavior_logprobs"][own][generated] == logprobs
        assert np.isnan(tokens["behavior_logprobs"][own][~generated]).all()
        lag = np.where(generated, sample.step - 1 - versions, -1)
        assert tokens["lag"][own].tolist() == lag.tolist()
        assert tokens.mean("lag")[row] == pytest.approx(lag[generated].mean())
        assert (sample.group, sample.sample) == (trajectory.group, trajectory.sample)
        assert sample.prompt_tokens == trajectory.prompt_tokens
        assert sample.reward == trajectory.reward
    assert [len(column) for column in tokens.columns.values()] == [len(tokens)] * 8


@given(TEXTS, st.lists(st.integers(0, 99), max_size=3))
@settings(max_examples=50, deadline=None)
def test_the_texts_of_the_tokens_are_the_completion(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, 1, (with_text(text, cuts=cuts),))
    tokens = read_samples(folder).tokens
    assert "".join(tokens.texts(0)) == text == tokens.completions[0]
    labels = tokens.labels(0)
    assert labels[-1] == "<end>"
    expected = [
        label
        for character in text
        for label in [f"part of {character!r}"] * (len(character.encode()) - 1)
        + [character.replace("\n", "↵")]
    ]
    assert labels[:-1] == expected


def test_a_prompt_is_written_once_for_its_group(tmp_path: Path) -> None:
    written(tmp_path, 1, random_batch(groups=3, samples=4).trajectories, prompt="the prompt")
    content = (tmp_path / "trajectories" / "step-00001.jsonl").read_text()
    assert content.count("the prompt") == content.count("prompt_tokens") == 3
    assert [row.prompt for row in read_samples(tmp_path).rows] == ["the prompt"] * 12


def test_float32_logprobs_are_kept_exactly(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    logprobs = -draw.exponential(2.0, 1000).astype(np.float32)
    segment = Segment(tuple(range(1000)), tuple(map(float, logprobs)), 0)
    trajectory = replace(with_text("a", cuts=[]), parts=(segment,))
    text = SampleText("p", "", (0,) * 1000)
    (tmp_path / "trajectories").mkdir()
    RunFolder(tmp_path).write_trajectories(1, [trajectory], [text], special={})
    assert (read_samples(tmp_path).tokens["behavior_logprobs"] == logprobs).all()


def test_files_with_a_line_per_sample_are_read(tmp_path: Path) -> None:
    """As runs wrote them before prompts were shared and texts were recorded."""
    trajectories = random_batch(groups=2, samples=2).trajectories
    (tmp_path / "trajectories").mkdir()
    lines = [
        {
            "step": 1,
            "group": t.group,
            "sample": t.sample,
            "prompt": f"prompt {t.group}",
            "completion": "some text",
            "reward": t.reward,
            "rewards": t.rewards,
            "finish_reason": t.finish_reason,
            "prompt_tokens": t.prompt_tokens,
            "parts": [
                {"observation": part.tokens}
                if isinstance(part, Observation)
                else {"version": part.version, "tokens": part.tokens, "logprobs": part.logprobs}
                for part in t.parts
            ],
        }
        for t in trajectories
    ]
    file = tmp_path / "trajectories" / "step-00001.jsonl"
    # The writer was killed in the last line.
    file.write_text("\n".join(json.dumps(line) for line in lines)[:-10])
    samples = read_samples(tmp_path)
    assert [row.prompt for row in samples.rows] == [f"prompt {t.group}" for t in trajectories[:3]]
    tokens = samples.tokens
    assert tokens["ids"].tolist() == [i for t in trajectories[:3] for i in t.response_tokens]
    assert not tokens.has_text(0)
    assert tokens.labels(0)[0] == f"token {trajectories[0].response_tokens[0]}"
    with pytest.raises(ValueError, match="recorded without the text of each token"):
        tokens.texts(0)


def test_compressed_files_are_read(tmp_path: Path) -> None:
    written(tmp_path, 1, random_batch().trajectories)
    plain = read_samples(tmp_path)
    file = tmp_path / "trajectories" / "step-00001.jsonl"
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    compressed = read_samples(tmp_path)
    assert compressed.rows == plain.rows
    assert (compressed.tokens["ids"] == plain.tokens["ids"]).all()
    assert read_samples(tmp_path, compressed) is compressed


def test_a_file_that_is_not_complete_yet_is_not_seen(tmp_path: Path) -> None:
    batch = random_batch().trajectories
    written(tmp_path, 1, batch)
    (tmp_path / "trajectories" / ".step-00002.jsonl.tmp").write_text('{"step": 2')
    samples = read_samples(tmp_path)
    assert {row.step for row in samples.rows} == {1}
    assert read_samples(tmp_path, samples) is samples


def test_a_column_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"no column 'ratio'; there are sample, position"):
        _ = read_samples(tmp_path).tokens["ratio"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"characters": [1]}, "counts 1 characters of 1 tokens"),
        (
            {"parts": [{"version": 0, "tokens": [1, 2], "logprobs": [0.0]}]},
            "one log-prob per token",
        ),
        ({"reward": None}, "has no 'reward'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    written(tmp_path, 1, random_batch(groups=1).trajectories)
    file = tmp_path / "trajectories" / "step-00001.jsonl"
    line = json.loads(file.read_text())
    line["samples"][1] |= change
    if change.get("reward", 0) is None:
        del line["samples"][1]["reward"]
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"line 1 of .*step-00001.jsonl .*{message}"):
        read_samples(tmp_path)


def tokens_with(rows: list[tuple[int, float, float, float]]) -> Tokens:
    """Tokens of one sample from (lag, pi_prox / pi_behav, pi_theta / pi_prox, advantage)."""
    lag, weight, ratio, advantages = (np.array(column) for column in zip(*rows, strict=True))
    behavior = np.full(len(rows), -1.0)
    proximal = behavior + np.log(weight)
    columns = {
        "lag": lag,
        "advantages": advantages,
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "logprobs": proximal + np.log(ratio),
    }
    return Tokens(columns, np.array([0, len(rows)]), ("",), {})


def test_an_old_token_is_dropped_by_standard_ppo_only() -> None:
    tokens = tokens_with(
        [
            (0, 1.0, 1.0, 1.0),
            (0, 1.0, 1.3, 1.0),  # both drop it
            (2, 1.5, 1.0, 1.0),  # far from its sampler before the step began
            (2, 1.5, 1.0, -1.0),  # as far, but its advantage pushes it back
            (2, 1.5, 0.7, -1.0),  # came back on the whole, went down in this step
            (2, 1.1, 1.15, 1.0),  # 1.265 in all
        ]
    )
    by_lag = clipped_by_lag(tokens)
    assert list(by_lag.index) == [0, 2]
    assert list(by_lag["tokens"]) == [2, 4]
    assert list(by_lag["decoupled_ppo"]) == [0.5, 0.25]
    assert list(by_lag["standard_ppo"]) == [0.5, 0.5]
    expected = [0.0, (3 * math.log(1.5) + math.log(1.1)) / 4]
    assert list(by_lag["weight_change"]) == pytest.approx(expected)
    assert list(clipped_by_lag(tokens, clip_epsilon=0.4)["standard_ppo"]) == [0.0, 0.25]


def test_the_losses_drop_the_same_tokens() -> None:
    draw = np.random.default_rng(1)
    count = 500
    rows = list(
        zip(
            draw.integers(0, 4, count),
            draw.lognormal(0, 0.3, count),
            draw.lognormal(0, 0.2, count),
            draw.normal(size=count),
            strict=True,
        )
    )
    tokens = tokens_with(rows)
    tensors = [
        torch.tensor(tokens[name])[None]
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
    ]
    by_lag = clipped_by_lag(tokens, clip_epsilon=0.2)
    for loss, column in (
        (decoupled_ppo, "decoupled_ppo"),
        (anchored_at_behavior(ppo, clip_epsilon=0.2), "standard_ppo"),
    ):
        clipped = loss(*tensors, torch.ones(1, count, dtype=torch.bool)).clipped[0].numpy()
        for lag in range(4):
            assert by_lag[column][lag] == pytest.approx(clipped[tokens["lag"] == lag].mean())
        assert clipped.any()


def test_tokens_without_fields_are_not_counted() -> None:
    tokens = tokens_with([(0, 1.0, 1.0, 1.0), (1, 2.0, 2.0, 1.0)])
    tokens["logprobs"][1] = np.nan
    assert list(clipped_by_lag(tokens).index) == [0]


def test_what_cannot_be_counted_is_refused() -> None:
    tokens = tokens_with([(0, 1.0, 1.0, 1.0)])
    with pytest.raises(ValueError, match="clip_epsilon is 0, but must be > 0"):
        clipped_by_lag(tokens, clip_epsilon=0)
    plain = Tokens({"lag": tokens["lag"]}, tokens.starts, ("",), {})
    with pytest.raises(ValueError, match="token_fields=true"):
        clipped_by_lag(plain)
