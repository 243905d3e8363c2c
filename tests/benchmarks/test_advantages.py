"""The benchmark of advantages: all that it compares compute the same thing."""

from __future__ import annotations

import torch

from benchmarks import advantages


def test_every_loop_gives_the_advantages_that_are_measured() -> None:
    batch = advantages.make_batch(5, 300)
    assert batch.lengths.sum() == batch.rewards.numel() >= 300
    assert advantages.largest_error(batch) < 1e-12
    ours = advantages.ours(batch)
    expected = ours["gae, packed"]()
    torch.testing.assert_close(ours["gae, padded"]()[batch.exists], expected, rtol=1e-4, atol=1e-4)
    assert ours["gae, packed, forward and backward"]().shape == expected.shape

    loops = advantages.baselines(batch)
    tokens, over_time = loops["loop over time, padded"]
    assert tokens == expected.numel()
    torch.testing.assert_close(over_time()[batch.exists], expected, rtol=1e-4, atol=1e-4)
    for case in ("loop over tokens, floats", "loop over tokens, tensors"):
        tokens, loop = loops[case]
        result = torch.tensor([float(x) for x in loop()])
        assert tokens == expected.numel()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
