"""Engines that hold experts in MXFP4, as gpt-oss is published; its trainer holds bf16."""

import pytest

from simulator.assembly.check import problems
from simulator.assembly.engines import engine_decode
from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.lora.adapters import sent_weights
from simulator.costs.precision.fp8_kernels import precise_coefficients
from simulator.costs.precision.numbers import BF16, EngineNumbers
from simulator.costs.weight_sync import weight_update
from simulator.report.provenance import warnings

H100 = find_gpu("H100")
GPT_OSS = find_model("gpt-oss-120b")
AUTO = EngineNumbers(weights="auto")


def configured(*changes: str) -> SimulationConfig:
    """gpt-oss-120b on H100s, with nothing measured."""
    model = ("model=gpt-oss-120b", "weights.update_s=null", "weights.backend=nccl")
    engine = ("rollout.decode_step_s=null", "gpus=72", "cluster.rollout_gpus=8")
    return load_simulation("small", [*model, *engine, *changes])


def test_engines_hold_the_checkpoint_unless_told_otherwise() -> None:
    assert AUTO.weight_bytes(GPT_OSS) == GPT_OSS.checkpoint_bytes()
    assert BF16.weight_bytes(GPT_OSS) == 2 * GPT_OSS.parameters
    dense = find_model("Qwen3-8B")
    assert AUTO.weight_bytes(dense) == BF16.weight_bytes(dense)
    for sequences in (1, 100):
        few = AUTO.decode_weight_bytes(GPT_OSS, sequences=sequences)
        assert few == GPT_OSS.decode_checkpoint_bytes(sequences=sequences)


def test_the_larger_one_fits_on_one_gpu_as_its_model_card_says() -> None:
    """ "Fit on a single 80 GB GPU" (arXiv:2508.10925, section 2.1)."""
    assert cache_tokens(GPT_OSS, H100, numbers=AUTO, utilization=0.9) > 50_000
    with pytest.raises(ValueError, match="does not fit on H100 with tensor_parallel=1"):
        cache_tokens(GPT_OSS, H100, utilization=0.9)
    assert not [one for one in problems(configured()) if "does not fit" in one.message]


def test_decode_steps_are_shorter_by_the_bytes() -> None:
    steps = []
    for precision in ("auto", "bf16"):
        config = configured(f"rollout.weight_precision={precision}", "rollout.tensor_parallel=8")
        steps.append(engine_decode(config, GPT_OSS, H100).parts(200, 200_000))
    quantized, plain = steps
    read = GPT_OSS.decode_checkpoint_bytes(sequences=200) / GPT_OSS.decode_weight_bytes(
        sequences=200
    )
    assert quantized["reading weights"] == pytest.approx(read * plain["reading weights"])
    for same in ("layers", "reading cache", "all-reduce"):
        assert quantized[same] == plain[same]


def test_kernels_stay_those_of_bf16() -> None:
    assert precise_coefficients(H100, AUTO) == precise_coefficients(H100, BF16)


def test_updates_send_what_engines_hold() -> None:
    auto, plain = configured(), configured("rollout.weight_precision=bf16")
    assert sent_weights(auto).weight_bytes(GPT_OSS) == GPT_OSS.checkpoint_bytes()
    assert sent_weights(plain).weight_bytes(GPT_OSS) == GPT_OSS.weight_bytes()
    quotient = (
        weight_update(auto, GPT_OSS, H100).seconds / weight_update(plain, GPT_OSS, H100).seconds
    )
    assert quotient == pytest.approx(GPT_OSS.checkpoint_bytes() / GPT_OSS.weight_bytes())
    assert sent_weights(configured("rollout.weight_precision=fp8")) == BF16


def test_the_trainer_holds_bf16_whatever_engines_do() -> None:
    """So a layout that is too small for bf16 is refused."""
    told = []
    for precision in ("auto", "bf16"):
        few = ("gpus=16", "trainer.step_s=null", "rollout.tensor_parallel=8")
        config = configured(f"rollout.weight_precision={precision}", *few)
        told.append([one.message for one in problems(config)])
    assert told[0] == told[1]
    assert any(line.startswith("trainer: training gpt-oss-120b takes") for line in told[0]), told


def test_a_report_says_that_the_kernels_were_not_measured() -> None:
    said = [line for line in warnings(configured()) if "MXFP4" in line]
    assert len(said) == 1
    assert not [
        line for line in warnings(configured("rollout.weight_precision=bf16")) if "MXFP4" in line
    ]
