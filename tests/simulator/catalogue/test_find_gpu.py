"""GPUs of the catalogue and custom GPUs."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulator.catalogue.gpu import GPU, GPUS, IDLE_SHARE, Price, find_gpu, gpu_from_fields
from tools.pages.hardware import PAGE, page

NUMBERS = [
    field.name
    for field in dataclasses.fields(GPU)
    if field.name not in ("name", "price", "purchase", "sources")
]
OWN: dict[str, Any] = {
    "name": "own",
    "flops_per_s": 500e12,
    "memory_bytes": 96e9,
    "memory_bytes_per_s": 3e12,
    "nvlink_bytes_per_s": 200e9,
    "network_bytes_per_s": 25e9,
    "power_w": 500,
}


# --- the catalogue -------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_number_has_a_source_with_a_year(gpu: GPU) -> None:
    assert set(gpu.sources) == set(NUMBERS)
    dated = re.compile(r"\b20[12]\d\b")
    assert [name for name, source in gpu.sources.items() if not dated.search(source)] == []
    for price in (gpu.price, gpu.purchase):
        assert price is None or (price.source and dated.search(price.date))


# TFLOP/s "with sparsity", which data sheets print first.
SPARSE = {
    "A100-40": 624,
    "A100-80": 624,
    "H100": 1979,
    "H100-PCIe": 1513,
    "H800": 1979,
    "H20": 296,
    "H200": 1979,
    "B200": 4500,
    "GB200": 5000,
    "B300": 4500,
    "GB300": 5000,
    "MI300X": 2614.9,
    "MI325X": 2614.9,
    "MI355X": 5033.2,
    "L40S": 733,
    "RTX-4090": 330.3,
    "RTX-5090": 419.2,
}


@pytest.mark.parametrize("name", SPARSE)
def test_flops_are_dense(name: str) -> None:
    assert GPUS[name].flops_per_s == pytest.approx(SPARSE[name] / 2 * 1e12, rel=0.02)


def test_links_count_one_direction() -> None:
    """Data sheets print both directions together: 600, 900 and 1,800 GB/s of NVLink 3, 4 and 5."""
    both = {
        **{"A100-80": 600e9, "H100": 900e9, "H20": 900e9},
        **dict.fromkeys(("B200", "B300", "GB200", "GB300"), 1800e9),
        **{"MI300X": 896e9, "MI325X": 896e9, "TPU-v6e": 800e9, "TPU7x": 1200e9},
    }
    assert {name: 2 * GPUS[name].nvlink_bytes_per_s for name in both} == both


@pytest.mark.parametrize(
    ("name", "chips", "field", "published"),
    [
        # NVIDIA's rack: 360 PFLOP/s with sparsity, 20 TB (of GiB), 576 TB/s, 130 TB/s of NVLink.
        ("GB300", 72, "flops_per_s", 360e15 / 2),
        ("GB300", 72, "memory_bytes", 20e3 * 2**30),
        ("GB300", 72, "memory_bytes_per_s", 576e12),
        ("GB300", 72, "nvlink_bytes_per_s", 130e12 / 2),
        # DGX B300: 72 PFLOP/s of sparse fp8, a quarter of it in dense bf16; 2.1 TB.
        ("B300", 8, "flops_per_s", 72e15 / 4),
        ("B300", 8, "memory_bytes", 2.1e3 * 2**30),
        # AMD: compute units * operations per cycle * clock; 7 links of 153.6 GB/s both ways.
        ("MI355X", 1, "flops_per_s", 256 * 4096 * 2.4e9),
        ("MI355X", 1, "nvlink_bytes_per_s", 7 * 153.6e9 / 2),
        # Google's pods: 234.9 PFLOP/s and 102.4 TB/s of all-reduce; 42.5 EFLOP/s of fp8, 1.77 PB.
        ("TPU-v6e", 256, "flops_per_s", 234.9e15),
        ("TPU-v6e", 256, "nvlink_bytes_per_s", 102.4e12),
        ("TPU7x", 9216, "flops_per_s", 42.5e18 / 2),
        ("TPU7x", 9216, "memory_bytes", 1.77e6 * 2**30),
    ],
)
def test_chips_add_up_to_the_published_numbers_of_their_racks(
    name: str, chips: int, field: str, published: float
) -> None:
    assert chips * getattr(GPUS[name], field) == pytest.approx(published, rel=0.035)
    assert chips in (1, GPUS[name].node_gpus)


def test_an_h800_is_an_h100_with_slower_nvlink() -> None:
    h100, h800 = GPUS["H100"], GPUS["H800"]
    differ = [name for name in NUMBERS if getattr(h100, name) != getattr(h800, name)]
    assert differ == ["nvlink_bytes_per_s"]
    assert h800.nvlink_bytes_per_s == 200e9
    # AReaL (arXiv:2505.24298): 3.2 Tb/s per node of 8
    assert h800.network_bytes_per_s == pytest.approx(3.2e12 / 8 / h800.node_gpus)


def test_idle_gpus_draw_the_measured_fraction_of_power() -> None:
    assert pytest.approx(142.5 / 700, rel=0.03) == IDLE_SHARE
    assert all(gpu.idle_power_w == IDLE_SHARE * gpu.power_w for gpu in GPUS.values())


def test_gpus_without_nvlink_use_pcie() -> None:
    assert GPUS["L40S"].link_bytes_per_s == GPUS["L40S"].pcie_bytes_per_s == 32e9
    assert GPUS["H100"].link_bytes_per_s == GPUS["H100"].nvlink_bytes_per_s


def test_disputed_numbers_and_missing_prices_are_marked() -> None:
    ascend = GPUS["Ascend-910B"]
    assert "disagree" in ascend.sources["memory_bytes_per_s"]
    assert "disagree" in ascend.sources["flops_per_s"]
    for name in ("H800", "Ascend-910B", "TPU7x"):
        assert GPUS[name].price.typical is None
        assert "no list price" in GPUS[name].price.source


def test_gpus_can_be_sent_to_processes_and_are_hashable() -> None:
    for gpu in GPUS.values():
        copy = pickle.loads(pickle.dumps(gpu))
        assert copy == gpu
        assert copy.sources == gpu.sources
        assert {gpu: 1}[copy] == 1


def test_a_price_can_be_replaced() -> None:
    mine = Price(low=1.0, typical=2.0, high=3.0, source="my contract", date="2026-05")
    gpu = dataclasses.replace(GPUS["H800"], price=mine)
    assert gpu.price.typical == 2.0
    assert GPUS["H800"].price.typical is None


def test_the_page_shows_the_catalogue() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"
    for gpu in GPUS.values():
        assert page().count(f"| {gpu.name} |") == 2


def test_the_catalogue_loads_nothing_heavy() -> None:
    script = "import sys, tools.pages.hardware; print(sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    heavy = {"torch", "transformers", "numpy", "pandas", "matplotlib", "omegaconf"}
    assert [name for name in heavy if f"'{name}'" in result.stdout] == []


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H800", "H800"),
        ("h100", "H100"),
        ("H100 SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("a100_80", "A100-80"),
        ("A100", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("mi300x", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("GB300 NVL72", "GB300"),
        ("TPU v6e", "TPU-v6e"),
        ("Trillium", "TPU-v6e"),
        ("tpu7x", "TPU7x"),
        ("TPU v7", "TPU7x"),
        ("Ironwood", "TPU7x"),
        ("910B", "Ascend-910B"),
    ],
)
def test_names_are_found_as_people_write_them(written: str, name: str) -> None:
    assert find_gpu(written) is GPUS[name]


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^unknown GPU 'H1000'; did you mean .*'H100'[^\n]*$"):
        find_gpu("H1000")
    with pytest.raises(ValueError, match="known are A100-40, A100-80, H100, "):
        find_gpu("Gaudi 3")


# --- custom GPUs ---------------------------------------------------------------------------------


def test_a_custom_gpu_from_all_its_fields() -> None:
    gpu = gpu_from_fields({**OWN, "price": 1.8, "purchase": {"low": 5e3, "high": 7e3}})
    assert (gpu.name, gpu.flops_per_s, gpu.node_gpus) == ("own", 500e12, 8)
    assert gpu.idle_power_w == IDLE_SHARE * 500
    assert (gpu.price.low, gpu.price.typical, gpu.price.high) == (None, 1.8, None)
    assert gpu.price.source == "given by the user"
    assert gpu.purchase is not None
    assert (gpu.purchase.low, gpu.purchase.typical, gpu.purchase.high) == (5e3, None, 7e3)
    assert gpu.sources["flops_per_s"] == "given by the user"
    assert gpu_from_fields(OWN).price.typical is None


def test_a_gpu_like_another_differs_only_in_the_given_fields() -> None:
    gpu = gpu_from_fields({"name": "slow", "like": "h100 sxm", "memory_bytes_per_s": 2e12})
    assert gpu == dataclasses.replace(GPUS["H100"], name="slow", memory_bytes_per_s=2e12)
    assert gpu.sources["memory_bytes_per_s"] == "given by the user"
    assert gpu.sources["flops_per_s"].startswith("like the H100: AIConfigurator")
    more_power = gpu_from_fields({"name": "hot", "like": "H100", "power_w": 1000})
    assert more_power.idle_power_w == IDLE_SHARE * 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flop_per_s": 1e15}, "unknown field 'flop_per_s' of a GPU; did you mean 'flops_per_s'"),
        ({"bandwidth": 1}, "unknown field 'bandwidth' of a GPU"),
        ({"like": "H1O0"}, "unknown GPU 'H1O0'"),
        ({"flops_per_s": "fast"}, "flops_per_s of a GPU is 'fast', but must be a number"),
        ({"flops_per_s": True}, "flops_per_s of a GPU is True"),
        ({"flops_per_s": 0}, r"flops_per_s of GPU own is 0\.0, but must be > 0"),
        ({"memory_bytes": -1}, r"memory_bytes of GPU own is -1\.0"),
        ({"memory_bytes_per_s": math.nan}, "memory_bytes_per_s of GPU own is nan"),
        ({"network_bytes_per_s": math.inf}, "network_bytes_per_s of GPU own is inf"),
        ({"pcie_bytes_per_s": 0}, "pcie_bytes_per_s of GPU own is 0"),
        ({"nvlink_bytes_per_s": -1}, r"nvlink_bytes_per_s of GPU own is -1\.0.*0 means no NVLink"),
        ({"idle_power_w": 501}, r"idle_power_w of GPU own is 501\.0.*from 0 to power_w \(500"),
        ({"flops_per_s": 989}, r"989\.0, but must be from 1e09 to 1e18; did you mean 9\.89e14\?"),
        ({"memory_bytes": 80}, r"is 80\.0, but must be from .*; did you mean 8\.59e10\?"),
        ({"memory_bytes": 81920}, r"did you mean 8\.59e10\?"),
        ({"memory_bytes_per_s": 3.35}, r"did you mean 3\.35e12\?"),
        ({"memory_bytes_per_s": 3350}, r"did you mean 3\.35e12\?"),
        ({"nvlink_bytes_per_s": 450}, r"did you mean 4\.5e11\?"),
        ({"power_w": 0.01}, "power_w of GPU own is 0.01, but must be from 0.1 to 1e05$"),
        ({"flops_per_s": 989e30}, r"must be from 1e09 to 1e18$"),
        ({"node_gpus": 0}, "node_gpus of GPU own is 0, but must be >= 1"),
        ({"node_gpus": 7.5}, r"node_gpus of a GPU is 7\.5, but must be a whole number"),
        ({"node_gpus": math.nan}, "node_gpus of a GPU is nan, but must be a whole number"),
        ({"price": {"low": 3, "high": 2}}, r"price is 3 / None / 2, but must be 0 <= low"),
        ({"price": -1}, "price is None / -1 / None"),
        ({"price": "cheap"}, "typical of price is 'cheap', but must be a number of dollars"),
        ({"price": {"typicl": 3}}, "unknown field 'typicl' of price; did you mean 'typical'"),
    ],
)
def test_an_impossible_gpu_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        gpu_from_fields({**OWN, **change})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OWN)
def test_a_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in OWN.items() if key != name}
    with pytest.raises(ValueError, match=rf"needs {name}; set them, or .*like: H100"):
        gpu_from_fields(fields)


def test_a_gpu_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: H100\nflops_per_s: 5e14\nprice: {typical: 2, date: 2026-05-20}\n")
    gpu = find_gpu(str(path))
    assert (gpu.name, gpu.flops_per_s) == ("mine", 5e14)
    assert (gpu.price.typical, gpu.price.date) == (2, "2026-05-20")


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", page(), flags=re.DOTALL)
    names = []
    for number, example in enumerate(examples):
        path = tmp_path / f"example{number}.yaml"
        path.write_text(example)
        gpu = find_gpu(str(path))
        assert gpu.price.typical is not None
        names.append(gpu.name)
    assert names == ["example0", "my accelerator"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 2 is not YAML"),
        ("- 1\n- 2\n", "holds a list, but must hold fields of a GPU"),
        ("like: mine.yaml\n", "mine.yaml refers to itself through `like`; set like to"),
        ("like: ./mine.yaml\n", "mine.yaml refers to itself"),
        ("flops: 1\n", "unknown field 'flops' of a GPU; did you mean 'flops_per_s'"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        find_gpu("mine.yaml")
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist \(looked in "):
        find_gpu("nowhere.yaml")


def test_a_folder_is_refused_as_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").mkdir()
    with pytest.raises(ValueError, match=r"mine\.yaml is a folder, but must be a YAML file"):
        find_gpu(str(tmp_path / "mine.yaml"))
