"""CPU time of engines by version: published steps, and what replaces it."""

from typing import Any

import pytest

from simulator.assembly.engines import engines_of
from simulator.assembly.unused import ignored_settings
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.costs.decode import DecodeCost, decode_cost
from simulator.costs.measured_engine import EAGER_ERROR, EAGER_LAYER_S, ENGINE_S, ENGINES, EngineCPU
from simulator.costs.weight_bytes import EngineNumbers
from simulator.report.to_json import Part, cost_parts


def decode(model: str, gpu: str, **settings: Any) -> DecodeCost:
    values = {f"rollout.{name}": value for name, value in settings.items()}
    config = load_simulation(None, {"model": model, "cluster.gpu": gpu, **values})
    return engines_of(config).decode()


def cpu_s(engine: EngineCPU, sequences: int) -> float:
    return engine.step_s + sequences * engine.sequence_s


def test_the_default_is_unchanged() -> None:
    assert cpu_s(ENGINES["default"], 1) == cpu_s(ENGINES["default"], 256) == ENGINE_S == 1.5e-3
    usual = decode("Qwen2.5-0.5B", "H100")
    auto = EngineNumbers(weights="auto")
    plain = decode_cost(find_model("Qwen2.5-0.5B"), find_gpu("H100"), numbers=auto)
    assert usual == plain
    assert usual.step_s(1, 10) == ENGINE_S


def test_every_engine_has_a_source_and_costs_more_with_more_sequences() -> None:
    for name, engine in ENGINES.items():
        assert "20" in engine.source or name in ("default", "sglang-0.5")
        assert cpu_s(engine, 256) >= cpu_s(engine, 1) > 0


def test_vllm_0_6_takes_as_long_for_one_sequence_as_published() -> None:
    """Qwen2.5's page (2024-11), A100: milliseconds a step; prefill of one token."""
    for model, ms in (("Qwen2.5-1.5B", 1e3 / 183.3), ("Qwen2.5-3B", 1e3 / 127.6)):
        step_s = decode(model, "A100-80", engine="vllm-0.6").step_s(1, 1024)
        assert 1e3 * step_s == pytest.approx(ms, rel=0.06)


def test_vllm_v1_takes_as_long_as_published() -> None:
    """Llama 3.2 1B: 2.73 ms a token with vLLM 0.8 (pull request 17866, 2025-05-08)."""
    step_s = decode("Llama-3.2-1B", "H100", engine="vllm-0.8").step_s(1, 500)
    assert 1e3 * step_s == pytest.approx(2.73, rel=0.02)


def test_asynchronous_scheduling_hides_the_cpu() -> None:
    """Qwen2.5-7B, 32 sequences on an H100: steps of about 6 ms with vLLM 0.24 (issue 48229,
    2026-07-10)."""
    hidden = decode("Qwen2.5-7B", "H100", engine="vllm-0.14")
    assert 1e3 * hidden.step_s(32, 32 * 80) == pytest.approx(6, rel=0.05)
    shown = decode("Qwen2.5-7B", "H100", engine="vllm-0.8")
    assert shown.step_s(32, 32 * 80) - hidden.step_s(32, 32 * 80) == pytest.approx(
        cpu_s(ENGINES["vllm-0.8"], 32)
    )


def test_v1_is_as_much_faster_than_v0_as_published() -> None:
    """Up to 1.7 times on Llama 3.1 8B, ShareGPT, H100 (vLLM blog, 2025-01-27)."""
    first, second = (
        decode("Llama-3.1-8B", "H100", engine=name).step_s(256, 256 * 320)
        for name in ("vllm-0.6", "vllm-0.8")
    )
    assert first / second == pytest.approx(1.7, rel=0.03)


@pytest.mark.parametrize(("running", "tokens_per_s"), [(64, 646_000 / 128), (128, 623_000 / 64)])
def test_areals_engines_reach_the_flat_part_of_its_curve(running: int, tokens_per_s: float) -> None:
    step_s = decode("R1-Distill-Qwen-1.5B", "H800", engine="areal-0.3").step_s(
        running, running * 5100
    )
    assert running / step_s == pytest.approx(tokens_per_s, rel=0.02)


def test_table_1_is_within_the_stated_error_of_areals_engine() -> None:
    """The synchronous 1.5B row was fitted with 14.25 ms for few sequences."""
    engine = ENGINES["areal-0.3"]
    assert engine.error is not None
    assert cpu_s(engine, 1) * (1 + engine.error) == pytest.approx(14.25e-3, rel=0.01)


def test_sglang_is_no_slower_than_its_published_speed_of_a_small_model() -> None:
    """Qwen3-0.6B on an H20: 414.2 tokens/s with 0.4.6.post1 (2025-05)."""
    assert cpu_s(ENGINES["sglang-0.4"], 0) <= 1 / 414.2


@pytest.mark.parametrize(
    ("layers", "step_ms"), [(32, 8.23), (12, 1e3 / 207.7), (12, 1e3 / 205.1), (28, 22)]
)
def test_launching_a_layer_takes_within_a_factor_of_two_of_published(
    layers: int, step_ms: float
) -> None:
    assert 0.5 < EAGER_LAYER_S / (step_ms / 1e3 / layers) < 2


def test_the_embedded_engine_launches_its_layers_with_and_without_the_setting() -> None:
    """28 layers of 43 operations and 47 besides at 7 us, and the scheduler's Python."""
    engine = ENGINES["embedded"]
    assert engine.layer_s == pytest.approx(43 * 7e-6, rel=0.01)
    for graphs in (True, False):
        step_s = decode("Qwen2.5-1.5B", "H100", engine="embedded", cuda_graphs=graphs).step_s(1, 99)
        assert step_s == pytest.approx(28 * engine.layer_s + cpu_s(engine, 1))
    measured = decode("Qwen2.5-1.5B", "H100", engine="embedded", engine_overhead_s=0.004)
    assert measured.step_s(1, 99) < 28 * engine.layer_s


def test_without_graphs_a_step_takes_at_least_its_launches() -> None:
    for engine in ("vllm-0.6", "sglang-0.5"):
        graphs = decode("Qwen2.5-1.5B", "H100", engine=engine)
        eager = decode("Qwen2.5-1.5B", "H100", engine=engine, cuda_graphs=False)
        launches_s = 28 * EAGER_LAYER_S
        assert eager.step_s(1, 100) == pytest.approx(launches_s + cpu_s(ENGINES[engine], 1))
        # The launches are hidden once the GPU takes longer.
        assert eager.step_s(256, 10**7) == graphs.step_s(256, 10**7)
        assert eager.parts(1, 100)["engine CPU"] > graphs.parts(1, 100)["engine CPU"]


def test_measured_times_replace_the_engines() -> None:
    def engine(**settings: Any) -> tuple[float, float, bool]:
        values = {f"rollout.{name}": value for name, value in settings.items()}
        found = engines_of(load_simulation(None, values)).cpu
        return found.step_s, found.sequence_s, found.overlap

    assert engine(engine="vllm-0.6") == (1.37e-3, 43e-6, False)
    assert engine(engine="vllm-0.6", engine_overhead_s=2e-3) == (2e-3, 0, False)
    assert engine(engine="vllm-0.6", engine_sequence_s=1e-6) == (1.37e-3, 1e-6, False)
    assert engine(engine_overhead_s=2e-3, engine_sequence_s=3e-6) == (2e-3, 3e-6, True)
    assert engine(engine="vllm-0.6", engine_overlap=True) == (1.37e-3, 43e-6, True)


def test_an_engine_whose_cpu_time_is_measured_still_says_whether_it_overlaps() -> None:
    settings = {"rollout.engine": "vllm-0.8", "rollout.engine_overhead_s": 0.1}
    assert not list(ignored_settings(load_simulation(None, settings)))
    for replaced in ({"rollout.engine_overlap": True}, {"rollout.decode_step_s": 0.01}):
        found = list(ignored_settings(load_simulation(None, settings | replaced)))
        assert [line for line in found if line.startswith("rollout.engine is vllm-0.8")]


def test_the_report_names_the_engine() -> None:
    config = load_simulation(None, {"rollout.engine": "vllm-0.6"})
    (part,) = [part for part in cost_parts(config) if part.name == "engine CPU"]
    assert part.source.startswith("1.4 ms per decode step and 43 us per sequence: vLLM 0.6")
    assert part.error == 0.5


def test_launches_without_graphs_are_a_part_with_the_error_of_published_steps() -> None:
    def launches(**settings: Any) -> list[Part]:
        values = {f"rollout.{name}": value for name, value in settings.items()}
        parts = cost_parts(load_simulation(None, values))
        return [part for part in parts if part.name == "kernel launches"]

    published_s = (8.23e-3 / 32, (1 / 207.7 + 1 / 205.1) / 2 / 12, 22e-3 / 28)
    errors = [abs(EAGER_LAYER_S / seconds - 1) for seconds in published_s]
    assert sum(errors) / len(errors) == pytest.approx(EAGER_ERROR, abs=0.01)
    (part,) = launches(cuda_graphs=False)
    assert part.error == EAGER_ERROR
    assert part.source.startswith("0.43 ms for each of 28 layers")
    assert launches(cuda_graphs=False, engine_overhead_s=0.0) == [part]
    assert not launches()
    assert not launches(cuda_graphs=False, decode_step_s=0.01)
