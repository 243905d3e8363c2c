"""How entries of the catalogue name their sources."""

from __future__ import annotations

from simulator.catalogue.gpu import IDLE_SOURCE

GIB = 2**30

MARKET = "unverified: usual figure of market reports"
NOT_SOLD = "no list price in western clouds"

COMPUTE = "flops_per_s memory_bytes memory_bytes_per_s power_w"
"""Fields of one chip."""
LINKS = "nvlink_bytes_per_s network_bytes_per_s pcie_bytes_per_s node_gpus"
"""Fields of its connections."""


def aiconfigurator(system: str) -> str:
    """Source of the numbers that NVIDIA's performance model uses for a system."""
    return f"AIConfigurator 0.12.0 systems/{system}.yaml (NVIDIA, 2026-09)"


def sources_of(**by_source: tuple[str, str]) -> dict[str, str]:
    """Source per field, from groups of (fields, source)."""
    named = {name: source for fields, source in by_source.values() for name in fields.split()}
    return {**named, "idle_power_w": IDLE_SOURCE}
