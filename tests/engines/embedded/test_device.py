"""The embedded engine on a device that is not the CPU: nothing mixes, the tokens are the same, and
the host waits once a step."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("llama", "qwen2", "qwen3")


def main(folder: Path) -> None:
    """Compare the pretend device with the CPU; in a process of its own, for its registration."""
    from tests.training import pretend

    device = pretend.register()
    import torch

    # Tensors that say they are elsewhere do not work in inference mode, which saves only time.
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]
    from areal_lab.engines.embedded.attention import IMPLEMENTATION
    from areal_lab.engines.embedded.batcher import Batcher, Sample
    from areal_lab.engines.embedded.loading import load_model
    from areal_lab.engines.protocol import GenerateRequest, PauseMode
    from areal_lab.engines.weights.folder import deduplicated_state, write_weights
    from areal_lab.models.copies import copy_into
    from tests.engines.tiny import ragged_requests, tiny_model

    def mixed_requests() -> list[GenerateRequest]:
        """Plain, greedy, cold, and truncated ones."""
        kinds: list[dict[str, float]] = [
            {},
            {"temperature": 0.0},
            {"temperature": 0.7},
            {"top_k": 5},
            {"top_p": 0.8},
        ]
        return [
            dataclasses.replace(
                one,
                sampling=dataclasses.replace(one.sampling, **kinds[index % 5]),  # type: ignore[arg-type]
            )
            for index, one in enumerate(ragged_requests(12))
        ]

    def generated(batcher: Batcher, new: dict[str, torch.Tensor]) -> tuple[list[Sample], int]:
        """All samples, with new weights in between; and the steps."""
        samples = [batcher.add(one) for one in mixed_requests()]
        steps = 0
        while batcher.running or batcher.waiting:
            if steps == 6:
                batcher.pause(PauseMode.RETRACT)
                batcher.replace_weights(new, "1", flush=True)
                batcher.resume()
            batcher.step()
            steps += 1
        return samples, steps

    with pretend.PretendMode():
        low = torch.zeros(3, dtype=torch.bfloat16, device=device)
        copy_into(low, torch.tensor([1.0, 1.001, -3.3]))
        assert not pretend.WAITS
    assert torch.equal(low.inner, torch.tensor([1.0, 1.001, -3.3]).bfloat16())

    for number, kind in enumerate(KINDS):
        model = tiny_model(kind, tied=number == 1)
        new = deduplicated_state(tiny_model(kind, seed=1, tied=number == 1))
        saved = write_weights(model, folder / kind, 0, dtype=torch.float32)
        served = copy.deepcopy(model)
        served.set_attn_implementation(IMPLEMENTATION)
        expected, _ = generated(Batcher(served, version="0", max_running_requests=5), new)
        with pretend.PretendMode():
            there = load_model(saved.path, torch.float32, str(device))
            assert all(isinstance(t.data, pretend.PretendTensor) for t in there.parameters())
            batcher = Batcher(there, version="0", max_running_requests=5)
            pretend.WAITS.clear()
            found, steps = generated(batcher, new)
            waits = dict(pretend.WAITS)
        assert sum(waits.values()) == steps, waits
        assert len(waits) == 1
        for one, other in zip(expected, found, strict=True):
            assert other.tokens == one.tokens, kind
            assert other.spans == one.spans
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_a_device_generates_what_the_cpu_does_and_is_waited_for_once_a_step(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engines.embedded.test_device", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_on_a_gpu_are_those_of_a_plain_forward(tmp_path: Path, kind: str) -> None:
    """Not run on a GPU yet (docs/gpu.md)."""
    import torch

    from areal_lab.engines.embedded.batcher import Batcher
    from areal_lab.engines.embedded.loading import load_model
    from areal_lab.engines.weights.folder import write_weights
    from tests.engines.tiny import largest_error, ragged_requests, run, tiny_model

    model = tiny_model(kind)
    saved = write_weights(model, tmp_path, 0, dtype=torch.float32)
    there = load_model(saved.path, torch.float32, "cuda")
    batcher = Batcher(there, version="0", max_running_requests=5)
    for one in ragged_requests(14):
        batcher.add(one)
    for sample in run(batcher).values():
        assert largest_error(model, sample) < 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
