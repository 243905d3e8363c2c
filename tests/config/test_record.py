"""Records that check themselves."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, Field

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import (
    About,
    Bounds,
    Count,
    Record,
    Share,
    find_setting,
    settings,
    value_of,
)
from areal_lab.config.unknown import UNKNOWN, VALUES


class Shelf(Record):
    """Holds cakes."""

    width_s: Annotated[float, Ge(0), AllowInfNan(False)] = 1.0
    cakes: Count = 3
    heat: Annotated[float, Gt(0), Lt(5), About(unit="kelvin", hint="warm")] | None = None
    share: Share = 0.5
    size: Literal[-1] | Count = -1
    order: list[Annotated[int, Le(9)]] = Field(default_factory=list)
    kind: Literal["pie", "cake"] = "pie"


class Shop(Record):
    """Has shelves."""

    name: str = "shop"
    open: bool = True
    first: Shelf = Field(default_factory=Shelf)
    others: list[Shelf] = Field(default_factory=list)


def test_allowed_values_are_described_in_words() -> None:
    words = {setting.name: setting.allowed for setting in settings(Shop)}
    assert words == {
        "name": "text",
        "open": "true or false",
        "others": "a list of {width_s, cakes, heat, share, size, order, kind}",
        "first.width_s": "a finite number >= 0, in seconds",
        "first.cakes": "an integer >= 1",
        "first.heat": "a number > 0 and < 5, in kelvin, or null",
        "first.share": "a number from 0 to 1",
        "first.size": "-1 or an integer >= 1",
        "first.order": "a list of integers <= 9",
        "first.kind": "one of pie, cake",
    }


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("name", Bounds()),
        ("first.width_s", Bounds(0)),
        ("first.cakes", Bounds(1)),
        ("first.heat", Bounds(0, 5, above=True, below=True)),
        ("first.share", Bounds(0, 1)),
        ("first.order", Bounds(None, 9)),
    ],
)
def test_a_control_is_made_from_the_bounds_of_a_setting(name: str, bounds: Bounds) -> None:
    setting = find_setting(Shop, name)
    assert setting.name == name
    assert setting.bounds == bounds
    record = Shop()
    for limit, excluded in ((bounds.least, bounds.above), (bounds.most, bounds.below)):
        if limit is not None:
            value = [limit] if name == "first.order" else limit
            if excluded:
                with pytest.raises(ConfigError):
                    record.with_settings({name: value})
            else:
                assert value_of(record.with_settings({name: value}), name) == value


def test_choices_are_listed_also_those_of_a_list() -> None:
    class Menu(Record):
        kinds: list[Literal["pie", "cake"]] = Field(default_factory=list)

    assert find_setting(Shop, "first.kind").choices == ("pie", "cake")
    assert find_setting(Menu, "kinds").choices == ("pie", "cake")
    assert find_setting(Shop, "first.cakes").choices == ()


def test_a_setting_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'cakes'; did you mean 'first.cakes'?"):
        find_setting(Shop, "cakes")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("first.cakes", 0, "first.cakes is 0, but must be an integer >= 1; the default is 3"),
        ("first.cakes", True, "first.cakes is True, but must be an integer >= 1"),
        ("first.width_s", True, "first.width_s is True, but must be a finite number >= 0"),
        ("first.heat", 5, "first.heat is 5, but must be a number > 0 and < 5, in kelvin, or null;"),
        ("first.heat", "3 K", "; write 3, without a unit"),
        ("first.kind", "pye", "must be one of pie, cake; did you mean 'pie'?"),
        ("first.size", 0, "first.size is 0, but must be -1 or an integer >= 1"),
        ("first.order", [10], "first.order is [10], but must be a list of integers <= 9"),
        ("first.cake", 1, "unknown setting 'first.cake'; did you mean 'first.cakes'?"),
        ("second.cakes", 1, "unknown setting 'second.cakes'; did you mean 'first.cakes'?"),
        ("name.x", 1, "unknown setting 'name.x'"),
        ("others", [{"cakes": 0}], "others[0].cakes is 0, but must be an integer >= 1"),
        ("others", [{}, 3], "others[1] is 3, but must be {width_s, cakes, heat, "),
        ("first", {"cakes": 0}, "first.cakes is 0, but must be an integer >= 1"),
    ],
)
def test_a_wrong_value_is_one_line_at_any_depth(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Shop().with_settings({name: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_are_checked_at_construction_and_assignment() -> None:
    with pytest.raises(ConfigError, match=r"^open is 'perhaps', but must be true or false"):
        Shop(open="perhaps")  # type: ignore[arg-type]
    shop = Shop(first=Shelf(cakes=5))
    shop.first.cakes = 7
    with pytest.raises(ConfigError, match=r"^cakes is 0, but must be an integer >= 1"):
        shop.first.cakes = 0
    with pytest.raises(ConfigError, match=r"^cake is not a setting; did you mean 'cakes'\?"):
        shop.first.cake = 1  # type: ignore[attr-defined]
    assert shop.first.cakes == 7


def test_a_number_is_a_name() -> None:
    assert Shop(name=2024).name == "2024"  # type: ignore[arg-type]


def test_all_problems_of_a_record_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        Shop(public=False, first={"cakes": 0, "share": 2}, name=[])  # type: ignore[call-arg, arg-type]
    assert {one.setting for one in caught.value.problems} == {
        *("public", "first.cakes", "first.share", "name"),
    }


def test_a_changed_copy_shares_nothing_with_the_original() -> None:
    shop = Shop(others=[Shelf()])
    changed = shop.with_settings({"first.cakes": 9})
    assert (shop.first.cakes, changed.first.cakes) == (3, 9)
    changed.others[0].cakes = 8
    changed.first.order.append(1)
    assert shop == Shop(others=[Shelf()])
    assert value_of(changed, "first.cakes") == 9


def test_records_and_their_errors_cross_processes() -> None:
    shop = Shop(first=Shelf(cakes=5))
    assert pickle.loads(pickle.dumps(shop)) == copy.deepcopy(shop) == shop
    with pytest.raises(ConfigError) as caught:
        Shelf(cakes=0, share=2)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


ROOT = Path(__file__).parents[2]
ASKED = [(name, value, why) for name, values in VALUES.items() for value, why in values.items()]


@pytest.mark.parametrize(("setting", "value", "why"), ASKED)
def test_a_value_is_refused_with_its_reason(setting: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{setting}={value}"])
    assert f"{setting} is {value!r}, but must be one of" in str(error.value)
    assert str(error.value).endswith(why)
    for file in re.findall(r"areal_lab/[\w/]+\.py", why):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize(("setting", "why"), UNKNOWN.items())
def test_a_setting_of_articles_is_answered(setting: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{setting}=x"])
    assert f"unknown setting {setting!r}" in str(error.value)
    assert str(error.value).endswith(why)
