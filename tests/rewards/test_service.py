"""The reward service with real processes: hangs, crashes, errors, and the parent's death."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_lab.data.problems import Problem
from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.rewards.service import RewardError, RewardOutcome, RewardService
from areal_lab.rewards.wire import LENGTH

SCORE = "tests.rewards.misbehaving:score"
SCORE_ASYNC = "tests.rewards.misbehaving:score_async"
EXAMPLE = {"answer": "13"}
SHORT_S = 1.0
SCORED = (
    b'{"kind": "scored", "request": 1, "index": 0, "status": "ok", "reward": %s, "rewards": {},'
    b' "detail": ""}'
)
BOMBED = Path(f"/tmp/areal-lab-bombed-{os.getpid()}")


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BOMBED.touch, ()


def score_group(
    completions: Sequence[str], function: Any = SCORE, **settings: Any
) -> tuple[list[RewardOutcome], dict[str, int]]:
    """Score one group in a new service."""

    async def main() -> tuple[list[RewardOutcome], dict[str, int]]:
        async with RewardService(function, **{"max_error_rate": 1.0, **settings}) as service:
            return await service.score(completions, EXAMPLE), service.counts

    return asyncio.run(main())


def statuses(outcomes: Sequence[RewardOutcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def wait_for_end(pid: int) -> None:
    """Return when the process has ended; fail after 20 s."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 20.0)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


def test_a_group_is_scored_in_order() -> None:
    outcomes, counts = score_group(["13", "14", "13"])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 1.0]
    assert counts == {"ok": 3, "timeout": 0, "error": 0, "refused": 0}


def test_an_empty_group_has_no_outcomes() -> None:
    assert score_group([])[0] == []


def test_a_problem_reaches_the_function_as_a_mapping() -> None:
    problem = Problem(prompt="6 + 7 =", answer="13", key="6 + 7", metadata={"left": 6})

    def score(completion: str, example: Any) -> float:
        return float(completion == example["answer"] and example["left"] == 6)

    async def main() -> float:
        async with RewardService(score) as service:
            return (await service.score(["13"], problem))[0].reward

    assert asyncio.run(main()) == 1.0


def test_functions_of_a_notebook_may_use_what_is_around_them() -> None:
    bonus = 0.25

    def score(completion: str, example: dict[str, str]) -> float:
        return bonus + len(completion) * (example == EXAMPLE)

    assert score_group(["13"], score)[0][0].reward == 2.25


def test_named_rewards_have_weights() -> None:
    weights = {"format": 2.0, "answer": -1.0}
    (parts,), _ = score_group(["parts"], weights=weights)
    assert (parts.reward, parts.rewards) == (-0.5, {"format": 0.25, "answer": 1.0})
    (unnamed,), _ = score_group(["parts"], weights={"format": 0.0})
    assert unnamed.reward == 1.0  # a component without a weight counts once


@pytest.mark.parametrize(
    ("completion", "weights", "why"),
    [
        ("parts", {"formatt": 1.0}, "names formatt, but the reward function returned format"),
        ("named", {"length": 1.0}, "returned `reward`, which is trained on as it is"),
        ("13", {"answer": 1.0}, "names answer, but the reward function returned one number"),
    ],
)
def test_weights_that_do_not_fit_are_errors(
    completion: str, weights: dict[str, float], why: str
) -> None:
    (outcome,), _ = score_group([completion], weights=weights)
    assert outcome.status == "error"
    assert why in outcome.detail


def test_named_rewards_are_summed_unless_one_is_called_reward() -> None:
    (parts, named), _ = score_group(["parts", "named"])
    assert (parts.reward, parts.rewards) == (1.25, {"format": 0.25, "answer": 1.0})
    assert (named.reward, named.rewards) == (0.5, {"reward": 0.5, "length": 7.0})


def test_a_hung_completion_costs_only_itself() -> None:
    outcomes, counts = score_group(["13", "hang", "13", "14"], timeout_s=SHORT_S)
    assert statuses(outcomes) == ["ok", "timeout", "ok", "ok"]
    assert math.isnan(outcomes[1].reward)
    assert "no reward after" in outcomes[1].detail
    assert counts == {"ok": 3, "timeout": 1, "error": 0, "refused": 0}


def test_a_worker_that_ended_while_it_was_idle_costs_nothing() -> None:
    async def main() -> tuple[list[RewardOutcome], dict[str, int]]:
        async with RewardService(SCORE) as service:
            (first,) = await service.score(["pid"], EXAMPLE)
            os.kill(int(first.reward), signal.SIGKILL)
            wait_for_end(int(first.reward))
            return await service.score(["pid", "13"], EXAMPLE), service.counts

    outcomes, counts = asyncio.run(main())
    assert outcomes[1].reward == 1.0
    assert counts == {"ok": 3, "timeout": 0, "error": 0, "refused": 0}


def test_workers_do_not_get_the_key_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a-key")

    def score(completion: str, example: object) -> float:
        del completion, example
        own = Path("/proc/self/environ").read_bytes()
        return float(KEY_VARIABLE in os.environ or KEY_VARIABLE.encode() in own)

    assert score_group(["13"], score)[0][0].reward == 0.0


def test_a_worker_that_ignores_being_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lab.host.processes.STOP_GRACE_S", 0.1)
    outcomes, _ = score_group(["ignore SIGTERM and hang", "13"], timeout_s=SHORT_S)
    assert statuses(outcomes) == ["timeout", "ok"]


def test_a_crash_costs_only_its_completion_and_says_how_the_worker_ended() -> None:
    outcomes, counts = score_group(["13", "crash", "13", "exit", "13"])
    assert statuses(outcomes) == ["ok", "error", "ok", "error", "ok"]
    assert "was killed by SIGABRT" in outcomes[1].detail
    assert "exited with 3" in outcomes[3].detail
    assert counts["error"] == 2


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("raise", "KeyError: 'planted'"),
        ("text", "returned '1.0', but must return a number"),
        ("nan", "returned nan, but rewards must be finite"),
    ],
)
@pytest.mark.parametrize("function", [SCORE, SCORE_ASYNC])
def test_errors_carry_their_traceback_and_no_reward(
    function: str, completion: str, said: str
) -> None:
    (outcome, good), _ = score_group([completion, "13"], function)
    assert outcome.status == "error"
    assert math.isnan(outcome.reward)
    assert said in outcome.detail
    assert good.reward == 1.0


def test_other_groups_do_not_wait_for_a_hung_one() -> None:
    async def main() -> None:
        async with RewardService(SCORE, timeout_s=1000, workers=2) as service:
            hung = asyncio.create_task(service.score(["hang"], EXAMPLE))
            for _ in range(5):
                assert statuses(await service.score(["13"], EXAMPLE)) == ["ok"]
            assert not hung.done()
            hung.cancel()
            await asyncio.wait([hung])

    asyncio.run(main())


def test_an_async_function_scores_a_group_at_once() -> None:
    # In turn, the first would wait for the second for ever.
    outcomes, _ = score_group(["wait", "wake"], SCORE_ASYNC)
    assert statuses(outcomes) == ["ok", "ok"]


def test_an_async_function_that_hangs_is_cancelled_in_its_worker() -> None:
    outcomes, _ = score_group(["pid", "hang softly", "pid"], SCORE_ASYNC, timeout_s=SHORT_S)
    assert statuses(outcomes) == ["ok", "timeout", "ok"]
    assert outcomes[0].reward == outcomes[2].reward


@pytest.mark.parametrize(("word", "status"), [("crash", "error"), ("hang", "timeout")])
def test_the_completion_that_crashes_a_worker_is_found(
    word: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lab.rewards.service._SOFT_TIMEOUT_GRACE_S", 0.0)
    outcomes, _ = score_group(["pause", word, "pause", "13"], SCORE_ASYNC, timeout_s=SHORT_S)
    assert statuses(outcomes) == ["ok", status, "ok", "ok"]


def test_an_object_with_an_async_call_is_awaited() -> None:
    outcomes, _ = score_group(["13", "14"], "tests.rewards.misbehaving:score_object")
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]


def test_too_many_failures_stop_the_run_with_the_first_traceback() -> None:
    async def main() -> dict[str, int]:
        async with RewardService(SCORE, max_error_rate=0.02) as service:
            await service.score(["13", "raise"], EXAMPLE)
            await service.score(["nothing", "13"], EXAMPLE)
            with pytest.raises(RewardError, match="3 of the last 5 calls") as caught:
                await service.score(["text"], EXAMPLE)
            assert "KeyError: 'planted'" in str(caught.value)
            assert "returned None" not in str(caught.value)
            return service.counts

    assert asyncio.run(main()) == {"ok": 2, "timeout": 0, "error": 2, "refused": 1}


@pytest.mark.parametrize("function", [SCORE, SCORE_ASYNC])
def test_none_is_no_reward(function: str) -> None:
    outcomes, counts = score_group(["nothing", "13"], function)
    assert statuses(outcomes) == ["refused", "ok"]
    assert math.isnan(outcomes[0].reward)
    assert outcomes[0].detail == "the reward function returned None, which is not a reward"
    assert (counts["refused"], counts["ok"]) == (1, 1)


def test_old_failures_are_forgotten() -> None:
    async def main() -> None:
        async with RewardService(SCORE, max_error_rate=0.01) as service:
            for _ in range(3):
                await service.score(["raise"], EXAMPLE)
                await service.score(["13"] * 99, EXAMPLE)
                await service.score(["13"], EXAMPLE)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("tests.rewards.misbehaving:gone", "has no 'gone'"),
        ("no_such_module:score", "module 'no_such_module' does not exist"),
        ("no colon", "not of the form module:function"),
        ("tests.rewards.misbehaving:__doc__", "which is not callable"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start(
    function: str, said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        score_group(["13"], function, workers=2)


def test_cancelling_a_call_leaves_the_service_usable() -> None:
    async def main() -> list[RewardOutcome]:
        async with RewardService(SCORE) as service:
            call = asyncio.create_task(service.score(["13", "hang"], EXAMPLE))
            while not service._idle.empty():
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await service.score(["14", "13"], EXAMPLE)

    assert [outcome.reward for outcome in asyncio.run(main())] == [0.0, 1.0]


def test_workers_end_with_the_service() -> None:
    (outcome,), _ = score_group(["pid"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.reward), 0)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (pickle.dumps(Bomb()), "what is no JSON: b'\\x80"),
        (b'{"kind": "ready", "is_async": false}', "a reply to something else"),
        (b'{"kind": "scored"}', "a reply with other fields"),
        (SCORED % b"NaN", "what is no JSON"),
        (SCORED % b'"1"', "a reward that is not a finite number: '1'"),
        (SCORED % b"1e999", "a reward that is not a finite number: inf"),
        (SCORED.replace(b'"index": 0', b'"index": 9') % b"1", "completion 9, which was not waited"),
        (SCORED.replace(b'"request": 1', b'"request": 2') % b"1", "a reply to something else"),
    ],
)
def test_what_is_no_reply_costs_its_completion_and_the_worker(sent: bytes, said: str) -> None:
    outcomes, _ = score_group([f"send {(LENGTH.pack(len(sent)) + sent).hex()}", "pid"])
    assert statuses(outcomes) == ["error", "ok"]
    assert said in outcomes[0].detail
    assert not BOMBED.exists()


def test_a_reply_of_any_length_is_not_waited_for() -> None:
    outcomes, _ = score_group([f"send {LENGTH.pack(1 << 60).hex()}", "13"])
    assert statuses(outcomes) == ["error", "ok"]
    assert "a reply of 1152921504606846976 bytes, but at most" in outcomes[0].detail


def test_a_reply_that_comes_twice_is_not_a_reward_of_the_next_completion() -> None:
    twice = SCORED % b"1"
    outcomes, _ = score_group([f"send {((LENGTH.pack(len(twice)) + twice) * 2).hex()}", "14"])
    assert statuses(outcomes) == ["ok", "error"]
    assert "completion 0, which was not waited for" in outcomes[1].detail


def test_a_worker_that_sends_nonsense_at_the_start_is_refused() -> None:
    with pytest.raises(RewardError, match="worker sent a reward before it was asked"):
        score_group(["13"], "tests.rewards.misbehaving:impatient")
    with pytest.raises(RewardError, match="worker sent what is no JSON"):
        score_group(["13"], "tests.rewards.misbehaving:babbling")


def test_components_with_long_names_are_errors() -> None:
    outcomes, _ = score_group(["long name", "13"])
    assert statuses(outcomes) == ["error", "ok"]
    assert "names of up to 200 characters" in outcomes[0].detail


def test_a_function_gets_the_sandbox_of_the_settings() -> None:
    function = "tests.rewards.misbehaving:score_in_sandbox"
    outcomes, _ = score_group(["unsafe", "auto"], function, sandbox="unsafe")
    assert [one.reward for one in outcomes] == [1.0, 0.0]
    outcomes, _ = score_group(["unsafe", "auto"], function)
    assert [one.reward for one in outcomes] == [0.0, 1.0]

    # Also one that a notebook defines.
    def score(completion: str, example: object, *, sandbox: str) -> float:
        return float(bool(example) and completion == sandbox)

    assert score_group(["unsafe"], score, sandbox="unsafe")[0][0].reward == 1.0


def test_without_a_sandbox_the_service_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RewardError, match="bubblewrap: bwrap is not installed"):
        score_group(["13"], "tests.rewards.misbehaving:score_in_sandbox", sandbox="bubblewrap")


def test_workers_do_not_load_torch() -> None:
    assert score_group(["torch"])[0][0].reward == 0.0


def test_output_of_the_function_goes_to_the_log_folder(tmp_path: Path) -> None:
    def score(completion: str, example: dict[str, str]) -> float:
        print("looking at", completion, "for", example["answer"])
        return 1.0

    score_group(["14"], score, log_folder=tmp_path)
    assert "looking at 14 for 13" in (tmp_path / "reward-0.log").read_text()


PARENT = """
import asyncio, os, re, sys
from areal_lab.rewards.service import RewardService

def score(completion, example):
    if completion == "pid":
        return os.getpid()
    if completion == "in C":  # which keeps all threads from running
        re.match("(a+)+$", "a" * 64 + "b")
    while True:
        pass

async def main():
    async with RewardService(score, timeout_s=1000) as service:
        (outcome,) = await service.score(["pid"], {})
        print(int(outcome.reward), flush=True)
        if "idle" not in sys.argv:
            await service.score(sys.argv[1:], {})
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("doing", ["busy", "in C", "idle"])
def test_a_worker_dies_with_its_parent_however_that_dies(
    how: signal.Signals, doing: str, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, doing],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert list(tmp_path.iterdir())
        parent.send_signal(how)
        assert parent.wait() == -how
    wait_for_end(worker)
    deadline_s = time.monotonic() + 20
    while list(tmp_path.iterdir()):  # a guard removes them after it has killed the worker
        assert time.monotonic() < deadline_s, list(tmp_path.iterdir())
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": math.nan}, "timeout_s is nan"),
        ({"workers": 0}, "workers is 0"),
        ({"max_error_rate": 1.5}, "max_error_rate is 1.5"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardService(SCORE, **settings)
