"""Datasheet facts of GPUs, and of a typical CPU, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from fp8plan.errors import ConfigError
from fp8plan.model.precision import Precision

MIB, GIGA, TERA = 1 << 20, 1e9, 1e12

# NVIDIA CUDA programming guide, "Compute Capabilities": FP8 tensor-core formats start with Ada (8.9) and Hopper (9.0).
FIRST_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or `cpu`, which stands for any. Peaks are dense (no sparsity) and per GPU; SI units.

    name:               key used by the command line and by profiles, e.g. "h200_sxm"
    product:            marketing name as NVML reports it, e.g. "NVIDIA H200"
    compute_capability: (major, minor); None for a CPU
    sm_count:           streaming multiprocessors; a CPU's cores
    memory_bytes:       memory the driver shows to a process (torch's total_memory), not the box's round number
    memory_bandwidth:   bytes/s, datasheet
    l2_bytes:           L2 cache; a CPU's last level
    bf16_flops:         dense BF16 FLOP/s
    fp8_flops:          dense FP8 FLOP/s; None where the GPU has no FP8 tensor cores
    nvlink_bandwidth:   bytes/s per GPU in one direction; None where there is no NVLink
    pcie_bandwidth:     bytes/s in one direction
    sources:            field name -> where the number is from
    gpus_per_node:      GPUs that reach each other without the network: those of one host (8 in HGX and DGX hosts), or
                        of one NVLink domain where that is larger. `--gpus-per-node` overrides it
    """

    name: str
    product: str
    compute_capability: tuple[int, int] | None
    sm_count: int
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    bf16_flops: float
    fp8_flops: float | None
    nvlink_bandwidth: float | None
    pcie_bandwidth: float
    sources: dict[str, str]
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node is {self.gpus_per_node!r}; allowed: a whole number of at least 1")

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None

    @property
    def architecture(self) -> str:
        """What decides which kernels there are: the compute capability, as "9.0", or "cpu"."""
        return "cpu" if self.compute_capability is None else ".".join(map(str, self.compute_capability))

    @property
    def has_fp8(self) -> bool:
        return self.fp8_flops is not None

    @property
    def e8m0_scales(self) -> bool:
        """Whether block-FP8 GEMMs take power-of-two scales only: DeepGEMM's README says so of SM100 (Blackwell). On
        Hopper vLLM uses them too unless VLLM_USE_DEEP_GEMM_E8M0=0, which the emitters set. SM120, Blackwell without
        HBM, has no DeepGEMM: CUTLASS takes FP32 scales there."""
        return self.compute_capability is not None and (10, 0) <= self.compute_capability < (12, 0)

    def why_not(self, precision: Precision) -> str | None:
        """Why a rollout in `precision` cannot run here; None where it can."""
        if self.is_cpu:
            return None if precision.weights == "bf16" else _NO_BLOCK_FP8_ON_CPU
        if self.has_fp8 or not precision.uses_fp8:
            return None
        need = ".".join(map(str, FIRST_FP8_CAPABILITY))
        return f"{self.product} has no FP8 tensor cores (compute capability {self.architecture}; they start at {need})"


# vllm/model_executor/kernels/linear, 0.30: with AMX it widens the weights and multiplies in BF16 (W8A16), without it
# refuses. A KV cache in FP8 is only storage; the CPU backend has it, on x86 with AVX-512 or AMX (cpu_attn.py).
_NO_BLOCK_FP8_ON_CPU = "vLLM's CPU backend has no blockwise FP8 GEMM (W8A8); the KV cache alone can be FP8 there"

# vLLM divides up what cudaMemGetInfo reports, which is torch's total_memory. nvidia-smi shows 0.3 to 0.6 GiB more
# (what the driver keeps for itself); the difference between driver versions is below 0.2 GiB.
_TORCH = "torch.cuda.get_device_properties(0).total_memory as printed in public logs"
_PCIE5 = "PCIe 5.0 x16: 128 GB/s in both directions together, half of it one way"
_PCIE4 = "PCIe 4.0 x16: 64 GB/s in both directions together, half of it one way"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_H200 = "NVIDIA H200 datasheet"
_H100 = "NVIDIA H100 datasheet"
_A100 = "NVIDIA A100 80GB datasheet"
_B200 = "NVIDIA Blackwell datasheet (HGX B200, per GPU)"
_B300 = "NVIDIA HGX B300 specifications"
_GB200 = "NVIDIA GB200 NVL72 specifications, per GPU"
_L40S = "NVIDIA L40S datasheet"
_RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet"
_RTX_WORKSTATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet"
_H20 = "NVIDIA H20 product brief as quoted in the press"
_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper"
_OOM = "torch out-of-memory messages in public logs: total capacity"
_A100_MEMORY = f"{_OOM} 79.25 GiB (79.15 on some drivers); nvidia-smi shows 81920 MiB"
_NO_BRIDGE = "none assumed: the bridge (600 GB/s both ways) is optional and joins two cards only"
_DENSE = "dense = half of the sparse figure"

_A100_SXM = Gpu(
    name="a100_sxm",
    product="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    sm_count=108,
    memory_bytes=81152 * MIB,
    memory_bandwidth=2.039 * TERA,
    l2_bytes=40 * MIB,
    bf16_flops=312 * TERA,
    fp8_flops=None,
    nvlink_bandwidth=300 * GIGA,
    pcie_bandwidth=32 * GIGA,
    sources={
        "sm_count": _A100_PAPER,
        "memory_bytes": _A100_MEMORY,
        "memory_bandwidth": f"{_A100}, SXM column: 2,039 GB/s",
        "l2_bytes": f"{_A100_PAPER}: 40 MB",
        "bf16_flops": f"{_A100}: 312 TFLOPS dense",
        "nvlink_bandwidth": f"{_A100}, SXM column: 600 GB/s in both directions together",
        "pcie_bandwidth": _PCIE4,
    },
)

_H100_SXM = Gpu(
    name="h100_sxm",
    product="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    sm_count=132,
    memory_bytes=81090 * MIB,
    memory_bandwidth=3.35 * TERA,
    l2_bytes=50 * MIB,
    bf16_flops=989.5 * TERA,
    fp8_flops=1979 * TERA,
    nvlink_bandwidth=450 * GIGA,
    pcie_bandwidth=64 * GIGA,
    sources={
        "sm_count": f"{_HOPPER}, table of H100 variants",
        "memory_bytes": f"{_TORCH}: 81090 MiB = 79.19 GiB; nvidia-smi shows 81559 MiB",
        "memory_bandwidth": f"{_H100}: 3.35 TB/s",
        "l2_bytes": f"{_HOPPER}: 50 MB",
        "bf16_flops": f"{_H100}: 1,979 TFLOPS with sparsity; {_DENSE}",
        "fp8_flops": f"{_H100}: 3,958 TFLOPS with sparsity; {_DENSE}",
        "nvlink_bandwidth": f"{_H100}: 900 GB/s in both directions together",
        "pcie_bandwidth": _PCIE5,
    },
)

_B200_SXM = Gpu(
    name="b200",
    product="NVIDIA B200",
    compute_capability=(10, 0),
    sm_count=148,
    memory_bytes=182642 * MIB,
    memory_bandwidth=7.7 * TERA,
    l2_bytes=126 * MIB,
    bf16_flops=2250 * TERA,
    fp8_flops=4500 * TERA,
    nvlink_bandwidth=900 * GIGA,
    pcie_bandwidth=64 * GIGA,
    sources={
        "sm_count": f"{_TORCH} (multi_processor_count)",
        "memory_bytes": f"{_TORCH}: 182642 MiB = 178.36 GiB; nvidia-smi shows 183359 MiB",
        "memory_bandwidth": f"{_B200}: 7.7 TB/s (up to 8 TB/s in the DGX B200 datasheet)",
        "l2_bytes": "torch.cuda.get_device_properties(0).L2_cache_size: 126 MB",
        "bf16_flops": f"{_B200}: 4.5 PFLOPS with sparsity; {_DENSE}",
        "fp8_flops": f"{_B200}: 9 PFLOPS with sparsity; {_DENSE}",
        "nvlink_bandwidth": f"{_B200}: 1.8 TB/s in both directions together",
        "pcie_bandwidth": f"{_PCIE5} (the GPU can do PCIe 6.0; HGX and DGX B200 hosts have 5.0)",
    },
)

_RTX_PRO_6000 = Gpu(
    name="rtx_pro_6000",
    product="NVIDIA RTX PRO 6000 Blackwell Server Edition",
    compute_capability=(12, 0),
    sm_count=188,
    memory_bytes=97249 * MIB,
    memory_bandwidth=1.597 * TERA,
    l2_bytes=128 * MIB,
    bf16_flops=500 * TERA,
    fp8_flops=1000 * TERA,
    nvlink_bandwidth=None,
    pcie_bandwidth=64 * GIGA,
    sources={
        "sm_count": f"{_TORCH} (multi_processor_count)",
        "memory_bytes": f"{_OOM} 94.97 GiB; nvidia-smi shows 97887 MiB",
        "memory_bandwidth": f"{_RTX}: 1,597 GB/s",
        "l2_bytes": "NVIDIA RTX Blackwell PRO GPU architecture whitepaper: 128 MB",
        "bf16_flops": f"{_RTX}: 4 PFLOPS of sparse FP4, of which dense BF16 is an eighth",
        "fp8_flops": f"{_RTX}: 4 PFLOPS of sparse FP4, of which dense FP8 is a quarter",
        "nvlink_bandwidth": f"{_RTX}: no NVLink",
        "pcie_bandwidth": _PCIE5,
    },
)

_GPUS = (
    Gpu(
        name="h200_sxm",
        product="NVIDIA H200",
        compute_capability=(9, 0),
        sm_count=132,
        memory_bytes=143156 * MIB,
        memory_bandwidth=4.8 * TERA,
        l2_bytes=60 * MIB,
        bf16_flops=989.5 * TERA,
        fp8_flops=1979 * TERA,
        nvlink_bandwidth=450 * GIGA,
        pcie_bandwidth=64 * GIGA,
        sources={
            "sm_count": f"{_TORCH} (multi_processor_count)",
            "memory_bytes": f"{_TORCH}: 143156 MiB = 139.80 GiB; nvidia-smi shows 143771 MiB (measured on an H200)",
            "memory_bandwidth": f"{_H200}: 4.8 TB/s",
            "l2_bytes": "torch.cuda.get_device_properties(0).L2_cache_size: 60 MB (the H100 reports 50 MB)",
            "bf16_flops": f"{_H200}: 1,979 TFLOPS with sparsity; {_DENSE}",
            "fp8_flops": f"{_H200}: 3,958 TFLOPS with sparsity; {_DENSE}",
            "nvlink_bandwidth": f"{_H200}: 900 GB/s in both directions together",
            "pcie_bandwidth": _PCIE5,
        },
    ),
    _H100_SXM,
    replace(
        _H100_SXM,
        name="h800",
        product="NVIDIA H800",
        nvlink_bandwidth=200 * GIGA,
        sources=_H100_SXM.sources
        | {
            "memory_bytes": "as the H100's: nvidia-smi shows 81559 MiB as well",
            "nvlink_bandwidth": "NVIDIA H800 SXM as quoted in the press: 400 GB/s in both directions together; the "
            "rest but FP64 is an H100's",
        },
    ),
    replace(
        _H100_SXM,
        name="h100_nvl",
        product="NVIDIA H100 NVL",
        memory_bytes=95334 * MIB,
        memory_bandwidth=3.9 * TERA,
        bf16_flops=835.5 * TERA,
        fp8_flops=1671 * TERA,
        nvlink_bandwidth=None,
        sources={
            "sm_count": "NVIDIA H100 NVL product brief: 132 SMs (16,896 CUDA cores)",
            "memory_bytes": f"{_OOM} 93.10 GiB; nvidia-smi shows 95830 MiB",
            "memory_bandwidth": f"{_H100}, NVL column: 3.9 TB/s",
            "l2_bytes": f"{_HOPPER}: 50 MB",
            "bf16_flops": f"{_H100}, NVL column: 1,671 TFLOPS with sparsity; {_DENSE}",
            "fp8_flops": f"{_H100}, NVL column: 3,341 TFLOPS with sparsity; {_DENSE}",
            "nvlink_bandwidth": _NO_BRIDGE,
            "pcie_bandwidth": _PCIE5,
        },
    ),
    Gpu(
        name="h100_pcie",
        product="NVIDIA H100 PCIe",
        compute_capability=(9, 0),
        sm_count=114,
        memory_bytes=81008 * MIB,
        memory_bandwidth=2.0 * TERA,
        l2_bytes=50 * MIB,
        bf16_flops=756.5 * TERA,
        fp8_flops=1513 * TERA,
        nvlink_bandwidth=None,
        pcie_bandwidth=64 * GIGA,
        sources={
            "sm_count": f"{_HOPPER}, table of H100 variants",
            "memory_bytes": f"{_TORCH}: 81008 MiB = 79.11 GiB; nvidia-smi shows 81559 MiB",
            "memory_bandwidth": f"{_H100}, PCIe column: 2 TB/s",
            "l2_bytes": f"{_HOPPER}: 50 MB",
            "bf16_flops": f"{_H100}, PCIe column: 1,513 TFLOPS with sparsity; {_DENSE}",
            "fp8_flops": f"{_H100}, PCIe column: 3,026 TFLOPS with sparsity; {_DENSE}",
            "nvlink_bandwidth": _NO_BRIDGE,
            "pcie_bandwidth": _PCIE5,
        },
    ),
    Gpu(
        name="h20",
        product="NVIDIA H20",
        compute_capability=(9, 0),
        sm_count=78,
        memory_bytes=97285 * MIB,
        memory_bandwidth=4.0 * TERA,
        l2_bytes=60 * MIB,
        bf16_flops=148 * TERA,
        fp8_flops=296 * TERA,
        nvlink_bandwidth=450 * GIGA,
        pcie_bandwidth=64 * GIGA,
        sources={
            "sm_count": f"{_TORCH} (multi_processor_count)",
            "memory_bytes": f"{_TORCH}: 97285 MiB = 95.00 GiB (the 96 GB card)",
            "memory_bandwidth": f"{_H20}: 4.0 TB/s",
            "l2_bytes": f"{_H20}: 60 MB",
            "bf16_flops": f"{_H20}: 148 TFLOPS dense",
            "fp8_flops": f"{_H20}: 296 TFLOPS dense",
            "nvlink_bandwidth": f"{_H20}: 900 GB/s in both directions together",
            "pcie_bandwidth": _PCIE5,
        },
    ),
    _A100_SXM,
    replace(
        _A100_SXM,
        name="a100_pcie",
        product="NVIDIA A100 80GB PCIe",
        memory_bandwidth=1.935 * TERA,
        nvlink_bandwidth=None,
        sources=_A100_SXM.sources
        | {"memory_bandwidth": f"{_A100}, PCIe column: 1,935 GB/s", "nvlink_bandwidth": _NO_BRIDGE},
    ),
    _B200_SXM,
    replace(
        _B200_SXM,
        name="b300",
        product="NVIDIA B300 SXM6 AC",
        compute_capability=(10, 3),
        memory_bytes=274115 * MIB,
        sources=_B200_SXM.sources
        | {
            "memory_bytes": f"{_OOM} 267.69 GiB; nvidia-smi shows 275040 MiB",
            "memory_bandwidth": f"{_B300} as quoted in the press: 7.7 TB/s (up to 8 TB/s in NVIDIA's announcements)",
            "l2_bytes": "assumed: as the B200's",
            "bf16_flops": f"{_B300}: 36 PFLOPS of 8 GPUs with sparsity; {_DENSE}",
            "fp8_flops": f"{_B300}: 72 PFLOPS of 8 GPUs with sparsity; {_DENSE}",
            "nvlink_bandwidth": f"{_B300}: 1.8 TB/s in both directions together",
        },
    ),
    replace(
        _B200_SXM,
        name="gb200",
        product="NVIDIA GB200",
        sm_count=152,
        memory_bytes=188733 * MIB,
        memory_bandwidth=8.0 * TERA,
        bf16_flops=2500 * TERA,
        fp8_flops=5000 * TERA,
        gpus_per_node=72,
        sources=_B200_SXM.sources
        | {
            "sm_count": f"{_TORCH} (multi_processor_count)",
            "memory_bytes": f"{_OOM} 184.31 GiB; nvidia-smi shows 189471 MiB",
            "memory_bandwidth": f"{_GB200}: 8 TB/s (16 TB/s of the superchip's two)",
            "bf16_flops": f"{_GB200}: 360 PFLOPS of 72 GPUs with sparsity; {_DENSE}",
            "fp8_flops": f"{_GB200}: 720 PFLOPS of 72 GPUs with sparsity; {_DENSE}",
            "nvlink_bandwidth": f"{_GB200}: 1.8 TB/s in both directions together",
            "pcie_bandwidth": f"{_PCIE5} (to the network; the Grace CPU is reached over NVLink-C2C)",
            "gpus_per_node": f"{_GB200}: 72 GPUs in one NVLink domain, in trays of 4",
        },
    ),
    Gpu(
        name="l40s",
        product="NVIDIA L40S",
        compute_capability=(8, 9),
        sm_count=142,
        memory_bytes=45486 * MIB,
        memory_bandwidth=0.864 * TERA,
        l2_bytes=96 * MIB,
        bf16_flops=362.05 * TERA,
        fp8_flops=733 * TERA,
        nvlink_bandwidth=None,
        pcie_bandwidth=32 * GIGA,
        sources={
            "sm_count": f"{_TORCH} (multi_processor_count)",
            "memory_bytes": "total_gpu_memory 44.42 GiB in the vLLM log of vllm-project/vllm issue 15815; "
            "nvidia-smi shows 46068 MiB",
            "memory_bandwidth": f"{_L40S}: 864 GB/s",
            "l2_bytes": "96 MiB measured on the L40 (arXiv 2606.22588), which has the same AD102 chip and 142 SMs",
            "bf16_flops": f"{_L40S}: 362.05 TFLOPS dense (733 with sparsity)",
            "fp8_flops": f"{_L40S}: 733 TFLOPS dense (1,466 with sparsity)",
            "nvlink_bandwidth": f"{_L40S}: no NVLink",
            "pcie_bandwidth": _PCIE4,
        },
    ),
    _RTX_PRO_6000,
    *(
        replace(
            _RTX_PRO_6000,
            name=name,
            product=f"NVIDIA RTX PRO 6000 Blackwell {edition} Edition",
            memory_bandwidth=1.792 * TERA,
            bf16_flops=sparse_fp4 / 8,
            fp8_flops=sparse_fp4 / 4,
            sources=_RTX_PRO_6000.sources
            | {
                "memory_bandwidth": f"{_RTX_WORKSTATION}: 1,792 GB/s",
                "bf16_flops": f"{_RTX_WORKSTATION}: sparse FP4 as AI TOPS, of which dense BF16 is an eighth",
                "fp8_flops": f"{_RTX_WORKSTATION}: sparse FP4 as AI TOPS, of which dense FP8 is a quarter",
            },
        )
        for name, edition, sparse_fp4 in (
            ("rtx_pro_6000_workstation", "Workstation", 4000 * TERA),
            ("rtx_pro_6000_max_q", "Max-Q Workstation", 3511 * TERA),
        )
    ),
)

# Any x86 laptop or small server of the 2020s, within a factor of a few: what a profile's efficiencies are fractions of.
# CPUs differ so much that a profile of one says little about another; `Profile.remarks` says so each time.
_CPU = Gpu(
    name="cpu",
    product="CPU",
    compute_capability=None,
    sm_count=8,
    memory_bytes=16384 * MIB,
    memory_bandwidth=76.8 * GIGA,
    l2_bytes=16 * MIB,
    bf16_flops=2.048 * TERA,
    fp8_flops=None,
    nvlink_bandwidth=None,
    pcie_bandwidth=38.4 * GIGA,
    sources={
        "sm_count": "assumed: 8 cores, a common laptop or the share of a server that one user gets",
        "memory_bytes": "assumed: 16 GiB; nothing is refused because of it, vLLM's KV pool is VLLM_CPU_KVCACHE_SPACE",
        "memory_bandwidth": "two channels of DDR5-4800 (JEDEC JESD79-5): 2 x 8 bytes x 4800 MT/s",
        "l2_bytes": "assumed: 16 MiB of shared last-level cache",
        "bf16_flops": "8 cores x 4 GHz x 64 FLOP: one 512-bit VDPBF16PS (32 multiply-adds, Intel SDM) a cycle; without "
        "AVX512-BF16 a CPU reaches a half or less, with AMX several times as much",
        "pcie_bandwidth": "no such link: fp8plan plans a single rank on a CPU; half of the memory's bandwidth",
        "gpus_per_node": "a single rank",
    },
    gpus_per_node=1,
)

_DEVICES = (*_GPUS, _CPU)
_ALIASES = {
    "h200": "h200_sxm",
    "h100": "h100_sxm",
    "a100": "a100_sxm",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "nvidia b300": "b300",
    "gb200_nvl72": "gb200",
    "h20_sxm": "h20",
    "h800_sxm": "h800",
    "rtx_pro_6000_server": "rtx_pro_6000",
    "rtx pro 6000": "rtx_pro_6000",
}


def gpus() -> tuple[Gpu, ...]:
    """Every GPU fp8plan knows; the CPU is none of them."""
    return _GPUS


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`: a key ("h200_sxm", "h200"), a product name ("NVIDIA H200"), "auto" for this machine's, or
    "cpu", which "auto" never means.

    Case does not matter. Raises ConfigError, naming the nearest, for another name and when "auto" finds none it knows.
    """
    if not isinstance(name, str):
        raise ConfigError(f"gpu is {name!r}; allowed: a name such as 'h200', or 'auto'")
    key = name.strip().lower()
    if key == "auto":
        return find_gpu(_product_of_this_machine())
    known = {g.name: g for g in _DEVICES} | {g.product.lower(): g for g in _DEVICES}
    known |= {alias: known[target] for alias, target in _ALIASES.items()}
    if key in known:
        return known[key]
    near = dict.fromkeys(known[match].name for match in get_close_matches(key, known, n=3, cutoff=0.5))
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ConfigError(
        f"unknown GPU {name!r}; {hint}known: {', '.join(g.name for g in _DEVICES)}, or auto to ask the driver"
    )


gpu = find_gpu  # the name that users know as fp8plan.gpu


def _product_of_this_machine() -> str:
    """Product name of the first GPU, from NVML."""
    known = ", ".join(g.name for g in _DEVICES)
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            f"gpu 'auto' needs nvidia-ml-py (pip install nvidia-ml-py); or name one of: {known}"
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            product = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ConfigError(f"gpu 'auto' found no NVIDIA GPU here ({error}); name one of: {known}") from error
    return product.decode() if isinstance(product, bytes) else str(product)
