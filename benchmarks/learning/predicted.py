"""The limits and the plan of an arm, written before it, and the table that sets what was observed beside it.

Rollout speed-up: the BF16 arm's seconds per token of a rollout over the arm's, of the same step, as both draw the same
problems in it; the median over steps. Step speed-up: the same of a whole RL step. KL: median k3 over steps. ESS: of the
untruncated weights. Clip rate: tokens with a ratio above C.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.learning.arms import BASELINE, LOGGED
from benchmarks.learning.policies.tasks import Task
from benchmarks.learning.state import RunFolder
from benchmarks.tables import markdown
from fp8plan import jsonl, schemas
from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.workload import Trace, Workload

Steps = Sequence[Mapping[str, Any]]  # rows of steps.jsonl

# What the plan says of a choice, under its own names.
FORESEEN: Final = (
    "precision", "speedup", "speedup_low", "speedup_high", "step_speedup", "kl_k3", "kl_k3_low", "kl_k3_high",
    "ess_raw", "clip_fraction", "makespan_s", "makespan_low_s", "makespan_high_s", "risk", "extrapolated",
)  # fmt: skip
UNSEEN: Final = "-"
POOL: Final = 0.7  # KV cache, of an engine's share of a GPU


def limits_of(gpu: Gpu, task: Task, share: float) -> tuple[EngineLimits, dict[str, int]]:
    """The limits of an engine for a task that has a share of a GPU's memory, and vLLM's argument for its KV cache.

    Left alone, vLLM would take for its own what others take while it looks. A CPU is not shared.
    """
    limits = replace(EngineLimits.for_gpu(gpu), max_model_len=task.max_prompt_tokens + task.max_response_tokens)
    if gpu.is_cpu:
        return limits, {}
    pool = {"kv_cache_memory_bytes": int(POOL * share * gpu.memory_bytes)}
    return replace(limits, gpu_memory_utilization=share), pool


def plan_of_pilot(
    model: Path,
    gpu: str,
    shape: tuple[int, int],
    seen: Sequence[tuple[int, int]],
    limits: EngineLimits,
    times: StepTimes,
) -> Plan:
    """The plan of the arm. seen: lengths (prompt, response) of a pilot rollout; times: the trainer's own seconds

    Raises ProfileError where nothing was measured that could predict it.
    """
    import vllm

    prompts, responses = (tuple(lengths) for lengths in zip(*seen, strict=True))
    of_prompts = Trace(prompts[:: shape[1]], "the pilot rollout")  # samples of a prompt follow each other
    work = Workload(*shape, prompt_lengths=of_prompts, response_lengths=Trace(responses, "the pilot rollout"))
    version = vllm.__version__.partition("+")[0]
    return plan(str(model), gpu, work, limits=limits, gpus=1, trainer=times, engine_version=version)


def foreseen(found: Plan | Fp8PlanError, precision: str) -> dict[str, Any]:
    """The plan's figures of a precision, for predicted.json; why there are none, if there could be no plan."""
    if isinstance(found, Fp8PlanError):
        return dict.fromkeys(FORESEEN) | {"precision": precision, "warnings": [str(found)]}
    choice = found.select(precision)
    return {name: getattr(choice, name) for name in FORESEEN} | {"warnings": list(found.warnings)}


def observed(folder: RunFolder) -> dict[str, float | None]:
    """Medians over the steps of a run, its first left out: it warms up; reward: mean of the last tenth of the steps."""
    every = folder.rows("steps.jsonl")
    run, tail = folder.rows("run.jsonl")[1:], last_tenth(every)
    found: dict[str, float | None] = {"reward": sum(row["reward"] for row in tail) / len(tail) if tail else None}
    for name, metric in (("kl_k3", schemas.K3), ("ess_raw", schemas.ESS_RAW), ("clip_fraction", schemas.CLIP_FRACTION)):
        found[name] = _median([row["metrics"][metric] for row in run if row["metrics"].get(metric) is not None])
    bounds = [row["metrics"][schemas.TIS] for row in run if row["metrics"].get(schemas.TIS)]
    return found | {"lowest_c": min(bounds, default=None)}


def last_tenth(steps: Sequence[Any]) -> Sequence[Any]:
    """The last tenth of a run's steps, at least one."""
    return steps[-max(1, len(steps) // 10) :]


def speedups(base: Steps, run: Steps, part: str, left_out: Collection[int] = ()) -> list[float]:
    """The observed speed-ups of a run over the BF16 run of the same seed, one for each step that is in both.

    base, run: rows of steps.jsonl; part: "rollout" or "step"; left_out: steps that do not count, beside the first
    """
    seconds = []
    for steps in (base, run):
        rows = [row for row in steps[1:] if row["step"] not in left_out]
        seconds.append({row["step"]: row[f"{part}_s"] / row["response_tokens"] for row in rows})
    return [seconds[0][step] / seconds[1][step] for step in sorted(seconds[0].keys() & seconds[1].keys())]


def table(runs: Mapping[tuple[str, int], RunFolder]) -> str:
    """Predicted beside observed, one line for each run (arm, seed), in Markdown."""
    head = (
        "arm", "seed", "steps", "reward on the pilot's problems, before", "after", "reward, last tenth",
        "rollout speed-up, predicted", "observed",
        "step speed-up, predicted", "observed", "k3, predicted (90%)", "observed", "raw ESS, predicted", "observed",
        "clipped, predicted", "observed", "least C",
    )  # fmt: skip
    lines = []
    seen = {key: observed(folder) for key, folder in runs.items()}
    for (arm, seed), folder in runs.items():
        said, now, base = read_json(folder / "predicted.json"), seen[arm, seed], runs.get((BASELINE, seed))
        base = base if said.get("at_once", 1) == 1 else None  # the seconds of runs that share a device say nothing
        low, high = said["kl_k3_low"], said["kl_k3_high"]
        band = UNSEEN if low is None else f"{_short(said['kl_k3'])} ({_short(low)} to {_short(high)})"
        miss = "" if None in (low, now["kl_k3"]) or low <= now["kl_k3"] <= high else " **outside**"
        cells = [
            arm, str(seed), str(len(folder.rows("steps.jsonl"))), _short(said["pilot_reward"]),
            _short(reward_after(folder) if folder.done else None), _short(now["reward"]),
            _short(said["speedup"]), _observed_speedup(base, folder, "rollout"),
            _short(said["step_speedup"]), _observed_speedup(base, folder, "step"), band, _short(now["kl_k3"]) + miss,
            _short(said["ess_raw"]), _short(now["ess_raw"]), _short(said["clip_fraction"]),
            _short(now["clip_fraction"]), _short(now["lowest_c"]) if LOGGED[arm].correction != "none" else UNSEEN,
        ]  # fmt: skip
        lines.append(cells)
    return markdown.table(head, lines)


def reward_after(folder: RunFolder) -> float:
    """The reward after a run that is over, of the pilot's problems."""
    return float(read_json(folder / "done.json")["reward_after"])


def read_json(path: Path) -> Any:
    return jsonl.parse(path.read_text(encoding="utf-8"), str(path))


def _observed_speedup(base: RunFolder | None, folder: RunFolder, part: str) -> str:
    if base is None:
        return UNSEEN
    return _short(_median(speedups(base.rows("steps.jsonl"), folder.rows("steps.jsonl"), part)))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _short(number: float | None) -> str:
    return UNSEEN if number is None else f"{number:.3g}"
