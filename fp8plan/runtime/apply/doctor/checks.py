"""All checks in the order of the report: those of an engine's make-up and of a run's log stand here.

The engine's are precision, kernels, scales of weights and KV cache, routers, graphs and memory. A log has the KL, the
tokens behind it, and the alarms of its Monitor. Its last step decides: a figure that is missing, or is no number, is
never fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isclose, isfinite
from typing import Final

from fp8plan.errors import some
from fp8plan.model.precision import E4M3_MAX, Precision, find_precision
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import POW2
from fp8plan.runtime.apply.doctor import trainer_checks, weights_checks
from fp8plan.runtime.apply.doctor.observed import (
    NOTHING,
    Finding,
    Logged,
    Observed,
    fault,
    needs_e8m0,
    ok,
    unknown,
    warning,
)
from fp8plan.runtime.apply.weight_sync.fixed_scales import INSTEAD, keeps_scales
from fp8plan.runtime.watch.controller.alarms import MEANINGS, Alarm, Meaning
from fp8plan.runtime.watch.controller.state import AlarmLimits
from fp8plan.runtime.watch.guard.causes import MANY_PREEMPTIONS
from fp8plan.runtime.watch.guard.observation import fallback
from fp8plan.runtime.watch.guard.prefix_cache import OFF, few_hits
from fp8plan.runtime.watch.mismatch.attribution import sentence
from fp8plan.schemas import K3

RECALIBRATE: Final = (
    """engine.recalibrate_kv(); vllm serve: --weight-transfer-config '{"backend": "fp8plan"}', which measures them; """
    "elsewhere: --kv-cache-dtype auto"
)
# Allowed largest value of a few prompts, as a multiple of the largest that scales of other prompts hold.
MOST_CLIP: Final = 1.25
VLLM_NAMES: Final = {"fp8_block": "fp8_per_block"}  # vLLM's names that stand for one format of weights alone


def precision(seen: Observed) -> Finding:
    """The engine runs the planned precision. A part that nothing tells is unknown, unless another part is wrong."""
    says = _running(seen)
    if not says:
        return unknown("precision", seen.unseen.get("ranks", NOTHING))
    planned = None if seen.precision is None else find_precision(seen.precision)
    if planned is not None and _differs(seen, planned):
        todo = (
            "start the engine as planned: RolloutEngine.from_plan(plan), or the flags of: fp8plan emit PLAN.json vllm"
        )
        return fault("precision", "wrong_precision", f"{says}; planned: {planned.name}", todo)
    if missing := "; ".join(_not_told(seen, planned)):
        _, _, todo = seen.unseen.get("ranks", NOTHING).partition("; type: ")
        return unknown("precision", f"{says}; {missing}" + (f"; type: {todo}" if todo else ""))
    return ok("precision", says)


def _running(seen: Observed) -> str:
    """The state of the weights and the KV cache, in words; "" if nothing is known of them."""
    layers, cache = list(seen.facts.get("layers", ())), seen.facts.get("kv_cache_dtype")
    linears = sorted({kind.partition(" / ")[2] for kind in layers if "Linear" in kind})
    parts = []
    if linears:
        parts.append(f"linears {', '.join(linears)}")
    elif seen.runs is None and seen.facts.get("quantization", NOTHING) is None:
        parts.append("weights are not quantised")
    elif seen.runs is None and seen.weights_format:
        parts.append(f"quantization {seen.weights_format}")
    if cache:
        parts.append(f"KV cache {cache}")
    return ": ".join(filter(None, [seen.runs, ", ".join(parts)]))


def _differs(seen: Observed, planned: Precision) -> bool:
    """True if what is known is certainly another precision than the planned one."""
    if seen.runs is not None:
        return planned.name != seen.runs
    if seen.fp8_kv is not None and seen.fp8_kv != (planned.kv == "fp8"):
        return True
    if kinds := _fp8_layers(seen):
        return planned.weights == "bf16" or planned.in_blocks != all("PerBlock" in kind for kind in kinds)
    return seen.weights_format is not None and bool(seen.weights_format) != (planned.weights != "bf16")


def _not_told(seen: Observed, planned: Precision | None) -> Iterator[str]:
    """Sentences on the parts of the precision that nothing tells."""
    weights = seen.weights_format
    named = weights if seen.runs is None and not _fp8_layers(seen) else None
    if weights is None:
        yield "weights are not told"
    elif named and planned is not None and named != VLLM_NAMES.get(planned.weights):
        yield f"this may be {planned.weights} or another format"
    if seen.fp8_kv is None:
        yield "the KV cache's dtype is not told"


def _fp8_layers(seen: Observed) -> list[str]:
    return [kind for kind in seen.facts.get("layers", ()) if "Fp8" in kind]


def kernels(seen: Observed) -> Finding:
    """The kernels are the profile's."""
    if seen.kernels is None:
        return unknown("kernels", seen.unseen.get("kernels", seen.unseen.get("ranks", NOTHING)))
    says = ", ".join(f"{kernel} {name}" for kernel, name in seen.kernels.items()) or "none that vLLM names"
    measured = seen.measured_kernels
    if measured is None and seen.kernels:
        why, _, todo = seen.unseen.get("measured_kernels", "no profile").partition("; type: ")
        return unknown("kernels", f"{says}; not compared: {why}" + (f"; type: {todo}" if todo else ""))
    if measured is None:
        return ok("kernels", says)
    wrong = [text for kernel, name in seen.kernels.items() if (text := fallback(kernel, measured.get(kernel), name))]
    if not wrong:
        return ok("kernels", says)
    first, _, todo = wrong[0].partition(": ")
    return fault("kernels", "wrong_kernel", "; ".join([first, *wrong[1:]]), todo)


def e8m0(seen: Observed) -> Finding:
    """Scales of FP8 weights are FP32, or powers of two where GPU, checkpoint or trainer has those."""
    if "e8m0" not in seen.facts:
        return unknown("e8m0", seen.unseen.get("ranks", NOTHING))
    if seen.facts["e8m0"] is None:
        return ok("e8m0", "no blockwise FP8 weights")
    if not seen.facts["e8m0"]:
        return ok("e8m0", "scales are FP32")
    if seen.facts.get("held_e8m0"):
        return ok("e8m0", "scales are powers of two, as the checkpoint's")
    if needs_e8m0(seen):
        return ok("e8m0", f"scales are powers of two, as {seen.gpu} multiplies them")
    if seen.trainer_precision == POW2:
        return ok("e8m0", "scales are powers of two, as the trainer's")
    return fault(
        "e8m0",
        "e8m0_on",
        "DeepGEMM's scales are powers of two (E8M0): weights are rounded twice, to 3.7% RMS error instead of 2.6%",
        "export VLLM_USE_DEEP_GEMM_E8M0=0, before vLLM is imported",
    )


def router(seen: Observed) -> Finding:
    """Routers of experts are not quantised."""
    routers = seen.facts.get("routers")
    if routers is None:
        return unknown("router", seen.unseen.get("ranks", NOTHING))
    if not routers:
        return ok("router", "no router")
    says = ", ".join(f"{count} in {dtype}" for dtype, count in routers.items())
    if not any(dtype.startswith(("float8", "int", "uint")) for dtype in routers):
        return ok("router", says)
    todo = """quantization_config={"ignore": ["re:.*mlp\\\\.gate$"]} (fp8plan emit PLAN.json vllm has the whole list)"""
    return fault("router", "router_quantised", f"{says}: quantised routers pick other experts than the trainer's", todo)


def cuda_graphs(seen: Observed) -> Finding:
    """Decode steps run in CUDA graphs."""
    if "cudagraph_mode" not in seen.facts and "enforce_eager" not in seen.facts:
        return unknown("cuda_graphs", seen.unseen.get("ranks", NOTHING))
    mode, eager = seen.facts.get("cudagraph_mode"), seen.facts.get("enforce_eager")
    if seen.cpu:
        return ok("cuda_graphs", "none on a CPU")
    if eager or mode == "NONE":
        why = "enforce_eager is set" if eager else "cudagraph_mode is NONE"
        cost = "each decode step pays its launches: the tail of a rollout runs at the host's speed"
        todo = "leave enforce_eager and cudagraph_mode unset"
        return fault("cuda_graphs", "graphs_off", f"off: {why}; {cost}", todo)
    if mode == "PIECEWISE":
        says = "PIECEWISE: attention is launched outside of them; profiles were measured with FULL_AND_PIECEWISE"
        return fault("cuda_graphs", "graphs_piecewise", says, "leave cudagraph_mode unset")
    if not mode:
        return unknown("cuda_graphs", "enforce_eager is not set; cudagraph_mode is not told")
    return ok("cuda_graphs", str(mode))


def kv_scales(seen: Observed) -> Finding:
    """Scales of an FP8 KV cache are measured, the same on device and host, and clip nothing."""
    if seen.fp8_kv is None:
        return unknown("kv_scales", seen.unseen.get("ranks", NOTHING))
    if not seen.fp8_kv:
        return ok("kv_scales", "the KV cache is not FP8")
    if not seen.kv_scales:
        return unknown("kv_scales", seen.unseen.get("kv_scales", NOTHING))
    parts = {layer: (scales["k"], scales["v"]) for layer, scales in seen.kv_scales.items()}
    fixed = keeps_scales(seen.facts.get("attention", ()))
    if not fixed and all(pair == (1.0, 1.0) for pair in parts.values()):
        says = f"1.0 in all {len(parts)} layers: |K| and |V| above {E4M3_MAX:.0f} are clipped, and nobody measured them"
        return fault("kv_scales", "kv_scales_unit", says, RECALIBRATE)
    torn = [layer for layer, scales in seen.kv_scales.items() if any(_torn(scales, part) for part in "kv")]
    if torn:
        says = f"the host's copy is another than the device's in {some(torn)}: what reads it uses old scales"
        return fault("kv_scales", "kv_scales_torn", says, RECALIBRATE)
    amax = {layer: most[1:] for layer, most in (seen.kv_amax or {}).items() if layer in parts}
    clips = {layer: max(most / scale for most, scale in zip(amax[layer], parts[layer], strict=True)) for layer in amax}
    if wrong := {layer: most for layer, most in clips.items() if most > MOST_CLIP * E4M3_MAX}:
        worst = max(wrong, key=wrong.__getitem__)
        says = f"{some([*wrong])} clip: {worst} has seen {wrong[worst] / E4M3_MAX:.2f} times what its scale holds"
        return fault("kv_scales", "kv_scales_clip", says, INSTEAD if fixed else RECALIBRATE)
    every = [scale for pair in parts.values() for scale in pair]
    room = f", with room for {E4M3_MAX / max(clips.values()):.2f} times what was seen" if any(clips.values()) else ""
    kind = "fixed, " if fixed else ""
    return ok("kv_scales", f"{kind}{min(every):.3g} to {max(every):.3g} in {len(parts)} layers{room}")


def preemption(seen: Observed) -> Finding:
    """Requests are seldom preempted."""
    if seen.preemptions == 0 and seen.requests is None:
        return ok("preemption", f"none since {seen.since}")
    if seen.preemptions and seen.requests is None:
        return unknown("preemption", f"{seen.preemptions:,} since {seen.since}; in how many requests is not told")
    if seen.preemptions is None or not seen.requests:
        return unknown("preemption", seen.unseen.get("counts", f"no request has finished since {seen.since}"))
    says = f"{seen.preemptions:,} in {seen.requests:,} requests since {seen.since}"
    if seen.preemptions <= MANY_PREEMPTIONS * seen.requests:
        return ok("preemption", says)
    larger = "VLLM_CPU_KVCACHE_SPACE" if seen.cpu else "gpu_memory_utilization or tensor_parallel_size"
    todo = f"raise {larger}, lower max_num_seqs, or plan an FP8 KV cache (fp8plan plan ... --workload)"
    return fault("preemption", "preemption_storm", f"{says}: each computes its request's tokens again", todo)


def prefix_hits(seen: Observed) -> Finding:
    """The engine keeps prefixes, and finds some of them again."""
    if seen.facts.get("prefix_caching") is False:
        return warning("prefix_hits", "prefix_caching_off", *OFF)
    queries, hits = seen.prefix_cache_queries, seen.prefix_cache_hits
    if not queries or hits is None:
        return unknown("prefix_hits", seen.unseen.get("counts", f"no prompt was looked up since {seen.since}"))
    says = f"{hits / queries:.1%} of {queries:,} tokens since {seen.since} were in the prefix cache"
    lost = seen.lost_prefixes or few_hits(queries, hits)
    if lost is None:
        return ok("prefix_hits", says)
    return warning("prefix_hits", "prefix_cache_missed", f"{says}; {lost.says}", lost.todo)


def _torn(scales: Mapping[str, float], part: str) -> bool:
    """True if host and device have different scales; the device's are float32, the host's are not."""
    host = scales.get(f"{part}_host")
    return host is not None and not isclose(host, scales[part], rel_tol=1e-6)


# Limit of k3 per token between trainer and FP8 rollout, for a run without one: the risk budget's limit of high risk.
MOST_K3: Final = RiskBudget().moderate_kl
MOST_INVALID: Final = AlarmLimits().invalid  # share of a step's tokens without a finite log-prob
RECENT: Final = 10  # last steps in which an alarm is a fault; an earlier one is a warning
UNKNOWN_ALARM: Final = Meaning("not known to this fp8plan", "pip install --upgrade fp8plan")
FIND: Final = (
    "doctor(engine, weights=..., scored=...) in the trainer's process says whether it is weights or temperature"
)


def mismatch(seen: Observed) -> Finding:
    """The logged KL between trainer and rollout is a number within its limit."""
    log = seen.log
    if log is None:
        return unknown("mismatch", seen.unseen.get("log", "only a run's log tells; type: fp8plan doctor run.jsonl"))
    if log.invalid and log.invalid > MOST_INVALID * (log.invalid + (log.tokens or 0)):
        says = f"invalid log-probs: {_invalid(log)}"
        return fault("mismatch", "invalid_logprobs", says, MEANINGS[Alarm.INVALID].remedy)
    if log.tokens == 0:
        return unknown("mismatch", f"step {log.step} has no valid token")
    if log.k3 is None or log.k3_step is None:
        return unknown("mismatch", f"no step logs {K3}")
    if not isfinite(log.k3):
        says = f"k3 of step {log.k3_step} is no finite number: log-probs are NaN, infinite, or of other tokens"
        return fault("mismatch", "invalid_logprobs", says, MEANINGS[Alarm.INVALID].remedy)
    limit = MOST_K3 if log.limit is None or not isfinite(log.limit) else log.limit
    says = f"k3 {log.k3:.1e} per token, limit {limit:.1e}"
    if causes := sentence(log.causes, log.differing):
        says += f"; {causes}"
    if log.k3 > limit:
        return fault("mismatch", "mismatch_high", says, FIND)
    if log.k3_step != log.step:
        return unknown("mismatch", f"step {log.step} logs none; in step {log.k3_step}, the last that does: {says}")
    return ok("mismatch", f"{says}; {_invalid(log)}" if log.invalid else says)


def alarms(seen: Observed) -> list[Finding]:
    """One finding for each alarm in the run's log: a fault if it is recent, else a warning."""
    if seen.log is None or seen.log.steps is None:
        return []
    log, steps = seen.log, seen.log.steps
    recent = steps[-RECENT:]
    findings: list[Finding] = []
    for name, sounded in log.alarms.items():
        meaning, remedy = MEANINGS[Alarm(name)] if name in {*Alarm} else UNKNOWN_ALARM
        lately = [step for step in sounded if step >= recent[0]]
        if lately:
            often = f", and in {len(lately)} of the last {len(recent)} steps" if len(lately) > 1 else ""
            findings.append(fault("alarm", f"alarm_{name}", f"{name} in step {lately[-1]}{often}: {meaning}", remedy))
        else:
            says = f"{name} in {len(sounded)} of {len(steps)} steps, last in step {sounded[-1]}: {meaning}"
            findings.append(warning("alarm", f"alarm_{name}", says, remedy))
    return findings or [ok("alarm", f"none in {len(steps)} steps")]


def _invalid(log: Logged) -> str:
    every = (log.invalid or 0) + (log.tokens or 0)
    return f"{log.invalid:,.0f} of {every:,.0f} tokens of step {log.step} have none that is finite"


CHECKS: Final[tuple[Callable[[Observed], Finding], ...]] = (
    precision,
    kernels,
    e8m0,
    router,
    trainer_checks.routing,
    trainer_checks.trainer,
    kv_scales,
    cuda_graphs,
    preemption,
    prefix_hits,
    weights_checks.version,
    weights_checks.weights,
    weights_checks.sync,
    weights_checks.decode,
    weights_checks.prefix_cache,
    weights_checks.temperature,
    mismatch,
)


def findings(seen: Observed) -> list[Finding]:
    """One finding of each check, and of each alarm in a run's log."""
    return [*(check(seen) for check in CHECKS), *alarms(seen)]
