"""An operator's own rollouts as workload and observed: the gain over the BF16 that ran stands first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Done

MODEL = "Qwen/Qwen3-30B-A3B"
LENGTHS = [200 + 37 * number % 900 for number in range(64)]
SECONDS = {"bf16": 11.0, "fp8_block": 5.0}
# precision and TP of the measured rollouts -> is the baseline the layout of the last one in BF16
RAN: dict[str, tuple[list[tuple[str, int]], bool]] = {
    "bf16 on a slow layout": ([("bf16", 2)], True),
    "bf16 on two layouts": ([("bf16", 2), ("bf16", 4)], True),
    "bf16 and then fp8": ([("bf16", 2), ("fp8_block", 4)], True),
    "fp8 alone": ([("fp8_block", 4)], False),
}


def log(rollouts: list[tuple[str, int]]) -> list[str]:
    """The options that read a log of these rollouts on eight H100s."""
    same: dict[str, Any] = {"model": MODEL, "gpu": "h100", "engine": "vllm", "engine_version": "0.26.0"}
    same |= {"prompt_lengths": [64] * 64, "response_lengths": LENGTHS}
    rows = [
        same
        | {"precision": precision, "seconds": SECONDS[precision]}
        | {"tensor_parallel": size, "data_parallel": 8 // size}
        for precision, size in rollouts
    ]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--workload", "own.jsonl", "--observed", "own.jsonl"]


@pytest.mark.parametrize("case", RAN)
def test_the_first_reason_states_the_gain_over_the_bf16_that_ran_or_the_best(
    fp8plan: Callable[..., Done], case: str
) -> None:
    rollouts, observed = RAN[case]
    words = ["plan", MODEL, "--gpu", "h100", "--gpus", 8, *log(rollouts)]
    saved, table = json.loads(fp8plan(*words, "--json").out), fp8plan(*words).out
    choices = saved["choices"]
    bf16 = [c for c in choices if c["precision"] == "bf16" and c["available"]]
    best, base, picked = min(bf16, key=lambda c: c["makespan_s"]), choices[saved["baseline"]], choices[saved["chosen"]]
    if observed:
        assert (base["tensor_parallel"], base["expert_parallel"]) == (
            [size for precision, size in rollouts if precision == "bf16"][-1], False
        )  # fmt: skip
    else:
        assert base == best
    for choice in choices:
        if choice["available"]:
            assert choice["speedup_over_best"] == pytest.approx(base["makespan_s"] / choice["makespan_s"])

    layout = picked["tensor_parallel"], picked["expert_parallel"]
    assert layout != (base["tensor_parallel"], base["expert_parallel"])
    gain = f"{picked['speedup_over_best']:.2f}x as fast as"
    for text in (saved["reasons"][0], " ".join(table.split("\n- ")[1].split())):
        assert text.startswith(f"Choose {picked['precision']} on ")
        first = re.findall(r"It is ([\d.]+x as fast as) ([^(]*)", text)[0]
        assert first[0] == gain
        assert f"of tensor_parallel_size {base['tensor_parallel']}" in first[1]
        assert ("as observed" in first[1]) is observed
        assert ("the best bf16" in first[1]) is not observed
    row = next(line for line in table.splitlines() if line.startswith("> "))
    assert f"{picked['speedup_over_best']:.2f}x (" in row


def test_the_way_back_is_the_best_bf16_layout(fp8plan: Callable[..., Done]) -> None:
    words = ["plan", MODEL, "--gpu", "h100", "--gpus", 8, *log([("bf16", 2)]), "--json", "plan.json"]
    assert fp8plan(*words).code == 0
    choices = json.loads(Path("plan.json").read_text())["choices"]
    bf16 = [c for c in choices if c["precision"] == "bf16" and c["available"]]
    assert len({c["makespan_s"] for c in bf16}) == len(bf16) > 4
    best = min(bf16, key=lambda c: c["makespan_s"])
    arguments = json.loads(fp8plan("emit", "plan.json", "vllm", "--choice", "bf16").out)["engine_args"]
    assert arguments.get("tensor_parallel_size", 1) == best["tensor_parallel"]
    assert arguments.get("enable_expert_parallel", False) is best["expert_parallel"]
