"""How a Plan's choice is started: vLLM's arguments and environment, and what must be true once it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.model.configs import find_config
from fp8plan.model.hardware import gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.vllm_versions import check_vllm_version
from fp8plan.runtime.weight_sync.manifest import Manifest, checkpoint_manifest
from fp8plan.runtime.worker.extension import EXTENSION

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan

# What decides the precision is the plan's to say.
THE_PLANS = ("model", "dtype", "quantization", "quantization_config", "kv_cache_dtype", "worker_extension_cls")


# What cannot be synced: the only value that it may have, and why.
NOT_SUPPORTED = {
    "data_parallel_size": (1, "a sync reaches one replica; start an engine for each"),
    "enable_eplb": (False, "experts that move between syncs would get each other's weights"),
}

# Attention of vLLM that reads KV scales anew in every step: from the device, or on a CPU from the host. FlashInfer
# keeps those of its first step (vllm/v1/attention/backends, 0.26 to 0.30).
LIVE_SCALES = ("FlashAttentionImpl", "TritonAttentionImpl", "CPUAttentionBackendImpl")


@dataclass(frozen=True, slots=True)
class Launch:
    """One engine of a plan.

    plan, choice: what it applies; gpu: name in fp8plan.model.hardware
    model:        whose shape the cost model is asked about: the folder that is loaded, or the plan's
    kwargs, env:  of vllm.LLM and its processes
    limits:       that it really runs with
    device:       of the engine's tensors, as torch names it
    """

    plan: Plan
    choice: int
    keep_bf16: tuple[int, int]
    more: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    limits: EngineLimits
    model: str
    device: str
    vocabulary: int

    @property
    def precision(self) -> str:
        return self.plan.choices[self.choice].precision

    @property
    def gpu(self) -> str:
        return self.plan.gpu

    @property
    def fp8_weights(self) -> bool:
        return self.plan.choices[self.choice].preset.weights == "fp8_block"

    @property
    def fp8_kv(self) -> bool:
        return self.plan.choices[self.choice].preset.kv == "fp8"

    def with_precision(self, name: str) -> Launch:
        """The same engine in another precision of the plan. Raises ConfigError if the plan has none on this layout."""
        layout = self.plan.choices[self.choice].tensor_parallel
        found = [i for i, c in enumerate(self.plan.choices) if (c.precision, c.tensor_parallel) == (name, layout)]
        if not found:
            raise ConfigError(f"the plan has no {name} on {layout} GPU(s); allowed: a plan with all precisions")
        keep = self.keep_bf16 if self.plan.choices[found[0]].preset.weights == "fp8_block" else (0, 0)
        return launch(self.plan, str(self.kwargs["model"]), found[0], keep, self.more)

    def prepare(self) -> None:
        """Set the environment of the vLLM to come. Raises ConfigError for blockwise FP8 on a CPU that cannot run it."""
        os.environ.update(self.env)
        if self.fp8_weights and self.device == "cpu" and not _cpu_has_blockwise_fp8():
            raise ConfigError(
                f"{self.precision} was planned, and vLLM has no blockwise FP8 for this CPU (its own kernel wants AMX); "
                "allowed here: bf16, fp8_kv (choice=...), or a GPU with FP8"
            )

    def checkpoint(self) -> Manifest | None:
        """The tensors of the model's safetensors files, where they lie on this machine."""
        folder = local_folder(str(self.kwargs["model"]), self.kwargs.get("revision"), self.kwargs.get("download_dir"))
        return None if folder is None else checkpoint_manifest(folder)

    def refuse_other(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError if the engine that runs is not the one that was planned, or keeps KV scales where a sync
        cannot change them."""
        wanted_e8m0 = self.env.get("VLLM_USE_DEEP_GEMM_E8M0")
        if facts["e8m0"] and wanted_e8m0 == "0":
            raise ConfigError(
                "DeepGEMM uses power-of-two scales although VLLM_USE_DEEP_GEMM_E8M0=0 was planned; vLLM read its "
                "environment earlier in this process: set the variable before vLLM is first used"
            )
        runs_fp8_kv = str(facts["kv_cache_dtype"]).startswith("fp8")
        if runs_fp8_kv != self.fp8_kv:
            raise ConfigError(f"the KV cache runs as {facts['kv_cache_dtype']}, and {self.precision} was planned")
        if self.fp8_kv and facts["attention"] not in LIVE_SCALES:
            raise ConfigError(
                f"attention runs as {facts['attention']}, which may keep the KV scales that it was started with; "
                f"allowed with an FP8 KV cache: {', '.join(LIVE_SCALES)} (type attention_backend='TRITON_ATTN')"
            )
        if self.fp8_kv and facts["cudagraph_mode"] == "FULL":
            raise ConfigError(
                "cudagraph_mode is FULL, which hides prompts from KV calibration; allowed with an FP8 KV cache: "
                "FULL_AND_PIECEWISE, vLLM's default, or any other"
            )
        quantised = any("Fp8" in kind for kind in facts["layers"])
        if quantised != self.fp8_weights:
            raise ConfigError(f"the layers run as {', '.join(facts['layers'])}, and {self.precision} was planned")


def launch(
    plan: Plan,
    model_path: str | None,
    choice: int | str | None,
    keep_bf16: tuple[int, int],
    more: Mapping[str, Any],
) -> Launch:
    """The Launch of a choice. Raises ConfigError for what vLLM, the plan or the arguments do not allow."""
    check_vllm_version()
    index = plan.index(choice)
    preset = plan.select(index).preset
    if taken := sorted(set(more).intersection(THE_PLANS)):
        raise ConfigError(f"{', '.join(taken)} come from the plan; allowed: another choice of the plan (choice=...)")
    for name, (allowed, why) in NOT_SUPPORTED.items():
        if more.get(name, allowed) != allowed:
            raise ConfigError(f"{name} is {more[name]!r}; allowed: {allowed!r}: {why}")
    kwargs = plan.vllm_kwargs(index) | {"disable_log_stats": False} | dict(more) | {"worker_extension_cls": EXTENSION}
    if model_path is not None:
        kwargs["model"] = str(model_path)
    model = str(kwargs["model"])
    local = (Path(model) / "config.json").is_file()
    config = _config(Path(model).resolve() if local else model, plan.model)
    if "quantization_config" in config:
        raise ConfigError(
            f"{model} is quantised already ({config['quantization_config'].get('quant_method')}); allowed: the BF16 "
            "checkpoint that the trainer started from, which vLLM quantises while it loads"
        )
    if preset.weights == "fp8_block":
        _keep_bf16(kwargs, keep_bf16, config)
    elif any(keep_bf16):
        raise ConfigError(f"keep_bf16 is {keep_bf16}, and {preset.name} has no FP8 weights; leave it out")
    known = {field.name for field in fields(EngineLimits)}
    return Launch(
        plan=plan,
        choice=index,
        keep_bf16=keep_bf16,
        more=more,
        kwargs=kwargs,
        env=plan.env(index),
        limits=replace(plan.limits, **{name: value for name, value in kwargs.items() if name in known}),
        model=model if local else plan.model,
        device="cpu" if gpu(plan.gpu).is_cpu else "cuda",
        vocabulary=int(config.get("vocab_size", 1000)),
    )


def local_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where a model's files lie: the folder itself, or the Hugging Face cache's snapshot of a hub id; None: nowhere."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _config(model: str | Path, planned: str) -> dict[str, Any]:
    """config.json of what is loaded; of the planned model where that cannot be had (a new hub id, offline)."""
    try:
        return find_config(model)[0]
    except ConfigError:
        return find_config(planned)[0]


def _cpu_has_blockwise_fp8() -> bool:
    """Return whether one of vLLM's kernels, or of a plugin's, runs here."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return any(kernel.is_supported()[0] for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU])


def _keep_bf16(kwargs: dict[str, Any], ends: tuple[int, int], config: Mapping[str, Any]) -> None:
    """Add the first and last layers to what vLLM leaves alone."""
    first, last = ends
    if first < 0 or last < 0:
        raise ConfigError(f"keep_bf16 is {ends}; allowed: two counts of layers, e.g. (1, 1)")
    if not first and not last:
        return
    layers = config.get("num_hidden_layers")
    if layers is None or first + last > layers:
        raise ConfigError(f"keep_bf16 is {ends}, and the model has {layers} layers in config.json; allowed: fewer")
    numbers = "|".join(str(n) for n in (*range(first), *range(layers - last, layers)))
    settings = dict(kwargs["quantization_config"])
    settings["ignore"] = [*settings["ignore"], rf"re:.*\.layers\.({numbers})\..*"]
    kwargs["quantization_config"] = settings
