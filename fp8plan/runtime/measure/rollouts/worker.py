"""The measuring side inside vLLM's worker: memory, parts, even routing, and the kernels of a few steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.model.emit.vllm import is_router
from fp8plan.runtime.measure.rollouts.engine_facts import engine_parts

if TYPE_CHECKING:
    import torch

# Names of parameters, as vLLM has them in the models of fp8plan's families.
BIAS: Final = re.compile(r"bias$")
NORM: Final = re.compile(r"norm\w*\.weight$")
EMBEDDING: Final = re.compile(r"embed\w*\.weight$")
LONGEST_NAME = 200
ANNOTATIONS: Final = ("execute_", "gpu_", "ProfilerStep", "forward", "Command Buffer")  # spans, no kernels


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

    def fp8plan_engine_parts(self) -> dict[str, Any]:
        """KV cache groups, modules and parameters."""
        return engine_parts(getattr(self, "model_runner", None))

    def fp8plan_route_evenly(self) -> int:
        """Make tokens go to all experts alike, as in a trained model. Return the number of routers."""
        return route_evenly(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]

    def fp8plan_kernels_begin(self, steps: int, requests: int = 0, tokens: int = 0) -> None:
        """Record the kernels of the next `steps` steps that decode exactly `requests` requests, or fill at least
        `tokens` tokens of prompts."""
        wanted = fills(tokens) if tokens else decodes(requests)
        self._fp8plan_kernels = StepKernels(self.model_runner, wanted, steps)  # type: ignore[attr-defined]

    def fp8plan_kernels_end(self) -> Recorded:
        """The mean of the recorded steps."""
        return self._fp8plan_kernels.end()


def decodes(requests: int) -> Callable[[Sequence[int]], bool]:
    """Tell whether each of exactly `requests` requests gets one token."""
    return lambda tokens: len(tokens) == requests == sum(tokens)


def fills(prompt_tokens: int) -> Callable[[Sequence[int]], bool]:
    """Tell whether a step fills at least `prompt_tokens` tokens of prompts and does nothing else."""
    return lambda tokens: min(tokens, default=0) > 1 and sum(tokens) >= prompt_tokens


class Recorded(NamedTuple):
    """A mean of recorded steps.

    kernels: (name, launches, microseconds), the longest first
    tokens:  tokens of all requests
    span_us: microseconds from the first kernel's begin to the last one's end, by step. If the kernels' sum is less, the
             GPU waited for its host. If it is more, kernels ran in parallel
    """

    kernels: list[tuple[str, float, float]]
    tokens: float
    span_us: float


class StepKernels:
    """The kernels of `steps` steps in a row, by torch's profiler. Wraps the model runner's execute_model.

    wanted: tokens of each request in a step -> true to record the step
    tokens: tokens of all requests in the recorded steps
    """

    def __init__(self, runner: Any, wanted: Callable[[Sequence[int]], bool], steps: int) -> None:
        import torch

        self.runner, self.wanted, self.left, self.steps, self.tokens = runner, wanted, steps, steps, 0
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.execute, self.running = runner.execute_model, False
        runner.execute_model = self._execute

    def _execute(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        tokens = list(scheduled.num_scheduled_tokens.values())
        wanted = self.wanted(tokens)
        if wanted and not self.running and self.left:
            self._at_rest(self.profile.start)
            self.running = True
        elif self.running and (not wanted or not self.left):
            self._at_rest(self.profile.stop)
            self.running = False
        self.left -= self.running
        self.tokens += self.running * sum(tokens)
        return self.execute(scheduled, *arguments, **named)

    def _at_rest(self, act: Any) -> None:
        import torch

        torch.cuda.synchronize()
        act()

    def end(self) -> Recorded:
        if self.running:
            self._at_rest(self.profile.stop)
        self.runner.execute_model = self.execute
        steps, durations = self.steps - self.left, defaultdict(list)
        if not steps:
            return Recorded([], 0.0, 0.0)
        times = []
        results: Any = self.profile.profiler
        for event in results.kineto_results.events():
            if event.device_type().name == "CUDA" and not event.name().startswith(ANNOTATIONS):
                durations[event.name()[:LONGEST_NAME]].append(event.duration_ns() / 1e3)
                times += [event.start_ns(), event.start_ns() + event.duration_ns()]
        rows = [(name, round(len(us) / steps, 2), round(sum(us) / steps, 2)) for name, us in durations.items()]
        span = (max(times, default=0) - min(times, default=0)) / 1e3
        return Recorded(sorted(rows, key=lambda row: -row[2]), self.tokens / steps, round(span / steps, 2))


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
