"""A thousand weight updates in a row: memory of every process flat, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import choose_weights_root, remove_weights_root
from areal_lab.host.process_groups import shared_segments
from areal_lab.training.process.client import TrainerProcess
from tests.real_engines.conftest import Announce, only
from tests.real_engines.lab import BOUND_S, Lab, request, versions_of
from tests.training.tiny import random_batch, settings_for
from tests.training.updating import TRAIN_EVERY, assert_flat, update_often

UPDATES = 1000
KIB_PER_UPDATE = 16.0
"""A set of the weights has 723. Pools that are filled late count, too: up to 8 were seen."""


@only("embedded", "sglang")
@pytest.mark.parametrize("transfer", [one for one in Transfer if one is not Transfer.ADAPTER])
def test_a_thousand_updates_leave_memory_as_it_was(
    lab: Lab, transfer: Transfer, tmp_path: Path, announce: Announce
) -> None:
    async def scenario() -> None:
        size_bytes = lab.weights(0).size_bytes
        root = choose_weights_root(tmp_path, size_bytes)
        settings = settings_for(
            lab.weights(0).path,
            weights_root=root,
            more={"rollout.transfer": str(transfer), "rollout.transfer_timeout_s": BOUND_S},
        )
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            server = lab.engine.child.pid
            segments = shared_segments(server)
            growths = await update_often(
                trainer,
                lab.client,
                {"pipeline": os.getpid(), "trainer": trainer.child.pid, "engine": server},
                random_batch(groups=1, samples=2),
                since=0,
                updates=UPDATES,
            )
            (result,) = await lab.client.generate([request("after", [5, 6, 7], 5)])
            assert versions_of(result) == [UPDATES // TRAIN_EVERY]
            assert shared_segments(server) == segments
        finally:
            await trainer.stop()
            remove_weights_root(root)
        announce("".join(f"{growth}\n" for growth in growths))
        assert_flat(growths, kib_per_update=KIB_PER_UPDATE)
        # Segments that the engine opened would stay until it ends.
        assert not [*Path("/dev/shm").glob(f"torch_{trainer.child.pid}_*")]
        assert not root.exists()

    lab.loop.run_until_complete(scenario())
