"""Fetched fields become tensors without a copy; nothing else of the data plane loads torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from areal_lab.cluster.shards.torch_view import as_tensors
from areal_lab.data.arrays.jagged import Field, Jagged


def test_tensors_share_the_memory_of_arrays() -> None:
    fields: dict[str, Field] = {
        "reward": np.zeros(2),
        "tokens": Jagged.of_rows([[1, 2], [], [3]], "int32"),
    }
    tensors = as_tensors(fields)
    assert torch.equal(tensors["reward"], torch.zeros(2, dtype=torch.float64))
    assert [row.tolist() for row in tensors["tokens"].unbind()] == [[1, 2], [], [3]]
    for array, tensor in (
        (fields["reward"], tensors["reward"]),
        (fields["tokens"][0], tensors["tokens"].values()),
    ):
        array[0] = 7
        assert tensor[0] == 7


def test_servers_and_clients_load_no_torch() -> None:
    names = "server, client, mirror, fetched"
    script = (
        f"import sys; from areal_lab.cluster.shards import {names}; "
        "import areal_lab.data.arrays.samples; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
