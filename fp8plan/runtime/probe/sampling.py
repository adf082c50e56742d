"""Responses and their log-probs, sampled by a quantised engine as an RL run would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.setup import EngineSetup

# Prompts that KV scales are first calibrated on, before there is a rollout to calibrate them on.
FIRST_CALIBRATION = 16


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Settings of the responses that a probe samples.

    max_tokens: longest response; samples: responses to each prompt; temperature: of the RL run's rollouts
    kv_scales: of an FP8 KV cache: "calibrated" on a rollout, as after each weight sync, or vLLM's "unit" scales of 1.0
    mode:      mode of the engine; None: on a GPU a process of its own, which leaves nothing there; on a CPU, this one
    """

    max_tokens: int = 512
    samples: int = 4
    temperature: float = 1.0
    seed: int = 0
    kv_scales: Literal["calibrated", "unit"] = "calibrated"
    mode: Literal["inprocess", "multiprocess"] | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: a whole number of at least 1")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature!r}; allowed: above 0 (at 0 every log-prob is 0)")
        if self.kv_scales not in ("calibrated", "unit"):
            raise ConfigError(f"kv_scales is {self.kv_scales!r}; allowed: calibrated, unit")


class Sampled(NamedTuple):
    """One response: token ids of both, and the engine's log-prob of each token of the response."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]


def sample(
    setup: EngineSetup, prompts: Sequence[Sequence[int]], settings: SampleSettings, **vllm_kwargs: Any
) -> tuple[list[Sampled], dict[str, Any]]:
    """Sample `settings.samples` responses of the engine to each prompt.

    Also returns what really ran: the engine's facts, and under `kv_scales` where its scales came from. The engine is
    gone when this returns.
    """
    from fp8plan.runtime.engine.engine import RolloutEngine

    mode = settings.mode or ("inprocess" if setup.gpu.is_cpu else "multiprocess")
    options = {"skip_tokenizer_init": True, "seed": settings.seed} | vllm_kwargs
    engine = RolloutEngine.from_setup(setup, mode=mode, **options)
    try:
        scales = _calibrated(engine, prompts, settings) if engine.state.fp8_kv else None
        every = [tokens for tokens in prompts for _ in range(settings.samples)]
        found = _generated(engine, every, settings)
        return found, engine.facts | {"kv_scales": scales}
    finally:
        engine.shutdown()


def _calibrated(engine: Any, prompts: Sequence[Sequence[int]], settings: SampleSettings) -> str:
    """Calibrate first on prompts, so that no scale of 1.0 clips what is sampled, then on the samples, as a run does."""
    if settings.kv_scales == "unit":
        return "1.0"
    first = [list(tokens) for tokens in prompts[:FIRST_CALIBRATION]]
    engine.recalibrate_kv(kv_prompts=first)
    _generated(engine, first, settings)
    return str(engine.recalibrate_kv())


def _generated(engine: Any, prompts: Sequence[Sequence[int]], settings: SampleSettings) -> list[Sampled]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=settings.seed + number,  # the same random numbers in every precision
            logprobs=0,
            detokenize=False,
        )
        for number in range(len(prompts))
    ]
    outputs = engine.generate([{"prompt_token_ids": list(tokens)} for tokens in prompts], params)
    return [_sampled(list(tokens), output.outputs[0]) for tokens, output in zip(prompts, outputs, strict=True)]


def _sampled(prompt: list[int], completion: Any) -> Sampled:
    tokens = list(completion.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
    return Sampled(prompt, tokens, logprobs)
