"""Access to an engine: rollouts have it, or one procedure that changes it. It serves no rollout while it sleeps.

The second half prepares a started engine, so that a rollout compiles no kernel and collects no garbage.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.model.cost.gemm import rows_of_every_kernel
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.weight_sync.state import SHUT_DOWN, Event, SyncState

TAGS: Final = ("weights", "kv_cache")  # the parts that vLLM puts to sleep


def refuse_shut_down(state: SyncState) -> None:
    """Raises LostEngineError after shutdown()."""
    if state.shut_down:
        raise LostEngineError(SHUT_DOWN)


def refuse_dead(state: SyncState) -> None:
    """Raises NotServingError if the engine has died."""
    if state.dead:
        raise NotServingError(state.refusal)


@contextmanager
def generating(state: SyncState, only: bool = False) -> Iterator[None]:
    """Count a generate as running. Raises NotServingError while the weights must not be used.

    only: refuse a second generate
    """
    with state.lock:
        if only and state.generating:
            raise NotServingError("another generate is running; wait for it")
        refuse_dead(state)
        if state.asleep:
            raise NotServingError("the engine sleeps; call wake_up")
        if state.running:
            raise NotServingError("a sync is running; wait for it")
        if state.refusal is not None:
            raise NotServingError(f"{state.refusal}; call sync_weights with all weights")
        state.generating += 1
    try:
        yield
    finally:
        with state.lock:
            state.generating -= 1


@contextmanager
def alone(state: SyncState, busy: int) -> Iterator[None]:
    """Keep everybody else away from the engine. busy: unfinished requests that vLLM counts

    Raises SyncError while any request or another procedure runs.
    """
    with state.lock:
        if state.running:
            raise SyncError("another sync is running; wait for it. The weights that it leaves will serve")
        if requests := max(busy, state.generating):
            serve = "the old weights serve" if state.refusal is None else "the engine still refuses to generate"
            raise SyncError(f"{requests} requests are running; finish or abort them before. Nothing was sent; {serve}")
        state.running = True
    try:
        yield
    finally:
        state.running = False


@contextmanager
def falling_asleep(state: SyncState, level: int) -> Iterator[bool]:
    """Note that vLLM is put to sleep; yield False if it sleeps already.

    If that fails, the engine counts as asleep and refuses to generate until a wake-up and a complete sync.
    Raises ConfigError for levels other than 1 and 2, SyncError if the engine sleeps in part or at a lower level.
    """
    refuse_dead(state)
    if level not in (1, 2):
        raise ConfigError(
            f"level is {level!r}; allowed: 1, which keeps the weights on the host, and 2, which drops them"
        )
    if state.asleep:  # vLLM would ignore the call
        if state.asleep != frozenset(TAGS) or level > state.sleep_level:
            asleep = ", ".join(sorted(state.asleep))
            level_now = f"level {state.sleep_level}" if state.sleep_level else "perhaps not all of it"
            raise SyncError(f"the engine sleeps already ({asleep}, {level_now}); call wake_up before")
        yield False
        return
    state.note(Event.BEGIN, "the engine was put to sleep, and that has not ended")
    state.note(Event.WRITE)
    # An interrupted call may still have put it to sleep. Waking an engine that is awake does no harm.
    state.asleep, state.sleep_level = frozenset(TAGS), 0
    yield True
    state.sleep_level = level
    if level < 2:
        state.note(Event.RESTORE)
    else:
        state.note(Event.END, "the engine slept at level 2, which drops its weights")


def asleep_of(state: SyncState, tags: Sequence[str] | None) -> list[str]:
    """Return those of the tags (None: of all) that sleep. Raises ConfigError for tags that vLLM does not have."""
    refuse_dead(state)
    if isinstance(tags, str) or (unknown := [tag for tag in tags or () if tag not in TAGS]):
        wrong = tags if isinstance(tags, str) else unknown[0]
        raise ConfigError(f"tags: {wrong!r}; allowed: a list of {', '.join(TAGS)}, or None for all")
    return [tag for tag in TAGS if tag in state.asleep and tag in (TAGS if tags is None else tags)]


def refuse_asleep(state: SyncState, kv_amax: Any, scored: Any) -> None:
    """Raises SyncError if a part of the engine sleeps that a sync writes to or runs on."""
    if not state.asleep or state.dead:
        return
    runs = scored is not None or (state.fp8_kv and kv_amax is None)
    if "weights" in state.asleep or runs:
        instead = "" if "weights" in state.asleep else ", or give kv_amax and nothing scored"
        raise SyncError(
            f"the engine sleeps ({', '.join(sorted(state.asleep))}); call wake_up{instead}. Nothing was sent"
        )


# vLLM picks the tiles of its MoE kernel by the nearest of these token counts (vllm/model_executor/layers/fused_moe).
MOE_TILES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)

BASE = 32  # number base of the digits at a prompt's start, small as some vocabularies are

# With async scheduling vLLM frees the last blocks a moment after the last token is out.
RESET_TRIES, RESET_WAIT_S = 50, 0.1


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
    return [1, *[longest] * whole, *[rest] * (rest > 0)]


def _prompt(number: int, length: int) -> list[int]:
    """A prompt of small tokens that begins with the number's digits."""
    digits = [number // BASE**2, number // BASE % BASE, number % BASE]
    return (digits + digits[-1:] * length)[:length]


def until_reset() -> Iterator[float]:
    """Yield seconds to wait before each further try to empty the prefix cache. Raises SyncError after the last."""
    for _ in range(RESET_TRIES):
        yield RESET_WAIT_S
    raise SyncError(f"vLLM did not empty its prefix cache within {RESET_TRIES * RESET_WAIT_S:.0f} s")


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
