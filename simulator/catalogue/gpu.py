"""The properties of a GPU that the simulator needs. Bytes, rates per second, dollars.

Vendors' "GB" of memory are GiB (an H200 "of 141 GB" shows 143,771 MiB), their "GB/s" are 1e9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

_RATES: Final = (1e6, 1e14, (1e9,))
_BOUNDS: Final[Mapping[str, tuple[float, float, tuple[float, ...]]]] = MappingProxyType(
    {
        "flops_per_s": (1e9, 1e18, (1e12,)),
        "fp8_flops_per_s": (1e9, 1e18, (1e12,)),
        "memory_bytes": (1e8, 1e13, (2**30, 2**20)),
        "memory_bytes_per_s": (1e8, 1e14, (1e12, 1e9)),
        "nvlink_bytes_per_s": _RATES,
        "network_bytes_per_s": _RATES,
        "pcie_bytes_per_s": _RATES,
        "power_w": (0.1, 1e5, ()),
    }
)
"""By field: the least and largest value (from one CPU core to far beyond the largest GPU), and the
units of data sheets in which a too small number may have been given."""

_MAY_BE_ZERO: Final = MappingProxyType(
    {"nvlink_bytes_per_s": "NVLink", "fp8_flops_per_s": "fp8 units"}
)
"""Fields whose 0 means that there is none, and of what."""

IDLE_SHARE = 0.2
"""Power of an idle GPU that holds a model, as a fraction of its limit."""

IDLE_SOURCE = (
    f"{IDLE_SHARE:.0%} of power_w: idle H100s with 72 GB in use draw 140 to 145 of 700 W "
    "(nvidia-smi in wilicc/gpu-burn#114, 2024-10-25); with empty memory half of that, but a "
    "cluster that waits for work has full memory"
)
"""Source of the fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Dollars with their source: per GPU-hour when rented, per GPU when bought."""

    low: float | None
    typical: float | None
    """None if no price is published."""
    high: float | None
    source: str
    date: str
    """Date of the source, such as `2026-05`; empty if it has none."""

    def __post_init__(self) -> None:
        known = [one for one in (self.low, self.typical, self.high) if one is not None]
        if any(not math.isfinite(one) or one < 0 for one in known) or known != sorted(known):
            raise ValueError(
                f"a price is {self.low} / {self.typical} / {self.high}, "
                "but must be 0 <= low <= typical <= high dollars"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One type of GPU in its typical server."""

    name: str
    flops_per_s: float
    """Peak of **dense** bf16 matrix products accumulated in fp32; data sheets also print twice as
    much, "with sparsity"."""
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """Between the GPUs of a node, in one direction (data sheets add both); 0 means no NVLink."""
    network_bytes_per_s: float
    """Between nodes, in one direction, per GPU."""
    power_w: float
    """Power limit (TDP)."""
    idle_power_w: float = math.nan
    """Power while idle with a loaded model; if not given, `IDLE_SHARE` of `power_w`."""
    price: Price
    purchase: Price | None = None
    pcie_bytes_per_s: float = 32e9
    """To the host's memory, and between GPUs without NVLink, in one direction."""
    node_gpus: int = 8
    """GPUs that are connected without the network: a server, or a rack of GB200 NVL72."""
    fp8_flops_per_s: float = 0.0
    """Peak of dense fp8 matrix products; 0 means no fp8 units."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Source and date of the number, by field. Sources that were not checked in the primary source
    begin with `unverified`."""

    def __post_init__(self) -> None:
        if math.isnan(self.idle_power_w):
            object.__setattr__(self, "idle_power_w", IDLE_SHARE * self.power_w)
        for name in _BOUNDS:
            if name not in _MAY_BE_ZERO or getattr(self, name) != 0:
                _check(self.name, name, getattr(self, name))
        if not 0 <= self.idle_power_w <= self.power_w:
            raise ValueError(
                f"idle_power_w of GPU {self.name} is {self.idle_power_w}, "
                f"but must be from 0 to power_w ({self.power_w})"
            )
        if self.node_gpus < 1:
            raise ValueError(f"node_gpus of GPU {self.name} is {self.node_gpus}, but must be >= 1")

    @property
    def link_bytes_per_s(self) -> float:
        """Rate between two GPUs of a node in one direction: NVLink, or PCIe if there is none."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


def _check(gpu: str, name: str, value: float) -> None:
    """Refuse a number that no GPU has; it is usually in the wrong unit."""
    least, most, units = _BOUNDS[name]
    said = f"{name} of GPU {gpu} is {value}"
    if not math.isfinite(value) or value <= 0:
        none = f"; 0 means no {_MAY_BE_ZERO[name]}" if name in _MAY_BE_ZERO else ""
        raise ValueError(f"{said}, but must be > 0 and finite{none}")
    if not least <= value <= most:
        meant = [value * unit for unit in units if least <= value * unit <= most]
        hint = f"; did you mean {_short(meant[0])}?" if value < least and meant else ""
        raise ValueError(f"{said}, but must be from {_short(least)} to {_short(most)}{hint}")


def _short(value: float) -> str:
    """In short notation: 9.89e14."""
    return f"{value:.4g}".replace("e+", "e")
