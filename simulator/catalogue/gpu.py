"""GPUs: their properties, by name or from a file. Bytes, rates per second, dollars.

Vendors' "GB" of memory are GiB (an H200 "of 141 GB" shows 143,771 MiB), their "GB/s" are 1e9.

A CPU core of a host stands in for a GPU in runs of the embedded engine, whose engine and trainer
are processes with a few cores each. Their times are measured in the run (`areal-lab calibrate`), so
that only memory and power are used from here. Without measured times the cost model treats a core
as a small and slow GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from areal_lab.config.given import given_text
from areal_lab.config.gpus import gpu_name, read_gpus
from areal_lab.config.load import read_yaml
from areal_lab.config.unknown import did_you_mean, plain

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
"""Bounds by field: the least and largest value (from one CPU core to far beyond the largest
GPU), and the units of data sheets in which a too small number may have been given."""

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
    """Date of the source, such as `2026-05`; empty without one."""

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
    """Rate between the GPUs of a node, in one direction (data sheets add both); 0 means no
    NVLink."""
    network_bytes_per_s: float
    """Rate between nodes, in one direction, per GPU."""
    power_w: float
    """Power limit (TDP)."""
    idle_power_w: float = math.nan
    """Power while idle with a loaded model; if not given, `IDLE_SHARE` of `power_w`."""
    price: Price
    purchase: Price | None = None
    pcie_bytes_per_s: float = 32e9
    """Rate to the host's memory, and between GPUs without NVLink, in one direction."""
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
    return f"{value:.4g}".replace("e+", "e")


def _read_gpu(name: str, read: dict[str, Any], texts: Mapping[str, str]) -> GPU:
    sources = {
        field: text.format_map(texts)
        for fields, text in read.pop("sources").items()
        for field in fields.split()
    }
    fp8_source = sources.pop("fp8_flops_per_s")
    for kind in {"price", "purchase"} & read.keys():
        given = {"low": None, "typical": None, "high": None, **read[kind]}
        read[kind] = Price(**{**given, "source": given["source"].format_map(texts)})
    sources |= {"idle_power_w": IDLE_SOURCE, "fp8_flops_per_s": fp8_source}
    return GPU(name=name, **read, sources=sources)


def _read_catalogue() -> dict[str, GPU]:
    read = read_gpus()
    return {name: _read_gpu(name, dict(gpu), read["texts"]) for name, gpu in read["gpus"].items()}


GPUS: Final[Mapping[str, GPU]] = MappingProxyType(_read_catalogue())
"""GPUs that are shipped, by name, with the numbers of `areal_lab.config.gpus`."""

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


__all__ = ["GPU", "GPUS", "IDLE_SHARE", "Price", "find_gpu", "gpu_from_fields", "hardware_table"]

_FIELDS = tuple(field.name for field in dataclasses.fields(GPU) if field.name != "sources")
_NEEDED = tuple(
    field.name
    for field in dataclasses.fields(GPU)
    if field.default is field.default_factory is dataclasses.MISSING and field.name != "price"
)
_OWN = "given by the user"
OWN_FILES = (".yaml", ".yml", ".json")
"""Suffixes of files that describe a custom GPU."""


def find_gpu(name: str | Path | GPU) -> GPU:
    """A GPU of the catalogue, or a custom one.

    Args:
        name: a name of the catalogue in any case and punctuation, or as `nvidia-smi` prints it; or
            a YAML or JSON file with the fields of a GPU (`gpu_from_fields`); or `CPU core`.

    Raises:
        ValueError: one line: an unknown name (with the nearest ones), or a broken file.
    """
    if isinstance(name, GPU):
        return name
    return _find(given_text(name, "the GPU"), ())


def _find(name: str, before: tuple[Path, ...]) -> GPU:
    """Find a GPU; `before` are the files whose `like` led here."""
    if name.endswith(OWN_FILES):
        path = Path(name)
        if path.resolve() in before:
            raise ValueError(
                f"{path} refers to itself through `like`; set like to a GPU of the catalogue "
                "(like: H100)"
            )
        fields = {"name": path.stem, **_read_fields(path)}
        return _from_fields(fields, (*before, path.resolve()))
    if plain(name) == plain(CPU_CORE.name):
        return CPU_CORE
    known = gpu_name(name)
    if known is None:
        raise ValueError(
            f"unknown GPU {name!r}; {did_you_mean(name, GPUS)} "
            "(the path of a YAML file with your own numbers also works)"
        )
    return GPUS[known]


def gpu_from_fields(fields: Mapping[str, Any]) -> GPU:
    """A custom GPU.

    Args:
        fields: the fields of `GPU`, including `name`. `like` names a GPU that supplies missing
            fields. `price` and `purchase` are a number of dollars or `{low, typical, high}`; the
            default of `idle_power_w` is the usual share of `power_w`.
    """
    return _from_fields(fields, ())


def _from_fields(fields: Mapping[str, Any], before: tuple[Path, ...]) -> GPU:
    """Make a GPU of fields; `before` are the files whose `like` led here."""
    values = dict(fields)
    like = values.pop("like", None)
    base = None if like is None else _find(str(like), before)
    for name in values:
        if name not in _FIELDS:
            known = (*_FIELDS, "like")
            raise ValueError(f"unknown field {name!r} of a GPU; {did_you_mean(name, known)}")
    values = {name: _value(name, value) for name, value in values.items()}
    sources = {name: _OWN for name in values if name not in ("name", "price", "purchase")}
    if "power_w" in values and "idle_power_w" not in values:
        share = IDLE_SHARE if base is None else base.idle_power_w / base.power_w
        values["idle_power_w"] = share * values["power_w"]
        sources["idle_power_w"] = IDLE_SOURCE
    if base is not None:
        inherited = {
            name: f"like the {base.name}: {source}" for name, source in base.sources.items()
        }
        return dataclasses.replace(base, **values, sources={**inherited, **sources})
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise ValueError(
            f"a custom GPU needs {', '.join(missing)}; set them, or name a GPU that supplies "
            "them (like: H100)"
        )
    values.setdefault(
        "price", Price(low=None, typical=None, high=None, source="none given", date="")
    )
    return GPU(**values, sources=sources)


def hardware_table() -> str:
    """The catalogue as Markdown: numbers, prices, and their sources."""
    lines = [
        "| GPU | TFLOP/s | fp8 | memory GiB | TB/s | link GB/s | network GB/s | PCIe GB/s | W "
        "| idle W | GPUs per node |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for gpu in GPUS.values():
        numbers = (
            *(gpu.flops_per_s / 1e12, gpu.fp8_flops_per_s / 1e12),
            *(gpu.memory_bytes / 2**30, gpu.memory_bytes_per_s / 1e12),
            *(gpu.nvlink_bytes_per_s / 1e9, gpu.network_bytes_per_s / 1e9),
            *(gpu.pcie_bytes_per_s / 1e9, gpu.power_w, gpu.idle_power_w, gpu.node_gpus),
        )
        lines.append(f"| {gpu.name} | {' | '.join(f'{number:.4g}' for number in numbers)} |")
    lines += [
        "",
        "| GPU | $ per hour: low | typical | high | source | $ to buy: low | typical | high | "
        "source |",
        "| --- | --: | --: | --: | --- | --: | --: | --: | --- |",
    ]
    lines += [
        f"| {gpu.name} | {_prices(gpu.price)} | {_prices(gpu.purchase)} |" for gpu in GPUS.values()
    ]
    lines.append("")
    for gpu in GPUS.values():
        by_source: dict[str, list[str]] = {}
        for name, source in gpu.sources.items():
            if source == IDLE_SOURCE:
                continue
            by_source.setdefault(source, []).append(f"`{name}`")
        told = "; ".join(f"{', '.join(names)}: {source}" for source, names in by_source.items())
        lines.append(f"- **{gpu.name}**: {told}.")
    lines.append(f"- `idle_power_w` of all: {IDLE_SOURCE}.")
    return "\n".join(lines) + "\n"


def _prices(price: Price | None) -> str:
    if price is None:
        return "- | - | - | -"
    dollars = (price.low, price.typical, price.high)
    numbers = " | ".join("-" if one is None else f"{one:,.10g}" for one in dollars)
    return f"{numbers} | {price.source} ({price.date})"


def _value(name: str, value: Any) -> Any:
    if name == "name":
        return str(value)
    if name in ("price", "purchase"):
        return _price(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} of a GPU is {value!r}, but must be a number")
    if name == "node_gpus" and not float(value).is_integer():
        raise ValueError(f"node_gpus of a GPU is {value!r}, but must be a whole number")
    return int(value) if name == "node_gpus" else float(value)


def _price(name: str, value: Any) -> Price:
    if isinstance(value, Price):
        return value
    given = value if isinstance(value, Mapping) else {"typical": value}
    known = [field.name for field in dataclasses.fields(Price)]
    for key in given:
        if key not in known:
            raise ValueError(f"unknown field {key!r} of {name}; {did_you_mean(str(key), known)}")
    numbers = {key: given.get(key) for key in ("low", "typical", "high")}
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float, type(None))):
            raise ValueError(f"{key} of {name} is {number!r}, but must be a number of dollars")
    return Price(**numbers, source=str(given.get("source", _OWN)), date=str(given.get("date", "")))


def _read_fields(path: Path) -> dict[str, Any]:
    return {str(name): value for name, value in read_yaml(path, "fields of a GPU").items()}
