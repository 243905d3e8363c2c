"""The GPUs that are shipped with the simulator: every number with its source and date.

Prices change within months: replace them (`cluster.price_per_gpu_h`, `dataclasses.replace`).
"""

from __future__ import annotations

from types import MappingProxyType

from simulator.catalogue.entries import (
    COMPUTE,
    GIB,
    LINKS,
    MARKET,
    NOT_SOLD,
    aiconfigurator,
    sources_of,
)
from simulator.catalogue.fp8_peaks import with_fp8_peak
from simulator.catalogue.gpu import GPU, Price
from simulator.catalogue.recent_gpus import BLACKWELL_ULTRA, OTHER_VENDORS, RECENT_ALIASES

# --- sources -------------------------------------------------------------------------------------

RUNPOD = (
    "RunPod price list as copied by deploybase, whose two pages disagree on whether it is spot or "
    "on demand"
)
TIERS = "mercatus-ai price tiers, specialists' lowest to hyperscalers' highest"
VERL = "verl utils/flops_counter.py (2025, commit 02cf355)"

# --- NVIDIA, Ampere and Hopper -------------------------------------------------------------------

_A100_80 = GPU(
    name="A100-80",
    flops_per_s=312e12,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=2.039e12,
    nvlink_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    pcie_bytes_per_s=32e9,
    power_w=400,
    price=Price(
        low=1.10,
        typical=1.39,
        high=3.00,
        source=f"{RUNPOD} (2026-03-10 and -21); {TIERS} (2026-05)",
        date="2026-03 to 2026-05",
    ),
    purchase=Price(low=8e3, typical=11.5e3, high=15e3, source=f"{MARKET}, used", date="2026"),
    sources=sources_of(all=(f"{COMPUTE} {LINKS}", aiconfigurator("a100_sxm"))),
)
_A100_40 = GPU(
    name="A100-40",
    flops_per_s=312e12,
    memory_bytes=40 * GIB,
    memory_bytes_per_s=1.555e12,
    nvlink_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    pcie_bytes_per_s=32e9,
    power_w=400,
    price=Price(low=None, typical=1.0, high=None, source=MARKET, date="2026"),
    sources=sources_of(
        same=(
            f"flops_per_s power_w {LINKS}",
            f"{aiconfigurator('a100_sxm')}: as the 80 GB model",
        ),
        sheet=("memory_bytes memory_bytes_per_s", "unverified: NVIDIA A100 data sheet (2021)"),
    ),
)
_H100 = GPU(
    name="H100",
    flops_per_s=989e12,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3.35e12,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=700,
    price=Price(
        low=2.50,
        typical=2.95,
        high=5.00,
        source=f"aimultiple index, median of 37 providers (2026-05-20); {TIERS} (2026-05); "
        "RunPod 2.69 (2026-03)",
        date="2026-05-20",
    ),
    purchase=Price(low=25e3, typical=30e3, high=35e3, source=MARKET, date="2026"),
    sources=sources_of(all=(f"{COMPUTE} {LINKS}", aiconfigurator("h100_sxm"))),
)
_H100_PCIE = GPU(
    name="H100-PCIe",
    flops_per_s=756.5e12,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=2.0e12,
    nvlink_bytes_per_s=0,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=350,
    price=Price(
        low=1.99,
        typical=2.05,
        high=2.11,
        source=f"{RUNPOD} (2026-03-10 and -21); spheron (2026-03-08); typical is the middle",
        date="2026-03",
    ),
    purchase=Price(low=20e3, typical=25e3, high=30e3, source=MARKET, date="2026"),
    sources=sources_of(
        all=(
            f"{COMPUTE} {LINKS}",
            f"{aiconfigurator('h100_pcie')}: a plain server, without NVLink bridges",
        )
    ),
)
_H800 = GPU(
    name="H800",
    flops_per_s=989e12,
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3.35e12,
    nvlink_bytes_per_s=200e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=700,
    price=Price(
        low=None,
        typical=None,
        high=None,
        source=f"{NOT_SOLD}; the H100 is the same chip with faster NVLink",
        date="2026-05",
    ),
    sources=sources_of(
        compute=("flops_per_s", f"{VERL} lists it as the H100, dense"),
        sheet=(
            "memory_bytes memory_bytes_per_s power_w nvlink_bytes_per_s pcie_bytes_per_s node_gpus",
            "unverified: NVIDIA H800 data sheet (2023): an H100 whose NVLink is limited to 400 GB/s"
            " in both directions together, instead of 900",
        ),
        paper=(
            "network_bytes_per_s",
            "AReaL (arXiv:2505.24298, 2025): RoCE of 3.2 Tb/s per node of 8",
        ),
    ),
)
_H20 = GPU(
    name="H20",
    flops_per_s=148e12,
    memory_bytes=96 * GIB,
    memory_bytes_per_s=4.0e12,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=400,
    price=Price(
        low=1.0,
        typical=1.25,
        high=1.5,
        source=f"{MARKET} in China; {NOT_SOLD}; typical is the middle",
        date="2026",
    ),
    purchase=Price(low=10e3, typical=12.5e3, high=15e3, source=MARKET, date="2026"),
    sources=sources_of(
        compute=("flops_per_s", VERL),
        sheet=(
            f"memory_bytes memory_bytes_per_s power_w {LINKS}",
            "unverified: NVIDIA H20 data sheet (2024)",
        ),
    ),
)
_H200 = GPU(
    name="H200",
    flops_per_s=989e12,
    memory_bytes=141 * GIB,
    memory_bytes_per_s=4.8e12,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=700,
    price=Price(
        low=3.50,
        typical=3.59,
        high=7.00,
        source=f"{RUNPOD} (2026-03-10 and -21); {TIERS} (2026-05)",
        date="2026-03 to 2026-05",
    ),
    purchase=Price(low=30e3, typical=35e3, high=40e3, source=MARKET, date="2026"),
    sources=sources_of(all=(f"{COMPUTE} {LINKS}", aiconfigurator("h200_sxm"))),
)

# --- NVIDIA, Blackwell ---------------------------------------------------------------------------

_B200 = GPU(
    name="B200",
    flops_per_s=2250e12,
    memory_bytes=180 * GIB,
    memory_bytes_per_s=7.7e12,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=128e9,
    power_w=1000,
    price=Price(
        low=5.98,
        typical=6.00,
        high=6.03,
        source=f"{RUNPOD} (2026-03-10 and -21); spheron (2026-03-08); typical is the middle",
        date="2026-03",
    ),
    purchase=Price(low=35e3, typical=42.5e3, high=50e3, source=MARKET, date="2026"),
    sources=sources_of(
        all=(
            f"{COMPUTE} nvlink_bytes_per_s pcie_bytes_per_s node_gpus",
            f"{aiconfigurator('b200_sxm')}: usable memory and bandwidth, nominally 192 and 8.0",
        ),
        guide=(
            "network_bytes_per_s",
            "NVIDIA DGX B200 user guide (read 2026-11): 400 Gb/s per GPU; servers with ConnectX-8"
            " have 800",
        ),
    ),
)
_GB200 = GPU(
    name="GB200",
    flops_per_s=2500e12,
    memory_bytes=189_471 * 2**20,
    memory_bytes_per_s=8.0e12,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=1200,
    node_gpus=72,
    price=Price(
        low=8.0, typical=9.5, high=11.0, source=f"{MARKET}; typical is the middle", date="2026"
    ),
    purchase=Price(
        low=30e3,
        typical=32.5e3,
        high=35e3,
        source=f"{MARKET}: half of a superchip, which has two GPUs and a CPU",
        date="2026",
    ),
    sources=sources_of(
        all=(
            f"{COMPUTE} nvlink_bytes_per_s pcie_bytes_per_s node_gpus",
            f"{aiconfigurator('gb200')}: a rack of 72 is one NVLink domain, made of 18 servers",
        ),
        network=(
            "network_bytes_per_s",
            "unverified: 400 Gb/s per GPU between racks; AIConfigurator 0.12.0 (2026-09) has 800",
        ),
    ),
)

# --- others --------------------------------------------------------------------------------------

_MI300X = GPU(
    name="MI300X",
    flops_per_s=1307e12,
    memory_bytes=192 * GIB,
    memory_bytes_per_s=5.3e12,
    nvlink_bytes_per_s=448e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    power_w=750,
    price=Price(
        low=2.0, typical=2.5, high=3.0, source=f"{MARKET}; typical is the middle", date="2026"
    ),
    purchase=Price(low=10e3, typical=15e3, high=20e3, source=MARKET, date="2026"),
    sources=sources_of(
        sheet=(
            f"{COMPUTE} pcie_bytes_per_s node_gpus",
            "unverified: AMD Instinct MI300X data sheet (2023); verl (2025) lists 1336 TFLOP/s",
        ),
        fabric=(
            "nvlink_bytes_per_s",
            "unverified: AMD Instinct MI300X data sheet (2023): Infinity Fabric, 7 links of 64 GB/s"
            " each way, one to every other GPU",
        ),
        network=("network_bytes_per_s", "unverified: usual servers have 400 Gb/s per GPU (2025)"),
    ),
)
_L40S = GPU(
    name="L40S",
    flops_per_s=362e12,
    memory_bytes=46_068 * 2**20,
    memory_bytes_per_s=0.864e12,
    nvlink_bytes_per_s=0,
    network_bytes_per_s=25e9,
    pcie_bytes_per_s=32e9,
    power_w=350,
    price=Price(low=None, typical=0.79, high=None, source=RUNPOD, date="2026-03"),
    purchase=Price(low=7e3, typical=8e3, high=9e3, source=MARKET, date="2026"),
    sources=sources_of(
        all=(
            f"{COMPUTE} nvlink_bytes_per_s pcie_bytes_per_s node_gpus",
            f"{aiconfigurator('l40s')}: PCIe, no NVLink",
        ),
        network=(
            "network_bytes_per_s",
            "AIConfigurator: 25 GB/s in earlier releases, 50 in 0.12.0 (2026-09); the lower",
        ),
    ),
)
_RTX_NETWORK = "assumed (2026): one 25 Gb/s adapter for the 8 GPUs of a rented server"
_RTX_4090 = GPU(
    name="RTX-4090",
    flops_per_s=165e12,
    memory_bytes=24 * GIB,
    memory_bytes_per_s=1.008e12,
    nvlink_bytes_per_s=0,
    network_bytes_per_s=0.39e9,
    pcie_bytes_per_s=32e9,
    power_w=450,
    price=Price(low=None, typical=0.34, high=None, source=RUNPOD, date="2026-03"),
    purchase=Price(
        low=None, typical=1.6e3, high=None, source="unverified: list price at launch", date="2022"
    ),
    sources=sources_of(
        sheet=(
            f"{COMPUTE} nvlink_bytes_per_s pcie_bytes_per_s",
            "unverified: NVIDIA Ada GPU architecture white paper (2022); with fp32 accumulation,"
            " half of what fp16 accumulation reaches",
        ),
        network=("network_bytes_per_s node_gpus", _RTX_NETWORK),
    ),
)
_RTX_5090 = GPU(
    name="RTX-5090",
    flops_per_s=210e12,
    memory_bytes=32 * GIB,
    memory_bytes_per_s=1.792e12,
    nvlink_bytes_per_s=0,
    network_bytes_per_s=0.39e9,
    pcie_bytes_per_s=64e9,
    power_w=575,
    price=Price(
        low=0.69,
        typical=0.72,
        high=0.76,
        source=f"{RUNPOD} (2026-03-10 and -21); spheron (2026-03-08); typical is the middle",
        date="2026-03",
    ),
    purchase=Price(
        low=None, typical=2.0e3, high=None, source="unverified: list price at launch", date="2025"
    ),
    sources=sources_of(
        sheet=(
            f"{COMPUTE} nvlink_bytes_per_s pcie_bytes_per_s",
            "specification table of spheron (2026-05-20): 838.4 TFLOP/s sparse with fp16"
            " accumulation, halved once for dense and once for fp32 accumulation",
        ),
        network=("network_bytes_per_s node_gpus", _RTX_NETWORK),
    ),
)
_ASCEND_910B = GPU(
    name="Ascend-910B",
    flops_per_s=280e12,
    memory_bytes=64 * GIB,
    memory_bytes_per_s=1.6e12,
    nvlink_bytes_per_s=196e9,
    network_bytes_per_s=25e9,
    pcie_bytes_per_s=32e9,
    power_w=400,
    price=Price(low=None, typical=None, high=None, source=NOT_SOLD, date="2026-05"),
    sources=sources_of(
        compute=(
            "flops_per_s memory_bytes",
            "Gitee AI documentation of the 910B (read 2026-11): the lowest bin; sources disagree,"
            " from 256 to 376 TFLOP/s by bin, verl (2025) has 354",
        ),
        bandwidth=(
            "memory_bytes_per_s",
            "unverified (2025): sources disagree: 0.4, 0.77, 1.2 and 1.6 TB/s",
        ),
        links=(LINKS, "unverified (2025): HCCS of 392 GB/s in both directions together"),
        power=("power_w", "unverified (2025): 310 to 400 W by bin"),
    ),
)

CATALOGUE = MappingProxyType(
    {
        gpu.name: with_fp8_peak(gpu)
        for gpu in (
            *(_A100_40, _A100_80, _H100, _H100_PCIE, _H800, _H20, _H200, _B200, _GB200),
            *(*BLACKWELL_ULTRA, _MI300X, *OTHER_VENDORS),
            *(_L40S, _RTX_4090, _RTX_5090, _ASCEND_910B),
        )
    }
)
"""GPUs by name."""

ALIASES = MappingProxyType(
    {
        "A100": "A100-80",
        "A100 80GB": "A100-80",
        "A100 SXM4 80GB": "A100-80",
        "A100 40GB": "A100-40",
        "A100 SXM4 40GB": "A100-40",
        "H100 SXM": "H100",
        "H100 SXM5": "H100",
        "H100 80GB": "H100",
        "H100 80GB HBM3": "H100",
        "H800 SXM": "H800",
        "H200 SXM": "H200",
        "B200 SXM": "B200",
        "GB200 NVL72": "GB200",
        "4090": "RTX-4090",
        "5090": "RTX-5090",
        "GeForce RTX 4090": "RTX-4090",
        "GeForce RTX 5090": "RTX-5090",
        "Instinct MI300X": "MI300X",
        "910B": "Ascend-910B",
        **RECENT_ALIASES,
    }
)
"""Other spellings, including those of `nvidia-smi` (a leading vendor is ignored)."""
