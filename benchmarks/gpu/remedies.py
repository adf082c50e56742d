"""The mismatch of one precision of a policy of benchmarks/learning, with and without remedies.

    python -m benchmarks.gpu.remedies MODEL --policy moe --precision fp8_block --gpu h200 --output FILE

It calls `fp8plan.probe`: a trainer in BF16 and one in FP8, first and last layers in BF16, and router replay for a model
with experts. Several may share a GPU: each engine's pool has a fixed size, and vLLM would take what the others leave.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.learning.policies.make import task_of
from benchmarks.learning.policies.table import POLICIES, policy_named
from benchmarks.learning.policies.tasks import TRAIN
from fp8plan.model.architecture.kept import OUTPUTS
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.remedies import BF16, BLOCK, Remedies
from fp8plan.model.setup import default_limits
from fp8plan.runtime.measure.probe.probe import probe
from fp8plan.runtime.measure.probe.results import Probe
from fp8plan.runtime.measure.probe.sampling import SampleSettings
from fp8plan.views.findings import probe_report

POOL_BYTES: Final = 6_000_000_000
SHARE: Final = 0.1  # of the GPU's memory, which vLLM wants to be free at its start


def remedies_of(experts: bool) -> list[Remedies]:
    """All combinations, those without layers in BF16 first."""
    return [
        Remedies(replayed, trainer, kept)
        for kept in ((0, 0), (1, 1), (1, 1, OUTPUTS))
        for trainer in (BF16, BLOCK)
        for replayed in ([False, True] if experts else [False])
    ]


def prompts_of(policy: str, model: Path, count: int) -> Sequence[Any] | None:
    """The problems that a policy was taught. Policies that come trained get the probe's own tasks."""
    if policy_named(policy).size is None:
        return None
    return [problem.prompt for problem in task_of(policy, model).problems(count, (0, TRAIN, 0))]


def limits_of(gpu: Gpu, model: Path) -> tuple[EngineLimits, dict[str, Any]]:
    """The limits of an engine beside others, and vLLM's argument for its pool. A CPU is not shared."""
    if gpu.is_cpu:
        return default_limits(gpu, str(model), num_gpu_blocks=128, block_size=128, enforce_eager=True), {}
    limits = default_limits(gpu, str(model), gpu_memory_utilization=SHARE, max_num_seqs=256)
    return limits, {"kv_cache_memory_bytes": POOL_BYTES}


def measured(model: Path, policy: str, precision: str, gpu: str, prompts: int, samples: int, max_tokens: int) -> Probe:
    """Probe one precision. prompts: of a policy that was taught; samples: of each; max_tokens: of a response"""
    card = find_gpu(gpu)
    limits, pool = limits_of(card, model)
    return probe(
        str(model),
        [precision],
        prompts_of(policy, model, prompts),
        gpu=card,
        remedies=remedies_of(policy_named(policy).kind == "moe"),
        settings=SampleSettings(max_tokens, samples),
        limits=limits,
        progress=lambda text: print(text, file=sys.stderr),
        **pool,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.remedies")
    parser.add_argument("model", type=Path)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--precision", choices=PRESETS, required=True)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--output", type=Path, required=True, help="JSON, as of fp8plan probe --json")
    words = vars(parser.parse_args())
    output = words.pop("output")
    found = measured(**words)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    Console(width=160).print(probe_report(found))
    return int(any(probed.error for probed in found.findings))


if __name__ == "__main__":
    sys.exit(main())
