"""Facts of GPUs and of a typical CPU. The numbers and their sources are in gpus.json."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from fp8plan.checks import nearest_hint, refuse_names
from fp8plan.errors import ConfigError
from fp8plan.model.precision import Precision

# NVIDIA CUDA programming guide, "Compute Capabilities": FP8 tensor-core formats start with Ada (8.9) and Hopper (9.0),
# BF16 with Ampere (8.0).
FIRST_FP8_CAPABILITY = (8, 9)
FIRST_BF16_CAPABILITY = (8, 0)


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as text, such as "9.0"."""
    return ".".join(map(str, capability))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or `cpu`, which stands for any. Peaks are dense (no sparsity) and per GPU; SI units.

    name:               key used by the command line and by profiles, e.g. "h200_sxm"; for a GPU that is described by
                        numbers, these (`datasheet`)
    product:            marketing name as NVML reports it, e.g. "NVIDIA H200"
    compute_capability: (major, minor); None for a CPU
    sm_count:           streaming multiprocessors; a CPU's cores
    memory_bytes:       memory the driver shows to a process (torch's total_memory), not the rounded size
    memory_bandwidth:   bytes/s, datasheet
    l2_bytes:           L2 cache; a CPU's last level; 0: not known (no plan reads it)
    bf16_flops:         dense BF16 FLOP/s
    fp8_flops:          dense FP8 FLOP/s; None without FP8 tensor cores (the GPU can still store FP8)
    nvlink_bandwidth:   bytes/s per GPU in one direction; None without NVLink
    pcie_bandwidth:     bytes/s in one direction
    gpus_per_node:      GPUs that reach each other without the network: those of a host (8 in HGX and DGX hosts), or of
                        a larger NVLink domain. `--gpus-per-node` overrides it
    power_limit_watts:  power limit of the GPU alone, as shipped; None: not known
    tuned_fp8_experts:  (experts, their intermediate size on one rank) for which vLLM ships a tuned configuration of its
                        block-FP8 Triton kernel; None if it uses another kernel
    tuned_bf16_experts: the same for its BF16 kernel; None: not known
    is_blackwell_data_center: Blackwell with HBM, such as the B200 and the B300
    stores_fp8_only:    an NVIDIA GPU that stores FP8 but has no tensor cores for it, so kernels widen it to BF16
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
    gpus_per_node: int = 8
    power_limit_watts: float | None = None
    tuned_fp8_experts: frozenset[tuple[int, int]] | None = None
    tuned_bf16_experts: frozenset[tuple[int, int]] | None = None
    is_cpu: bool = field(init=False, repr=False, compare=False)
    is_blackwell_data_center: bool = field(init=False, repr=False, compare=False)
    stores_fp8_only: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        capability = self.compute_capability
        object.__setattr__(self, "is_cpu", capability is None)
        blackwell = capability is not None and (10, 0) <= capability < (12, 0)
        object.__setattr__(self, "is_blackwell_data_center", blackwell)
        object.__setattr__(self, "stores_fp8_only", capability is not None and capability < FIRST_FP8_CAPABILITY)
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node is {self.gpus_per_node!r}; allowed: a whole number of at least 1")

    def is_of(self, product: str) -> bool:
        """True if this is the GPU with that product name. A GPU given by its numbers may have any unknown name."""
        return product == self.product or (self.name.startswith(DATASHEET) and _named(product) is None)

    @property
    def is_here(self) -> bool:
        """True if this machine's first GPU is one of these, as far as NVML tells."""
        with suppress(ConfigError):
            return self.is_of(_product_of_this_machine())
        return False

    @property
    def architecture(self) -> str:
        """The compute capability as text, such as "9.0", or "cpu". It decides which kernels there are."""
        return "cpu" if self.compute_capability is None else dotted(self.compute_capability)

    @property
    def has_fp8(self) -> bool:
        return self.fp8_flops is not None

    def has_e8m0(self, wanted: bool) -> bool:
        """True if scales of FP8 blocks are powers of two. wanted: by the checkpoint, or by VLLM_USE_DEEP_GEMM_E8M0

        DeepGEMM has no others on SM100 (Blackwell), according to its README, and both kinds on Hopper. Other GPUs have
        no DeepGEMM. CUTLASS and Triton use FP32 scales there.
        """
        return self.is_blackwell_data_center or (wanted and self.compute_capability == (9, 0))

    def has_tuned_experts(self, experts: int, inner: int, fp8: bool) -> bool:
        """True if vLLM has a Triton configuration tuned for `experts` of width `inner` on one rank, or may have one."""
        shapes = self.tuned_fp8_experts if fp8 else self.tuned_bf16_experts
        return shapes is None or (experts, inner) in shapes

    def why_not(self, precision: Precision) -> str | None:
        """The reason why a rollout in `precision` is not planned on this GPU; None if it is.

        An FP8 KV cache is storage, which needs no FP8 tensor cores. Limits of a model's layers are in
        fp8plan.model.attention_backend.
        """
        if self.is_cpu:
            return None if precision.weights == "bf16" else _NO_BLOCK_FP8_ON_CPU
        if self.compute_capability is not None and self.compute_capability < FIRST_BF16_CAPABILITY:
            return (
                f"vLLM runs BF16 from compute capability {dotted(FIRST_BF16_CAPABILITY)} on ({self.product} has "
                f"{self.architecture}), and fp8plan plans no FP16"
            )
        if self.has_fp8 or precision.weights == "bf16":
            return None
        if not self.stores_fp8_only:
            return f"fp8plan does not know the FP8 FLOP/s of {self.product}, which FP8 weights are computed with"
        return (
            f"fp8plan does not model FP8 weights on {self.product} (compute capability {self.architecture}): vLLM "
            f"widens them to BF16 inside of Marlin's GEMM there (W8A16), and fp8plan knows W8A8 alone, which starts at "
            f"{dotted(FIRST_FP8_CAPABILITY)}"
        )


# vllm/model_executor/kernels/linear: with AMX vLLM widens the weights and multiplies in BF16 (W8A16), and without AMX
# it refuses. From 0.31 on it multiplies in FP8 (W8A8) on CPUs whose AMX has FP8. The CPU backend has an FP8 KV cache on
# x86 with AVX-512 or AMX (cpu_attn.py).
_NO_BLOCK_FP8_ON_CPU = (
    "vLLM's CPU backend has no blockwise FP8 GEMM (W8A8) without AMX-FP8, and fp8plan models neither it nor the one "
    "that widens the weights (W8A16, with AMX); the KV cache alone can be FP8 there, on x86 with AVX-512 or AMX"
)

# gpus.json maps a name to its facts. A fact is a value, or [value, source]. A GPU that is `like` another inherits its
# facts, but not its aliases. A model name of several GPUs, such as A100, means the first of them.
# - sold_as_gb, forms: the GB and the form factors that users may write beside the model name.
# - memory_mib: as cudaMemGetInfo and torch's total_memory report. nvidia-smi shows 0.3 to 0.6 GiB more, which the
#   driver keeps; driver versions differ by less than 0.2 GiB.
# - cpu: any x86 laptop or small server of the 2020s, within a factor of a few. A profile's efficiencies are fractions
#   of these peaks. A profile of one CPU says little about another (`Profile.remarks`).
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
    """The facts of one GPU, including those of the GPU that it is like."""
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
    for key, fact in facts.items():
        if key in ("like", "aliases", "product", "compute_capability", "sold_as_gb", "forms"):
            continue
        field, unit = _UNITS.get(key, (key, 1))
        value, _ = fact or (None, None)
        values[field] = frozenset(map(tuple, value)) if isinstance(value, list) else value and value * unit
    return Gpu(name=name, **values)


_DEVICES: Final = tuple(map(_device, _TABLE))


def gpus() -> tuple[Gpu, ...]:
    """Every GPU that fp8plan knows, without the CPU."""
    return tuple(device for device in _DEVICES if not device.is_cpu)


def find_gpu(name: str) -> Gpu:
    """Look up a GPU by its name in any usual spelling: "h200", "NVIDIA A100-SXM4-80GB", "rtx4090".

    "auto" is this machine's GPU. "cpu" stands for any CPU, and "auto" never means it. A GPU without a name is given by
    its numbers: "datasheet:memory_gib=24,..." (see `datasheet`).

    Raises ConfigError for an unknown name, with the nearest ones, and if "auto" finds no known GPU.
    """
    if not isinstance(name, str):
        raise ConfigError(f"gpu is {name!r}; allowed: a name such as 'h200', or 'auto'")
    key = name.strip().lower()
    if key == "auto":
        return find_gpu(_product_of_this_machine())
    if re.match(r"datasheet\b", key):
        return datasheet(key.removeprefix("datasheet"))
    card = _named(name)
    if card is not None:
        return card
    if reason := next((reason for words, reason in _REFUSED.items() if re.search(words, key)), None):
        allowed = "an NVIDIA GPU from Ampere on, or cpu"
        raise ConfigError(f"fp8plan does not plan for {name[:80]!r}: {reason}; allowed: {allowed}")
    _check_single(name, key)
    hint = nearest_hint(key, {written: d.name for d in _DEVICES for written in _spellings(d)}, 3, 0.65)
    raise ConfigError(
        f"unknown GPU {name[:80]!r}; {hint}known: {', '.join(g.name for g in _DEVICES)}, or auto to ask the driver; "
        f"for any other card give its numbers: --gpu {EXAMPLE}"
    )


def _check_single(name: str, key: str) -> None:
    """Raise ConfigError for several GPUs in one name, such as 8xH100. The error says what to type."""
    for pattern in (r"(?P<number>\d+) ?[x*] ?(?P<card>.+)", r"(?P<card>.+?) ?[x*] ?(?P<number>\d+)"):
        several = re.fullmatch(pattern, key)
        if several is not None and (card := _named(several["card"])) is not None:
            number = several["number"]
            raise ConfigError(
                f"gpu is {name[:80]!r}, which names {number} GPUs; type --gpu {card.name} --gpus {number}"
            )


# GPUs that have no row on purpose -> the reason.
_REFUSED: Final = {
    r"\bmi\d{3}|instinct|radeon|\bamd\b": "ROCm has other kernels, and up to the MI325X other FP8 numbers (FNUZ)",
    r"\b(t4|v100)\b": f"vLLM runs BF16 from compute capability {dotted(FIRST_BF16_CAPABILITY)} on",
}

# Words beside a model name that do not change its meaning.
_NOISE: Final = frozenset(
    "nvidia geforce tesla rtx gpu graphics card tensor core blackwell generation edition hgx dgx mega ac".split()
)
_WORDS: Final = re.compile(
    r"(nvidia|geforce|tesla|rtx|pro|ada|blackwell|hgx|dgx|pcie|nvl(?:72)?|sxm(?:[2-6](?!\d?g))?|(?:hbm|gddr)\d[ex]?)"
)


class _Written(NamedTuple):
    """The parts of a GPU's name: words of its model, form factor, and memory in GB."""

    model: frozenset[str]
    forms: frozenset[str]
    gb: frozenset[int]


def _taken_apart(name: str) -> _Written:
    """The parts of a name such as "NVIDIA A100-SXM4-80GB" or a line of `nvidia-smi -L`, in any case and spelling."""
    line = re.sub(r"^gpu \d+:|\(uuid.*\)$", "", name.strip().lower())
    text = " ".join(_WORDS.sub(r" \1 ", re.sub(r"[^a-z0-9]+", " ", line)).split())
    memory = re.compile(r"\b(\d{1,6}) ?gi?b?\b")
    words = [word for word in memory.sub(" ", text).split() if word not in _NOISE and not re.match("hbm|gddr", word)]
    forms = frozenset(re.sub(r"\d", "", word) for word in words if re.fullmatch(r"sxm\d?|pcie|nvl\d*", word))
    model = frozenset(word for word in words if re.sub(r"\d", "", word) not in forms)
    return _Written(model, forms, frozenset(map(int, memory.findall(text))))


def _spellings(device: Gpu) -> list[str]:
    """The names that the table gives a GPU, in lower case."""
    return [device.name, device.product.lower(), *_TABLE[device.name].get("aliases", ())]


@lru_cache(maxsize=256)
def _named(name: str) -> Gpu | None:
    """The GPU that a name means; None if there is none.

    It has one of the table's names, or is the first GPU of that model with the memory and form factor in the name.
    """
    key = name.strip().lower()
    for device in _DEVICES:
        if key in _spellings(device):
            return device
    parts = _taken_apart(name)
    for device in _DEVICES:
        facts = _facts(device.name)
        fits = parts.forms <= set(facts.get("forms", ())) and parts.gb <= set(facts.get("sold_as_gb", ()))
        if parts.model and fits and any(_taken_apart(spelling).model == parts.model for spelling in _spellings(device)):
            return device
    return None


DATASHEET: Final = "datasheet:"
EXAMPLE: Final = f"{DATASHEET}memory_gib=23.5,bandwidth_gb_s=1008,bf16_tflops=165,sms=128,compute_capability=8.9"


class _Number(NamedTuple):
    """A number of a GPU that is given by its numbers: the field of Gpu, its unit there, and the allowed range."""

    field: str
    unit: float
    least: float
    most: float
    meaning: str
    needed: bool = True


_NUMBERS: Final = {
    "memory_gib": _Number("memory_bytes", 1 << 30, 1, 4096, "GiB that torch shows as total_memory"),
    "bandwidth_gb_s": _Number("memory_bandwidth", 1e9, 10, 1e6, "10^9 bytes/s of the memory"),
    "bf16_tflops": _Number("bf16_flops", 1e12, 1, 1e6, "dense BF16, without sparsity"),
    "sms": _Number("sm_count", 1, 1, 10_000, "streaming multiprocessors"),
    "compute_capability": _Number(
        "compute_capability", 1, 8, 12.9, "such as 8.9; `nvidia-smi --query-gpu=compute_cap`"
    ),
    "fp8_tflops": _Number("fp8_flops", 1e12, 1, 1e6, "dense FP8; left out: twice BF16 from 8.9 on", needed=False),
    "nvlink_gb_s": _Number("nvlink_bandwidth", 1e9, 1, 1e5, "one direction; left out: no NVLink", needed=False),
    "pcie_gb_s": _Number("pcie_bandwidth", 1e9, 0.1, 1e4, "one direction; left out: 32, PCIe 4.0 x16", needed=False),
    "power_w": _Number("power_limit_watts", 1, 1, 1e5, "left out: not known", needed=False),
    "gpus_per_node": _Number("gpus_per_node", 1, 1, 1024, "left out: 8", needed=False),
}
_WHOLE: Final = ("sms", "gpus_per_node")


def datasheet(text: str) -> Gpu:
    """The GPU of these numbers: "memory_gib=24, bandwidth_gb_s=1008, ...", in any order.

    Its name is the text by which `find_gpu` makes it again. Commas, semicolons or spaces separate the numbers.
    Required: memory_gib, bandwidth_gb_s, bf16_tflops, sms and compute_capability. Optional: fp8_tflops, nvlink_gb_s,
    pcie_gb_s, power_w and gpus_per_node.
    Raises ConfigError for a number that is missing, unknown, given twice or impossible.
    """
    numbers: dict[str, float] = {}
    for part in filter(None, re.split(r"[\s,;]+", re.sub(r"\s*[=:]\s*", "=", text.lower().lstrip(": ")))):
        name, _, value = part.partition("=")
        refuse_names("--gpu datasheet", [name], _NUMBERS)
        if name in numbers:
            raise ConfigError(f"--gpu datasheet: {name} is given twice; allowed: once")
        numbers[name] = _number(name, value)
    missing = [name for name, number in _NUMBERS.items() if number.needed and name not in numbers]
    if missing:
        means = "; ".join(f"{name}: {_NUMBERS[name].meaning}" for name in missing)
        raise ConfigError(f"--gpu datasheet: lacks {', '.join(missing)} ({means}); for example: --gpu {EXAMPLE}")
    numbers = {name: numbers[name] for name in _NUMBERS if name in numbers}
    major, minor = divmod(round(10 * numbers["compute_capability"]), 10)
    fp8 = (major, minor) >= FIRST_FP8_CAPABILITY
    if not fp8 and "fp8_tflops" in numbers:
        raise ConfigError(
            f"--gpu datasheet: fp8_tflops is given, and GPUs of compute capability {major}.{minor} have no FP8 tensor "
            f"cores; they start at {dotted(FIRST_FP8_CAPABILITY)}; leave fp8_tflops out"
        )
    values: dict[str, Any] = {"nvlink_bandwidth": None, "pcie_bandwidth": 32e9, "l2_bytes": 0}
    values["fp8_flops"] = 2e12 * numbers["bf16_tflops"] if fp8 else None
    values |= {_NUMBERS[name].field: value * _NUMBERS[name].unit for name, value in numbers.items()}
    values |= {
        field: round(values[field]) for field in ("sm_count", "memory_bytes", "gpus_per_node") if field in values
    }
    return Gpu(
        name=DATASHEET + ",".join(f"{name}={value!r}".removesuffix(".0") for name, value in numbers.items()),
        product=f"a GPU of {numbers['memory_gib']:g} GiB",
        **values | {"compute_capability": (major, minor)},
    )


def _number(name: str, value: str) -> float:
    """The value of a number. Raises ConfigError for an impossible one."""
    number = _NUMBERS[name]
    if name == "compute_capability":
        digits = re.fullmatch(r"(?:sm_?)?(8|9|10|12)\.?(\d?)", value)
        amount, good = float(f"{digits[1]}.{digits[2] or 0}") if digits else float("nan"), digits is not None
        allowed = "8.0 to 10.3, or 12.0 and 12.1"
    else:
        try:
            amount = float(value)
        except ValueError:
            amount = float("nan")
        good = number.least <= amount <= number.most and not (name in _WHOLE and amount % 1)
        allowed = f"{'a whole' if name in _WHOLE else 'a'} number from {number.least:g} to {number.most:g}"
    if not good:
        raise ConfigError(f"--gpu datasheet: {name} is {value[:40]!r}; allowed: {allowed} ({number.meaning})")
    return amount


def _product_of_this_machine() -> str:
    """The product name of the first GPU, from NVML."""
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
