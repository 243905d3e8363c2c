"""Calibration of engines that always prefill while they decode, and of prompts with a prefix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_lab.runlog.read_run import read_run
from simulator.calibrate.engine import fit_engine
from simulator.calibrate.fit import EnginePoint, is_held_out
from simulator.calibrate.fit_run import calibrate_from
from simulator.calibrate.replay import replay
from tests.simulator.calibrate.recordings import known, record

STEP_S, SEQUENCE_S, CONTEXT_S, PASS_S, TOKEN_S = 0.08, 0.01, 2e-5, 0.05, 4e-3


def mixed(count: int) -> list[EnginePoint]:
    """Stretches of decode steps, each with prefills."""
    generator = np.random.default_rng(5)
    points = []
    for place in range(1, count + 1):
        steps, batch, prompt = (int(generator.integers(low, 40)) for low in (1, 1, 2))
        sequences, context = steps * batch, steps * batch * int(generator.integers(20, 2000))
        points.append(
            EnginePoint(
                seconds=steps * (STEP_S + PASS_S)
                + SEQUENCE_S * sequences
                + CONTEXT_S * context
                + TOKEN_S * prompt * steps,
                steps=steps,
                sequences=sequences,
                context_tokens=context,
                prompt_tokens=prompt * steps,
                prompt_pairs=prompt * steps,
                place=place,
                alone=False,
            )
        )
    return points


def without_prefill(point: EnginePoint) -> EnginePoint:
    read_s = PASS_S * point.steps + TOKEN_S * point.prompt_tokens
    return replace(point, seconds=point.seconds - read_s, prompt_tokens=0, prompt_pairs=0)


def test_costs_are_recovered_if_few_stretches_have_no_prefills() -> None:
    points = mixed(40)
    points[:3] = map(without_prefill, points[:3])
    decode, prefill = fit_engine(points)
    assert prefill is not None
    assert decode.settings["rollout.decode_step_s"] == pytest.approx(STEP_S, rel=0.05)
    assert decode.settings["rollout.decode_sequence_s"] == pytest.approx(SEQUENCE_S, rel=0.01)
    assert decode.settings["rollout.decode_context_token_s"] == pytest.approx(CONTEXT_S, rel=0.01)
    assert prefill.settings["rollout.prefill_pass_s"] == pytest.approx(PASS_S, rel=0.05)
    assert prefill.settings["rollout.prefill_token_s"] == pytest.approx(TOKEN_S, rel=0.01)
    assert prefill.settings["rollout.prefill_pair_s"] == 0
    assert decode.held_out_error < 1e-3
    assert len(decode.places) == 40
    assert len(prefill.places) == 37
    assert "fitted together with prefills" in decode.note


def test_held_out_points_change_no_coefficient_of_either_part() -> None:
    points = mixed(40)
    slower = [replace(p, seconds=2 * p.seconds) if is_held_out(p.place) else p for p in points]
    for one, other in zip(fit_engine(points), fit_engine(slower), strict=True):
        assert one is not None
        assert other is not None
        assert one.settings == other.settings
        assert other.held_out_error == pytest.approx(0.5, abs=0.01)


def test_stretches_without_prefills_suffice_for_decode_steps() -> None:
    points = mixed(40)
    points[:20] = map(without_prefill, points[:20])
    decode, prefill = fit_engine(points)
    assert prefill is not None
    assert len(decode.places) == 20
    assert decode.settings["rollout.decode_step_s"] == pytest.approx(STEP_S, rel=1e-3)


def test_too_few_stretches_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"6 to fit and 2 held out.*record a longer run"):
        fit_engine(mixed(8))


def test_prompts_with_a_common_prefix_only_cost_the_rest(tmp_path: Path) -> None:
    run = record(tmp_path / "synchronous", known())
    whole = calibrate_from(run)
    assert not any("prompts share a prefix" in note for note in whole.notes)
    events = run / "events.jsonl"
    shared = []
    for line in events.read_text().splitlines():
        told = json.loads(line)
        counts = told.get("args", {})
        if counts.get("prompt_tokens"):
            prompts = counts["prompt_tokens"] / 20
            for name in ("sequences", "context_tokens", "prompt_pairs"):
                counts[name] /= prompts  # each is read by itself,
            counts["prompt_tokens"] = 5  # and three quarters of it were there
        shared.append(json.dumps(told))
    events.write_text("\n".join(shared) + "\n")
    found = calibrate_from(run)
    assert found.settings["workload.prompt_tokens"] == 20
    (told_of,) = [note for note in found.notes if "prompts share a prefix" in note]
    assert "of their tokens are prefilled" in told_of
    # Of 48 groups, three more run next to the last one prefilled, which its span does not show.
    (prefill,) = [part for part in found.parts if part.name == "prefill"]
    assert found.settings["rollout.prefill_token_s"] == pytest.approx(
        prefill.settings["rollout.prefill_token_s"] / 4 * 48 / 45
    )


def test_engines_that_load_weights_do_not_generate_in_run_or_simulation(tmp_path: Path) -> None:
    config = known("schedule.name=asynchronous", "eta=2")
    run = read_run(record(tmp_path / "run", config, counted=False))
    rows = {row.name.strip(): row for row in replay(known(), run).rows}
    taking, idle = rows["engines: taking new weights"], rows["engines idle"]
    assert taking.measured == pytest.approx(taking.predicted, abs=0.01)
    assert 0 < taking.measured <= idle.measured
