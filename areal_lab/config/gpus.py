"""The GPUs that are known by name: one table for the simulator and for the metrics of training.

`data/gpus.toml` has the numbers and their sources.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from areal_lab.config.unknown import plain

_FILE: Final = Path(__file__).parent / "data" / "gpus.toml"
_VENDORS: Final = re.compile(r"^\s*(nvidia|amd|google)\b", re.IGNORECASE)


@functools.cache
def read_gpus() -> dict[str, Any]:
    """The table: `gpus` by name, `aliases` (other spelling to name), `texts` of sources."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def gpu_name(text: str) -> str | None:
    """The name in the table of a GPU, or None.

    Args:
        text: a name or an alias in any case and punctuation, also with the vendor, as
            `nvidia-smi` and `torch.cuda.get_device_name` print it.
    """
    read = read_gpus()
    known = {plain(one): one for one in read["gpus"]}
    known |= {plain(one): name for one, name in read["aliases"].items()}
    return known.get(plain(_VENDORS.sub("", text)))


def peak_flops_per_s(text: str) -> float | None:
    """Peak of dense bf16 matrix products of a GPU by name (`gpu_name`), or None."""
    name = gpu_name(text)
    return None if name is None else float(read_gpus()["gpus"][name]["flops_per_s"])
