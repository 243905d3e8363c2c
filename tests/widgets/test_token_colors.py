"""Colors of tokens, and responses as colored text."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.runlog.token_columns import Tokens
from areal_lab.runlog.token_files import read_samples
from areal_lab.widgets.run_charts import clipping_chart, parting_chart
from areal_lab.widgets.token_colors import heads_of, quantities, token_colors, token_text
from tests.runlog.test_token_files import with_text, written
from tests.widgets.chart_rows import rows_of

FIELDS = ("proximal_logprobs", "logprobs", "advantages", "clipped", "entropy")


def tokens_of(values: list[float], **more: np.ndarray) -> Tokens:
    """Tokens of one sample, with the same values in all training fields."""
    count = len(values)
    columns = {
        "ids": np.arange(count),
        "lag": np.arange(count, dtype=np.int32),
        "versions": np.arange(count, dtype=np.int32)[::-1].copy(),
        "behavior_logprobs": np.zeros(count, np.float32),
        **{name: np.array(values, np.float32) for name in FIELDS},
        **more,
    }
    return Tokens(columns, np.array([0, count]), ("",), {})


def test_a_run_without_training_fields_has_what_the_engine_reported() -> None:
    tokens = tokens_of([0.0])
    plain = Tokens(
        {name: column for name, column in tokens.columns.items() if name not in FIELDS},
        tokens.starts,
        ("",),
        {},
    )
    assert quantities(plain) == ["lag", "version", "probability"]
    assert set(quantities(tokens)) > {"weight", "ratio", "advantage", "clipped", "entropy"}
    with pytest.raises(ValueError, match=r"quantity is 'weight', but .*probability; token_fields"):
        token_colors(plain, "weight")


@given(st.lists(st.floats(-3, 3) | st.just(float("nan")), min_size=1, max_size=20))
def test_every_token_has_a_color_with_a_meaning(values: list[float]) -> None:
    tokens = tokens_of(values)
    for quantity in quantities(tokens):
        found = token_colors(tokens, quantity)
        assert found.codes.max() < len(found.colors) == len(found.labels)
        assert ((found.codes == 0) == np.isnan(found.values)).all()
        assert (found.codes == 0).any() == bool(found.labels[0])
        # Larger values have colors further along.
        order = np.argsort(found.values[found.codes > 0])
        assert (np.diff(found.codes[found.codes > 0][order].astype(int)) >= 0).all()


@pytest.mark.parametrize(
    ("quantity", "column", "value", "label"),
    [
        ("weight", "proximal_logprobs", np.log(1.0), "0.95 to 1.05"),
        ("weight", "proximal_logprobs", np.log(0.4), "weight < 0.5"),
        ("weight", "proximal_logprobs", np.log(3.0), "2 and more"),
        ("advantage", "advantages", 0.0, "0"),
        ("advantage", "advantages", -0.2, "-0.5 to 0"),
        ("advantage", "advantages", 1.5, "1 and more"),
        ("clipped", "clipped", 1.0, "clipped"),
        ("clipped", "clipped", 0.0, "not clipped"),
        ("entropy", "entropy", 0.3, "0.1 to 0.5"),
        ("probability", "behavior_logprobs", np.log(0.95), "0.9 to 0.99"),
        ("probability", "behavior_logprobs", np.log(0.005), "0.01 and less"),
    ],
)
def test_a_value_is_in_the_bin_that_says_so(
    quantity: str, column: str, value: float, label: str
) -> None:
    tokens = tokens_of([0.0], **{column: np.array([value], np.float32)})
    found = token_colors(tokens, quantity)
    assert found.labels[found.codes[0]] == label


def test_lags_have_a_color_each_or_share_it_with_their_neighbors() -> None:
    few = token_colors(tokens_of([0.0] * 5), "lag")
    assert few.labels[1:] == ("lag 0", "lag 1", "lag 2", "lag 3", "lag 4")
    assert few.codes.tolist() == [1, 2, 3, 4, 5]
    assert len(set(few.colors)) == 6
    many = token_colors(tokens_of([0.0] * 45), "lag")
    assert many.labels[1:3] == ("lag 0 to 4", "lag 5 to 9")
    assert len(many.labels) <= 11
    assert many.codes.max() == len(many.labels) - 1


def test_yellow_is_old_by_lag_and_by_version() -> None:
    tokens = tokens_of([0.0] * 4)
    for quantity, oldest in (("lag", 3), ("version", 3)):
        found = token_colors(tokens, quantity)
        assert found.colors[found.codes[oldest]] == "#fde725"


# --- text ----------------------------------------------------------------------------------------


def visible(html: str) -> str:
    """The text of the spans of tokens, without marks for what has no text."""
    spans = re.findall(r'<span style="[^"]*" title="[^"]*">([^<]*)</span>', html)
    return unescape("".join(spans))


@settings(max_examples=40, deadline=None)
@given(st.text("a<&>\"'é€😀 \n", min_size=1, max_size=12))
def test_the_text_is_all_there_and_nothing_is_markup(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, 4, (with_text(text, cuts=[2]),))
    tokens = read_samples(folder).tokens
    html = token_text(tokens, [0], token_colors(tokens, "lag"), heads=["<b>&"])
    shown = visible(html).replace("↵\n", "\n").replace("·", "").removesuffix("<end>")
    assert shown == text
    assert "&lt;b&gt;&amp;" in html
    assert html.count("<div") == html.count("</div")
    assert html.count("<span") == html.count("</span")


def test_the_pointer_says_which_token_and_what_its_color_means(tmp_path: Path) -> None:
    written(tmp_path, 4, (with_text("€a", cuts=[3], version=2),))
    tokens = read_samples(tmp_path).tokens
    html = unescape(token_text(tokens, [0], token_colors(tokens, "lag"), marked=(0, 3)))
    assert "title=\"“part of '€'”, token 0: lag 1\"" in html
    assert 'title="“a”, token 3: lag 0"' in html
    assert html.count("outline:") == 1


def test_what_is_too_much_is_left_out_and_counted(tmp_path: Path) -> None:
    written(tmp_path, 4, (with_text("abcdef", cuts=[]), with_text("ghijkl", cuts=[])))
    tokens = read_samples(tmp_path).tokens
    html = token_text(tokens, [0, 1], token_colors(tokens, "lag"), most_tokens=10)
    assert visible(html).startswith("abcdef<end>ghi")
    assert "j" not in visible(html)
    assert "10 of 14 tokens are shown" in html
    with pytest.raises(ValueError, match="1 heads for 2 samples"):
        token_text(tokens, [0, 1], token_colors(tokens, "lag"), heads=["a"])


def test_tokens_without_texts_are_shown_by_their_ids(tmp_path: Path) -> None:
    written(tmp_path, 4, (with_text("ab", cuts=[]),))
    tokens = read_samples(tmp_path).tokens
    tokens["text_start"][:] = -1
    assert "token 257" in visible(token_text(tokens, [0], token_colors(tokens, "lag")))


@pytest.mark.parametrize("quantity", ["lag", "version", "probability"])
def test_letters_have_contrast_with_their_background(tmp_path: Path, quantity: str) -> None:
    written(tmp_path, 9, (with_text("abcdefgh", cuts=[1, 2, 3, 4, 5]),))
    tokens = read_samples(tmp_path).tokens
    html = token_text(tokens, [0], token_colors(tokens, quantity))
    pairs = re.findall(r"background:#([0-9a-f]{6});color:#(000|fff)", html)
    assert pairs
    for background, letter in pairs:
        levels = [int(background[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in levels]
        light = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        contrast = (light + 0.05) / 0.05 if letter == "000" else 1.05 / (light + 0.05)
        assert contrast >= 4.5


def test_a_head_says_where_a_sample_is_from_and_what_it_got() -> None:
    samples = pd.DataFrame(
        {
            "group": [7, 7],
            "sample": [0, 1],
            "step": [3, 3],
            "reward": [1.0, 0.25],
            "advantage": [0.7071, np.nan],
            "tokens": [12, 5],
            "head_version": [1, 2],
            "tail_version": [2, 2],
            "finish_reason": ["stop", "length"],
        }
    )
    first, second = heads_of(samples)
    assert first == (
        "group 7, sample 0, step 3 · reward 1 · advantage +0.71 · 12 tokens · versions 1 to 2 · "
        "ended by stop"
    )
    assert "advantage" not in second
    assert "version 2" in second
    assert len(heads_of(samples.drop(columns="advantage"))) == 2


def by_lag(*shares: float) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "tokens": [10] * len(shares),
            "decoupled_ppo": [0.01] * len(shares),
            "standard_ppo": list(shares),
            "weight_change": [0.1] * len(shares),
        },
        index=pd.RangeIndex(len(shares), name="lag"),
    )


def test_there_is_a_bar_for_each_lag_and_loss_and_a_pale_mark_of_the_reference() -> None:
    chart = clipping_chart(by_lag(0.1, 0.2), by_lag(0.05, 0.1))
    before, now, _ = rows_of(chart)
    assert [row["share"] for row in now] == [0.1, 0.01, 0.2, 0.01]
    assert [row["share"] for row in before] == [0.05, 0.01, 0.1, 0.01]
    spec = chart.to_dict()
    pale, bars, numbers = spec["layer"]
    assert [layer["mark"]["type"] for layer in (pale, bars, numbers)] == ["tick", "bar", "text"]
    assert bars["encoding"]["y"]["scale"]["domain"] == [0, 0.5]
    assert spec["background"] == "transparent"


@pytest.mark.parametrize("count", [0, 3])
def test_there_is_a_point_for_each_pair(count: int) -> None:
    pairs = pd.DataFrame(
        {
            "group_first": range(count),
            "about": ["rain"] * count,
            "sample": [0] * count,
            "same_tokens": range(count),
            "tokens_first": [9] * count,
            "tokens_second": [8] * count,
        }
    )
    (points,) = rows_of(parting_chart(pairs))
    assert len(points) == count
