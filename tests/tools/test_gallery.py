"""The gallery of notebooks, as it is served."""

from __future__ import annotations

import pytest

from tools.notebooks.gallery import with_token


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([], ["--token"]),
        (["--port", "29"], ["--token", "--port", "29"]),
        (["--no-token"], ["--no-token"]),
        (["--token-password", "x"], ["--token-password", "x"]),
    ],
)
def test_the_gallery_has_a_key_unless_its_options_say_something_else(
    asked: list[str], given: list[str]
) -> None:
    assert with_token(asked) == given
