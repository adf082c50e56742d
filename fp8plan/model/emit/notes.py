"""Notes that stand below settings: the expected mismatch, and what is left for the reader to set."""

from __future__ import annotations

from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.model.cost.front import OWN
from fp8plan.model.emit.job import Job
from fp8plan.model.emit.trainers import GRIDS, two_grids
from fp8plan.model.risk.remedies import BLOCK, POW2
from fp8plan.model.setup import EngineSetup
from fp8plan.model.targets import TARGETS, words_at_once

MEASURED: Final = "fp8plan measures the K and V scales after each weight sync"
FIXED: Final = "K and V scales stay at 1.0; after each weight sync fp8plan warns of layers that they clip"


def rollout_notes(job: Job) -> list[str]:
    """Notes that stand below every target's settings: trajectories at once, front end, mismatch, grids of numbers."""
    return [*_at_once_notes(job), *_front_notes(job), *_mismatch_notes(job), *_grid_notes(job)]


def _at_once_notes(job: Job) -> list[str]:
    """Notes on the trajectories at once: the bound of this target, and the words of others; [] for single turns."""
    turns, samples, starts = job.workload.get("turns"), job.workload["samples"], TARGETS[job.target]
    if turns is None:
        return []
    number, trajectories = turns.get("concurrent"), job.workload["prompts"] * samples
    bound = starts.starts_all
    if not bound:
        bound = f"bounded by {' and '.join(starts.at_once) or 'the caller of the engine'}"
    notes = [f"planned for {number or trajectories} trajectories at once, of {trajectories}: {bound}"]
    if number is not None:
        words = words_at_once(number, samples, job.setup.limits.data_parallel_size)
        if not starts.starts_all:
            words.pop(job.target, None)  # its settings have them
        elsewhere = (f"{TARGETS[other].sender}'s {typed}" for other, typed in words.items())
        notes.append(f"elsewhere they are {', '.join(elsewhere)}")
    return notes


def _front_notes(job: Job) -> list[str]:
    """A note if requests come over HTTP, and the plan has no front end for them; else []."""
    if not TARGETS[job.target].over_http or job.setup.inside != OWN:
        return []
    return ["requests over HTTP may take longer; plan again with --inside server-http, which has the front end"]


def _grid_notes(job: Job) -> list[str]:
    """A note on an FP8 trainer whose numbers are not the engine's; [] without one."""
    setup, trainer = job.setup, job.setup.remedies.trainer_precision
    grid: str = setup.precision.weights
    if setup.precision.in_blocks:
        grid = POW2 if setup.e8m0 else BLOCK
    note = two_grids(trainer, grid) if grid in GRIDS else ""
    return [f"{note}; plan again with --trainer-precision {grid}"] if note else []


def check_risk(job: Job) -> None:
    """Raise ConfigError if the plan accepts the risk of calibrated K and V scales, but not that of scales of 1.0."""
    at_one, budget, risk = job.picked.unit_kv_scales, job.budget, job.picked.risk
    if at_one is None or risk is None or job.kv_scales == "calibrated":
        return
    if not budget.accepts(risk) or budget.accepts(at_one["risk"]):
        return
    raise ConfigError(
        f"vLLM leaves the K and V scales of {job.setup.precision.name} at 1.0: there the risk is "
        f"{at_one['risk']} (KL k3 up to {at_one['kl_k3_high']:.2g}), and the plan, made for calibrated scales, accepts "
        f"{budget.accept} at most; plan again with --kv-scales unit or --accept {at_one['risk']}, emit another choice, "
        "or say --kv-scales calibrated if you calibrate them after each weight sync"
    )


def _mismatch_notes(job: Job) -> list[str]:
    """Notes on the K and V scales of an FP8 cache, and on the expected mismatch with them."""
    planned = (job.picked.kl_k3, job.picked.kl_k3_high, job.picked.risk)
    expected = _risk_note("expected mismatch", *planned)
    planned_at_one = expected if job.counted else _risk_note("expected mismatch at 1.0", *planned)
    if job.setup.precision.kv != "fp8":
        return expected
    stored, fixed = job.setup.stored, job.setup.why_fixed_kv_scales
    if stored is not None and stored.kv_fp8:
        return ["K and V scales are those of the checkpoint", *expected]
    measurer = TARGETS[job.target].measures
    if measurer == "trainer":
        return ["the trainer measures K and V scales itself", *planned_at_one]
    if measurer == "fp8plan":
        scales = [MEASURED] if fixed is None else [fixed, FIXED]
        return [*scales, *planned_at_one]
    stay = f"{TARGETS[job.target].engine} leaves K and V scales at 1.0"
    if job.kv_scales == "calibrated":
        counts = "and the plan counts on it"
        if not job.counted:
            counts = "and the plan, made for scales of 1.0, does not count on it"
        return [f"{stay}: calibrating them after each weight sync is yours, {counts}", *planned_at_one]
    advice = f"{stay}: {fixed}" if fixed else f"{stay}; fp8plan.RolloutEngine measures them after each weight sync"
    at_one = job.picked.unit_kv_scales
    if at_one is None:
        return [advice]
    notes = [advice, *_risk_note("expected mismatch at 1.0", at_one["kl_k3"], at_one["kl_k3_high"], at_one["risk"])]
    if job.counted:
        notes += _risk_note("the plan's own, for calibrated scales", *planned)
    return notes


def _risk_note(subject: str, kl: float | None, kl_high: float | None, risk: str | None) -> list[str]:
    return [] if kl is None else [f"{subject}: KL k3 {kl:.2g}, up to {kl_high:.2g}, risk {risk}"]


def shared_gpu_note(setup: EngineSetup) -> str:
    """A note for trainers whose processes hold the engine."""
    return (
        f"the trainer shares these GPUs, and gpu_memory_utilization is {setup.limits.gpu_memory_utilization:g}: unless "
        "that much is free for the engine, plan again with --gpu-memory-utilization at what it may take, or neither "
        "the planned KV pool nor the predicted speed-up is reached"
    )


def replicas_note(setup: EngineSetup, how: str) -> str:
    """A note on the number of planned replicas, and `how` they come about."""
    limits = setup.limits
    layout = f"{limits.data_parallel_size} replica(s) of {limits.tensor_parallel_size} GPU(s), {limits.gpus} in all"
    return f"planned for {layout}: {how}"


def mini_batch_note(job: Job, setting: str) -> str:
    """A note on the size of a mini-batch, whose default of 256 may be above the batch."""
    return f"{setting} is yours to set: at most {job.tokens('prompts')}, the prompts of a step (its default is 256)"
