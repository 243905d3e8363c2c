"""The choice of a level: never one that was not asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest

from areal_lab.host.isolation import Level, LevelSetting
from areal_lab.rewards.sandbox import confine, levels
from areal_lab.rewards.sandbox.confine import Visible
from areal_lab.rewards.sandbox.levels import CONTAINED, NoSandbox, choose, refusal, takes_sandbox
from areal_lab.rewards.sandbox.run import ENVIRONMENT, Sandbox


def broken(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(levels, "refusal", lambda level: "it is broken" if level in names else "")


def test_settings_are_the_levels_and_auto() -> None:
    assert {"auto", *get_args(Level)} == set(get_args(LevelSetting))
    assert {*CONTAINED, "unsafe"} == set(get_args(Level))


def test_auto_takes_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert choose("auto").level == "bubblewrap"
    broken(monkeypatch, "bubblewrap")
    assert choose("auto").level == "namespaces"


@pytest.mark.parametrize("setting", ["auto", "bubblewrap", "namespaces"])
def test_without_a_level_model_code_is_refused_with_reasons_and_a_fix(
    setting: LevelSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, *CONTAINED)
    with pytest.raises(NoSandbox) as caught:
        choose(setting)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"sandbox is {setting}, but programs cannot be contained here (")
    assert ("bubblewrap: it is broken" in message) == (setting != "namespaces")
    assert "apt-get install bubblewrap" in message
    assert "write reward.sandbox=unsafe" in message


def test_a_named_level_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "bubblewrap")
    with pytest.raises(NoSandbox):
        choose("bubblewrap")
    assert choose("unsafe").level == "unsafe"


def test_a_level_that_contains_nothing_fails_its_test() -> None:
    reason = refusal.__wrapped__("unsafe")
    assert reason.startswith("its test failed: AssertionError: it sees")


def test_without_bubblewrap_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert refusal.__wrapped__("bubblewrap") == "bwrap is not installed"


def test_a_bubblewrap_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho bwrap: Creating new namespace failed >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert refusal.__wrapped__("bubblewrap") == "bwrap: Creating new namespace failed"


def test_where_namespaces_are_used_up_the_reason_says_so() -> None:
    asks = "from areal_lab.rewards.sandbox.levels import refusal; print(refusal('namespaces'))"
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$1"'
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, asks],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "[Errno 28] clone: No space left on device\n"


def test_bubblewrap_shows_what_it_is_given_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/bwrap")
    words = confine.command(
        Visible(["/usr"], [("/lib", "usr/lib")]), 1000, ENVIRONMENT, ["python", "6"]
    )
    text = " ".join(words)
    assert "--unshare-all --unshare-user --disable-userns" in text
    assert "--ro-bind /usr /usr" in text
    assert text.count("--ro-bind") == 1
    assert "--symlink usr/lib /lib" in text
    assert "--size 1000 --perms 0700 --tmpfs /sandbox" in text
    assert text.endswith("-- python 6")


def test_a_function_with_a_parameter_of_that_name_takes_a_sandbox() -> None:
    def scores(completion: str, example: object, *, sandbox: str = "auto") -> float:
        return float(bool(completion and example and sandbox))

    class Scorer:
        def __init__(self, *, sandbox: str) -> None:
            self.sandbox = Sandbox("unsafe" if sandbox else "namespaces")

    assert takes_sandbox(scores)
    assert takes_sandbox(Scorer)
    assert not takes_sandbox(len)
    assert not takes_sandbox(dict)
    assert not takes_sandbox(str.strip)
