"""The queue of the families' benchmark, with a stand-in for the measurement, and its lists of cells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8plan.model.configs import bundled_configs

FAMILIES = Path(__file__).parents[2] / "benchmarks" / "families"
SCRIPT = FAMILIES.with_suffix(".sh")


def test_every_job_names_a_setting_and_a_precision_of_it() -> None:
    lines = [x for x in (FAMILIES / "queue.txt").read_text().splitlines() if not x.startswith("#")]
    assert lines
    for line in lines:
        gpus, cells, model, precision, *arguments = line.split("|")
        assert gpus in ("one", "all")
        if cells == "sync":
            assert model in bundled_configs()
            assert all(isinstance(json.loads(x), dict) for x in arguments)
            continue
        settings = {x["model"]: x for x in json.loads((FAMILIES / f"{cells}.json").read_text())}
        assert precision in settings[model]["precisions"]
        assert (settings[model].get("tensor_parallel_size", 1) > 1) == (gpus == "all")
        config = settings[model].get("config")
        assert (FAMILIES / config / "config.json").is_file() if config else model in bundled_configs()


@pytest.mark.skipif(not all(map(shutil.which, ("flock", "taskset"))), reason="needs util-linux")
def test_workers_share_the_queue_and_all_gpus_come_first(tmp_path: Path) -> None:
    fake, out = tmp_path / "bin", tmp_path / "out"
    fake.mkdir()
    # A stand-in for vLLM: says what it was told, and lasts a moment.
    scripts = {
        "measure": 'echo "$CUDA_VISIBLE_DEVICES measure $*"; sleep 0.2',
        "sync": 'echo "$CUDA_VISIBLE_DEVICES sync $*"',
    }
    for name, text in {**scripts, "python3": "", "nvidia-smi": ""}.items():
        (fake / name).write_text(f"#!/bin/bash\n{text}\n")
        (fake / name).chmod(0o755)
    queue = tmp_path / "queue.txt"
    jobs = ["all|two|T|bf16", "one|a|A|bf16", "one|a|A|fp8_kv", 'one|sync|S|fp8_block|{"x": 1}', "one|b|B|bf16"]
    queue.write_text("\n".join(["# jobs", *jobs]) + "\n")
    cards = min(2, len(os.sched_getaffinity(0)))
    env = os.environ | {"PATH": f"{fake}:{os.environ['PATH']}", "MEASURE": "measure", "SYNC": "sync", "APART": "0"}
    env |= {"CARDS": str(cards), "CACHES": str(tmp_path / "caches")}
    subprocess.run(["bash", str(SCRIPT), str(out), "60", str(queue)], env=env, check=True, capture_output=True)
    ran = [line for file in out.glob("*.log") for line in file.read_text().splitlines()]
    told = sorted(x.split("--model ")[1].split(" --trace")[0].split(" --steps")[0] for x in ran)
    assert told == [
        "A --precision bf16",
        "A --precision fp8_kv",
        "B --precision bf16",
        "S --precision fp8_block",
        "T --precision bf16",
    ]
    assert any('--engine-args {"x": 1}' in x for x in ran)
    begun = [x for x in (out / "jobs.txt").read_text().splitlines() if "begins" in x]
    assert begun[0].endswith("all begins all|two|T|bf16")
    assert any(x.startswith(",".join(map(str, range(cards))) + " measure") and "two" in x for x in ran)
    assert not [x for x in (out / "queue.txt").read_text().splitlines() if x]


def test_no_job_begins_after_the_time(tmp_path: Path) -> None:
    out, queue = tmp_path / "out", tmp_path / "queue.txt"
    queue.write_text("one|a|A|bf16\n")
    env = os.environ | {"MEASURE": "false", "CARDS": "1", "APART": "0", "CACHES": str(tmp_path / "caches")}
    subprocess.run(["bash", str(SCRIPT), str(out), "0", str(queue)], env=env, check=True, capture_output=True)
    assert "begins" not in (out / "jobs.txt").read_text()
    assert (out / "queue.txt").read_text() == "one|a|A|bf16\n"
