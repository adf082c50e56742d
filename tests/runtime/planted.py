"""Faults planted inside vLLM's workers, as functions that they are handed. Importable there, so sent by name."""

from __future__ import annotations

from typing import Any

DIRT = 0.5


def overwrite(worker: Any, name: str, value: float = DIRT) -> None:
    """Write one value over a whole parameter."""
    parameters = dict(worker.model_runner.get_model().named_parameters())
    parameters[name].data.fill_(value)


def miss_the_next_sync(worker: Any, rank: int) -> None:
    """Have one rank write nothing in a sync, and notice nothing."""
    import torch

    if worker.rank != rank:
        return
    live = worker._fp8plan_weights()
    begin = live.begin

    def begun(*args: Any) -> None:
        begin(*args)
        running = live._running
        running.samples.compare = lambda: {"compared": 0, "differ": [], "weight_error": None}
        live.load = lambda numbers, tensors: running.flags.append((torch.zeros(0), [])) or running.done.update(numbers)

    live.begin = begun


def lose_the_next_commit(worker: Any, rank: int) -> None:
    """Have one rank not hear that a sync has ended well."""
    if worker.rank == rank:
        live = worker._fp8plan_weights()
        live.commit = lambda: vars(live).pop("commit")


def mend(worker: Any) -> None:
    """Take back what was planted in a worker's live weights."""
    live = worker._fp8plan_weights()
    for name in ("begin", "load", "commit"):
        vars(live).pop(name, None)
