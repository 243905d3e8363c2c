"""The log's lines: exact round trips, readable after a kill, clear when they cannot be read."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.events import (
    Action,
    EngineLost,
    Event,
    GroupFinished,
    Interrupt,
    RunStarted,
    StartGroup,
)
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    MetricRecord,
    Record,
    RunHeader,
    SpanRecord,
    decode,
    encode,
    finite_json,
    read_log,
)

COUNTS = st.integers(0, 2**53)
WORDS = st.text(max_size=20)
TIMES = st.floats(0, 1e9)
NUMBERS = st.floats(allow_nan=False)
_BY_ANNOTATION = {
    "Version": COUNTS,
    "GroupId": COUNTS,
    "EngineId": COUNTS,
    "str": WORDS,
    "bool": st.booleans(),
    "float": NUMBERS,
    "tuple[EngineId, ...]": st.lists(COUNTS, max_size=4).map(tuple),
    "tuple[GroupId, ...]": st.lists(COUNTS, max_size=4).map(tuple),
    "tuple[Version, ...]": st.lists(COUNTS, max_size=4).map(tuple),
    "tuple[int, ...]": st.lists(COUNTS, max_size=4).map(tuple),
    "int": COUNTS,
}


def instances(cls: type) -> st.SearchStrategy[object]:
    """Any value of an event or action class, from its annotations."""
    return st.builds(cls, **{f.name: _BY_ANNOTATION[str(f.type)] for f in dataclasses.fields(cls)})


EVENTS = st.one_of([instances(cls) for cls in get_args(Event)])
ACTIONS = st.one_of([instances(cls) for cls in get_args(Action)])
LIMITS = st.dictionaries(
    WORDS,
    st.one_of(
        st.none(),
        st.booleans(),
        COUNTS,
        NUMBERS,
        WORDS.filter(lambda w: w not in ("inf", "-inf", "nan")),
    ),
    max_size=4,
)
SEGMENTS = st.lists(st.tuples(COUNTS, COUNTS), max_size=3).map(tuple)
SAMPLES = st.lists(st.tuples(NUMBERS, SEGMENTS, WORDS), max_size=4)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        RunHeader,
        mode=st.sampled_from(["train", "cosim", "simulate"]),
        started_at=TIMES,
        limits=LIMITS,
        processes=st.lists(WORDS, max_size=4).map(tuple),
    ),
    st.builds(EventRecord, TIMES, EVENTS),
    st.builds(ActionRecord, TIMES, ACTIONS),
    st.builds(
        lambda process, name, times, cause, args: SpanRecord(
            process=process, name=name, t_s=min(times), end_s=max(times), cause=cause, args=args
        ),
        WORDS,
        WORDS,
        st.tuples(TIMES, TIMES),
        WORDS,
        st.dictionaries(WORDS, NUMBERS, max_size=3),
    ),
    st.builds(
        lambda group, engine, times, samples: GroupRecord(
            group=group,
            engine=engine,
            t_s=sorted(times)[0],
            generated_s=sorted(times)[1],
            end_s=sorted(times)[2],
            rewards=tuple(reward for reward, _, _ in samples),
            segments=tuple(segments for _, segments, _ in samples),
            finish_reasons=tuple(reason for _, _, reason in samples),
        ),
        COUNTS,
        COUNTS,
        st.tuples(TIMES, TIMES, TIMES),
        SAMPLES,
    ),
    st.builds(MetricRecord, process=WORDS, name=WORDS, t_s=TIMES, value=NUMBERS),
)

HEADER = RunHeader(
    mode="train", started_at=1.7e9, limits={"eta": math.inf, "batch_groups": 2}, processes=("x",)
)


def no_constants(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@given(RECORDS)
def test_every_record_survives_its_line(record):
    line = encode(record)
    assert "\n" not in line
    json.loads(line, parse_constant=no_constants)
    assert decode(line) == record


@pytest.mark.parametrize("cls", [*get_args(Event), *get_args(Action)])
def test_every_event_and_action_has_fields_that_the_log_knows(cls):
    assert {str(f.type) for f in dataclasses.fields(cls)} <= set(_BY_ANNOTATION)


def test_a_line_reads_as_the_module_says():
    record = EventRecord(2.25, GroupFinished(7, head_version=0, tail_version=1))
    assert encode(record) == (
        '{"kind":"event","t_s":2.25,"type":"GroupFinished",'
        '"group":7,"head_version":0,"tail_version":1}'
    )


def test_a_lost_engine_of_an_older_log_lost_its_tokens_and_did_not_return():
    line = '{"kind":"event","t_s":1.0,"type":"EngineLost","engine":3}'
    assert decode(line) == EventRecord(1.0, EngineLost(3, tokens_kept=False, returns=False))
    with pytest.raises(ValueError, match="tokens_kept is 1, not a bool"):
        decode(line.replace("3}", '3,"tokens_kept":1}'))


def test_infinity_is_a_string_in_the_line_and_a_float_again_in_the_record():
    line = encode(HEADER)
    assert '"eta":"inf"' in line
    assert decode(line).limits["eta"] == math.inf


def test_a_reward_that_failed_is_nan_after_a_round_trip():
    record = GroupRecord(
        group=0,
        engine=0,
        t_s=0.0,
        generated_s=1.0,
        end_s=1.0,
        rewards=(math.nan,),
        segments=(((0, 3),),),
        finish_reasons=("stop",),
    )
    assert math.isnan(decode(encode(record)).rewards[0])


def test_an_older_log_has_no_interruption_by_hand():
    line = '{"kind":"action","t_s":1.5,"type":"Interrupt"}'
    assert decode(line) == ActionRecord(1.5, Interrupt(by_hand=False))


def test_finite_json_reaches_into_lists_and_mappings():
    assert finite_json({"a": [math.inf, (-math.inf, 1)]}) == {"a": ["inf", ["-inf", 1]]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind":"holiday"}', "unknown kind 'holiday'"),
        ('{"t_s":1}', "unknown kind None"),
        ("[1]", "one JSON object"),
        ('{"kind":"event","t_s":1,"type":"StartGroup","group":1}', "unknown event type"),
        ('{"kind":"action","t_s":1,"type":"GroupFinished","group":1}', "unknown action type"),
        ('{"kind":"action","t_s":1,"type":"Save"}', "version"),
        ('{"kind":"action","t_s":1,"type":"Save","version":1,"color":2}', "color"),
        ('{"kind":"action","t_s":1,"type":"Save","version":"1"}', "Save.version is '1', not a int"),
        ('{"kind":"action","t_s":1,"type":"Save","version":true}', "True, not a int"),
        ('{"kind":"event","type":"StopRequested"}', "t_s"),
        ('{"kind":"event","t_s":1,"type":"EtaRequested","eta":true}', "True, not a float"),
        ('{"kind":"event","t_s":1,"type":"EtaRequested","eta":"many"}', "many"),
        ('{"kind":"event","t_s":1,"type":"EtaRequested"}', "eta"),
        ('{"kind":"run","schema":2,"mode":"train"}', "has schema 2"),
        (
            '{"kind":"run","schema":1,"mode":"walk","started_at":0,"limits":{},"processes":[]}',
            "walk",
        ),
        ('{"kind":"metric","process":"p","name":"n","t_s":0,"value":"big"}', "big"),
    ],
)
def test_an_unreadable_line_says_why(line, says):
    with pytest.raises(ValueError, match=says):
        decode(line)


def test_records_refuse_times_that_go_backwards_and_unequal_samples():
    with pytest.raises(ValueError, match="must not end first"):
        SpanRecord(process="p", name="n", t_s=2.0, end_s=1.0)
    with pytest.raises(ValueError, match="one of each per sample"):
        GroupRecord(
            group=1,
            engine=0,
            t_s=0,
            generated_s=0,
            end_s=0,
            rewards=(1.0,),
            segments=(),
            finish_reasons=(),
        )
    with pytest.raises(ValueError, match="use a float"):
        RunHeader(mode="train", started_at=0, limits={"eta": "inf"}, processes=())


# --- whole logs ----------------------------------------------------------------------------------

LINES = [
    encode(HEADER),
    encode(EventRecord(0.0, RunStarted((0,)))),
    encode(ActionRecord(0.0, StartGroup(0, 0, 0))),
    encode(ActionRecord(3.0, Interrupt())),
]


def test_a_log_is_its_header_and_its_records_in_order():
    log = read_log(f"{line}\n" for line in LINES)
    assert log.header == HEADER
    assert [record.t_s for record in log.records] == [0.0, 0.0, 3.0]
    assert [type(record.action) for record in log.actions] == [StartGroup, Interrupt]
    assert log.end_s == 3.0
    assert not log.cut


@given(st.integers(1, len(LINES[-1]) - 1))
def test_a_log_cut_anywhere_in_its_last_line_is_read_without_it(length):
    log = read_log([*LINES[:-1], LINES[-1][:length]])
    assert log.cut
    assert log.records == read_log(LINES[:-1]).records


def test_a_broken_line_that_is_not_the_last_is_named():
    with pytest.raises(ValueError, match="line 2 of the log is not JSON"):
        read_log([LINES[0], LINES[1][:10], LINES[2]])


def test_a_malformed_record_is_named_even_at_the_end():
    with pytest.raises(ValueError, match="line 2 of the log: unknown kind"):
        read_log([LINES[0], '{"kind":"what"}'])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "no complete line"),
        ([LINES[0][:20]], "no complete line"),
        (LINES[1:], "first line of a log must be its run header"),
        ([LINES[0], LINES[0]], "second run header"),
    ],
)
def test_a_log_without_one_header_is_refused(lines, says):
    with pytest.raises(ValueError, match=says):
        read_log(lines)
