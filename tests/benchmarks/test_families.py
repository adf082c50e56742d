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


def test_every_job_names_a_setting_and_precisions_of_it() -> None:
    lines = [x for x in (FAMILIES / "queue.txt").read_text().splitlines() if not x.startswith("#")]
    for line in lines:
        cells, model, precisions, seconds, mode = line.split("|")
        settings = {x["model"]: x for x in json.loads((FAMILIES / f"{cells}.json").read_text())}
        assert set(precisions.split(",")) <= set(settings[model]["precisions"])
        config = settings[model].get("config")
        assert (FAMILIES / config / "config.json").is_file() if config else model in bundled_configs()
        assert int(seconds) > 0
        assert mode == "plain" or model in {x["model"] for x in json.loads((FAMILIES / "triton.json").read_text())}


@pytest.mark.skipif(not all(map(shutil.which, ("setsid", "flock", "taskset", "xz"))), reason="needs util-linux and xz")
def test_lanes_share_the_queue_and_a_cute_job_that_fails_is_run_with_triton(tmp_path: Path) -> None:
    fake, out = tmp_path / "bin", tmp_path / "out"
    fake.mkdir()
    scripts = {"measure": 'echo "$@"; case "$*" in */cells.json*B*) exit 1;; esac', "python3": "", "nvidia-smi": ""}
    for name, text in scripts.items():
        (fake / name).write_text(f"#!/bin/bash\n{text}\n")
        (fake / name).chmod(0o755)
    queue = tmp_path / "queue.txt"
    queue.write_text("# jobs\ncells|A|bf16,fp8_kv|9|plain\ncells|B|bf16|9|cute\nstarts|C|bf16|9|plain\n")
    cores = len(os.sched_getaffinity(0))
    env = os.environ | {"PATH": f"{fake}:{os.environ['PATH']}", "MEASURE": "measure", "CARDS": str(min(2, cores))}
    env["CACHES"] = str(tmp_path / "caches")
    for words in (["start", str(out), str(queue)], ["wait", str(out), "30", str(tmp_path)]):
        subprocess.run(["bash", str(SCRIPT), *words], env=env, check=True, capture_output=True)
    ran = "".join(file.read_text() for file in out.glob("lane*.log")).splitlines()
    assert sorted(x.split("--model ")[1].split(" --trace")[0] for x in ran) == [
        "A --precision bf16 --precision fp8_kv",
        "B --precision bf16",
        "B --precision bf16",
        "C --precision bf16 --env VLLM_DEEP_GEMM_WARMUP=skip",
    ]
    assert sum("triton.json" in x for x in ran) == 1
    assert (tmp_path / "families.tar.xz").stat().st_size > 0
