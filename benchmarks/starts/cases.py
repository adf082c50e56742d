"""The engines of the start check: kinds of models x GPUs x precisions, as a plan writes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.configs import find_config
from fp8plan.model.emit.vllm import vllm_env, vllm_kwargs
from fp8plan.model.memory.plan import MemoryPlan
from fp8plan.model.plan.candidates import candidates
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import FP8_KV, PRESETS
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable
from fp8plan.model.workload import Workload

# One for each compute capability that vLLM treats differently.
GPUS = ("a100_sxm", "a10", "l40s", "h200_sxm", "b200", "b300", "rtx_5090")
RESULTS = Path(__file__).resolve().parent.parent / "results" / "starts.jsonl"
LONGEST = 2048  # tokens of the longest request
REQUESTS = 64


@dataclass(frozen=True)
class Kind:
    """A kind of model: a bundled model of it, cut to so many layers that all their kinds are left.

    text: the class of the text model, which vLLM then builds alone; "": the config's own
    """

    name: str
    model: str
    layers: int
    text: str = ""


Key = tuple[str, str, str]  # kind, GPU, precision

KINDS = (
    Kind("dense", "Qwen/Qwen3-8B", 2),
    Kind("biases on keys", "Qwen/Qwen2.5-7B", 2),
    Kind("experts", "Qwen/Qwen3-30B-A3B", 2),
    Kind("windows", "google/gemma-3-12b-it", 6),
    Kind("windows, heads of two sizes", "google/gemma-4-31B-it", 6, "Gemma4ForCausalLM"),
    Kind("windows, sinks, experts", "fp8plan/gpt-oss-20b-bf16", 2),
    Kind("latent attention", "deepseek-ai/DeepSeek-V2-Lite", 2),
    Kind("gated delta nets", "Qwen/Qwen3-Next-80B-A3B-Instruct", 4),
    Kind("Mamba 2", "nvidia/Nemotron-H-8B-Base-8K", 8),
)


@dataclass(frozen=True)
class Case:
    """One engine. Either `refused`, the plan's reason against it, or `setup` and `memory`, as the plan starts it."""

    kind: str
    gpu: str
    precision: str
    setup: EngineSetup | None = None
    memory: MemoryPlan | None = None
    refused: str | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.gpu, self.precision

    @property
    def scales(self) -> str:
        """The plan's word for the K and V scales; "" without an FP8 cache.

        "measured" after each sync, "fixed" at those of the start, or "not synced": no trainer may have such an engine.
        """
        if self.setup is None or self.setup.precision.kv != "fp8":
            return ""
        if why_not_shardable(self.setup.shape, FP8_KV, 1, "trl"):
            return "not synced"
        return "fixed" if self.setup.why_fixed_kv_scales else "measured"

    def for_vllm(self) -> dict[str, Any]:
        """The case for `benchmarks.starts.engine`."""
        assert self.setup is not None
        assert self.memory is not None
        gpu = self.setup.gpu
        card = {"capability": gpu.compute_capability, "memory_bytes": gpu.memory_bytes, "product": gpu.product}
        return {
            "card": card | {"sms": gpu.sm_count},
            "engine_args": vllm_kwargs(self.setup),
            "env": vllm_env(self.setup),
            "kv_bytes": self.memory.num_gpu_blocks * self.memory.kv.block_bytes,
        }

    def row(self, result: dict[str, Any] | None, version: str) -> dict[str, Any]:
        """The case and vLLM's result as a row of RESULTS."""
        known = {"vllm": version, "kind": self.kind, "gpu": self.gpu, "precision": self.precision}
        if result is None:
            return known | {"refused": self.refused}
        if "error" in result:
            return known | {"error": result["error"], "step": result["step"]}
        return known | {"attention": result["attention"], "scales": self.scales, "graphs": result["cudagraph_mode"]}


def cut(kind: Kind, folder: Path) -> Path:
    """Write the config.json of a kind's model with few layers into a folder of its own, and return that."""
    config = dict(find_config(kind.model)[0])
    text = dict(config.get("text_config", config)) | {"num_hidden_layers": kind.layers}
    for listed in ("layer_types", "hybrid_override_pattern"):
        if listed in text:
            text[listed] = text[listed][: kind.layers]
    place = folder / kind.model.replace("/", "--")
    place.mkdir(parents=True)
    if kind.text:
        text["architectures"] = [kind.text]
    (place / "config.json").write_text(json.dumps(text))
    return place


def cases_of(kind: str, folder: Path, version: str, gpus: tuple[str, ...] = GPUS) -> Iterator[Case]:
    """The cases of the model in a folder, for a version of vLLM."""
    shape = ModelShape.from_hf(folder)
    for gpu in gpus:
        for precision in PRESETS:
            yield _case(kind, shape, gpu, precision, version)


def _case(kind: str, shape: ModelShape, gpu: str, precision: str, version: str) -> Case:
    work = Workload(REQUESTS, 1, LONGEST // 2, LONGEST // 2)
    try:
        (candidate,) = candidates(PlanRequest(shape, gpu, work, precisions=[precision], engine_version=version))
    except (CapacityError, ConfigError) as error:
        return Case(kind, gpu, precision, refused=str(error))
    return Case(kind, gpu, precision, candidate.setup, candidate.memory)


def kinds(folder: Path, version: str) -> list[Case]:
    """The cases of every kind in KINDS; their configs are written into a folder."""
    return [case for kind in KINDS for case in cases_of(kind.name, cut(kind, folder), version)]


def run(cases: Iterable[Case], folder: Path) -> dict[Key, dict[str, Any]]:
    """Start the cases that the plan does not refuse, in a process of their own. Return each one's result by its key."""
    # By GPU, as each change of it makes vLLM forget what it remembers.
    started = sorted((case for case in cases if case.setup is not None), key=lambda case: case.gpu)
    asked, answered = folder / "cases.jsonl", folder / "results.jsonl"
    asked.write_text("".join(f"{json.dumps(case.for_vllm())}\n" for case in started))
    command = [sys.executable, "-m", "benchmarks.starts.engine", str(asked), str(answered)]
    root = Path(__file__).resolve().parent.parent.parent
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    results = map(json.loads, answered.read_text().splitlines())
    return dict(zip((case.key for case in started), results, strict=True))
