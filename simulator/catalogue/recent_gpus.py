"""Accelerators of 2024 and 2025: NVIDIA B300 and GB300, AMD MI325X and MI355X, Google TPUs.

None of them was measured here. Their coefficients are typical ones with an error of 30 to 50 %
(`simulator.costs.typical_coefficients`).
"""

from __future__ import annotations

from types import MappingProxyType

from simulator.catalogue.entries import COMPUTE, GIB, aiconfigurator, sources_of
from simulator.catalogue.gpu import GPU, Price

VERDA_TABLE = (
    "Verda, GB300 NVL72 architecture (read 2026-11), table of GPUs, dense; usable memory, "
    "nominally 288"
)
VERDA_PRICE = "Verda price list, on demand (2026-08-22)"
BLENDED = "signwl, blended spot, on demand and 1 year in North America (2026-04-06)"
AMD_PRICES = (
    "Vultr, 8-GPU servers on demand (2026-09-26); TensorWave, starting at (2026-09-24); highest"
)
TPU_TABLE = (
    "Google Cloud documentation, docs.cloud.google.com/tpu/docs/tpu7x and /v6e (read 2026-11)"
)
NETWORK_AMD = "unverified: usual servers have one 400 Gb/s adapter per GPU (2025)"

# --- NVIDIA, Blackwell Ultra ---------------------------------------------------------------------

_B300 = GPU(
    name="B300",
    flops_per_s=2250e12,
    memory_bytes=268 * GIB,
    memory_bytes_per_s=7.7e12,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=100e9,
    pcie_bytes_per_s=128e9,
    power_w=1100,
    price=Price(
        low=6.00,
        typical=7.50,
        high=10.31,
        source=f"Akash (2026-08-02); {VERDA_PRICE}; {BLENDED}",
        date="2026-04 to 2026-08",
    ),
    sources=sources_of(
        table=("flops_per_s memory_bytes_per_s power_w nvlink_bytes_per_s", VERDA_TABLE),
        memory=(
            "memory_bytes",
            "Verda price list (2026-08-22): 268; its article has 270; NVIDIA: 2.1 TB for 8",
        ),
        network=("network_bytes_per_s", "acecloud (2026-02-23): ConnectX-8, 800 Gb/s per GPU"),
        links=(
            "pcie_bytes_per_s node_gpus",
            "unverified (2026): as the B200, servers of 8",
        ),
    ),
)
_GB300 = GPU(
    name="GB300",
    flops_per_s=2500e12,
    memory_bytes=279 * GIB,
    memory_bytes_per_s=8.0e12,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=100e9,
    pcie_bytes_per_s=64e9,
    power_w=1400,
    node_gpus=72,
    price=Price(
        low=None,
        typical=8.62,
        high=12.32,
        source=f"{VERDA_PRICE}; {BLENDED}",
        date="2026-04 to 2026-08",
    ),
    sources=sources_of(
        table=(f"{COMPUTE} nvlink_bytes_per_s", VERDA_TABLE),
        network=(
            "network_bytes_per_s",
            "unverified: NVIDIA GB300 NVL72 page as quoted (2026-08): ConnectX-8, 800 Gb/s per GPU",
        ),
        host=(
            "pcie_bytes_per_s",
            f"unverified: as the GB200 in {aiconfigurator('gb200')}; NVLink-C2C to the Grace CPU"
            " has 225 GB/s per GPU",
        ),
        rack=(
            "node_gpus",
            "unverified: NVIDIA GB300 NVL72 page as quoted (2026-08): a rack is one NVLink domain",
        ),
    ),
)

# --- AMD -----------------------------------------------------------------------------------------

_MI325X = GPU(
    name="MI325X",
    flops_per_s=1307e12,
    memory_bytes=256 * GIB,
    memory_bytes_per_s=6.0e12,
    nvlink_bytes_per_s=448e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=1000,
    price=Price(
        low=1.95,
        typical=2.25,
        high=4.62,
        source=f"TensorWave in cliffcenter (2026-05-18); {AMD_PRICES}: Vultr, one GPU",
        date="2026-05 to 2026-09",
    ),
    sources=sources_of(
        sheet=(
            "flops_per_s power_w",
            "AMD ROCm blog, typical attained FLOPs (2026-10-06): 1,300 dense at 1,000 W; the chip"
            " is that of the MI300X",
        ),
        memory=(
            "memory_bytes memory_bytes_per_s",
            "unverified: AMD at the launch (2024-10): 256 GB at 6 TB/s; ROCm documentation (2026)"
            " has 256 GiB",
        ),
        fabric=(
            "nvlink_bytes_per_s pcie_bytes_per_s node_gpus",
            "unverified: as the MI300X (2024): Infinity Fabric, 7 links of 64 GB/s each way",
        ),
        network=("network_bytes_per_s", NETWORK_AMD),
    ),
)
_MI355X = GPU(
    name="MI355X",
    flops_per_s=2517e12,
    memory_bytes=288 * GIB,
    memory_bytes_per_s=8.0e12,
    nvlink_bytes_per_s=537e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=1400,
    price=Price(
        low=2.59,
        typical=2.95,
        high=8.60,
        source=f"{AMD_PRICES}: Oracle",
        date="2026-09",
    ),
    sources=sources_of(
        compute=(
            "flops_per_s",
            "unverified: AMD at ISSCC as told by the press (2026-02-16): 256 compute units with"
            " 8,192 fp8 operations per cycle at 2.4 GHz; half of them in bf16",
        ),
        sheet=(
            "memory_bytes memory_bytes_per_s power_w",
            "unverified: AMD at the launch, as told by The Register (2025-06-12); ROCm"
            " documentation (2026) has 288 GiB",
        ),
        fabric=(
            "nvlink_bytes_per_s",
            "unverified: AMD Instinct MI355X data sheet (2025): Infinity Fabric, 7 links of"
            " 76.8 GB/s each way",
        ),
        links=("pcie_bytes_per_s node_gpus", "unverified: AMD Instinct MI355X data sheet (2025)"),
        network=("network_bytes_per_s", NETWORK_AMD),
    ),
)

# --- Google --------------------------------------------------------------------------------------

_TPU_V6E = GPU(
    name="TPU-v6e",
    flops_per_s=918e12,
    memory_bytes=32 * GIB,
    memory_bytes_per_s=1.638e12,
    nvlink_bytes_per_s=400e9,
    network_bytes_per_s=12.5e9,
    pcie_bytes_per_s=64e9,
    power_w=380,
    node_gpus=256,
    price=Price(
        low=1.22,
        typical=2.70,
        high=None,
        source="unverified: copies of Google's list, which needs a browser (2026-05-25): 3 years, "
        "on demand",
        date="2026-05-25",
    ),
    sources=sources_of(
        table=(
            "flops_per_s memory_bytes memory_bytes_per_s network_bytes_per_s pcie_bytes_per_s",
            TPU_TABLE,
        ),
        torus=(
            "nvlink_bytes_per_s node_gpus",
            f"{TPU_TABLE}: a pod of 256 is a torus of two dimensions with 800 GB/s per chip in both"
            " directions together; slices below a pod are not closed and reach less",
        ),
        power=(
            "power_w",
            "unverified (2026): Epoch AI's estimate from Google's work per watt; SemiAnalysis has"
            " 300 W",
        ),
    ),
)
_TPU_7X = GPU(
    name="TPU7x",
    flops_per_s=2307e12,
    memory_bytes=192 * GIB,
    memory_bytes_per_s=7.38e12,
    nvlink_bytes_per_s=600e9,
    network_bytes_per_s=12.5e9,
    pcie_bytes_per_s=64e9,
    power_w=960,
    node_gpus=9216,
    price=Price(
        low=None,
        typical=None,
        high=None,
        source="no list price is published",
        date="2026-05-25",
    ),
    sources=sources_of(
        table=("flops_per_s memory_bytes memory_bytes_per_s network_bytes_per_s", TPU_TABLE),
        torus=(
            "nvlink_bytes_per_s node_gpus",
            f"{TPU_TABLE}: a pod of 9,216 is a torus of three dimensions with 1,200 GB/s per chip"
            " in both directions together; slices below 64 chips are not closed and reach less",
        ),
        host=("pcie_bytes_per_s", "unverified (2026): PCIe 5, as the v6e"),
        power=(
            "power_w",
            "unverified (2026): Epoch AI's estimate from Google's work per watt; a pod of about"
            " 10 MW would be 1,085 W per chip with everything around it",
        ),
    ),
)

BLACKWELL_ULTRA = (_B300, _GB300)
OTHER_VENDORS = (_MI325X, _MI355X, _TPU_V6E, _TPU_7X)

RECENT_ALIASES = MappingProxyType(
    {
        "B300 SXM": "B300",
        "B300 SXM6": "B300",
        "GB300 NVL72": "GB300",
        "Instinct MI325X": "MI325X",
        "Instinct MI355X": "MI355X",
        "v6e": "TPU-v6e",
        "Trillium": "TPU-v6e",
        "TPU v6 lite": "TPU-v6e",
        "TPU v7": "TPU7x",
        "TPU v7x": "TPU7x",
        "Ironwood": "TPU7x",
    }
)
"""Other spellings."""
