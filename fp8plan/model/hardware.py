"""Facts of GPUs and of a typical CPU. The numbers and their sources are in gpus.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.precision import Precision

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
    power_limit_watts:  of the GPU alone, as shipped; None where it is not known
    tuned_fp8_experts:  (experts, their intermediate size on one rank) for which vLLM ships a tuned configuration of its
                        block-FP8 Triton kernel; None where it takes another kernel
    tuned_bf16_experts: the same of its BF16 kernel; None where it is not known
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
    power_limit_watts: float | None = None
    tuned_fp8_experts: frozenset[tuple[int, int]] | None = None
    tuned_bf16_experts: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node is {self.gpus_per_node!r}; allowed: a whole number of at least 1")

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None

    @property
    def architecture(self) -> str:
        """The compute capability as text, such as "9.0", or "cpu". It decides which kernels there are."""
        return "cpu" if self.compute_capability is None else ".".join(map(str, self.compute_capability))

    @property
    def has_fp8(self) -> bool:
        return self.fp8_flops is not None

    @property
    def e8m0_scales(self) -> bool:
        """True where block-FP8 GEMMs take power-of-two scales only, as DeepGEMM's README says of SM100 (Blackwell).

        On Hopper vLLM uses them too, unless VLLM_USE_DEEP_GEMM_E8M0=0, which the emitters set. SM120, Blackwell without
        HBM, has no DeepGEMM: CUTLASS takes FP32 scales there.
        """
        return self.compute_capability is not None and (10, 0) <= self.compute_capability < (12, 0)

    def why_not(self, precision: Precision) -> str | None:
        """The reason why a rollout in `precision` cannot run on this GPU; None if it can."""
        if self.is_cpu:
            return None if precision.weights == "bf16" else _NO_BLOCK_FP8_ON_CPU
        if self.has_fp8 or not precision.uses_fp8:
            return None
        need = ".".join(map(str, FIRST_FP8_CAPABILITY))
        return f"{self.product} has no FP8 tensor cores (compute capability {self.architecture}; they start at {need})"


# vllm/model_executor/kernels/linear, 0.30: with AMX it widens the weights and multiplies in BF16 (W8A16), without it
# refuses. A KV cache in FP8 is only storage; the CPU backend has it, on x86 with AVX-512 or AMX (cpu_attn.py).
_NO_BLOCK_FP8_ON_CPU = (
    "vLLM's CPU backend has no blockwise FP8 GEMM (W8A8); the KV cache alone can be FP8 there, on x86 with AVX-512 or "
    "AMX"
)

# gpus.json maps a name to its facts. A fact is a value, or [value, its source]. A GPU that is `like` another differs
# from it in the facts it names itself, and has none of its aliases.
# - memory_mib: vLLM divides up what cudaMemGetInfo reports, which is torch's total_memory. nvidia-smi shows 0.3 to 0.6
#   GiB more (what the driver keeps for itself); the difference between driver versions is below 0.2 GiB.
# - cpu: any x86 laptop or small server of the 2020s, within a factor of a few. A profile's efficiencies are fractions
#   of these peaks. CPUs differ so much that a profile of one says little about another; `Profile.remarks` says so.
_TABLE: Final[dict[str, dict[str, Any]]] = json.loads((files(__package__) / "gpus.json").read_text(encoding="utf-8"))
_UNITS: Final = {
    "memory_mib": ("memory_bytes", 1 << 20),
    "memory_tb_s": ("memory_bandwidth", 1e12),
    "l2_mib": ("l2_bytes", 1 << 20),
    "bf16_tflops": ("bf16_flops", 1e12),
    "fp8_tflops": ("fp8_flops", 1e12),
    "nvlink_gb_s": ("nvlink_bandwidth", 1e9),
    "pcie_gb_s": ("pcie_bandwidth", 1e9),
    "power_w": ("power_limit_watts", 1),
}


def _facts(name: str) -> dict[str, Any]:
    """The facts of one GPU, those of the GPU that it is like included."""
    row = _TABLE[name]
    return (_facts(row["like"]) if "like" in row else {}) | row


def _device(name: str) -> Gpu:
    """The GPU of that name in the table, in SI units."""
    facts = _facts(name)
    capability = facts["compute_capability"]
    values: dict[str, Any] = {
        "product": facts["product"],
        "compute_capability": capability and tuple(map(int, capability.split("."))),
    }
    sources: dict[str, str] = {}
    for key, fact in facts.items():
        if key in ("like", "aliases", "product", "compute_capability"):
            continue
        field, unit = _UNITS.get(key, (key, 1))
        value, source = fact or (None, None)
        values[field] = frozenset(map(tuple, value)) if isinstance(value, list) else value and value * unit
        if source:
            sources[field] = source
    return Gpu(name=name, sources=sources, **values)


_DEVICES: Final = tuple(map(_device, _TABLE))


def gpus() -> tuple[Gpu, ...]:
    """Every GPU that fp8plan knows; the CPU is not among them."""
    return tuple(device for device in _DEVICES if not device.is_cpu)


def find_gpu(name: str) -> Gpu:
    """Look up a GPU by its key ("h200_sxm", "h200") or its product name ("NVIDIA H200"), whatever the case.

    "auto" is this machine's GPU; "cpu" stands for any CPU, and "auto" never means it. Raises ConfigError, naming the
    nearest, for another name, and when "auto" finds no GPU that fp8plan knows.
    """
    if not isinstance(name, str):
        raise ConfigError(f"gpu is {name!r}; allowed: a name such as 'h200', or 'auto'")
    key = name.strip().lower()
    if key == "auto":
        return find_gpu(_product_of_this_machine())
    known = {g.name: g for g in _DEVICES} | {g.product.lower(): g for g in _DEVICES}
    known |= {alias: known[name] for name, row in _TABLE.items() for alias in row.get("aliases", ())}
    if key in known:
        return known[key]
    near = dict.fromkeys(known[match].name for match in get_close_matches(key, known, n=3, cutoff=0.65))
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
