"""Digests of the parameters that no patch can check: those of modules that vLLM reloads, in layouts of its own.

Between two syncs nothing may write to them. Tensors that are written in place are compared with the trainer's digests
instead (runtime.apply.worker.patches).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.worker.facts import digest

if TYPE_CHECKING:
    import torch


def refuse_foreign(names: Sequence[str]) -> None:
    """Raises ConfigError for tensors that are not as the last sync left them."""
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ConfigError(f"something else than a sync has written to {', '.join(names[:4])}{more} of the live weights")


class Untouched:
    """The digests of some modules' parameters after the last sync that wrote to them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._digests: dict[str, dict[str, int]] = {}  # module -> its parameters -> digest

    def note(self, modules: Iterable[str], written: Collection[str]) -> None:
        """Note the parameters of modules as they are now. written: modules that this sync wrote to"""
        for module in sorted(modules):
            if module in written or module not in self._digests:
                self._digests[module] = self._now(module)

    def changed(self, turn: int, every: int) -> list[str]:
        """Return the parameters that have changed, among one in `every` modules. turn: chooses these modules"""
        names = []
        for number, (module, digests) in enumerate(self._digests.items()):
            if number % every == turn % every:
                names += [name for name, own in self._now(module).items() if digests.get(name) != own]
        return names

    def _now(self, module: str) -> dict[str, int]:
        parameters = self._model.get_submodule(module)._parameters
        return {f"{module}.{name}": digest(tensor.data) for name, tensor in parameters.items() if tensor is not None}
