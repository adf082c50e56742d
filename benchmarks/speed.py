"""Time that fp8plan takes: import, the command, `plan()`, and the scheduler as the batch grows.

`make bench` runs this and writes benchmarks/results/speed.jsonl, one row per measurement.

    python benchmarks/speed.py --large        large batches alone; the other rows stay
    python benchmarks/speed.py --schedules    the schedule of 100,000 responses, for models with one kind of cache and
                                              with several
    python benchmarks/speed.py --gate         the GATED commands; fails if one takes too long
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tables import markdown

import fp8plan
from fp8plan import jsonl
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import plan
from fp8plan.model.rollout import schedule_with
from fp8plan.model.schedule.scheduler import compiled
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload

RESULTS = Path(__file__).parent / "results"
LONG_TAILED = LogNormal(6000, 0.9, 20480)
UNSTARVED = EngineLimits(max_num_seqs=96)
STARVED = EngineLimits(gpu_memory_utilization=0.5)
EIGHT_GPUS = (
    "Qwen/Qwen3-8B --gpu h100 --gpus 8 --prompts 1024 --samples 16 "
    "--response-lengths lognormal:mean=6000,sigma=0.9,max=16384"
)
AGENTS = (
    "Qwen/Qwen3-8B --gpu h200 --prompts 1024 --samples 16 --prompt-lengths fixed:1000 "
    "--turns 8 --turn-tokens lognormal:mean=500,sigma=0.8,max=4000 --tool-tokens fixed:300 "
    "--tool-s lognormal:mean=2,sigma=1,max=60"
)
LARGE = (
    ("10,000 responses, KV-starved", "Qwen/Qwen3-8B --gpu h200 --prompts 625"),
    ("1,000,000 responses, KV-starved", "Qwen/Qwen3-8B --gpu h200 --prompts 62500"),
    ("1,000,000 responses of 4,096 tokens", "Qwen/Qwen3-8B --gpu h200 --prompts 62500 --response-lengths fixed:4096"),
    ("1,000,000 responses, windows", "fp8plan/gpt-oss-20b-bf16 --gpu h200 --prompts 62500"),
    ("10,000,000 responses, KV-starved", "Qwen/Qwen3-8B --gpu h200 --prompts 625000"),
)
# The scheduler simulates all their responses, although a plan takes a sample of so many.
SCHEDULED = (
    ("Qwen/Qwen3-8B", "bf16"),
    ("fp8plan/gpt-oss-20b-bf16", "bf16"),
    ("google/gemma-3-12b-it", "bf16"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "fp8_block"),
)


class Gated(NamedTuple):
    """A command that must not take more CPU seconds than `most_s`, at the pace of the machine of speed.jsonl."""

    what: str
    arguments: str
    fresh: bool  # each run is the first one of a clone
    most_s: float


GATED = (
    Gated("the quick start, from a fresh clone", "Qwen/Qwen3-8B --gpu h200", True, 1.0),
    Gated("every layout of 8 GPUs, 16,384 responses, KV-starved", EIGHT_GPUS, False, 2.7),
    Gated("16,384 trajectories of 8 turns", AGENTS, False, 9.0),
)
# Work of the kinds that a plan has. Its CPU seconds say how fast the machine is at the moment. YARDSTICK_S are those at
# the pace of the Intel Xeon of speed.jsonl, where the plan for 8 GPUs of commit 7b64f8ce took 3.06 s: measured in turns
# with that plan on another machine.
YARDSTICK_S = 0.333
YARDSTICK = """
import numpy as np
x = np.linspace(1, 2, 10_000)
for _ in range(6_000):
    np.sqrt(x * x + x)
sum(i * i for i in range(3_000_000))
"""


def measure(what: str, run: Callable[[], object], runs: int, **facts: object) -> dict[str, object]:
    """Wall time after one warm-up."""
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    row = {"what": what, "runs": runs, "median_s": median, "min_s": min(times), "max_s": max(times), **facts}
    print(f"{what}: {median:.4f} s", file=sys.stderr)
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def python(code: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def processes() -> list[dict[str, object]]:
    bare = measure("python, doing nothing", python("pass"), 9)
    imported = measure("import fp8plan, whole process", python("import fp8plan"), 9)
    inside = "import time; t = time.perf_counter(); import fp8plan; print(time.perf_counter() - t)"
    timed = [float(subprocess.run([sys.executable, "-c", inside], capture_output=True).stdout) for _ in range(9)]
    within = {"what": "import fp8plan, the statement", "runs": 9, "median_s": round(statistics.median(timed), 5)}
    within |= {"min_s": round(min(timed), 5), "max_s": round(max(timed), 5)}
    command = [str(Path(sys.executable).parent / "fp8plan"), "plan", "Qwen/Qwen3-8B", "--gpu", "h200"]
    run = lambda: subprocess.run(command, check=True, capture_output=True)  # noqa: E731
    return [
        bare,
        imported,
        within,
        measure("fp8plan plan, whole process", run, 9, command="fp8plan " + " ".join(command[1:])),
        *layouts(command[0]),
    ]


def layouts(program: str) -> list[dict[str, object]]:
    """Every layout of 8 GPUs: with the default batch, and with a large one whose KV fits some layouts, or none."""
    large = ["--prompts", "512"]  # x 16 samples
    rows = []
    for what, model, gpu, more in (
        ("512 responses", "Qwen/Qwen3-32B", "h100", []),
        ("8,192 responses", "Qwen/Qwen3-8B", "h200", large),
        ("8,192 responses, KV-starved", "Qwen/Qwen3-32B", "h100", large),
    ):
        command = [program, "plan", model, "--gpu", gpu, "--gpus", "8", *more]
        run = lambda c=command: subprocess.run(c, check=True, capture_output=True)  # noqa: E731
        facts = "fp8plan " + " ".join(command[1:])
        rows.append(measure(f"fp8plan plan, every layout of 8 GPUs, {what}", run, 3, command=facts))
    return rows


def large(sizes: tuple[tuple[str, str], ...] = LARGE, runs: int = 3) -> list[dict[str, object]]:
    """CPU time and memory of the whole command as the batch grows: user and system time, and the largest process."""
    rows: list[dict[str, object]] = []
    for what, arguments in sizes:
        command = [sys.executable, "-m", "fp8plan", "plan", *arguments.split(), "--json"]
        used = [cpu_seconds(command) for _ in range(runs)]
        seconds, most_memory = [each for each, _ in used], max(memory for _, memory in used)
        row = {"what": f"fp8plan plan, {what}, CPU time", "runs": runs, "median_s": statistics.median(seconds)}
        row |= {"min_s": min(seconds), "max_s": max(seconds), "max_rss_mb": most_memory}
        rows.append(row | {"command": f"fp8plan plan {arguments}"})
        print(f"{rows[-1]}", file=sys.stderr)
    return rows


def cpu_seconds(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[float, int]:
    """User and system seconds of a command with its processes, and the megabytes of the largest of them."""
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0, f"{command} ends with status {status}"
    return round(usage.ru_utime + usage.ru_stime, 2), usage.ru_maxrss // 1024


def gated(runs: int = 5) -> list[dict[str, object]]:
    """CPU seconds of the GATED commands, in turns with the yardstick, at the pace of the machine of speed.jsonl.

    A fresh clone has no bytecode of fp8plan and no compiled scheduler. The packages that it imports have theirs.
    """
    seconds: dict[str, list[float]] = {"yardstick": [], **{gated.what: [] for gated in GATED}}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs + 1):
            for gated in GATED:
                clone = _clone(folder / (f"fresh-{number}" if gated.fresh else "used"))
                command = [sys.executable, "-m", "fp8plan", "plan", *gated.arguments.split()]
                seconds[gated.what].append(cpu_seconds(command, clone)[0])
            seconds["yardstick"].append(cpu_seconds([sys.executable, "-c", YARDSTICK])[0])
            print({what: each[-1] for what, each in seconds.items()}, file=sys.stderr)
    measured = {what: statistics.median(each[1:]) for what, each in seconds.items()}  # the first filled the caches
    pace = measured["yardstick"] / YARDSTICK_S
    return [
        {"what": f"fp8plan plan, {gated.what}, CPU time, gated", "runs": runs}
        | {"median_s": round(measured[gated.what] / pace, 2), "most_s": gated.most_s}
        | {"measured_s": measured[gated.what], "yardstick_s": measured["yardstick"]}
        | {"command": f"fp8plan plan {gated.arguments}"}
        for gated in GATED
    ]


def _clone(folder: Path) -> dict[str, str]:
    """The environment of a command in a copy of the package in `folder`, made where there is none yet.

    Bytecode goes beside it, so that the packages that fp8plan imports keep theirs from copy to copy.
    """
    source = Path(fp8plan.__file__).parent
    if not folder.exists():
        shutil.copytree(source, folder / "fp8plan", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "profiles").symlink_to(source.parent / "profiles")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept |= {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}


def faults(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Sentences on the gated rows that take longer than they may; empty if the gate is open."""
    return [
        f"{row['what']}: {row['median_s']} s at the pace of the machine of speed.jsonl; allowed: {row['most_s']}"
        for row in rows
        if float(str(row["median_s"])) > float(str(row["most_s"]))
    ]


def plans() -> list[dict[str, object]]:
    rows = []
    for what, limits in (
        ("plan(), 4 precisions, no preemption", UNSTARVED),
        ("plan(), 4 precisions, KV-starved", STARVED),
    ):
        work = Workload(96, 16, Fixed(1024), LONG_TAILED)
        answer = plan("Qwen/Qwen3-8B", "h200", work, limits=limits)
        facts = {
            "responses": 1536,
            "response_tokens": answer.workload["response_tokens"],
            "preemptions": {c.precision: c.preemptions for c in answer.choices},
        }
        rows.append(measure(what, lambda w=work, x=limits: plan("Qwen/Qwen3-8B", "h200", w, limits=x), 9, **facts))
    return rows


def schedules(runs: int = 3, prompts: int = 6250) -> list[dict[str, object]]:
    """CPU time of the schedule of one replica on an H200, with the KV cache that vLLM would give each model."""
    batch = Workload(prompts, 16, Fixed(1024), LONG_TAILED).batch()
    rows: list[dict[str, object]] = []
    for model, precision in SCHEDULED:
        setup = EngineSetup(model, "h200", precision)
        kv, seconds = setup.memory(batch.longest).kv, []
        for _ in range(runs):
            start = time.process_time()
            made = schedule_with(batch, kv, setup.limits)
            seconds.append(round(time.process_time() - start, 2))
        row = {"what": f"schedule, {len(batch.prompts):,} responses, {model} in {precision}, CPU time", "runs": runs}
        row |= {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        row |= {"events": len(made.steps), "preemptions": made.num_preemptions, "groups": len(kv.specs)}
        rows.append(row)
        print(row, file=sys.stderr)
    return rows


def cpu() -> str:
    """The CPU's name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(paths: list[Path]) -> str:
    """The rows in Markdown, without those of schedules."""
    lines = []
    for path in paths:
        for row in (row for row in jsonl.rows(path) if "groups" not in row):
            facts = [f"{row['response_tokens']:,} response tokens"] if "response_tokens" in row else []
            facts += [row["command"]] if "command" in row else []
            facts += [f"at most {row['most_s']:.1f} s, measured {row['measured_s']:.2f} s"] if "most_s" in row else []
            facts += ["no C compiler"] if row.get("compiled") is False else []
            facts += [f"at most {row['max_rss_mb']:,} MB of memory"] if "max_rss_mb" in row else []
            lines.append((row["what"], f"{row['median_s'] * 1e3:,.0f} ms", "; ".join(facts)))
    return markdown.table(("what", "median", "details"), lines)


# Option -> the field that only its rows have, and their measurement.
PARTS: dict[str, tuple[str, Callable[[], list[dict[str, object]]]]] = {
    "large": ("max_rss_mb", large),
    "schedules": ("groups", schedules),
    "gate": ("most_s", gated),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PARTS:
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="part")
    parser.add_argument("--output", type=Path, default=RESULTS / "speed.jsonl")
    options = parser.parse_args()
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    machine |= {"compiled": compiled() is not None, "cpu": cpu()}
    before = jsonl.rows(options.output)
    fields = {field for field, _ in PARTS.values()}
    rows = [row for row in before if not fields & row.keys()]
    if options.part is None:
        rows = [row | machine for row in (*processes(), *plans())]
    for name, (field, measured) in PARTS.items():
        if options.part in (None, name):
            rows += [row | machine for row in measured()]
        else:
            rows += [row for row in before if field in row]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table([options.output, RESULTS / "aiconfigurator_time.jsonl"]))
    if problems := faults(row for row in rows if "most_s" in row):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
