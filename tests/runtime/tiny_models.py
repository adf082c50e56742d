"""Tiny Qwen3 checkpoints, each with two sets of weights, and real vLLM engines on them, to be compared bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import cpu_engines  # noqa: F401 -- it sets the environment of engines
import pytest
from frozen_imports import freeze_imports
from plans import index, plan

from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

KINDS = ("dense", "moe", "tied")
QUICK = (("dense", "bf16"), ("dense", "fp8_kv"), ("dense", "fp8_block"), ("moe", "fp8_block+fp8_kv"))  # of `make test`
SEEDS = {"a": 0, "b": 1}
LAYERS, EXPERTS, VOCABULARY = 3, 8, 1024

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # 128 rows of k and v each: the parts of qkv start at blocks of 128
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,  # larger than usual, so that two sets of weights say different things
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 128, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
# What a kind has otherwise. ragged: parts of qkv and gate_up that share a block of 128 x 128, so that no part can be
# quantised on its own.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": MOE,
    "tied": {"tie_word_embeddings": True},
    "ragged": {"num_key_value_heads": 1, "intermediate_size": 320},
}

BLOCK_SIZE = 128  # tokens of a KV block; the CPU's smallest prompt that can be cached
KV_BLOCKS = 64
PROMPTS = ([5, 9, 33, 17, 200, 801], list(range(11, 21)))
TOKENS = 3  # of an answer: two steps of decoding after the prompt
LONG_PROMPT = [(7 * n) % VOCABULARY for n in range(BLOCK_SIZE + 40)]
CALIBRATION = [list(range(30)), list(range(500, 540))]

Outputs = list[tuple[list[int], list[float]]]  # tokens and log-probs of each prompt


def params(cases: Sequence[tuple[str, str]], quick: Sequence[tuple[str, str]] = QUICK) -> list[Any]:
    """Kinds and precisions as pytest's parameters. Those that are not quick repeat a test, and are slow."""
    slow = pytest.mark.slow
    return [pytest.param(case, id="-".join(case), marks=() if case in quick else slow) for case in cases]


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fp8plan-tiny-")  # gone when the test process ends


def folder() -> Path:
    """The folder that holds this process's checkpoints."""
    return Path(_folder().name)


@cache
def checkpoint(kind: str, which: str) -> Path:
    """Folder of a BF16 checkpoint; which: "a" or "b", two sets of random weights of one shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = COMMON | DIFFERENCES[kind]
    torch.manual_seed(SEEDS[which])
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)) if kind == "moe" else Qwen3ForCausalLM(Qwen3Config(**settings))
    )
    path = folder() / f"{kind}_{which}"
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def weights(kind: str, which: str) -> dict[str, Any]:
    """The tensors that a trainer would send, under their Hugging Face names; fresh ones, to be changed at will."""
    from safetensors.torch import load_file

    return load_file(checkpoint(kind, which) / "model.safetensors")


def quantised(tensors: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The same as E4M3 and scales, for the tensors named."""
    from block_weights import quantize

    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in names:
            found[name], found[f"{name}_scale_inv"] = quantize(tensor)
        else:
            found[name] = tensor
    return found


def cpu_plan(precision: str, **limits: Any) -> Plan:
    """A plan for the CPU with this precision."""
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    small |= {"block_size": BLOCK_SIZE, "num_gpu_blocks": KV_BLOCKS, "enforce_eager": True}
    return plan(gpu="cpu", chosen=index(precision), limits=EngineLimits(**(small | limits)))


@contextmanager
def experts_or_skip() -> Iterator[None]:
    """Skip a test whose engine has experts in FP8, for which the tests' kernel needs vLLM 0.30."""
    import torch

    try:
        yield
    except ValueError as error:
        if "Unsupported FP8 MoE backend" in str(error):
            torch.set_default_dtype(torch.float32)  # vLLM leaves its own
            pytest.skip("no kernel for experts in FP8 before vLLM 0.30")
        raise


@contextmanager
def started(kind: str | Path, which: str, precision: str, **settings: Any) -> Iterator[RolloutEngine]:
    """A fresh engine on a checkpoint (or folder), shut down at the end. settings: of RolloutEngine.from_plan, or of
    SyncSettings."""
    import torch

    freeze_imports()
    torch.set_num_threads(1)  # where torch was loaded before OMP_NUM_THREADS was set
    path = kind if isinstance(kind, Path) else checkpoint(kind, which)
    sync = {name: settings.pop(name) for name in SyncSettings.__dataclass_fields__ if name in settings}
    forget_groups()
    with experts_or_skip():
        engine = RolloutEngine.from_plan(
            cpu_plan(precision), str(path), sync=SyncSettings(**sync), skip_tokenizer_init=True, **settings
        )
    try:
        if engine.state.fp8_kv:
            engine.recalibrate_kv(kv_prompts=CALIBRATION)
        yield engine
    finally:
        engine.shutdown()


def forget_groups() -> None:
    """Let the next engine make its process groups. Those that a dense model's left lack the one of experts.

    That engine may still run, in a fixture of the same module: it takes the new groups then.
    """
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


_references: dict[tuple[str, str, str], Outputs] = {}


@contextmanager
def started_beside_references(
    kind: str, precision: str, **settings: Any
) -> Iterator[tuple[RolloutEngine, dict[str, Outputs]]]:
    """An engine on the weights a, and what fresh engines on a and on b generate.

    One process holds one engine at a time, so b's comes first; the one on a is its own reference.
    """
    if (kind, precision, "b") not in _references:
        with started(kind, "b", precision) as engine:
            _references[kind, precision, "b"] = generate(engine)
    with started(kind, "a", precision, **settings) as engine:
        found = generate(engine)
        assert _references.setdefault((kind, precision, "a"), found) == found  # two starts say the same
        yield engine, {which: _references[kind, precision, which] for which in SEEDS}


def generate(engine: RolloutEngine, *, cold: bool = False) -> Outputs:
    """Sampled tokens and their log-probs, one request at a time: the same batches give the same bits.

    cold: empty the prefix cache first. Only the first request after a sync may leave it out: a prompt that is cached is
          computed in other pieces.
    """
    if cold:
        engine.llm.reset_prefix_cache()
    return [answer(engine, prompt) for prompt in (*PROMPTS, LONG_PROMPT)]


def answer(engine: RolloutEngine, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of one request."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    (request,) = engine.generate([{"prompt_token_ids": list(prompt)}], how)
    (found,) = request.outputs
    tokens = list(found.token_ids)
    return tokens, [entry[token].logprob for token, entry in zip(tokens, found.logprobs, strict=True)]


def prompt_logprobs(engine: RolloutEngine, tokens: Sequence[int]) -> list[float]:
    """Log-prob of each token but the first, given those before it."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (request,) = engine.generate([{"prompt_token_ids": list(tokens)}], how)
    return [entry[token].logprob for token, entry in zip(tokens[1:], request.prompt_logprobs[1:], strict=True)]
