"""A started engine made ready, so that a rollout compiles no kernel and collects no garbage."""

from __future__ import annotations

import gc
import os
from functools import lru_cache
from itertools import count
from pathlib import Path

from fp8plan.errors import ConfigError
from fp8plan.model.cost.gemm import rows_of_every_kernel
from fp8plan.model.setup import EngineSetup

# vLLM picks the tiles of its MoE kernel by the nearest of these token counts (vllm/model_executor/layers/fused_moe).
MOE_TILES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)

BASE = 32  # number base of the digits at a prompt's start, small as some vocabularies are


def freeze_garbage() -> None:
    """Spare Python's garbage collector the objects that stay, as vLLM does in its server, engine and worker processes.

    vLLM does not do so in the process that holds an `LLM`. There each full collection stops the front end for up to
    0.6 s (steps/ of the H200's profile).
    """
    gc.collect()
    gc.freeze()


def deep_gemm_rows(setup: EngineSetup, most: int) -> list[int]:
    """Return numbers of tokens, up to `most`, that together need every DeepGEMM kernel of a model.

    The list is empty without blockwise FP8 weights, and for a model whose matrices fp8plan does not know. The kernels
    of such a model are compiled when a rollout meets them.
    """
    if setup.precision.weights != "fp8_block":
        return []
    try:
        linears = setup.shape.linears(setup.limits.tensor_parallel_size)
    except ConfigError:
        return []
    shapes = [(linear.n, linear.k) for linear in linears if linear.quantised]
    return rows_of_every_kernel(shapes, most, setup.gpu.sm_count)


def warm_up_batches(setup: EngineSetup, max_model_len: int) -> list[list[list[int]]]:
    """Return batches of prompts that together run every kernel of a step.

    Each batch is one step of a certain number of tokens: MOE_TILES, odd and even, and `deep_gemm_rows`. A batch is one
    prompt if that leaves room for a response. Otherwise a prompt of one token goes first, to keep an engine in another
    process busy until the other prompts have arrived. So these run in one step.

    A rollout would not do as warm-up: requests arrive one by one, so its first step holds any number of tokens.
    All prompts begin differently, or the prefix cache would hold all but their ends.
    """
    longest, limits = max_model_len - 1, setup.limits
    steps = {tokens + odd for tokens in MOE_TILES for odd in (0, 1)}
    steps |= set(deep_gemm_rows(setup, limits.max_num_batched_tokens))
    batches = [_split(tokens, longest) for tokens in sorted(steps) if tokens <= limits.max_num_batched_tokens]
    number = count()
    return [
        [_prompt(next(number), length) for length in lengths]
        for lengths in batches
        if len(lengths) <= limits.max_num_seqs
    ]


def _split(tokens: int, longest: int) -> list[int]:
    """The lengths of a batch's prompts, none above `longest`."""
    if tokens <= longest:
        return [tokens]
    whole, rest = divmod(tokens, longest)
    lengths = [longest] * whole
    if rest:
        lengths.append(rest)
    return [1, *lengths]


def _prompt(number: int, length: int) -> list[int]:
    """A prompt of small tokens that begins with the number's digits."""
    digits = [number // BASE**2, number // BASE % BASE, number % BASE]
    return (digits + digits[-1:] * length)[:length]


def compiled_files() -> int:
    """Count the compiled kernels in the caches of Triton, DeepGEMM and FlashInfer's own DeepGEMM.

    Each kernel is a folder, whose content is not counted: that would take tens of milliseconds.
    """
    home = Path.home()
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / ".cache" / "vllm"))
    flashinfer = Path(os.environ.get("TRTLLM_DG_CACHE_DIR", home / ".tensorrt_llm"))
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    folders = [vllm / "deep_gemm" / "cache", flashinfer / "cache", triton]
    return sum(_entries(str(folder), os.stat(folder).st_mtime_ns) for folder in folders if folder.is_dir())


@lru_cache(maxsize=16)
def _entries(folder: str, changed: int) -> int:
    """Count a folder's entries. changed: its modification time; the folder is read again only when that changes."""
    return len(os.listdir(folder))
