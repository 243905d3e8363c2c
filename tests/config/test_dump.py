"""Settings written as YAML are read back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from areal_lab.config.dump import to_yaml
from areal_lab.config.load import load_config, load_record
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import Record
from areal_lab.config.schema import TrainConfig


class Price(Record):
    """One price."""

    item: str
    dollars: Annotated[float, Ge(0)] = 1.0


class Oven(Record):
    """Bakes."""

    heat: float = 200.0
    time_s: float | None = None
    kind: Literal["gas", "electric"] = "gas"
    tray: Price = Field(default_factory=lambda: Price(item="tray"))


class Kitchen(Record):
    """Has ovens."""

    name: str = "kitchen"
    open: bool = True
    cooks: int = 2
    words: list[str] = Field(default_factory=list)
    prices: list[Price] = Field(default_factory=list)
    first: Oven = Field(default_factory=Oven)
    last: Oven = Field(default_factory=Oven)


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda t: "???" not in t),
    st.sampled_from(
        ["1e5", "0x10", "no", "null", "~", "2024-01-01", "1:30", "a: b", "# x", "${first.heat}"]
    ),
    st.sampled_from(["\\${x", "\\\\${first.heat}", "$", "a\\", "", " a", "'", '"', "- a", "inf"]),
)
NUMBER = st.floats(allow_nan=False)
PRICE = st.builds(Price, item=TEXT, dollars=st.floats(0, allow_nan=False))
OVEN = st.builds(
    Oven,
    heat=NUMBER,
    time_s=st.none() | NUMBER,
    kind=st.sampled_from(["gas", "electric"]),
    tray=PRICE,
)
START = st.builds(
    Kitchen, cooks=st.integers(-(2**63) + 1, 2**63 - 1), first=st.builds(Oven, heat=NUMBER)
)
KITCHEN = st.builds(
    Kitchen,
    name=TEXT,
    open=st.booleans(),
    cooks=st.integers(-(2**63) + 1, 2**63 - 1),
    words=st.lists(TEXT, max_size=3),
    prices=st.lists(PRICE, max_size=2),
    first=OVEN,
    last=OVEN,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "kitchen.yaml"


@given(config=KITCHEN, start=START)
def test_a_file_is_read_back_as_the_settings_that_were_written(
    file: Path, config: Kitchen, start: Kitchen
) -> None:
    file.write_text(to_yaml(config, start, head=["a head"]), encoding="utf-8", newline="")
    assert load_record(start, file) == config


@given(config=KITCHEN)
def test_only_what_differs_is_written(config: Kitchen) -> None:
    assert to_yaml(config, config) == ""
    assert to_yaml(Kitchen()) == ""


def test_settings_stand_in_groups_with_their_units() -> None:
    config = Kitchen(cooks=3, first=Oven(time_s=1e-5, tray=Price(item="a tray", dollars=2)))
    config.prices = [Price(item="yes"), Price(item="b", dollars=float("inf"))]
    assert to_yaml(config, head=["Baked", ""]).splitlines() == [
        *("# Baked", "#", "cooks: 3"),
        'prices: [{item: "yes"}, {item: b, dollars: .inf}]',
        *("first:", "  time_s: 1e-05  # seconds", "  tray:"),
        *("    item: a tray", "    dollars: 2.0"),
    ]


def test_text_that_marks_a_missing_value_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match=r"name is '\?\?\?', but '\?\?\?' marks a missing value"):
        to_yaml(Kitchen(name="???"))


def test_the_settings_of_a_run_are_read_back(tmp_path: Path) -> None:
    config = load_config("arithmetic", ["eta=inf", "gconfig.stop=['\\n', ' a']", "seed=3"])
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_record(TrainConfig(), file) == config
