"""Tensors of an update that arrive part by part in a worker, whose sender waits until all have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fp8plan.errors import text_of

if TYPE_CHECKING:
    import torch

    Write = Callable[[Sequence[tuple[str, torch.Tensor]]], None]  # writes named tensors


class Arriving:
    """The tensors so far; for vLLM a stand-in for the model that it loads into.

    write:   writes a part; None after an earlier failure
    renew:   called when a part has come

    failure: the first error, after which parts are ignored; None without one
    count:   parts so far
    """

    def __init__(self, write: Write | None) -> None:
        self.failure: str | None = None
        self.count = 0
        self.renew: Callable[[], None] = lambda: None
        self._write = write

    def load_weights(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write a part. Raises nothing: the sender waits for an answer, or sends on."""
        self.count += 1
        self.renew()
        if self.failure is not None or self._write is None:
            return
        try:
            self._write(pairs)
        except Exception as error:
            self.failure = text_of(error)
