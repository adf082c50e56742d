"""Megabytes and seconds of a fresh installation, its first plan, a user's type check, and the Pythons that it is for.

    python3 -m benchmarks.install            prints a row
    python3 -m benchmarks.install --record   writes it to benchmarks/results/install.jsonl, too

It needs a package index, a C compiler, and a Python with venv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).parent / "results" / "install.jsonl"
RESOLVED = ("3.12", "3.13", "3.14")  # other Pythons
EXTRAS = "report,parquet,monitor,wandb,trackio"  # resolved with the rest
PLAN = ("plan", "Qwen/Qwen3-8B", "--gpu", "h200")
# Printed in the new environment: bytes of each package's files, and of their compiled modules.
SIZES = """
import json
from importlib.metadata import distributions
sizes = {}
for package in distributions():
    paths = [path.locate() for path in package.files or ()]
    there = [(str(path), path.stat().st_size) for path in paths if path.is_file()]
    compiled = sum(size for name, size in there if name.endswith(".pyc"))
    sizes[package.name] = sum(size for _, size in there) - compiled, compiled
print(json.dumps(sizes))
"""
USER = """
from collections.abc import Iterable
from typing import Any

import fp8plan
from fp8plan.integrations import slime
from fp8plan.integrations.trl import GRPOTrainer, planned

work = fp8plan.Workload(32, 16, fp8plan.Fixed(1024), fp8plan.LogNormal(mean=6000, sigma=0.9, max=20480))
plan: fp8plan.Plan = fp8plan.plan("Qwen/Qwen3-8B", "h200", work)
seconds: float | None = plan.choices[plan.chosen].makespan_s
settings: dict[str, object] = plan.vllm_kwargs()
loss_of_slime = slime.correct


def train(batches: Iterable[tuple[Any, Any, Any]], losses: Any) -> Any:
    engine = fp8plan.RolloutEngine.from_plan(plan, "Qwen/Qwen3-8B")
    sinks = [fp8plan.JsonLines("run.jsonl"), fp8plan.TensorBoard("runs"), fp8plan.Wandb("project")]
    monitor = fp8plan.Monitor(plan=plan, engine=engine, sinks=sinks)
    for train_logprobs, rollout_logprobs, mask in batches:
        step = monitor.step(train_logprobs, rollout_logprobs, mask)
        loss = step.loss(losses)
        kl: float = step.mismatch.k3
        engine.apply(step.verdict, step.decided.escalate)
        print(loss, kl, engine.sync_weights({}).patched)
    return monitor.state_dict()


def grpo(args: Any, dataset: Any, reward: Any) -> None:
    chosen: int = planned(args, dataset, model="Qwen/Qwen3-8B", gpu="h200").chosen
    GRPOTrainer("Qwen/Qwen3-8B", reward, args, dataset, plan="auto", choice=chosen).train()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the row to {RECORD.relative_to(ROOT)}")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        row = measured(Path(folder))
    print(json.dumps(row, indent=2))
    if options.record:
        RECORD.write_text(json.dumps(row) + "\n", encoding="utf-8")


def measured(folder: Path) -> dict[str, Any]:
    """Install the checkout into an environment below `folder`, and use it. Raises RuntimeError if a step fails."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = folder / "dist"
    run(folder, *pip, "wheel", "--no-deps", "--wheel-dir", str(built), str(ROOT))
    (wheel,) = built.glob("*.whl")
    own = set(json.loads(run(folder, python, "-c", SIZES)[0]))
    _, install_s = run(folder, *pip, "install", str(wheel))
    sizes = json.loads(run(folder, python, "-c", SIZES)[0])
    added = {name: size for name, size in sizes.items() if name not in own}
    _, first_s = run(folder, python, "-m", "fp8plan", *PLAN)
    _, second_s = run(folder, python, "-m", "fp8plan", *PLAN)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "date": date.today().isoformat(),
        "cpus": os.cpu_count(),
        "wheel_mb": wheel.stat().st_size / 1e6,
        "files_mb": sum(files for files, _ in added.values()) / 1e6,
        "compiled_mb": sum(compiled for _, compiled in added.values()) / 1e6,
        "packages_mb": {name: sum(size) / 1e6 for name, size in added.items() if sum(size) > 5e6},
        "packages": len(added),
        "install_s": install_s,
        "first_plan_s": first_s,
        "next_plan_s": second_s,
        "mypy_s": type_check(folder, pip, python),
        "resolved": {version: resolved(folder, pip, f"{wheel}[{EXTRAS}]", version) for version in RESOLVED},
    }


def run(folder: Path, *command: str) -> tuple[str, float]:
    """Run a command outside of the checkout, with a cache of its own. Returns what it prints, and its seconds."""
    dropped = ("PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ends with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout, seconds


def type_check(folder: Path, pip: list[str], python: str) -> float:
    """Check a user's file by `mypy --strict` against the installed package. Returns its seconds."""
    run(folder, *pip, "install", "mypy")
    (folder / "user.py").write_text(USER, encoding="utf-8")
    return run(folder, python, "-m", "mypy", "--strict", "user.py")[1]


def resolved(folder: Path, pip: list[str], wheel: str, version: str) -> dict[str, str]:
    """Resolve the wheel for another Python, without installing it. Returns the versions of the largest packages."""
    report = folder / f"{version}.json"
    words = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "--python-version", version)
    run(folder, *pip, "install", *words, "--target", str(folder / "nowhere"), "--report", str(report), wheel)
    packages = (row["metadata"] for row in json.loads(report.read_text(encoding="utf-8"))["install"])
    versions = {package["name"].lower(): package["version"] for package in packages}
    return {name: versions[name] for name in ("numpy", "pandas", "pyarrow", "scipy", "trackio", "wandb")}


def table() -> str:
    """The recorded row, in Markdown."""
    from tables import markdown

    row: Mapping[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    largest = sorted(row["packages_mb"].items(), key=lambda item: -item[1])[:4]
    total = row["files_mb"] + row["compiled_mb"]
    rows = [
        ("wheel", f"{row['wheel_mb']:.1f} MB"),
        ("installed", f"{row['files_mb']:.0f} MB in {row['packages']} packages; {total:.0f} MB as pip compiles them"),
        ("of them", ", ".join(f"{name} {size:.0f} MB" for name, size in largest)),
        ("`pip install`", f"{row['install_s']:.0f} s"),
        ("first plan", f"{row['first_plan_s']:.1f} s; the next one {row['next_plan_s']:.1f} s"),
        ("`mypy --strict` of a user's file", f"{row['mypy_s']:.0f} s, without an error"),
        ("resolves for", f"Python {', '.join(row['resolved'])}, too, with {EXTRAS.replace(',', ', ')}"),
    ]
    return markdown.table((f"Python {row['python']}, {row['cpus']} cores", row["date"]), rows)


if __name__ == "__main__":
    main()
