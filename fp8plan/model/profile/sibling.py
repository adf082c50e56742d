"""The coefficients of a GPU that has the profile of a sibling: its small kernels, sampling, experts and power.

**Small kernels.** Their coefficients are shares of the memory's bandwidth, but many reach little of it. The SMs bound
these, so slower memory does not slow them. A kernel that reaches the share e of the measured card's bandwidth takes

    seconds = seconds there * ((1 - e^4) / (SMs' ratio)^4 + e^4 / (bandwidths' ratio)^4)^(1/4)

on the sibling: the fourth root of the sum of the fourth powers of a time for the SMs and one for the memory. No number
in it is fitted. `python -m benchmarks.siblings` compares it with single kernels that were timed on an H200 and an H100.

**Sampling.** vLLM's sampler is a sequence of kernels that each pass over the logits. The passes that it cannot do
without (`LEAST_SAMPLING`) count as bound by memory, and the rest of the measured time as bound by the SMs.

**Experts.** A layer that was timed keeps its measured time. If vLLM has a tuned Triton configuration on only one of the
two cards, these run different kernels. Then the sibling's layer has the time by the coefficients.

**Power.** A GPU at its power limit lowers clock and voltage. With a voltage that is linear in the clock f, power goes
with f^3 and the joules of an operation with f^2 (CMOS: P = C V^2 f). So the clock at the limit goes with the cube root
of the watts for each SM, and a step at the limit takes

    seconds = seconds at the measured card's limit * (its watts for each SM / the sibling's)^(1/3)

The whole limit counts, though memory and an idle card follow no such law.
NVIDIA's datasheets agree: 132 SMs at 400 W (H100 NVL) have 0.844 of the FLOP/s that they have at 700 W, and the cube
root says 0.830. An H100 PCIe has 0.885 for each SM, and the cube root says 0.833. The law is meant for limits from half
to twice the measured one. Below them the voltage reaches its floor, and the law is too fast.

A step is never slower with a higher limit. With more SMs at the same limit it may be, if memory bounds it, because SMs
that wait for memory draw power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from fp8plan.model.hardware import Gpu

Layers: TypeAlias = dict[str, dict[str, list[list[float]]]]  # as Profile.layers
EXPERTS = "moe."

# Least traffic of vLLM's samplers with temperature and one log-prob, in passes over FP32 logits. They get BF16 logits.
# v1 (v1/sample/sampler.py): log-softmax 1.5, copy to FP32 1.5, temperature 2, softmax 2, noise 1, its quotient 3,
# argmax 1 and rank 1. v2 (v1/worker/gpu/sample): copy to FP32 1.5, argmax with noise 1, log-softmax 1, rank 0.5.
LEAST_SAMPLING = {"v1": 13.0, "v2": 4.0}

SMALL = ("quantise.", "quantise_query.", "kv_write.", "overhead.")  # starts of their coefficients
EFFICIENCY, PASSES = ".bandwidth_efficiency", ".activation_passes"
# Least traffic of the rows around a grouped GEMM, in the passes that its cost function counts. Two GEMMs, activation,
# sum and FP8's two quantisations read their input and write their output: 1.7 to 2.0 passes by the layer's widths.
LEAST_PASSES = 1.75

IDLE, LIMIT, MEMORY_WATTS = "power.idle_watts", "power.limit_watts", "power.memory_watts"
MATH = {"bf16": ("power.bf16_watts", "power.bf16_expert_watts"), "fp8": ("power.fp8_watts", "power.fp8_expert_watts")}
LIMIT_SHARE = 0.99  # single kernels at the limit of 700 W read 690 to 699 W

# sd of the log of a step's seconds if one of both limits is not known. Limits of Hopper cards differ by up to a factor
# of two, and an unknown one is taken as the same for each SM: half of that factor's correction.
UNKNOWN_POWER_SD = math.log(2) / 3 / 2


def clock_ratio(measured: Gpu, sibling: Gpu) -> float:
    """The clock of the sibling at its power limit over the measured card's; 1.0 if a limit is not known."""
    limits = measured.power_limit_watts, sibling.power_limit_watts
    if limits[0] is None or limits[1] is None:
        return 1.0
    ratio = limits[1] / sibling.sm_count / (limits[0] / measured.sm_count)
    return float(ratio ** (1 / 3))


def power_sd(measured: Gpu, sibling: Gpu) -> float:
    """The sd of the log of a step's seconds that the difference in power adds.

    It is the size of the correction, or half of that without the SMs if this is more: cards with fewer SMs, as the H20,
    have not been measured. 0.0 for the same limit and SMs, as of the pair that the siblings' own sds are from.
    """
    limits = measured.power_limit_watts, sibling.power_limit_watts
    if limits[0] is None or limits[1] is None:
        return UNKNOWN_POWER_SD
    return max(abs(math.log(clock_ratio(measured, sibling))), abs(math.log(limits[1] / limits[0])) / 3 / 2)


def watts_of_sibling(coefficients: Mapping[str, float], measured: Gpu, sibling: Gpu) -> dict[str, float]:
    """The coefficients of a profile, with those of power changed for the sibling.

    An idle GPU draws what the measured one does for each SM. All other watts are of the time that the sibling's limit
    takes. FLOPs and bytes have their joules at any rate of them, so their watts go with peak and bandwidth for each SM.
    """
    known = measured.power_limit_watts
    if known is None or IDLE not in coefficients:
        return dict(coefficients)
    sms = sibling.sm_count / measured.sm_count
    limit = sibling.power_limit_watts
    changed = dict(coefficients)
    if limit is None:
        limit = changed[LIMIT] = known * sms
    idle = min(coefficients[IDLE] * sms, LIMIT_SHARE * limit / 2)
    left = LIMIT_SHARE * limit - idle, LIMIT_SHARE * known - coefficients[IDLE]
    factor = left[0] / left[1] / clock_ratio(measured, sibling)
    for name in coefficients:
        if name.startswith("power.") and name not in (IDLE, LIMIT):
            changed[name] *= factor
    for dtype, peaks in _peaks(measured, sibling).items():
        for name in MATH[dtype]:
            if name in changed:
                changed[name] *= peaks / sms
    if MEMORY_WATTS in changed:
        changed[MEMORY_WATTS] *= sibling.memory_bandwidth / measured.memory_bandwidth / sms
    changed[IDLE] = idle
    return changed


def _peaks(measured: Gpu, sibling: Gpu) -> dict[str, float]:
    """The sibling's peak of each dtype over the measured card's."""
    peaks = {"bf16": sibling.bf16_flops / measured.bf16_flops}
    if measured.fp8_flops and sibling.fp8_flops:
        peaks["fp8"] = sibling.fp8_flops / measured.fp8_flops
    return peaks


def rates_of_sibling(coefficients: Mapping[str, float], measured: Gpu, sibling: Gpu) -> dict[str, float]:
    """The coefficients of a profile, with the sibling's shares of its own bandwidth for small kernels and sampling."""
    changed = dict(coefficients)
    faster = sibling.memory_bandwidth / measured.memory_bandwidth
    for name, value in coefficients.items():
        if name.startswith(SMALL) and name.endswith(EFFICIENCY):
            changed[name] = value / (faster * longer(value, measured, sibling))
        elif name.endswith(PASSES):
            changed[name] = value * faster * longer(min(1.0, LEAST_PASSES / value), measured, sibling)
    return changed | _sampling(coefficients, measured, sibling)


def _sampling(coefficients: Mapping[str, float], measured: Gpu, sibling: Gpu) -> dict[str, float]:
    """The coefficients of sampling that change. One row is on one SM, and takes as long on both cards."""
    faster = sibling.memory_bandwidth / measured.memory_bandwidth
    changed = {}
    for runner, least in LEAST_SAMPLING.items():
        passes, sm_bandwidth = f"sampling.{runner}.passes", f"sampling.{runner}.sm_bandwidth"
        if passes not in coefficients:
            continue
        of_memory = min(least, coefficients[passes])
        of_sms = coefficients[passes] - of_memory
        changed[passes] = of_memory + of_sms * faster / (sibling.sm_count / measured.sm_count)
        if sm_bandwidth in coefficients:
            changed[sm_bandwidth] = coefficients[sm_bandwidth] * changed[passes] / coefficients[passes]
    return changed


def longer(share: float, measured: Gpu, sibling: Gpu) -> float:
    """The seconds of a kernel on the sibling over those on the measured card.

    share: the part of the measured card's bandwidth that the kernel reaches there, at most 1
    """
    memory, sms = sibling.memory_bandwidth / measured.memory_bandwidth, sibling.sm_count / measured.sm_count
    bound = share**4
    return float(((1 - bound) / sms**4 + bound / memory**4) ** 0.25)


def layers_of_sibling(layers: Layers, measured: Gpu, sibling: Gpu) -> Layers:
    """The timed layers of a profile without experts whose Triton configuration is tuned on one of both cards only."""
    return {
        kernel: {
            shape: timed
            for shape, timed in shapes.items()
            if not kernel.startswith(EXPERTS) or _tuned(kernel, shape, measured) == _tuned(kernel, shape, sibling)
        }
        for kernel, shapes in layers.items()
    }


def _tuned(kernel: str, shape: str, gpu: Gpu) -> bool:
    experts, _, _, inner = map(int, shape.split("x"))
    return gpu.has_tuned_experts(experts, inner, kernel != f"{EXPERTS}bf16")
