"""CPU cores of a host, which stand in for GPUs in runs of the embedded engine.

Engine and trainer of such a run are processes with a few cores each. Their times are measured in
the run (`areal-lab calibrate`), so that only memory and power are used from here. Without measured
times the cost model treats a core as a small and slow GPU.
"""

from __future__ import annotations

from typing import Final

from simulator.catalogue.gpu import GPU, Price

_XEON: Final = (
    "1/40 of a Xeon Platinum 8380 (2021): data sheet 270 W, 2.3 GHz, 8 channels of DDR4-3200"
)

CPU_CORE: Final = GPU(
    name="CPU core",
    flops_per_s=147e9,
    memory_bytes=16 * 2**30,
    memory_bytes_per_s=5.1e9,
    nvlink_bytes_per_s=0.0,
    network_bytes_per_s=1.25e9,
    power_w=6.75,
    idle_power_w=1.35,
    price=Price(low=None, typical=None, high=None, source="none given", date=""),
    node_gpus=64,
    sources={
        "flops_per_s": f"{_XEON}; two AVX-512 units, float32",
        "memory_bytes": "assumed: memory of one process",
        "memory_bytes_per_s": _XEON,
        "network_bytes_per_s": "assumed: 10 Gb/s",
        "power_w": _XEON,
        "idle_power_w": "assumed: a fifth of power_w, as for GPUs",
    },
)
"""One core of a server; not in the catalogue of GPUs, so that no plan recommends it."""
