"""Tables of real trainers' runs on GPUs, with fp8plan and without it, from committed measurements.

    python -m benchmarks.tables.trainers

benchmarks.gpu.verl_grpo, trl_server and trl_colocated made them, as the rows by hand in their files say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.markdown import table
from fp8plan import jsonl

RESULTS = Path(__file__).parents[1] / "results"
VERL, VERL_H100, TRL, TRL_H100 = (
    RESULTS / f"{name}.jsonl" for name in ("verl_h200", "verl_h100", "trl_server_h200", "trl_server_h100")
)
TRL_AUTO = RESULTS / "trl_auto"
WARM = 2  # steps at the beginning whose times do not count: engines warm up

Row = dict[str, Any]


def verl() -> str:
    """A row for each run of verl's main_ppo that came to its end: medians of its seconds, and what it learnt."""
    heads = ("verl", "GPUs", "mode", "rollout (s)", "weight sync (s)", "step (s)", "reward", "KL k3", "threshold")
    runs = (run for file in (VERL, VERL_H100) for run in runs_of(jsonl.rows(file), "command"))
    return table(heads, map(_verl, filter(_ended, runs)))


def _verl(run: list[Row]) -> tuple[str, ...]:
    command, steps = run[0], _steps(run)
    ours = "fp8plan/threshold_tis" in steps[0]
    target = [word.partition("target_kl=")[2] for word in command["words"] if "target_kl=" in word]
    seconds = (_median(steps, f"timing_s/{name}") for name in ("gen", "update_weights", "step"))
    sampler = any("custom_sampler" in word for word in command["words"])
    return (
        f"{'fp8plan' if ours else 'stock'}, `{command['precision']}`" + (f", target {target[0]}" if target else ""),
        f"{command['gpus']} {_gpu(command)}",
        command["mode"] + (", looks every 0.1 s" if sampler else ""),
        *(f"{value:.2f}" for value in seconds),
        _from_to([row["critic/score/mean"] for row in steps], ".3f"),
        _from_to([row["rollout_corr/k3_kl"] for row in steps], ".1e"),
        _from_to(sorted(row["fp8plan/threshold_tis"] for row in steps), ".3g") if ours else "",
    )


def trl() -> str:
    """A row for each part of TRL's server mode that came to its end."""
    syncs = ("start (s)", "sync, first (s)", "sync (s)", "sync, longest (s)", "KV scales (s)")
    runs = (run for file in (TRL, TRL_H100) for run in runs_of(jsonl.rows(file), "server"))
    return table(("TRL's server mode", "GPUs", *syncs, "step (s)", "mean weight"), map(_trl, filter(_trl_ended, runs)))


def trl_auto() -> str:
    """The choice of plan="auto" in TRL with a host that is not known and with one that is timed, and all rollouts."""
    names = ("bf16", "fp8_block")
    seconds = [[row["seconds"] for row in jsonl.rows(TRL_AUTO / f"trl_auto.{name}.run.jsonl")] for name in names]
    plans = [row for row in jsonl.rows(TRL_AUTO / "trl_auto.jsonl") if row["what"] == "plan"]
    rows = []
    for plan in plans[:2]:
        host = "not known" if plan["host_loop_s"] is None else f"timed, {1e6 * plan['host_loop_s']:.0f} µs"
        rows.append((host, plan["chosen"], *(_interval(*plan["makespans_s"][name]) for name in names)))
    rows.append(("measured, in turn", "", *(", ".join(f"{each:.2f}" for each in times) for times in seconds)))
    return table(("host", "chosen", *(f"{name} (s)" for name in names)), rows)


def _interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _trl(run: list[Row]) -> tuple[str, ...]:
    syncs = [row for row in run if row["what"] == "sync"]
    seconds = [row["seconds"] for row in syncs]
    scales = [row["report"]["seconds"]["kv_scales"] for row in syncs if row["report"]]
    steps = _trl_steps(run)
    return (
        f"{run[0]['part']}, `{run[0]['precision']}`",
        f"2 {_gpu(run[0])}",
        f"{run[0]['start_s']:.0f}",
        f"{seconds[0]:.2f}",
        f"{median(seconds[WARM:]):.2f}",
        f"{max(seconds[WARM:]):.2f}",
        f"{median(scales[WARM:]):.2f}" if scales else "not renewed",
        f"{_median(steps, 'step_time'):.2f}",
        f"{_median(steps, 'sampling.importance_sampling_ratio.mean'):.2f}",
    )


def _trl_ended(run: list[Row]) -> bool:
    """Return whether a part did all its steps, and enough of them to have medians. What fails later is another's."""
    return any(row["what"] == "done" for row in run) and len(_trl_steps(run)) > WARM


def _trl_steps(run: list[Row]) -> list[Row]:
    """The rows of steps, without the summary that TRL logs at the end."""
    return [row for row in _steps(run) if "step_time" in row]


def runs_of(rows: Iterable[Row], first: str) -> Iterator[list[Row]]:
    """The rows of one run after the other; a run begins with a row of what `first` says."""
    run: list[Row] = []
    for row in rows:
        if row["what"] == first and run:
            yield run
            run = []
        if run or row["what"] == first:
            run.append(row)
    yield run


def _ended(run: Iterable[Row]) -> bool:
    """Return whether a run did all its steps, and enough of them to have medians."""
    ends = {row["what"] for row in run}
    return "done" in ends and "failed" not in ends and len(_steps(run)) > WARM


def _gpu(row: Row) -> str:
    """The GPU's name in `NVIDIA H200` and `NVIDIA H100 80GB HBM3`."""
    name: str = row["gpu_product"].split()[1]
    return name


def _steps(run: Iterable[Row]) -> list[Row]:
    return [row for row in run if row["what"] == "step"]


def _median(steps: Iterable[Row], name: str) -> float:
    return float(median(row[name] for row in list(steps)[WARM:]))


def _from_to(values: Sequence[float], form: str) -> str:
    """The first value and the last, or what both are."""
    return " to ".join(dict.fromkeys(format(values[at], form) for at in (0, -1)))


if __name__ == "__main__":
    print(verl(), trl(), trl_auto(), sep="\n\n")
