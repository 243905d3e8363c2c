"""`docs/simulator_hardware.md`: GPUs and models of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from simulator.catalogue.gpu import IDLE_SHARE, hardware_table
from simulator.catalogue.models import model_table

PAGE: Final = Path(__file__).parents[2] / "docs" / "simulator_hardware.md"

_TEXT = """\
# GPUs and models of the simulator

<!-- Written by `python -m tools.pages`; a test compares. -->

## GPUs

FLOP/s are for **dense** bf16 matrix products; data sheets print twice as much, "with sparsity". The
column fp8 has those of fp8; 0 means no fp8 units.
Link rates are for one direction; data sheets add both. A link of 0 GB/s means no NVLink: such GPUs
use PCIe. Vendors' GB of memory are GiB. `-` means that no number is published.

{gpus}
Sources that begin with *unverified* were not checked in the primary source. Prices change within
months: `cluster.price_per_gpu_h` replaces the typical one, `cluster.overhead` adds a fraction for
storage, network and operation (0.3 to 0.5 is usual).

### Custom GPUs

`cluster.gpu` may be the path of a YAML file instead of a name. The file changes a GPU of the table,

```yaml
# h100_nvl.yaml; then: areal-lab simulate my.yaml cluster.gpu=h100_nvl.yaml
like: H100-PCIe
flops_per_s: 835e12
memory_bytes: 101e9
memory_bytes_per_s: 3.9e12
power_w: 400
price: {{low: 2.2, typical: 2.5, high: 3.0, source: my contract, date: 2026-05}}
```

or describes a GPU completely:

```yaml
name: my accelerator
flops_per_s: 500e12          # dense, bf16
memory_bytes: 96e9
memory_bytes_per_s: 3e12
nvlink_bytes_per_s: 200e9    # one direction; 0 means no NVLink
network_bytes_per_s: 25e9    # one direction, per GPU
power_w: 500
price: 1.8                   # dollars per GPU-hour
node_gpus: 8                 # this and the following have defaults
fp8_flops_per_s: 1000e12     # dense; 0 means no fp8 units
pcie_bytes_per_s: 64e9
idle_power_w: 90             # {idle:.0%} of power_w
```

In Python: `gpu_from_fields({{...}})` of `simulator.catalogue.gpu`, or `dataclasses.replace`
on a GPU that `find_gpu` returns.

## Models

`model` is a name of the table (organization and tuning are ignored: `Qwen/Qwen2.5-7B-Instruct`), or
a Hugging Face folder or `config.json`, dense or mixture of experts. Parameters are those of the
matrices; *active* ones are used by one token. GFLOPs are for one token in one forward pass: in
matrix products, and in attention per 1,000 tokens of context; forward and backward together take
three times as much, without recomputation. *Weights* are those of an engine in the precision of the
checkpoint (`rollout.weight_precision=auto`): bf16, and 4.25 bits per number of gpt-oss's experts
(12.8 and 60.7 GiB; its model card has 12.8 and 60.8). A decode step reads all weights but the input
embedding; for a mixture of experts the table counts all experts, which is close to what large
batches read.

{models}
The simulator only reads widths and counts from a `config.json`, and whether its experts are in
MXFP4; other quantizations count as bf16, with a warning, also where only `hf_quant_config.json`
beside it names one (NVIDIA's ModelOpt). What the `text_config` of a model of several modalities
leaves out is the default of its family in transformers 5.23, as are windows that alternate without
being listed (Gemma 3 lists neither its vocabulary nor its windows). Layers with a sliding window,
and those with a state instead of attention (Gated DeltaNet of Qwen3-Next and Qwen3.5, Kimi Delta
Attention), are counted as such: *per sequence* is the memory of full windows and states, which does
not grow with the context. Layers that choose what they attend to (sparse attention) are counted as
if they attended to everything, with a warning; models with other kinds of layers (Mamba) are
refused.
"""


def page() -> str:
    """The page as Markdown."""
    return _TEXT.format(gpus=hardware_table(), models=model_table(), idle=IDLE_SHARE)
