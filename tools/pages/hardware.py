"""The documentation page of the catalogues: `python -m tools.pages.hardware > docs/...`."""

from __future__ import annotations

from simulator.catalogue.find_gpu import IDLE_SHARE, hardware_table
from simulator.catalogue.models import model_table

PAGE = "docs/simulator_hardware.md"

_TEXT = """\
# GPUs and models of the simulator

<!-- Written by `python -m tools.pages.hardware > {page}`; a test compares. -->

## GPUs

FLOP/s are those of bf16 matrix products, **dense**: data sheets print twice as much, "with
sparsity". Links count one direction; data sheets add both up. 0 GB/s of link is no NVLink: there
GPUs talk over PCIe. Vendors' GB of memory are GiB. `-` is a number that nobody publishes.

{gpus}
What begins with *unverified* was not checked in the primary source. Prices move within months:
`cluster.price_per_gpu_h` replaces the typical one, `cluster.overhead` adds a share for storage,
network and operation (0.3 to 0.5 is usual).

### A GPU of your own

`cluster.gpu` may name a YAML file instead of a GPU of the table. It starts from one of them,

```yaml
# h100_nvl.yaml; then: areal-lab simulate my.yaml cluster.gpu=h100_nvl.yaml
like: H100-PCIe
flops_per_s: 835e12
memory_bytes: 101e9
memory_bytes_per_s: 3.9e12
power_w: 400
price: {{low: 2.2, typical: 2.5, high: 3.0, source: my contract, date: 2026-05}}
```

or gives everything:

```yaml
name: my accelerator
flops_per_s: 500e12          # dense, bf16
memory_bytes: 96e9
memory_bytes_per_s: 3e12
nvlink_bytes_per_s: 200e9    # one direction; 0 has none
network_bytes_per_s: 25e9    # one direction, per GPU
power_w: 500
price: 1.8                   # dollars per GPU-hour
node_gpus: 8                 # this and the rest have defaults
pcie_bytes_per_s: 64e9
idle_power_w: 90             # {idle:.0%} of power_w
```

In Python: `gpu_from_fields({{...}})` of `simulator.catalogue.find_gpu`, or
`dataclasses.replace` of one that `find_gpu` returns.

## Models

`model` is a name of the table (organization and tuning are not looked at:
`Qwen/Qwen2.5-7B-Instruct`), or a Hugging Face folder or `config.json`, dense or mixture of experts.
Parameters are those of the matrices; *active* ones are what one token passes. GFLOPs are of one
token in one forward pass: in matrix products, and in attention for every 1,000 tokens of context
that it looks back at; forward and backward together take three times as much, without what is
recomputed. What a decode step reads is all but the input embedding; of a mixture of experts it is
all experts, which large batches come near to.

{models}
From a `config.json` the simulator reads widths and counts only. Layers that look at a part of the
context (sliding windows) are counted as if they looked at all of it, and the result says so; models
with layers of other kinds (Mamba, linear attention) are refused.
"""


def catalogue_page() -> str:
    """The page as Markdown."""
    return _TEXT.format(page=PAGE, gpus=hardware_table(), models=model_table(), idle=IDLE_SHARE)


if __name__ == "__main__":
    print(catalogue_page(), end="")
