from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import _TABLE, Gpu, find_gpu, gpus
from fp8plan.model.precision import BF16, FP8_KV, PRESETS

GIB = 1 << 30


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "h200_sxm"),
        ("H200_SXM", "h200_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("h100", "h100_sxm"),
        ("nvidia h100 80gb hbm3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H20", "h20"),
        ("a100", "a100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        (" b200 ", "b200"),
        ("L40S", "l40s"),
        ("h800", "h800"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("GB200", "gb200"),
        ("NVIDIA GB200", "gb200"),
        ("GB300 NVL72", "gb300"),
        ("NVIDIA L20", "l20"),
        ("b300", "b300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("RTX PRO 6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000_workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000_max_q"),
    ],
)
def test_every_spelling_finds_its_gpu(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize("row", _TABLE.values(), ids=list(_TABLE))
def test_every_number_has_a_source(row) -> None:
    numbers = row.keys() - {"like", "aliases", "product", "compute_capability", "sold_as_gb", "forms"}
    assert all(row[name] is None or len(row[name][1]) > 10 for name in numbers)


@pytest.mark.parametrize("g", gpus(), ids=lambda g: g.name)
def test_peaks_are_dense_and_units_are_si(g) -> None:
    # A dense FP8 tensor core does twice its BF16 rate; a sparse figure in one place would give 1 or 4.
    if g.has_fp8:
        assert 1.95 < g.fp8_flops / g.bf16_flops < 2.05
    assert 20 * GIB < g.memory_bytes < 300 * GIB
    assert 2.5e11 < g.memory_bandwidth < 1e13
    # No GPU does more than 16,384 dense BF16 FLOP per SM and cycle below 2.2 GHz: a sparse figure would.
    assert g.bf16_flops / g.sm_count < 16384 * 2.2e9 / 2


def test_hopper_peak_follows_from_its_clock() -> None:
    # 132 SMs x 4096 dense BF16 FLOP per cycle x 1.83 GHz boost (H100 whitepaper), an independent way to the peak.
    assert find_gpu("h100").bf16_flops == pytest.approx(132 * 4096 * 1.83e9, rel=0.01)


def test_memory_is_what_a_process_sees() -> None:
    # nvidia-smi's totals, which include what the driver keeps for itself.
    totals = {"h200": 143771, "h100": 81559, "h100_nvl": 95830, "h800": 81559, "b200": 183359, "b300": 275040}
    totals |= {"gb200": 189471, "l40s": 46068, "a100": 81920, "rtx_pro_6000": 97887, "gh200": 97871, "l4": 23034}
    totals |= {"rtx_4090": 24564, "rtx_3090": 24576, "rtx_5090": 32607, "rtx_a6000": 49140, "rtx_6000_ada": 49140}
    for name, nvidia_smi_mib in totals.items():
        hidden = nvidia_smi_mib - find_gpu(name).memory_bytes / (1 << 20)
        assert 300 < hidden < 1000


def test_fp8_weights_need_fp8_tensor_cores_and_a_kv_cache_does_not() -> None:
    for g in gpus():
        assert g.has_fp8 == (g.compute_capability >= (8, 9)) == (not g.stores_fp8_only)
        assert g.why_not(BF16) is None
        assert g.why_not(FP8_KV) is None
        weights = [p for p in PRESETS.values() if p.weights != "bf16"]
        assert all((g.why_not(precision) is None) == g.has_fp8 for precision in weights)
    assert "compute capability 8.0): vLLM widens them" in find_gpu("a100").why_not(PRESETS["fp8_block"])


def test_power_of_two_scales_are_deep_gemms() -> None:
    """It has no others on SM100, and both kinds on SM90; SM120 and Ada run CUTLASS, with FP32 scales."""
    always, wanted = ({g.name for g in gpus() if g.has_e8m0(asked)} for asked in (False, True))
    assert always == {"b200", "b300", "gb200", "gb300"}
    assert wanted - always == {g.name for g in gpus() if g.architecture == "9.0"}
    assert "h200_sxm" in wanted


def test_a_node_is_a_host_or_an_nvlink_domain() -> None:
    assert {g.gpus_per_node for g in gpus()} == {1, 8, 72}
    assert find_gpu("gh200").gpus_per_node == 1
    assert find_gpu("gb200").gpus_per_node == 72
    with pytest.raises(ConfigError, match="gpus_per_node is 0; allowed: a whole number of at least 1"):
        replace(find_gpu("h200"), gpus_per_node=0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MI300X", "ROCm"),
        ("AMD Instinct MI325X", "ROCm"),
        ("mi355x", "ROCm"),
        ("Tesla T4", "BF16 from compute capability 8.0"),
        ("v100", "BF16"),
    ],
)
def test_a_gpu_that_is_left_out_on_purpose_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not plan for '{name}': .*{reason}.*; allowed: an NVIDIA GPU"):
        find_gpu(name)


def test_unknown_gpu_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nearest: .*h200_sxm.*known: .*b200.*auto"):
        find_gpu("h201")


def fake_nvml(product: str) -> SimpleNamespace:
    class NVMLError(Exception):
        pass

    def name(handle: object) -> str:
        if not product:
            raise NVMLError("Driver Not Loaded")
        return product

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=name,
    )


def test_auto_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("NVIDIA H20"))
    assert find_gpu("auto").name == "h20"
    assert [name for name in ("h20", "h200", "cpu") if find_gpu(name).is_here] == ["h20"]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "nvidia-ml-py"),
        (fake_nvml(""), "Driver Not Loaded"),
        (fake_nvml("NVIDIA GeForce RTX 2080"), "unknown GPU 'NVIDIA GeForce RTX 2080'"),
        (fake_nvml("NVIDIA A100-SXM4-80GB MIG 1g.10gb"), "unknown GPU"),
    ],
)
def test_auto_without_a_known_gpu_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, module: object, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(ConfigError, match=f"{message}.*h200_sxm"):
        find_gpu("auto")
    assert not find_gpu("h200").is_here


VENDOR = ["", "nvidia ", "NVIDIA ", "geforce ", "Nvidia GeForce ", "nvidia-"]


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, Gpu]:
    """A product name in any case, with any separators and vendor words, and the GPU that it is."""
    device = draw(st.sampled_from(gpus()))
    words = re.split(r"[ -]", device.product.removeprefix("NVIDIA ").removeprefix("GeForce "))
    separators = draw(st.lists(st.sampled_from([" ", "-", "_", "  ", "/", "."]), min_size=len(words) - 1))
    text = words[0] + "".join(separator + word for separator, word in zip(separators, words[1:], strict=False))
    upper = draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    cased = "".join(letter.upper() if up else letter.lower() for letter, up in zip(text, upper, strict=True))
    return draw(st.sampled_from(VENDOR)) + cased, device


@given(spelling=spellings())
def test_any_spelling_of_a_product_finds_it(spelling: tuple[str, Gpu]) -> None:
    assert find_gpu(spelling[0]) is spelling[1]


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_what_nvidia_smi_lists_is_found(device: Gpu) -> None:
    assert find_gpu(device.name) is find_gpu(device.product) is device
    assert find_gpu(f"GPU 3: {device.product} (UUID: GPU-0a1b2c3d-ffff-0000)") is device


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("4090", "rtx_4090"),
        ("rtx4090", "rtx_4090"),
        ("geforce rtx 4090", "rtx_4090"),
        ("a100-80gb", "a100_sxm"),
        ("A100-SXM4-80GB", "a100_sxm"),
        ("a100sxm480gb", "a100_sxm"),
        ("A100 80GB PCIe", "a100_pcie"),
        ("a100-40gb", "a100_sxm_40gb"),
        ("nvidia-tesla-a100", "a100_sxm_40gb"),  # Google's word for it
        ("A100 PCIe 40 GB", "a100_pcie_40gb"),
        ("h100-80gb-hbm3", "h100_sxm"),
        ("nvidia-h100-mega-80gb", "h100_sxm"),
        ("H100 SXM5", "h100_sxm"),
        ("h100 94GB", "h100_nvl"),
        ("nvidia-h200-141gb", "h200_sxm"),
        ("GH200 480GB", "gh200"),
        ("gb200_nvl72", "gb200"),
        ("rtxa6000", "rtx_a6000"),
        ("RTX_6000Ada", "rtx_6000_ada"),
        ("RTX PRO 6000 Blackwell", "rtx_pro_6000"),
        ("RTX_PRO_6000_WS", "rtx_pro_6000_workstation"),
        ("a10g", "a10g"),
        ("H20-3e", "h20_3e"),
    ],
)
def test_names_that_people_and_clouds_write_are_found(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


# Another memory, another chip, or a part of one: none of them is a card of the table.
OTHERS = (
    "A100 20GB|H100 64GB|H100 96GB|GH200 144GB|H200 80GB|RTX 4090 48GB|RTX 4090 Laptop GPU|4090D|3090 Ti|RTX 6000|"
    "Quadro RTX 6000|H800 PCIe|A100X|NVIDIA A100-SXM4-80GB MIG 1g.10gb|h100h200|"
    "nvidia|80gb|sxm||8xfoo"
).split("|")


@pytest.mark.parametrize("name", OTHERS)
def test_another_card_is_not_taken_for_a_known_one(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown GPU .*any other card give its numbers: --gpu datasheet:memory_gib="
    ):
        find_gpu(name)


@given(device=st.sampled_from(gpus()), number=st.integers(1, 99), times=st.sampled_from(["x", " x ", "X", "*"]))
def test_a_number_of_any_known_card_says_how_to_type_it(device: Gpu, number: int, times: str) -> None:
    for text in (f"{number}{times}{device.product}", f"{device.name}{times}{number}"):
        with pytest.raises(ConfigError, match=f"type --gpu {device.name} --gpus {number}$"):
            find_gpu(text)


@given(device=st.sampled_from(gpus()), gb=st.integers(1, 999))
def test_a_name_with_another_memory_is_never_found(device: Gpu, gb: int) -> None:
    """A GPU that is found has about the memory that its name says. The driver shows at most a tenth less."""
    plain = re.sub(r"\b\d+GB\b", "", device.product)
    with suppress(ConfigError):
        found = find_gpu(f"{plain} {gb}GB")
        sold = 96 if gb == 480 else gb  # GH200 480GB is named by its CPU's memory
        assert 0.9 < found.memory_bytes / GIB / sold <= 1


CARD = "datasheet:memory_gib=23.5,bandwidth_gb_s=1008,bf16_tflops=165.2,sms=128,compute_capability=8.9"


@pytest.mark.parametrize(
    "text",
    [
        CARD,
        "DataSheet: memory_gib=23.5, bandwidth_gb_s = 1008; BF16_TFLOPS: 165.2 sms=128 compute_capability=sm_89",
        "datasheet:compute_capability=89,sms=128,bf16_tflops=165.2,bandwidth_gb_s=1008.0,memory_gib=23.50",
    ],
)
def test_a_card_is_given_by_its_numbers(text: str) -> None:
    found, known = find_gpu(text), find_gpu("rtx 4090")
    assert found.name == CARD
    assert (found.sm_count, found.compute_capability) == (known.sm_count, known.compute_capability)
    assert found.fp8_flops == 2 * found.bf16_flops == pytest.approx(known.fp8_flops, rel=1e-3)
    assert (found.memory_bandwidth, found.pcie_bandwidth, found.nvlink_bandwidth) == (1.008e12, 32e9, None)
    assert found.memory_bytes == 23.5 * GIB


@given(
    needed=st.fixed_dictionaries(
        {
            "memory_gib": st.floats(1, 4096),
            "bandwidth_gb_s": st.floats(10, 1e6),
            "bf16_tflops": st.floats(1, 1e6),
            "sms": st.integers(1, 10_000),
            "compute_capability": st.sampled_from(["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]),
        },
        optional={
            "nvlink_gb_s": st.floats(1, 1e5),
            "pcie_gb_s": st.floats(0.1, 1e4),
            "power_w": st.integers(1, 10_000),
            "gpus_per_node": st.integers(1, 1024),
        },
    ),
    order=st.randoms(),
)
def test_the_name_of_a_card_finds_it_again(needed: dict[str, Any], order: Random) -> None:
    parts = [f"{name}={value}" for name, value in needed.items()]
    order.shuffle(parts)
    found = find_gpu("datasheet:" + ",".join(parts))
    assert find_gpu(found.name) == found
    assert ".".join(map(str, found.compute_capability)) == needed["compute_capability"]
    assert found.has_fp8 == (found.compute_capability >= (8, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasheet", "lacks memory_gib, bandwidth_gb_s, bf16_tflops, sms, compute_capability.*for example: --gpu"),
        (CARD.replace("bf16_tflops=165.2,", ""), r"lacks bf16_tflops \(.*dense"),
        (CARD + ",memory_gib=24", "memory_gib is given twice"),
        (CARD.replace("memory_gib", "memory_gb"), r"takes no memory_gb \(did you mean memory_gib\?\)"),
        (CARD + ",cuda_cores=9", "takes no cuda_cores; allowed: memory_gib"),
        (CARD.replace("23.5", "nan"), "memory_gib is 'nan'; allowed: a number from 1 to 4096"),
        (CARD.replace("23.5", "24GB"), "memory_gib is '24gb'"),
        (CARD.replace("=128", "=12.5"), "sms is '12.5'; allowed: a whole number"),
        (CARD.replace("8.9", "7.5"), "compute_capability is '7.5'; allowed: 8.0 to 10.3, or 12.0 and 12.1"),
        (CARD.replace("8.9", "8.6") + ",fp8_tflops=300", "8.6 have no FP8 tensor cores; they start at 8.9"),
        (CARD + ",sms", "sms is given twice"),
        (CARD.replace("165.2", ""), "bf16_tflops is ''"),
        (CARD.replace("165.2", "-1"), "bf16_tflops is '-1'"),
        (CARD.replace("165.2", "1e400"), "bf16_tflops is '1e400'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_gpu(text)


def test_a_given_card_is_that_of_any_machine_but_a_known_one() -> None:
    """`fp8plan calibrate --gpu datasheet:...` measures on a machine whose GPU has no name here."""
    card = find_gpu(CARD)
    assert card.is_of("NVIDIA GeForce RTX 4070")
    assert not card.is_of("NVIDIA H200")
    assert find_gpu("h200").is_of("NVIDIA H200")
    assert not find_gpu("h200").is_of("NVIDIA GeForce RTX 4070")
