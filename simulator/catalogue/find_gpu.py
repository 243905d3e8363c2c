"""GPUs by name, custom GPUs from a file, and the table of GPUs for the documentation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lab.config.load import read_yaml
from areal_lab.config.suggest import did_you_mean, plain
from simulator.catalogue.gpu import GPU, IDLE_SHARE, IDLE_SOURCE, Price
from simulator.catalogue.gpus import ALIASES
from simulator.catalogue.gpus import CATALOGUE as GPUS
from simulator.catalogue.host import CPU_CORE

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


def find_gpu(name: str) -> GPU:
    """A GPU of the catalogue, or a custom one.

    Args:
        name: a name of the catalogue in any case and punctuation, or as `nvidia-smi` prints it; or
            a YAML or JSON file with the fields of a GPU (`gpu_from_fields`); or `CPU core`.

    Raises:
        ValueError: one line: an unknown name (with the nearest ones), or a broken file.
    """
    return _find(name, ())


def _find(name: str, before: tuple[Path, ...]) -> GPU:
    """The same; `before` are the files whose `like` led here."""
    if name.endswith(OWN_FILES):
        path = Path(name)
        if path.resolve() in before:
            raise ValueError(
                f"{path} refers to itself through `like`; set like to a GPU of the catalogue "
                "(like: H100)"
            )
        fields = {"name": path.stem, **_read_fields(path)}
        return _from_fields(fields, (*before, path.resolve()))
    known = {plain(one): one for one in GPUS} | {plain(one): gpu for one, gpu in ALIASES.items()}
    wanted = plain(re.sub(r"^\s*(nvidia|amd|google)\b", "", name, flags=re.IGNORECASE))
    if wanted == plain(CPU_CORE.name):
        return CPU_CORE
    if wanted not in known:
        raise ValueError(
            f"unknown GPU {name!r}; {did_you_mean(name, GPUS)} "
            "(the path of a YAML file with your own numbers also works)"
        )
    return GPUS[known[wanted]]


def gpu_from_fields(fields: Mapping[str, Any]) -> GPU:
    """A custom GPU.

    Args:
        fields: the fields of `GPU`, including `name`. `like` names a GPU that supplies missing
            fields. `price` and `purchase` are a number of dollars or `{low, typical, high}`; the
            default of `idle_power_w` is the usual share of `power_w`.

    Raises:
        ValueError: one line: an unknown field (with the nearest name), a missing one, or an
            impossible value.
    """
    return _from_fields(fields, ())


def _from_fields(fields: Mapping[str, Any], before: tuple[Path, ...]) -> GPU:
    """The same; `before` are the files whose `like` led here."""
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
    """The value of a field in its type; a price may be a number or a mapping."""
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
