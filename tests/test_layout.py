"""The layout of the tree: `python -m tools.layout` finds what breaks it."""

from __future__ import annotations

from pathlib import Path

from tools import layout


def test_the_tree_has_no_problem() -> None:
    assert layout.problems() == []


def test_growth_that_the_changelog_does_not_name_is_refused() -> None:
    changelog = (
        "# C\n\n## Unreleased\n\n- `b`, 2,000 lines: reads b.\n\n## 0.1\n\n- `a`, 9,000 lines: x\n"
    )
    recorded = {"a": 1000, "b": 1000}

    def found(**lines: int) -> list[str]:
        return layout.unnamed_growth(lines, recorded, changelog)

    assert found(a=1100, b=2050, c=100) == []
    grown = [line.split(" lines")[0] for line in found(a=1101, c=101)]
    assert grown == ["a has 1,101", "c has 101"]
    assert "1,000 were recorded" in found(a=1101)[0]
    assert [line.split()[0] for line in found(b=2101)] == ["b"]


def test_a_room_that_a_map_does_not_name_is_found() -> None:
    files = [Path("areal_lab/data/problems.py"), Path("simulator/run/loop.py")]
    whole = "```\nareal_lab/\n  data/ problems\nsimulator/\n  run/ loop\ncosim/\n```\n"
    assert layout.missing_in_maps(files, {"map": whole}) == []
    [problem] = layout.missing_in_maps(files, {"map": whole.replace("  data/", "  date/")})
    assert problem == "map: its drawing does not name areal_lab/data"
    drawing = "```\nareal_lab simulator cosim\n  data   run\n```\n"
    assert layout.missing_in_maps(files, {"map": drawing}) == []
    assert (
        len(layout.missing_in_maps(files, {"map": "data run\n" + drawing.replace("run", "")})) == 1
    )


def test_a_package_that_breaks_a_rule_is_found(tmp_path: Path) -> None:
    room = tmp_path / "tools" / "plan"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").write_text('"""Tools."""\n')
    (room / "__init__.py").write_text("from tools.plan.space import *\n")
    names = ["__init__", "plan", "plan_space", *(f"m{n}" for n in range(29))]
    files = [Path("tools/__init__.py"), *(Path("tools/plan") / f"{name}.py" for name in names)]
    found = layout.misplaced(files, tmp_path)
    starts = ["has 31 modules", "repeats", "repeats", "needs a sentence", "imports"]
    for problem, start in zip(found, starts, strict=True):
        assert problem.partition(" ")[2].startswith(start)
