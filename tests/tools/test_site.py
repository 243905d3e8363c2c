"""The documentation site has every page, and its links lead to pages."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks.gallery import with_token
from tools.site import assemble as site
from tools.site.assemble import ROOT, assemble


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site") / "docs"
    assemble(target)
    return target


def listed(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for place in entry.values():
            if isinstance(place, str):
                yield place
            else:
                yield from listed(place)


def test_the_navigation_lists_every_page_once(pages: Path) -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    found = sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    assert sorted(listed(config["project"]["nav"])) == found


def test_a_page_has_one_title(pages: Path) -> None:
    for page in pages.rglob("*.md"):
        outside_code = page.read_text(encoding="utf-8").split("```")[::2]
        titles = [line for text in outside_code for line in text.split("\n") if line[:2] == "# "]
        assert len(titles) == 1, page


def test_code_that_a_page_begins_ends_there(pages: Path) -> None:
    """Else what follows is code, headings and links to them too."""
    for page in pages.rglob("*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert sum(line.lstrip().startswith("```") for line in lines) % 2 == 0, page


def test_links_to_results_lead_into_the_site(pages: Path) -> None:
    assert "](changelog.md)" in (pages / "design.md").read_text(encoding="utf-8")
    assert "](images/table_1.png)" in (pages / "reproductions.md").read_text(encoding="utf-8")


def test_a_link_to_a_missing_page_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "reproductions" / "images").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text("[a](b.md)")
    for name in site.ELSEWHERE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"docs/page.md links to b.md, which does not exist"):
        assemble(tmp_path / "build")


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
