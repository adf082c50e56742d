"""vLLM's modules, imported and left out of garbage collection.

An engine's start and end collect garbage seven times between them. Each time walks the million objects of what is
imported: 0.26 s, a third of what the tests of engines took. What engines leave is still collected.
"""

from __future__ import annotations

import gc
from functools import cache

_freeze = gc.freeze


@cache
def freeze_imports() -> None:
    """Freeze all there is, for good: vLLM and fp8plan would unfreeze it at each engine's end."""
    import vllm.v1.worker.cpu_worker  # noqa: F401 -- what an engine and its worker import

    freeze_again()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


def freeze_again() -> None:
    """Freeze what was imported since, while no engine runs."""
    gc.collect()
    _freeze()
