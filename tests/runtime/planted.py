"""Faults planted inside vLLM's workers, as functions that they are handed. Importable there, so sent by name."""

from __future__ import annotations

import os
from typing import Any

from fp8plan.errors import ConfigError


def overwrite(worker: Any, name: str, value: float = 0.5) -> None:
    """Write one value over a whole parameter."""
    parameters = dict(worker.model_runner.get_model().named_parameters())
    parameters[name].data.fill_(value)


def remember(worker: Any, rank: int) -> None:
    """Have one rank keep a copy of its weights."""
    if worker.rank == rank:
        parameters = worker.model_runner.get_model().named_parameters()
        worker.remembered = {name: parameter.data.clone() for name, parameter in parameters}


def go_back(worker: Any, rank: int) -> None:
    """Have one rank serve the weights that it remembers, as if it had missed all syncs since."""
    if worker.rank == rank:
        for name, parameter in worker.model_runner.get_model().named_parameters():
            parameter.data.copy_(worker.remembered[name])


def lose_the_next_commit(worker: Any, rank: int) -> None:
    """Have one rank not hear that the next sync has ended well."""
    if worker.rank == rank:
        live = worker._fp8plan_weights()
        live.commit = lambda stamp: vars(live).pop("commit")


def process(worker: Any) -> dict[str, int]:
    """Say which process this is."""
    return {"ok": os.getpid()}


def refuse_the_next_finish(worker: Any) -> dict[str, None]:
    """Have a worker find fault with the next sync, once all of it has been written."""
    live = worker._fp8plan_weights()

    def finish(patches: int) -> None:
        vars(live).pop("finish")
        raise ConfigError("a planted fault")

    live.finish = finish
    return {"ok": None}


def corrupt_the_next_update(worker: Any) -> dict[str, None]:
    """Flip the signs of all weights of the next update over verl's transport, once all of it has been written.

    Not of their scales: a weight is the product of both. Only then, as vLLM's reload, which some layers go through, has
    other tensors in the model's places until it is closed.
    """
    live = worker._fp8plan_updates().live
    close = live._close

    def corrupted(running: Any, reloaded: Any) -> None:
        vars(live).pop("_close")
        close(running, reloaded)
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if not name.endswith("scale_inv"):
                parameter.data.copy_(-parameter.data.float())

    live._close = corrupted
    return {"ok": None}
