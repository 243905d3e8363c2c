"""What passes through a controller, from the measured inputs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.config.problem import ConfigError
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.costs import controller as terms
from simulator.costs.controller import (
    ControllerCost,
    ControllerInputs,
    OwnBatches,
    controller_cost,
    load_inputs,
)
from simulator.costs.training_timing import SLOWEST_RANK, MeasuredTraining, TrainTiming

TOKENS, RESPONSES = 76_000_000, 8192
"""A step of the paper's 1.5B run."""
INPUTS = ControllerInputs()


def test_the_paper_s_batch_is_29_seconds_of_reading_and_under_a_gigabyte_of_arrays() -> None:
    assert terms.read_s(TOKENS, INPUTS) == pytest.approx(29, abs=0.5)
    assert terms.reply_bytes(TOKENS, INPUTS) == pytest.approx(3.3e9, rel=0.02)
    assert terms.packed_bytes(TOKENS, INPUTS) == pytest.approx(0.6e9, rel=0.02)


def test_bytes_of_a_reply_are_those_of_the_json_that_sglang_sends() -> None:
    """Token ids, and for each the log-prob, the id and no text."""
    random = np.random.default_rng(0)
    tokens = 2000
    ids = random.integers(0, 150_000, tokens).tolist()
    logprobs = [[-float(random.random()), token, None] for token in ids]
    reply = {"output_ids": ids, "meta_info": {"output_token_logprobs": logprobs}}
    found = len(json.dumps(reply)) / tokens
    assert found == pytest.approx(INPUTS.reply_token_bytes, rel=0.05)


def test_bytes_of_metadata_are_those_of_a_response_with_two_versions() -> None:
    told = {
        "group": 123456,
        "sample": 7,
        "shard": "3f2c9a7b1d",
        "node": "10.0.12.7:8731",
        "incarnation": 17,
        "offset": 1234567,
        "tokens": 9277,
        "versions": [[12, 5000], [13, 4277]],
        "reward": 1.0,
        "finish_reason": "stop",
    }
    assert len(json.dumps(told)) == pytest.approx(INPUTS.metadata_bytes, rel=0.05)


def cost(kind: str, **fields: object) -> ControllerCost:
    return ControllerCost(kind=kind, **fields)  # type: ignore[arg-type]


def test_each_way_passes_what_its_name_says() -> None:
    single, metadata, spmd = (cost(kind, readers=4) for kind in ("single", "metadata", "spmd"))
    for way in (single, metadata, spmd):
        reply, batch = way.reply(RESPONSES, TOKENS), way.batch(RESPONSES, TOKENS)
        assert reply.sent_bytes == batch.received_bytes == 0
        tensors = reply.received_bytes > TOKENS
        assert tensors == (way is single)
    read_s, told_s = terms.read_s(TOKENS, INPUTS), terms.messages_s(RESPONSES, INPUTS)
    assert replace(single, readers=0).read_s(TOKENS) == 0
    assert single.reply(RESPONSES, TOKENS).seconds == pytest.approx(read_s + told_s)
    assert metadata.reply(RESPONSES, TOKENS).seconds == told_s
    assert metadata.read_s(TOKENS) == spmd.read_s(TOKENS) == read_s
    assert spmd.reply(RESPONSES, TOKENS).seconds == spmd.batch(RESPONSES, TOKENS).seconds == 0
    assert [way.fetch(RESPONSES, TOKENS).bytes for way in (single, metadata, spmd)] == [
        0,
        terms.packed_bytes(TOKENS, INPUTS),
        0,
    ]
    through = metadata.reply(RESPONSES, TOKENS).received_bytes
    through += metadata.batch(RESPONSES, TOKENS).sent_bytes
    assert through < 0.01 * terms.packed_bytes(TOKENS, INPUTS)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        # 8e9 bytes: over 2 streams of 1e9, over 4 hosts' networks of 1e8, over 5 of 1e8.
        ({"receivers": 2, "receiving_hosts": 9, "sending_hosts": 9, "network": 1e9}, 4.0),
        ({"receivers": 99, "receiving_hosts": 4, "sending_hosts": 9, "network": 1e8}, 20.0),
        ({"receivers": 99, "receiving_hosts": 9, "sending_hosts": 5, "network": 1e8}, 16.0),
    ],
)
def test_the_slowest_of_streams_and_networks_bounds_a_fetch(
    fields: dict[str, float], seconds: float
) -> None:
    inputs = ControllerInputs(stream_bytes_per_s=1e9, request_s=0.0)
    network = fields.pop("network")
    sizes = {name: int(value) for name, value in fields.items()}
    assert terms.fetch_s(1, 8e9, network, inputs, **sizes) == pytest.approx(seconds)
    each = replace_request(inputs, 0.5)
    asked = terms.fetch_s(100, 8e9, network, each, **sizes) - seconds
    assert asked == pytest.approx(0.5 * math.ceil(100 / sizes["receivers"]))


def replace_request(inputs: ControllerInputs, request_s: float) -> ControllerInputs:
    return inputs.with_settings({"request_s": request_s})


@given(
    nodes=st.integers(1, 64),
    tokens=st.integers(1, 10**9),
    responses=st.integers(1, 10**5),
    kind=st.sampled_from(["single", "metadata", "spmd"]),
)
def test_more_nodes_are_never_slower_and_more_tokens_never_faster(
    nodes: int, tokens: int, responses: int, kind: str
) -> None:
    def seconds(count: int, size: int) -> float:
        way = cost(kind, readers=count, receiving_hosts=count, sending_hosts=count)
        return (
            way.read_s(size) / max(1, count)
            + way.reply(responses, size).seconds
            + way.fetch(responses, size).seconds
        )

    assert seconds(nodes + 1, tokens) <= seconds(nodes, tokens) <= seconds(nodes, 2 * tokens)


def test_a_config_gives_hosts_and_ranks() -> None:
    found = controller_cost(load_simulation("table_1_1.5b_asynchronous", ["controller.kind=spmd"]))
    assert found is not None
    assert (found.readers, found.receivers) == (16, 16)
    assert (found.sending_hosts, found.receiving_hosts) == (12, 4)
    metadata = ["controller.kind=metadata", "controller.network_bytes_per_s=1e9"]
    found = controller_cost(load_simulation("table_1_1.5b_asynchronous", metadata))
    assert found is not None
    assert (found.readers, found.network_bytes_per_s) == (12, 1e9)
    assert controller_cost(load_simulation("small")) is None


# --- the file of inputs --------------------------------------------------------------------------


def test_a_file_replaces_what_it_names_and_what_it_measured_has_no_error(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"controller_inputs": {"read_token_s": 3e-7}, "machine": {"cores": 2}}')
    found = load_inputs(path)
    assert found.read_token_s == 3e-7
    assert found.read_error == 0
    assert found.message_s == INPUTS.message_s
    assert found.message_error == INPUTS.message_error
    assert str(path) in found.source
    assert load_inputs("") == INPUTS
    config = load_simulation("small", ["controller.kind=single", f"controller.inputs={path}"])
    way = controller_cost(config)
    assert way is not None
    assert way.reply(1, 10**6).seconds == pytest.approx(0.3 + INPUTS.message_s)
    assert "0.3 us" in way.provenance
    assert way.error == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "has no object 'controller_inputs'"),
        ("{", "is not JSON"),
        ('{"controller_inputs": {"read_token_s": -1}}', "read_token_s is -1, but must be"),
        ('{"controller_inputs": {"read_tokens_s": 1}}', "read_tokens_s"),
        (None, "cannot be read: No such file"),
    ],
)
def test_another_file_is_one_line_that_names_it(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_inputs(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(caught.value.problems) == 1


# --- training on own sequences -------------------------------------------------------------------


@dataclass(frozen=True)
class PerRank:
    """A reference: divides tokens evenly among ranks, a second per token."""

    ranks: int

    def step(self, lengths: object, *, minibatches: int) -> TrainTiming:
        assert minibatches == 2
        tokens = int(np.asarray(lengths).sum())
        return TrainTiming(
            seconds=tokens / self.ranks,
            parts={"train": tokens / self.ranks},
            micro_batches=1,
            tokens=tokens,
            flops=2.0 * tokens,
        )


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_a_step_takes_as_long_as_the_rank_with_the_most_tokens(
    ranks: int, each: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, ranks * each)
    found = OwnBatches(training=PerRank(ranks), ranks=ranks).step(lengths, minibatches=2)
    most = max(sum(lengths[rank * each : (rank + 1) * each].tolist()) for rank in range(ranks))
    assert found.seconds == pytest.approx(most)
    assert (found.tokens, found.flops) == (lengths.sum(), 2.0 * lengths.sum())
    waits_s = found.parts.get(SLOWEST_RANK, 0.0)
    assert waits_s == pytest.approx(most - lengths.sum() / ranks)


def test_equal_sequences_wait_for_nothing() -> None:
    model = find_model("R1-Distill-Qwen-1.5B")
    training = MeasuredTraining(seconds=5.0, token_s=1e-3, model=model)
    lengths = [100] * 32
    found = OwnBatches(training=training, ranks=4).step(lengths, minibatches=4)
    assert found == training.step(lengths, minibatches=4)
