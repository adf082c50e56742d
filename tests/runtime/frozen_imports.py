"""vLLM's modules, imported and left out of garbage collection.

An engine's start and end collect garbage seven times between them. Each time walks the million objects of what is
imported: 0.26 s, a third of what the tests of engines took. What engines leave is still collected.
"""

from __future__ import annotations

import gc
import sys
from functools import cache

from cpu_engines import GPU

_freeze = gc.freeze
_frozen = 0  # modules


def freeze_imports() -> None:
    """Freeze all there is, if anything was imported since the last time, while no engine runs."""
    _import_vllm()
    if len(sys.modules) != _frozen:
        freeze_again()


@cache
def _import_vllm() -> None:
    """Import what an engine and its worker import. What is frozen stays so: both would unfreeze it at their end."""
    if GPU:  # the CPU's worker puts placeholders in place of CUDA's streams
        import vllm.v1.worker.gpu_worker
    else:
        import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.sample import logits_processor

    # Each engine would read the entry points of all that is installed.
    logits_processor._load_logitsprocs_plugins = cache(logits_processor._load_logitsprocs_plugins)
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


def freeze_again() -> None:
    """Freeze what was imported since, while no engine runs."""
    global _frozen
    gc.collect()
    _freeze()
    _frozen = len(sys.modules)
