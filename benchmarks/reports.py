"""fp8plan's side of three public reports (docs/evidence/accuracy.md).

    python -m benchmarks.reports     prints the tables of that page

tests/model/test_reports.py holds what the page says of the memory of the first report and the rollout of the second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.tables.markdown import table
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.planner import plan
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import by_group, validate
from fp8plan.model.workload import Workload

VERSION = "0.26.0"
MEASURED = profiles_path() / "h100_sxm" / f"vllm-{VERSION}" / "reports" / "rollouts.jsonl"

# vllm issue 21348: `vllm serve Qwen3-235B-A22B-FP8 --tensor-parallel-size 4` on H100s, July 2025.
REPORTED_KV_GIB = 8.11
SERVED = EngineSetup(
    "Qwen/Qwen3-235B-A22B",
    "h100",
    "fp8_block",
    replace(
        EngineLimits.for_gpu(find_gpu("h100")),
        tensor_parallel_size=4,
        gpu_memory_utilization=0.9,
        max_model_len=40_960,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
    ),
    engine_version=VERSION,
)

# verl's recipe low_precision/run_dapo_qwen3_moe_30b_megatron_fp8e2e.sh, with the batch of docs/low_precision/fp8.md.
ROLLED_OUT = EngineLimits(
    tensor_parallel_size=2,
    data_parallel_size=8,
    gpu_memory_utilization=0.5,
    max_model_len=22_528,
    max_num_seqs=256,
    max_num_batched_tokens=32_768,
)


# vllm issue 42058, comment of 2026-08-01: an A100, vLLM 0.26, Qwen3-8B, 8 requests of 256 tokens, enforce_eager. Prompt
# tokens -> seconds to the first token with a BF16 and an FP8 KV cache, and the tokens/s that the eight then decode.
AMPERE = {
    1_024: ((0.541, 0.569), (227.8, 228.8)),
    4_096: ((2.277, 2.332), (227.3, 238.6)),
    8_192: ((5.001, 5.132), (228.2, 232.2)),
    16_384: ((11.790, 12.206), (219.2, 231.3)),
}


def rollout(utilization: float, mean_tokens: int) -> dict[str, Choice]:
    """The second report's rollout, by precision."""
    work = Workload(96, 16, Fixed(300), LogNormal(mean_tokens, 0.9, 20_480))
    limits = replace(ROLLED_OUT, gpu_memory_utilization=utilization)
    known: dict[str, Any] = {"precisions": ["bf16", "fp8_block"], "engine_version": VERSION}
    answer = plan("Qwen/Qwen3-30B-A3B", "h100", work, limits=limits, **known)
    return {choice.precision: choice for choice in answer.choices}


@cache
def ampere(prompt: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The third report's figures for prompts of that many tokens, as in AMPERE."""
    card = find_gpu("a100")
    limits = replace(EngineLimits.for_gpu(card), enforce_eager=True)

    def seconds(tokens: int) -> list[float]:
        work = Workload(8, 1, Fixed(prompt), Fixed(tokens))
        known: dict[str, Any] = {"precisions": ["bf16", "fp8_kv"], "engine_version": VERSION}
        choices = plan("Qwen/Qwen3-8B", card, work, limits=limits, **known).choices
        return [choice.makespan_s or 0.0 for choice in choices]

    first, whole = seconds(1), seconds(256)
    return tuple(first), tuple(8 * 255 / (b - a) for a, b in zip(first, whole, strict=True))


def ampere_row(prompt: int) -> tuple[str, ...]:
    (first, rates), (ours, our_rates) = AMPERE[prompt], ampere(prompt)
    slower = f"{first[1] / first[0] - 1:+.1%}", f"{ours[1] / ours[0] - 1:+.1%}"
    faster = f"{rates[1] / rates[0] - 1:+.1%}", f"{our_rates[1] / our_rates[0] - 1:+.1%}"
    return f"{prompt:,}", f"{first[0]:.2f} s", f"{ours[0]:.2f} s", *slower, *faster


def ampere_table() -> str:
    heads = ("prompt", "first token, BF16", "fp8plan", "with FP8", "fp8plan", "decode with FP8", "fp8plan")
    return table(heads, map(ampere_row, AMPERE))


def measured_table() -> str:
    """The rollouts that were measured here for the second report, beside today's predictions."""
    records = read_records(MEASURED)
    lengths_of = {record.line: record.fields["response_lengths"] for record in records}
    groups = by_group(validate(records).records).values()
    shown = ("measured_kv_cache_tokens", "measured_kv_cache_tokens", "preemptions", "predicted_preemptions")
    lines = []
    for bf16, fp8 in groups:
        lengths = lengths_of[bf16["line"]]
        counts = (row[name] for row, name in zip((bf16, fp8, bf16, bf16), shown, strict=True))
        gains = (f"{bf16[name] / fp8[name]:.2f}x" for name in ("seconds", "predicted_s"))
        starved = ", starved" if bf16["preemptions"] else ""
        tokens = f"{sum(lengths) / len(lengths):,.0f}"
        lines.append((f"{len(lengths)}{starved}", tokens, *(f"{count:,}" for count in counts), *gains))
    pools = ("KV tokens, BF16", "FP8", "preemptions, BF16", "predicted")
    return table(("responses", "tokens each", *pools, "FP8 measured", "predicted"), lines)


def tables() -> dict[str, str]:
    """Name of a block of docs/evidence/accuracy.md -> its text."""
    return {
        "rollout of a report measured": measured_table(),
        "cache of a report": ampere_table(),
    }


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
