"""Claude Code, with a system message inside of its messages and 32 kB of system prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agents.scripted_model import Said
from tests.real_clients.lab import AGAIN, SUMS, TOGETHER, Done, Script, run

pytestmark = pytest.mark.agents


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("claude")
    return run("claude-code", {"reads": _reader(folder / "numbers.txt")}, folder)


def _reader(file: Path) -> Script:
    call = {"name": "Read", "arguments": {"file_path": str(file)}}

    def reads(said: list[Said]) -> str:
        last = said[-1]
        if last.role == "tool":
            number, _, text = last.text.partition("\t")
            assert number.strip() == "1"
            return SUMS.replace("5 and 9", text.strip())
        return TOGETHER if AGAIN in last.text else f"<tool_call>{json.dumps(call)}</tool_call>"

    return reads


def test_what_was_sampled_is_trained_once(done: Done) -> None:
    done["reads"].check()


def test_a_tool_and_a_second_turn_are_one_row(done: Done) -> None:
    assert done["reads"].said == [SUMS, TOGETHER]
    assert done["reads"].forks == {}
    assert done["reads"].matches == {"exact": 2}
    assert [len(row["turns"]) for row in done["reads"].rows] == [3]
