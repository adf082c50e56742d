"""The measuring side inside vLLM's worker: its memory, and even routing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from fp8plan.model.emit.vllm import is_router

if TYPE_CHECKING:
    import torch

# Names of parameters, as vLLM has them in the models of fp8plan's families.
BIAS: Final = re.compile(r"bias$")
NORM: Final = re.compile(r"norm\w*\.weight$")
EMBEDDING: Final = re.compile(r"embed\w*\.weight$")


class MeasuredWorker:
    """Mixed into vLLM's worker (worker_extension_cls)."""

    def fp8plan_memory_facts(self) -> dict[str, int | None]:
        """The exact bytes behind vLLM's log lines; None for those that this worker lacks, as on a CPU."""
        snapshot, runner = getattr(self, "init_snapshot", None), getattr(self, "model_runner", None)
        facts = {
            "total_bytes": getattr(snapshot, "total_memory", None),
            "free_at_start_bytes": getattr(snapshot, "free_memory", None),
            "requested_bytes": getattr(self, "requested_memory", None),
            "weights_bytes": getattr(runner, "model_memory_usage", None),
            "peak_activation_bytes": getattr(self, "peak_activation_memory", None),
            "non_torch_bytes": getattr(self, "non_torch_memory", None),
            "cuda_graphs_estimated_bytes": getattr(self, "cudagraph_memory_estimate", None),
            "available_kv_cache_bytes": getattr(self, "available_kv_cache_memory_bytes", None),
        }
        return {name: None if value is None else int(value) for name, value in facts.items()}

    def fp8plan_route_evenly(self) -> int:
        """Make tokens go to all experts alike, as in a trained model. Return the number of routers."""
        return route_evenly(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]


def route_evenly(named: Iterable[tuple[str, torch.nn.Parameter]]) -> int:
    """Give routers and embeddings weights by which tokens go to all experts alike. Return the number of routers.

    Routers get a standard deviation of 1 / sqrt(hidden), embeddings one of 1, norms the weight 1, all biases 0. vLLM's
    dummy weights are within 0.001 of zero, for three reasons unlike a trained model's:

    - A router's scores differ by less than BF16 resolves, or by less than a learned bias.
    - The biases of linears are as large as the embeddings, and decide the routing after some layers.
    - Attention outgrows such embeddings within some layers. It averages over the sequence, so that all samples of a
      prompt then go to the same experts.

    An embedding that is the output head too keeps its weights: a larger one would repeat the last token. Weights are
    changed in place, as captured CUDA graphs use them. A model without routers is left alone.
    """
    import torch

    parameters = list(named)
    weights = ((name.removesuffix(".weight"), value) for name, value in parameters if name.endswith(".weight"))
    routers = [value for name, value in weights if is_router(name) and value.dim() == 2 and value.shape[0] > 1]
    if not routers:
        return 0
    has_own_head = any(name.endswith("lm_head.weight") for name, _ in parameters)
    device = routers[0].device  # a worker has one
    source = torch.Generator(device=device).manual_seed(0)

    def drawn(value: torch.Tensor, deviation: float) -> torch.Tensor:
        return torch.randn(value.shape, generator=source, device=device).mul_(deviation).to(value.dtype)

    with torch.no_grad():
        for value in routers:
            value.copy_(drawn(value, value.shape[1] ** -0.5))
        for name, value in parameters:
            if BIAS.search(name):
                value.zero_()
            elif NORM.search(name):
                value.fill_(1.0)
            elif EMBEDDING.search(name) and has_own_head:
                value.copy_(drawn(value, 1.0))
    return len(routers)
