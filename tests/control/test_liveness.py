"""Which hosts are lost, whether the run is silent, and which heartbeats are late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.config.sections import ClusterConfig
from areal_lab.control.liveness import HostLiveness, RunLiveness, loss_s, silence_s


def run_liveness() -> RunLiveness:
    return RunLiveness(silent_after_s=3.5, lease_s=10.0, heard_s=0.0)


def test_only_silence_in_a_row_is_a_loss() -> None:
    host = HostLiveness("a", lost_after=3)
    for _ in range(10):
        host.silent("timeout")
        host.silent("timeout")
        host.replied("a")
    assert bool(host.lost) is False
    for _ in range(3):
        host.silent("timeout")
    assert host.lost == "it did not reply to 3 heartbeats (timeout)"
    host.replied("a")
    assert host.lost  # for good
    other = HostLiveness("a", lost_after=3)
    other.replied("b")
    assert "started again" in other.lost


def test_a_heartbeat_that_the_run_was_too_late_to_hear_is_not_missed() -> None:
    host = HostLiveness("a", lost_after=3)
    for _ in range(30):
        host.silent("timeout", waited_s=9.0, meant_s=1.0)
    assert (host.missed, host.lost) == (0, "")
    host.silent("timeout", waited_s=9.0, meant_s=1.0)  # nothing is late for ever
    host.silent("timeout", waited_s=1.0, meant_s=1.0)
    assert host.missed == 2
    host.replied("a")
    assert (host.missed, host.late) == (0, 0)


def test_a_host_counts_its_run_as_silent_before_the_run_counts_it_as_lost() -> None:
    default = ClusterConfig()
    assert silence_s(default.heartbeat_s, default.lost_after) == 3.5
    assert silence_s(0.2, 5) < loss_s(0.2, 5)


def test_a_run_is_silent_first_and_given_up_when_its_lease_is_over() -> None:
    run = run_liveness()
    run.heartbeat(1.0, 0)
    run.look(4.4)
    assert (run.silent, run.next_look_s(4.4)) == (False, 4.5 - 4.4)
    run.look(4.5)
    assert (run.silent, run.given_up(4.5), run.next_look_s(4.5)) == (True, False, 6.5)
    assert (run.given_up(10.9), run.given_up(11.0)) == (False, True)


def test_heartbeats_of_before_a_silence_do_not_end_it() -> None:
    run = run_liveness()
    for second in range(1, 4):
        run.heartbeat(second, second - 1)
    for _ in range(3):  # sent while the link was cut, and delivered once it is healed
        run.heartbeat(8.0, 3)
    assert run.silent, "seen when they arrive, although nothing has looked before"
    assert run.unheard_s(8.0) == 5.0
    run.heartbeat(9.0, 4)  # the run has had the reply to the first one of them
    assert not run.silent
    assert run.unheard_s(9.0) == 0.0
    run.heartbeat(10.0, 4)  # the last reply was late: without a silence that is no matter
    assert run.unheard_s(10.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.1, 12.0), st.booleans()), max_size=30))
def test_a_run_that_has_had_no_reply_since_a_silence_began_is_not_heard(
    heartbeats: list[tuple[float, bool]],
) -> None:
    """A heartbeat is sent after the newest reply was received, or before the silence (late)."""
    run, now_s, before = run_liveness(), 0.0, 0
    for gap_s, late in heartbeats:
        now_s += gap_s
        was_silent = run.silent or run.unheard_s(now_s) >= run.silent_after_s
        before = before if run.silent else run.replies
        run.heartbeat(now_s, before if late else run.replies)
        proven = not late and run.replies - 1 > before
        assert run.silent == (was_silent and not proven)
        assert (run.heard_s == now_s) == (not run.silent)
