"""What others wrote reaches the terminal as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.cli.outputs import error_exit
from areal_lab.config.schema import TrainConfig
from areal_lab.host.terminal import printable
from areal_lab.resolve.limits import limits_of
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.records import RunHeader
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.shell.display import Lines, Screen

TITLE = "\x1b]0;your title\x07 and \x9b2J, \u202egnp.exe"


@given(st.text())
def test_what_is_printed_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert all(one.isprintable() or one in "\n\t" or ord(one) > 0x9F for one in shown)
    assert not {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"} & {*shown}
    if text.isprintable() and not {*text} & {*"\u202e"}:
        assert shown == text


def test_errors_and_displays_show_them_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(error_exit(f"the agent said {TITLE}", 1), typer.Exit)
    shown = [capsys.readouterr().err]
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
        display = Screen(console, str, str) if terminal else Lines(console)
        display.note(TITLE)
        display.phase(TITLE)
        if isinstance(display, Screen):
            console.print(display)
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]
    for text in shown:
        assert "\\x1b]0;your title\\x07 and \\x9b2J, \\u202egnp.exe" in text
        assert "\x1b]" not in text
        assert "\x07" not in text


def test_the_run_folder_of_somebody_else_writes_nothing_else_to_the_terminal(
    tmp_path: Path,
) -> None:
    limits = limits_to_fields(limits_of(TrainConfig()))
    header = RunHeader(mode="train", started_at=0.0, limits=limits, processes=(TITLE,))
    with EventLog(tmp_path / "events.jsonl", header, clock=lambda: 1.0):
        pass
    (tmp_path / "summary.json").write_text(json.dumps({"error": TITLE}))
    for command in (["trace"], ["watch", "--once"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert "\\x1b]0;your title" in result.output
        assert "\x1b]" not in result.output
        assert "\x07" not in result.output
