"""Measure the mismatch of rollout precisions before a run.

    probed = probe("Qwen/Qwen3-8B", ["bf16", "fp8_block+fp8_kv"], prompts=[...], gpu="h200")
    probed.precisions["fp8_block+fp8_kv"].figures["kl_k3"]        Interval(value, low, high)

An engine of each precision, one after the other, samples responses with their log-probs. Then the trainer's model
scores the same tokens. The result holds for these prompts, this checkpoint and the start of a run; the Monitor follows
the drift in training. The mismatch of bf16 comes from the kernels alone, and is the floor.

The trainer computes in BF16, or with `remedies` as they say. All trainers score the samples of one engine. Each number
of layers kept in BF16 has an engine of its own, and the trainer keeps the same layers.

With `SampleSettings(after=..., top_k=...)` the trainer's model is one of a later step, which the engine got by a sparse
sync. The KL that top-k adds is this KL less that of a probe without `top_k`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from itertools import compress
from typing import Any, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.kept import Kept
from fp8plan.model.emit.vllm import ignored
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import FP8_BLOCK, PRESETS, Precision, find_precision
from fp8plan.model.risk.expected import mismatch_risk
from fp8plan.model.risk.remedies import BF16, NO_REMEDIES, Remedies
from fp8plan.model.setup import EngineSetup, default_limits
from fp8plan.runtime.apply.engine.launch import held_back
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.measure.machine import gpu_facts
from fp8plan.runtime.measure.probe.results import Interval, Probe, Probed, in_effect, intervals, tokens_needed
from fp8plan.runtime.measure.probe.sampling import Prompt, Sampled, SampleSettings, checkpoints, sample, token_ids


def probe(
    model_path: str,
    precisions: Sequence[str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    gpu: str | Gpu = "auto",
    remedies: Remedies | Sequence[Remedies] | None = None,
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
    remedies:    what lowers the mismatch in the run; several: each is measured; None: nothing
    limits:      limits of each engine; None: vLLM's defaults for this GPU
    most_prompts: number of prompts to take from the start; None: all
    progress:    called with a line of text at each new stage
    vllm_kwargs: further arguments of vllm.LLM

    Returns a Probe: KL and other figures per token, in nats, with 90% intervals from resampled prompts.

    Raises ConfigError for arguments with which no precision could be measured. If a single precision fails, its Probed
    has the error, and names the file with the engine's output. The engines are gone before the reference is loaded, so
    each may use the whole GPU.
    """
    presets = [find_precision(name) for name in (PRESETS if precisions is None else dict.fromkeys(precisions))]
    if not presets:
        raise ConfigError(f"no precision is given; allowed: {', '.join(PRESETS)}")
    settings, card = settings or SampleSettings(), gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    _refuse_absent(card)
    if settings.after is not None:
        checkpoints(model_path, settings.after)
    limits, version = limits or default_limits(card, model_path), check_vllm_version()
    tokens = token_ids(prompts, model_path, most_prompts)
    if (different := len({tuple(ids) for ids in tokens})) < 8:
        raise ConfigError(f"{different} different prompts are too few for an interval; allowed: at least 8")
    longest = max(len(ids) for ids in tokens) + settings.max_tokens
    several = [remedies] if isinstance(remedies, Remedies) else remedies
    combinations = several or [NO_REMEDIES]
    _refuse_replay_without_experts(model_path, combinations)
    _refuse_kept_without_fp8(presets, combinations)
    sampled: dict[_Engine, list[Sampled]] = {}
    findings: dict[_Engine, list[Probed]] = {}
    for engine in _engines(presets, combinations):
        progress(f"{engine.label}: an engine starts and samples {len(tokens) * settings.samples} responses")
        begun = time.perf_counter()
        try:
            returning = replace(limits, enable_return_routed_experts=engine.routed_experts)
            kept = Remedies(keep_bf16=engine.keep_bf16)
            setup = EngineSetup(model_path, card, engine.preset, returning, engine_version=version, remedies=kept)
            setup = setup.holding(longest)
            setup.check_precision()
            with held_back(engine_stays=False):
                sampled[engine], facts = sample(setup, tokens, settings, **vllm_kwargs)
        except Exception as error:  # the error of one engine: the others may run
            probed = Probed(engine.preset.name, error=_text_of(error))
            progress(f"{engine.label}: {probed.error}")
        else:
            seconds = {"sample": time.perf_counter() - begun}
            probed = Probed(engine.preset.name, facts=facts, seconds=seconds)
        findings[engine] = [replace(probed, remedies=each) for each in engine.remedies]
    if sampled:
        progress("the reference scores the same tokens")
        with held_back(engine_stays=False):
            setup = EngineSetup(model_path, card, FP8_BLOCK, limits, engine_version=version)
            _score(setup, sampled, findings, settings)
    import torch

    return Probe(
        model=model_path,
        gpu=card.name,
        date=datetime.now(UTC).date().isoformat(),
        engine_version=version,
        reference=f"transformers {version_of('transformers')}, torch {torch.__version__}, bf16",
        settings=settings,
        prompts=len(tokens),
        findings=[probed for each in findings.values() for probed in each],
    )


class _Engine(NamedTuple):
    """An engine that samples.

    keep_bf16: as in Remedies
    remedies:  those whose trainers score its samples
    """

    preset: Precision
    keep_bf16: Kept
    remedies: tuple[Remedies, ...]

    @property
    def label(self) -> str:
        return f"{self.preset.name}, keep_bf16 {self.keep_bf16}" if any(self.keep_bf16) else self.preset.name

    @property
    def routed_experts(self) -> bool:
        """True if it returns the experts of each token."""
        return any(each.router_replay for each in self.remedies)


def _engines(presets: Sequence[Precision], remedies: Sequence[Remedies]) -> list[_Engine]:
    """The engines of all precisions. Only those with FP8 weights have layers to keep."""
    engines = []
    for preset in presets:
        by_kept: dict[Kept, list[Remedies]] = {}
        for each in dict.fromkeys(in_effect(remedy, preset.name) for remedy in remedies):
            kept: Kept = (0, 0) if preset.weights == BF16 else each.keep_bf16
            by_kept.setdefault(kept, []).append(each)
        engines += [_Engine(preset, kept, tuple(those)) for kept, those in by_kept.items()]
    return engines


def compared(
    train: Sequence[Any], rollout: Sequence[Any], seed: int = 0, prompts: Sequence[Hashable] | None = None
) -> Probed:
    """Compare the trainer's with the engine's log-probs, in nats: an array or tensor [tokens] per sequence each.

    prompts: the prompt of each sequence, for the intervals; None: all differ
    """
    import torch

    from fp8plan.runtime.watch.mismatch.measure import measure, pack

    ours, theirs = (torch.cat([torch.as_tensor(row, dtype=torch.float32) for row in rows]) for rows in (train, rollout))
    tokens = pack(ours, theirs, lengths=[len(row) for row in rollout])
    ratios = [row.numpy() for row in tokens.log_ratio.split(tokens.lengths.tolist())]
    scored = None if prompts is None else [*compress(prompts, tokens.rows)]  # rows without a token are dropped
    figures = intervals(ratios, seed, prompts=scored)
    return Probed(
        precision="",
        figures=figures,
        mismatch=measure(tokens).metrics(),
        sequences=tokens.sequences,
        tokens=len(tokens),
        invalid=tokens.invalid,
        tokens_needed=tokens_needed(len(tokens), figures["kl_k3"]),
    )


def _score(
    setup: EngineSetup,
    sampled: Mapping[_Engine, Sequence[Sampled]],
    findings: dict[_Engine, list[Probed]],
    settings: SampleSettings,
) -> None:
    """Let each trainer score the samples of each engine. The comparison replaces the engine's finding.

    setup: an engine with FP8 weights; trainers in FP8 keep the same linears in BF16
    """
    from fp8plan.runtime.measure.probe.reference import Reference

    model_path = str(setup.model)
    reference = Reference(settings.after or model_path, "cpu" if setup.gpu.is_cpu else "cuda")
    for engine, rows in sampled.items():
        prompts, rollout = [tuple(row.prompt) for row in rows], [row.logprobs for row in rows]
        for number, probed in enumerate(findings[engine]):
            begun, remedies = time.perf_counter(), probed.remedies
            trainer = remedies.trainer_precision
            try:
                in_bf16 = ignored(replace(setup, remedies=remedies))
                with reference.computing_in(trainer, in_bf16):
                    train = reference.score(rows, settings.temperature, router_replay=remedies.router_replay)
                scored = compared(train.logprobs, rollout, settings.seed, prompts)
                scored = replace(scored, experts_differ=train.experts_differ)
            except Exception as error:  # the error of one trainer, e.g. of an engine whose log-probs are all NaN
                scored = Probed("", error=_text_of(error))
            seconds = dict(probed.seconds or {}) | {"score": time.perf_counter() - begun}
            scored = replace(scored, precision=probed.precision, remedies=remedies, facts=probed.facts, seconds=seconds)
            if settings.after is None:  # no expectation covers a sync
                scored = replace(scored, predicted=_predicted(model_path, scored, rows))
            findings[engine][number] = scored


def _predicted(model_path: str, measured: Probed, rows: Sequence[Sampled]) -> Interval | None:
    """The KL that fp8plan.model.risk.expected expects of the engine that ran; None for a model it does not cover."""
    with suppress(ConfigError):
        facts = measured.facts or {}
        risk = mismatch_risk(
            ModelShape.from_hf(model_path),
            find_precision(measured.precision),
            [max(1, len(row.response)) for row in rows],
            e8m0=bool(facts.get("e8m0")),
            kv_scales_calibrated=facts.get("kv_scales") != "1.0",
            remedies=measured.remedies,
        )
        return Interval(risk.kl_k3, risk.kl_k3_low, risk.kl_k3_high)
    return None


def _refuse_replay_without_experts(model_path: str, remedies: Sequence[Remedies]) -> None:
    """Raise ConfigError for router replay in a model without experts. A model that cannot be read may have some."""
    if not any(each.router_replay for each in remedies):
        return
    try:
        shape = ModelShape.from_hf(model_path)
    except ConfigError:
        return
    if not shape.parts_of(Experts):
        raise ConfigError(f"router_replay is given, and {model_path} has no experts; allowed: a model with experts")


def _refuse_kept_without_fp8(presets: Sequence[Precision], remedies: Sequence[Remedies]) -> None:
    """Raise ConfigError for kept layers that are in BF16 anyway: no precision and no trainer beside them has FP8."""
    for each in remedies:
        if all(in_effect(each, preset.name) != each for preset in presets):
            raise ConfigError(
                f"keep_bf16 is {each.keep_bf16}, and no precision of the probe has FP8 weights; leave --keep-bf16 out, "
                "or add --precision fp8_block"
            )


def _refuse_absent(card: Gpu) -> None:
    """Raise ConfigError for another GPU than the driver's. An unknown product may be any card."""
    if card.is_cpu:
        return
    product = gpu_facts()["gpu_product"]
    if product is None:
        raise ConfigError(
            f"{card.name} was asked for, and NVML finds no NVIDIA GPU on this machine; allowed: a machine with one, or "
            "--gpu cpu (slow, for a try)"
        )
    try:
        here = find_gpu(product).name
    except ConfigError:
        return
    if here != card.name:
        raise ConfigError(f"{card.name} was asked for, and this machine has {product}; allowed: {here}, or auto")


def _text_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__) + notes
