"""The command `python -m tools.gpu_day PART ...`: see docs/gpu.md.

facts     versions, card, memory, what this project sees of them
parity    a training step by attention kernel and type, against the CPU in float32
kernels   products, attention, copies, launches, AdamW: the ceilings of this card
logprobs  log-probs and entropy, forward and backward, over the bare matrix products
train     steps by kernel, checkpointing and compilation: MFU, host waits, peak memory
decode    steps and prefills of the embedded engine, against `generate` and the memory's floor
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from tools.gpu_day.engine import decode
from tools.gpu_day.hardware import facts, kernels
from tools.gpu_day.record import Day, DeviceLost
from tools.gpu_day.trainer import logprobs, parity, train

PARTS: Final[Mapping[str, Callable[[Day], None]]] = MappingProxyType(
    {
        "facts": facts,
        "parity": parity,
        "kernels": kernels,
        "logprobs": logprobs,
        "train": train,
        "decode": decode,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure parts one after another.

    Returns:
        1 if a check failed or the device was lost, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{known}; all without a name")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes in seconds")
    parser.add_argument(
        "--budget", type=float, default=400, metavar="S", help="seconds for each part: 400"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        metavar="FOLDER",
        help="folder of PART.jsonl; $OUT, or none",
    )
    given = parser.parse_args(arguments)
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]!r} is no part; known are {known}")
    if given.budget <= 0:
        parser.error(f"--budget is {given.budget:g}, but must be > 0 seconds")
    device = torch.device(given.device)
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device is {given.device}, but must be cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} finds no GPU with a driver; to try the program: "
            "--device cpu --tiny"
        )
    # A collection after each check need not visit what was imported.
    gc.collect()
    gc.freeze()
    ends = [
        _run(part, device, tiny=given.tiny, budget_s=given.budget, out=given.out)
        for part in given.parts or PARTS
    ]
    return int(not all(ends))


def _run(part: str, device: torch.device, *, tiny: bool, budget_s: float, out: Path | None) -> bool:
    if out is None:
        return _measured(Day(part, device=device, tiny=tiny, budget_s=budget_s))
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{part}.jsonl").open("a", encoding="utf-8") as lines:
        return _measured(Day(part, device=device, tiny=tiny, budget_s=budget_s, out=lines))


def _measured(day: Day) -> bool:
    lost = None
    try:
        PARTS[day.part](day)
    except DeviceLost as error:
        lost = str(error)
    day.say(
        "end",
        device=day.device.type,
        tiny=day.tiny,
        facts=day.facts,
        failed=day.failed,
        skipped=day.skipped,
        device_lost=lost,
    )
    return not day.failed and lost is None


if __name__ == "__main__":
    sys.exit(main())
