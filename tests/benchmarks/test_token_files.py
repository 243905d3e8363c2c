"""The benchmark of token files: the tiled run is a run, and its quick parts measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_lab.data.problems import Problem
from areal_lab.data.tokenize import TextCodec
from areal_lab.runlog.read_run import read_run
from benchmarks.large_run import RECORDED, main, tile_run
from benchmarks.token_files import layout, read_costs
from tests.data.byte_tokenizer import byte_tokenizer


def test_a_tiled_run_repeats_lags_texts_and_fields(tmp_path: Path) -> None:
    small = read_run(RECORDED)
    count = 2 * len(small.tokens) + 1
    written = tile_run(RECORDED, tmp_path / "large", tokens=count)
    large = read_run(tmp_path / "large")
    assert len(large.tokens) == written >= count
    length = len(small.tokens)
    for name in ("ids", "lag", "text_end", "behavior_logprobs", "logprobs", "clipped"):
        for begin in (0, length):
            repeated = large.tokens[name][begin : begin + length]
            assert np.array_equal(repeated, small.tokens[name], equal_nan=name != "ids"), name
    samples = large.samples
    assert not samples.duplicated(["group", "sample"]).any()
    assert samples["step"].is_monotonic_increasing
    assert list(samples["completion"][: len(small.samples)]) == list(small.samples["completion"])


def test_a_folder_that_exists_and_a_run_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        tile_run(RECORDED, tmp_path, tokens=1)
    with pytest.raises(ValueError, match="has no trajectories to tile"):
        tile_run(tmp_path, tmp_path / "large")


def test_the_command_says_how_many_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path / "large"), "--tokens", "100"])
    assert "tokens" in capsys.readouterr().out


def test_todays_files_are_smaller_and_fields_cost_what_the_docs_say() -> None:
    codec = TextCodec(byte_tokenizer())
    problems = [Problem(prompt="1 + 1 = 2\n2 + 2 = 4\n3 + 4 =", answer="7", key="7")]
    row = layout(codec, problems, 40, codec.encode("thé € " * 40))
    assert row["bytes"] < row["older_bytes"]
    assert 3 <= row["fields_bytes"] <= 12


def test_a_quick_reading_counts_its_tokens() -> None:
    costs = read_costs(13_000)
    assert 12_000 < costs["read_tokens"] < costs["read_tokens"] + costs["appended_tokens"]
    assert costs["columns_mb"] > 0
