from __future__ import annotations

import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import gpu, gpus
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
        ("b300", "b300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("RTX PRO 6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000_workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000_max_q"),
    ],
)
def test_every_spelling_finds_its_gpu(spelling: str, name: str) -> None:
    assert gpu(spelling).name == name


@pytest.mark.parametrize("g", gpus(), ids=lambda g: g.name)
def test_every_number_has_a_source(g) -> None:
    facts = {f.name for f in fields(g) if getattr(g, f.name) is not None}
    described = facts - {"name", "product", "compute_capability", "sources"}
    if g.gpus_per_node == gpu("h200").gpus_per_node:  # a host's, as in every HGX and DGX
        described -= {"gpus_per_node"}
    assert described <= set(g.sources)
    assert all(len(source) > 10 for source in g.sources.values())


@pytest.mark.parametrize("g", gpus(), ids=lambda g: g.name)
def test_peaks_are_dense_and_units_are_si(g) -> None:
    # A dense FP8 tensor core does twice its BF16 rate; a sparse figure in one place would give 1 or 4.
    if g.has_fp8:
        assert 1.95 < g.fp8_flops / g.bf16_flops < 2.05
    assert 40 * GIB < g.memory_bytes < 300 * GIB
    assert 5e11 < g.memory_bandwidth < 1e13
    # No GPU does more than 16,384 dense BF16 FLOP per SM and cycle below 2.2 GHz: a sparse figure would.
    assert g.bf16_flops / g.sm_count < 16384 * 2.2e9 / 2


def test_hopper_peak_follows_from_its_clock() -> None:
    # 132 SMs x 4096 dense BF16 FLOP per cycle x 1.83 GHz boost (H100 whitepaper), an independent way to the peak.
    assert gpu("h100").bf16_flops == pytest.approx(132 * 4096 * 1.83e9, rel=0.01)


def test_memory_is_what_a_process_sees() -> None:
    # nvidia-smi's totals, which include what the driver keeps for itself.
    totals = {"h200": 143771, "h100": 81559, "h100_nvl": 95830, "h800": 81559, "b200": 183359, "b300": 275040}
    totals |= {"gb200": 189471, "l40s": 46068, "a100": 81920, "rtx_pro_6000": 97887}
    for name, nvidia_smi_mib in totals.items():
        hidden = nvidia_smi_mib - gpu(name).memory_bytes / (1 << 20)
        assert 300 < hidden < 1000


def test_fp8_needs_fp8_tensor_cores() -> None:
    for g in gpus():
        assert g.has_fp8 == (g.compute_capability >= (8, 9))
        assert g.why_not(BF16) is None
        assert all((g.why_not(precision) is None) == g.has_fp8 for precision in PRESETS.values() if precision.uses_fp8)
    assert "compute capability 8.0; they start at 8.9" in gpu("a100").why_not(FP8_KV)


def test_only_datacenter_blackwell_needs_power_of_two_scales() -> None:
    """DeepGEMM's are for SM100; SM120 runs CUTLASS, with FP32 scales."""
    assert {g.name for g in gpus() if g.e8m0_scales} == {"b200", "b300", "gb200"}


def test_a_node_is_a_host_or_an_nvlink_domain() -> None:
    assert {g.gpus_per_node for g in gpus()} == {8, 72}
    assert gpu("gb200").gpus_per_node == 72
    with pytest.raises(ConfigError, match="gpus_per_node is 0; allowed: a whole number of at least 1"):
        replace(gpu("h200"), gpus_per_node=0)


def test_unknown_gpu_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nearest: .*h200_sxm.*known: .*b200.*auto"):
        gpu("h201")


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
    assert gpu("auto").name == "h20"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "nvidia-ml-py"),
        (fake_nvml(""), "Driver Not Loaded"),
        (fake_nvml("NVIDIA GeForce RTX 2080"), "unknown GPU 'NVIDIA GeForce RTX 2080'"),
    ],
)
def test_auto_without_a_known_gpu_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, module: object, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(ConfigError, match=f"{message}.*h200_sxm"):
        gpu("auto")
