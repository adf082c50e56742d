"""Measure the mismatch of rollout precisions before a run.

    found = probe("Qwen/Qwen3-8B", ["bf16", "fp8_block+fp8_kv"], prompts=[...], gpu="h200")
    found.precisions["fp8_block+fp8_kv"].figures["kl_k3"]        Interval(value, low, high)

An engine of each precision, one after the other, samples responses with their log-probs; then the model in BF16, as the
trainer has it, scores the same tokens. What that says holds for these prompts, this checkpoint and the start of a run:
drift in training is the Monitor's business. bf16 is the floor that the kernels leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS, Precision
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.risk.expected import mismatch_risk
from fp8plan.model.setup import EngineSetup, default_limits
from fp8plan.runtime.engine.launch import held_back
from fp8plan.runtime.measure.machine import gpu_facts
from fp8plan.runtime.probe.results import Interval, Probe, Probed, intervals, tokens_needed
from fp8plan.runtime.probe.sampling import Prompt, Sampled, SampleSettings, sample, token_ids
from fp8plan.runtime.vllm_versions import check_vllm_version


def probe(
    model_path: str,
    precisions: Sequence[str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    gpu: str | Gpu = "auto",
    settings: SampleSettings | None = None,
    limits: EngineLimits | None = None,
    most_prompts: int | None = None,
    progress: Callable[[str], Any] = lambda _: None,
    **vllm_kwargs: Any,
) -> Probe:
    """Measure the mismatch of each precision.

    model_path:  folder or Hugging Face id of the BF16 checkpoint
    precisions:  preset names; None: all
    prompts:     token ids, texts or {"messages": ...}; None: 16 tasks of reasoning through the model's chat template
    gpu:         GPU on which the engines and the reference run; "auto" asks the driver; "cpu" runs on the CPU
    limits:      limits of each engine; None: vLLM's defaults for this GPU
    most_prompts: take only the first so many prompts; None: all
    progress:    called with a line of text when something begins
    vllm_kwargs: further arguments of vllm.LLM

    Returns a Probe: KL and other figures per token, in nats, with 90% intervals from resampled prompts.

    Raises ConfigError for arguments with which no precision could be measured. If a single precision fails, its Probed
    has the error and names the file with the engine's output, which is not shown. The engines are gone before
    the reference is loaded, so each may have the whole GPU.
    """
    presets = [find_precision(name) for name in (PRESETS if precisions is None else dict.fromkeys(precisions))]
    if not presets:
        raise ConfigError(f"no precision is given; allowed: {', '.join(PRESETS)}")
    settings, card = settings or SampleSettings(), gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    _refuse_absent(card)
    limits, version = limits or default_limits(card, model_path), check_vllm_version()
    tokens = token_ids(prompts, model_path, most_prompts)
    _refuse_too_few(len({tuple(ids) for ids in tokens}))
    longest = max(len(ids) for ids in tokens) + settings.max_tokens
    found: dict[str, Probed] = {}
    samples: dict[str, list[Sampled]] = {}
    for preset in presets:
        progress(f"{preset.name}: an engine starts and samples {len(tokens) * settings.samples} responses")
        begun = time.perf_counter()
        try:
            setup = EngineSetup(model_path, card, preset, limits).holding(longest)
            setup.check_precision()
            with held_back(engine_stays=False):
                samples[preset.name], facts = sample(setup, tokens, settings, **vllm_kwargs)
        except Exception as error:  # of one engine: the others may run
            found[preset.name] = Probed(preset.name, error=_told(error))
            progress(f"{preset.name}: {found[preset.name].error}")
        else:
            seconds = {"sample": time.perf_counter() - begun}
            found[preset.name] = Probed(preset.name, facts=facts, seconds=seconds)
    if samples:
        progress("the BF16 reference scores the same tokens")
        with held_back(engine_stays=False):
            found |= _scored(model_path, card, samples, found, settings)
    for name in samples:
        found[name] = replace(found[name], predicted=_predicted(model_path, find_precision(name), found[name], samples))
    return Probe(
        model=model_path,
        gpu=card.name,
        date=datetime.now(UTC).date().isoformat(),
        engine_version=version,
        reference=_reference_version(),
        settings=settings,
        prompts=len(tokens),
        precisions=found,
    )


def compared(
    train: Sequence[Any], rollout: Sequence[Any], seed: int = 0, prompts: Sequence[Hashable] | None = None
) -> Probed:
    """Compare the trainer's with the engine's log-probs, in nats; both have an array or tensor [tokens] per sequence.

    prompts: the prompt of each sequence, for the intervals; None: all differ
    """
    import torch

    from fp8plan.runtime.mismatch.measure import measure, pack

    one, other = (torch.cat([torch.as_tensor(row, dtype=torch.float32) for row in side]) for side in (train, rollout))
    tokens = pack(one, other, lengths=[len(row) for row in rollout])
    ratios = [row.numpy() for row in tokens.log_ratio.split(tokens.lengths.tolist())]
    figures = intervals(ratios, seed, prompts=prompts)
    return Probed(
        precision="",
        figures=figures,
        mismatch=measure(tokens).metrics(),
        sequences=sum(len(row) > 0 for row in ratios),
        tokens=len(tokens),
        invalid=tokens.invalid,
        tokens_needed=tokens_needed(len(tokens), figures["kl_k3"]),
    )


def _scored(
    model_path: str,
    card: Gpu,
    samples: Mapping[str, Sequence[Sampled]],
    found: Mapping[str, Probed],
    settings: SampleSettings,
) -> dict[str, Probed]:
    """The samples of each precision beside the reference's log-probs of them."""
    from fp8plan.runtime.probe.reference import Reference

    reference, scored = Reference(model_path, "cpu" if card.is_cpu else "cuda"), {}
    for name, rows in samples.items():
        begun = time.perf_counter()
        try:
            train = reference.score(rows, settings.temperature)
            prompts = [tuple(row.prompt) for row in rows]
            one = compared(train, [row.logprobs for row in rows], settings.seed, prompts)
        except Exception as error:  # of one precision, as when an engine's log-probs are all NaN
            one = Probed(name, error=_told(error))
        seconds = dict(found[name].seconds or {}) | {"score": time.perf_counter() - begun}
        scored[name] = replace(one, precision=name, facts=found[name].facts, seconds=seconds)
    return scored


def _predicted(
    model_path: str, preset: Precision, measured: Probed, samples: Mapping[str, Sequence[Sampled]]
) -> Interval | None:
    """The KL that fp8plan.model.risk.expected expects of the engine that ran; None for a model it does not cover."""
    with suppress(ConfigError):
        facts = measured.facts or {}
        risk = mismatch_risk(
            ModelShape.from_hf(model_path),
            preset,
            [max(1, len(row.response)) for row in samples[preset.name]],
            e8m0=bool(facts.get("e8m0")),
            kv_scales_calibrated=facts.get("kv_scales") != "1.0",
        )
        return Interval(risk.kl_k3, risk.kl_k3_low, risk.kl_k3_high)
    return None


def _refuse_absent(card: Gpu) -> None:
    """Ask the driver: an engine takes a minute to find out. A product that fp8plan does not know may be any card."""
    if card.is_cpu:
        return
    product = gpu_facts()["gpu_product"]
    if product is None:
        raise ConfigError(
            f"{card.name} was asked for, and NVML finds no NVIDIA GPU on this machine; allowed: a machine with one, or "
            "--gpu cpu (slow, for a try)"
        )
    here = _known(product)
    if here is not None and here.name != card.name:
        raise ConfigError(f"{card.name} was asked for, and this machine has {product}; allowed: {here.name}, or auto")


def _known(product: str) -> Gpu | None:
    with suppress(ConfigError):
        return find_gpu(product)
    return None


def _refuse_too_few(prompts: int) -> None:
    if prompts < 8:
        raise ConfigError(f"{prompts} different prompts are too few for an interval; allowed: at least 8")


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__) + notes


def _reference_version() -> str:
    from importlib.metadata import version

    import torch

    return f"transformers {version('transformers')}, torch {torch.__version__}, bf16"
