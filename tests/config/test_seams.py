"""What is not here is refused with the reason, and the place where it would be added is real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.seams import UNKNOWN, VALUES

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
