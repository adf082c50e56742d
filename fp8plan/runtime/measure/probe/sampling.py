"""Responses with their log-probs, which a quantised engine samples as in an RL run, and the prompts for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from fp8plan import jsonl
from fp8plan.checks import in_range, whole
from fp8plan.errors import ConfigError
from fp8plan.model.setup import EngineSetup
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.apply.engine.launch import held_back
from fp8plan.runtime.apply.weight_sync.checkpoint import checkpoint_manifest, checkpoint_tensors, local_folder
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.mismatch.sampling import LEAST_TEMPERATURE

# Prompts of the first calibration of KV scales, before there is a rollout.
FIRST_CALIBRATION = 16


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Settings of the responses that a probe samples.

    max_tokens:  longest response
    samples:     responses to each prompt
    temperature: that of the RL run's rollouts
    kv_scales:   for an FP8 KV cache: "calibrated" on a rollout, as after each weight sync, or vLLM's "unit" (1.0)
    after:       folder of the trainer's checkpoint. The engine starts from the model's, and gets the changes by a sync
    top_k:       settings of that sync; None: it leaves nothing out

    Raises ConfigError for values out of range, and for top_k without after.
    """

    max_tokens: int = 512
    samples: int = 4
    temperature: float = 1.0
    seed: int = 0
    kv_scales: Literal["calibrated", "unit"] = "calibrated"
    after: str | None = None
    top_k: TopK | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "samples"):
            whole(name, getattr(self, name))
        least = f"{LEAST_TEMPERATURE:g} or more: vLLM raises lower ones to that, and at 0 every log-prob is 0"
        in_range(self, {"temperature": (lambda x: LEAST_TEMPERATURE <= x < inf, least)})
        if self.kv_scales not in ("calibrated", "unit"):
            raise ConfigError(f"kv_scales is {self.kv_scales!r}; allowed: calibrated, unit")
        if self.top_k is not None and self.after is None:
            raise ConfigError("top_k is given without after, the folder of the trainer's checkpoint after some steps")
        if self.after is not None and checkpoint_manifest(self.after) is None:
            raise ConfigError(f"after is {self.after!r}; allowed: a folder with safetensors")


class Sampled(NamedTuple):
    """One response of the engine.

    prompt, response: token ids
    logprobs:         of each token of the response
    experts:          those of each token but the last: [tokens, layers, experts per token]; None: none are returned
    """

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    experts: Any = None


def sample(
    setup: EngineSetup, prompts: Sequence[Sequence[int]], settings: SampleSettings, **vllm_kwargs: Any
) -> tuple[list[Sampled], dict[str, Any]]:
    """Sample `settings.samples` responses of the engine to each prompt, and shut the engine down.

    Also returns the engine's facts, under `kv_scales` the origin of its scales, and under `synced` the bytes and the
    residual of a sync to `settings.after`. Raises ConfigError as `checkpoints` does.
    """
    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    mode: Literal["inprocess", "multiprocess"] = "inprocess"
    if not setup.gpu.is_cpu:
        mode = "multiprocess"  # a process of its own leaves nothing on the GPU when it ends
    options = {"skip_tokenizer_init": True, "seed": settings.seed} | vllm_kwargs
    sync = None if settings.after is None else SyncSettings(delta="cpu", top_k=settings.top_k)
    engine = RolloutEngine.from_setup(setup, mode=mode, sync=sync, **options)
    try:
        synced = None if settings.after is None else _synced(engine, checkpoints(str(setup.model), settings.after))
        scales = _calibrated(engine, prompts, settings) if engine.state.fp8_kv else None
        every = [tokens for tokens in prompts for _ in range(settings.samples)]
        return _generated(engine, every, settings), engine.facts | {"kv_scales": scales, "synced": synced}
    finally:
        engine.shutdown()


def checkpoints(model: str, after: str) -> tuple[Path, Path]:
    """Return the folders of the model's checkpoint and of the trainer's later one.

    Raises ConfigError for a model whose files are not here, and for checkpoints of other tensors.
    """
    before = local_folder(model)
    manifest = None if before is None else checkpoint_manifest(before)
    if before is None or manifest is None:
        raise ConfigError(f"the model is {model!r}; allowed with after: a folder with safetensors, or a downloaded id")
    if differ := sorted(set(manifest) ^ set(checkpoint_manifest(after) or ())):
        raise ConfigError(f"{after} has other tensors than {before}: {differ[0].name}; allowed: a later step's")
    return before, Path(after)


def _synced(engine: Any, folders: tuple[Path, Path]) -> dict[str, float]:
    """Sync the engine as a run does: first all weights, then the changes. Returns bytes and residual of the second."""
    for folder in folders:
        report = engine.sync_weights(checkpoint_tensors(folder))
    if not report.patched:
        raise ConfigError(f"the engine took no patches: {report.healed or 'it was synced whole'}")
    return {"bytes": report.bytes, "residual": report.residual}


def _calibrated(engine: Any, prompts: Sequence[Sequence[int]], settings: SampleSettings) -> str:
    """Calibrate first on prompts, so that no scale of 1.0 clips the samples, then on the samples, as a run does."""
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
    texts = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
    samples = []
    for prompt, output in zip(prompts, engine.generate(texts, params), strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
        samples.append(Sampled(list(prompt), tokens, logprobs, completion.routed_experts))
    return samples


FORMS: Final = '{"prompt_token_ids": [...]}, {"messages": [{"role": ..., "content": ...}]} or {"prompt": "..."}'

# The default prompts: tasks as in RL for reasoning. A mismatch depends on the text; your own prompts are better.
TASKS: Final = (
    "A train leaves at 9:40 and arrives at 13:05. On the way it stands still for 35 minutes. How long does it move?",
    "Find all real x with x^4 - 5x^2 + 4 = 0 and explain each step.",
    "How many three-digit numbers have digits that add up to 9?",
    "Write a Python function that returns the longest palindromic substring of a string. Explain its running time.",
    "A bag holds 4 red and 6 blue balls. Three are drawn without putting back. How likely are exactly two blue ones?",
    "Prove that the product of two odd numbers is odd, and that the converse holds.",
    "Write SQL that lists the customers who ordered in every month of last year. Say which tables you assume.",
    "A rectangle has perimeter 46 and area 120. Find its sides, and check the result.",
    "Why does ice float on water? Answer in five sentences for a pupil of twelve.",
    "Given f(x) = ln(x)/x for x > 0, find its maximum and sketch how it behaves at both ends.",
    "Write a C function that reverses a singly linked list in place, then walk through it for three nodes.",
    "Pipe A fills a tank in 6 hours, pipe B in 4; drain C empties it in 12. How long with all three open?",
    "List the steps to find a memory leak in a long-running service, the cheapest first.",
    "What is the last digit of 7^2026? Show the pattern you use.",
    "Compare quicksort and mergesort: time, memory, stability, and when you would take which.",
    "Solve the system 2x + 3y = 12, x - y = 1, once by substitution and once by elimination.",
)

Prompt = Sequence[int] | str | Mapping[str, Any]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts, one of FORMS in each line. Raises ConfigError that names the first other line."""
    lines = list(jsonl.lines(path, "file of prompts", f"allowed: {FORMS}", whole=True))
    if not lines:
        raise ConfigError(f"{path} holds no prompts; allowed: lines like {FORMS}")
    return [_prompt(row, f"line {number} of {path}") for number, row in lines]


def _prompt(row: Any, where: str) -> Prompt:
    if isinstance(row, dict):
        tokens, text = row.get("prompt_token_ids"), row.get("prompt")
        if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
            return tokens
        if isinstance(row.get("messages"), list) and row["messages"]:
            return {"messages": row["messages"]}
        if isinstance(text, str) and text:
            return text
    raise ConfigError(f"{where} is {row!r:.60}; allowed: {FORMS}")


def token_ids(prompts: Sequence[Prompt] | None, model_path: str, most_prompts: int | None = None) -> list[list[int]]:
    """Token ids of each prompt (of the first `most_prompts`); None: of TASKS.

    Messages go through the chat template, and so do TASKS if the model has one: a prompt unlike those of training has
    another mismatch. Texts stay as they are.

    Raises ConfigError for an empty prompt, for tokens that are no ids, and for texts if the model has no tokeniser.
    """
    some: Sequence[Prompt] = (TASKS if prompts is None else prompts)[:most_prompts]
    if not some or any(not prompt for prompt in some):
        raise ConfigError("a prompt is empty, or there is none; allowed: token ids or text for each response")
    ids = [prompt for prompt in some if not isinstance(prompt, str | Mapping)]
    if len(ids) == len(some):
        return [_ids(prompt, number) for number, prompt in enumerate(ids)]
    tokeniser = _tokeniser(model_path)
    if prompts is None and tokeniser.chat_template:
        some = [{"messages": [{"role": "user", "content": task}]} for task in some]
    return [_encoded(prompt, number, tokeniser) for number, prompt in enumerate(some)]


def _tokeniser(model_path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        with held_back(engine_stays=False):
            tokeniser = AutoTokenizer.from_pretrained(model_path)
        why = "" if len(tokeniser) > 1 else "its vocabulary is empty: tokenizer.json is missing"
    except Exception as error:
        why = "; ".join([type(error).__name__, *getattr(error, "__notes__", [])])
    if why:
        raise ConfigError(
            f"{model_path} has no tokeniser that loads ({why}); allowed: --prompts FILE with token ids, "
            '{"prompt_token_ids": [...]} in each line'
        )
    return tokeniser


def _encoded(prompt: Prompt, number: int, tokeniser: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokeniser(prompt)["input_ids"])
    if isinstance(prompt, Mapping):
        text = tokeniser.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        return list(tokeniser(text, add_special_tokens=False)["input_ids"])
    return _ids(prompt, number)


def _ids(prompt: Sequence[int], number: int) -> list[int]:
    """Return token ids as Python's integers. Raises ConfigError for anything else. number: of the prompt, from 0"""
    return [whole(f"prompt {number}, token {position}", token, 0) for position, token in enumerate(prompt)]
