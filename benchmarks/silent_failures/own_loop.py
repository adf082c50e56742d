"""An own loop: a RolloutEngine with FP8 weights and KV cache, a policy in torch, a Monitor and the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from tiny_models import started

from .lab import Lab, cut
from .policy import Policy, Rollout, checkpoint

PRECISION: Final = "fp8_block+fp8_kv"
RESPONSE: Final = 48  # tokens at most
SAMPLING: Final = {"temperature": 1.0, "max_tokens": RESPONSE, "ignore_eos": True, "logprobs": 0}
UPDATES: Final = 8  # of the trainer between two syncs


class OwnLab(Lab):
    """The lab with a RolloutEngine."""

    def __init__(self, kind: str, engine: Any) -> None:
        super().__init__(Policy(kind), engine, self._rolled)

    def _rolled(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Rollout]:
        return cut(rolled(self.engine, prompts, sampling))

    def watch(self, **settings: Any) -> None:
        super().watch(**{"engine": self.engine} | settings)

    def examine(self) -> None:
        self.doctor(weights=self.policy.tensors())

    def sync(self, tensors: Any = None) -> Any:
        """Send the policy's weights, or others."""
        return self.engine.sync_weights(self.policy.tensors() if tensors is None else tensors)

    def learn(self, updates: int = UPDATES) -> None:
        """Train on the healthy batch."""
        self.policy.learn(self.healthy.rollouts, updates)

    def go_on(self, **sampling: Any) -> None:
        """The run as it is now, then the doctor, with the trainer's weights."""
        self.last(*(self.roll(seed=seed, **sampling) for seed in (11, 12)), sampling=sampling or None)
        self.examine()

    def restore(self) -> None:
        super().restore()
        self.engine.sync_weights(self.policy.tensors())
        self.roll(seed=0)  # KV scales are measured on a rollout
        self.engine.recalibrate_kv()

    def worker(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something inside of the worker."""
        return self.engine.llm.collective_rpc(act, args=arguments)[0]

    def mend(self) -> None:
        vars(self.engine).pop("_reset_prefix_cache", None)
        self.worker(repair)


@contextmanager
def lab(kind: str = "dense") -> Iterator[OwnLab]:
    """A lab on a fresh engine, calm."""
    with started(checkpoint(kind), "", PRECISION) as engine:
        made = OwnLab(kind, engine)
        made.worker(remember)
        made.calm()
        yield made


def rolled(engine: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Rollout]:
    """Sample one response to each prompt. seed: of torch, which vLLM's sampler on a CPU draws from"""
    from vllm import SamplingParams

    torch.manual_seed(sampling.pop("seed", 0))
    how = SamplingParams(**(SAMPLING | sampling))
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], how)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (one,) = output.outputs
        logprobs = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        found.append(Rollout(list(prompt), list(one.token_ids), logprobs))
    return found


# Inside of the worker


def model_of(worker: Any) -> Any:
    return worker.model_runner.get_model()


def remember(worker: Any) -> None:
    """Keep what a sync does not bring back."""
    worker.remembered = {name: buffer.clone() for name, buffer in model_of(worker).named_buffers()}


def repair(worker: Any) -> None:
    """Bring that back, and the way in which log-probs are made."""
    for name, buffer in model_of(worker).named_buffers():
        if "scale" not in name:
            buffer.copy_(worker.remembered[name])
    give(worker, "processed_logprobs")


def give(worker: Any, mode: str) -> None:
    """Have vLLM return log-probs of another `logprobs_mode`, as if it had been started with it."""
    runner = worker.model_runner
    for place in (runner.sampler, runner.sampler.topk_topp_sampler, runner.model_config):
        place.logprobs_mode = mode


def fill(worker: Any, part: str, value: float) -> int:
    """Write one value over every parameter and buffer whose name has `part`. Returns their number."""
    model = model_of(worker)
    chosen = [x for name, x in [*model.named_parameters(), *model.named_buffers()] if part in name]
    for tensor in chosen:
        tensor.data.fill_(value)
    return len(chosen)


def quantised(worker: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The FP8 weights with their block scales."""
    found = []
    for layer in model_of(worker).modules():
        weight = layer._parameters.get("weight")
        scale = layer._parameters.get("weight_scale_inv")
        scale = layer._parameters.get("weight_scale") if scale is None else scale
        if weight is not None and weight.dtype == torch.float8_e4m3fn and scale is not None:
            found.append((weight, scale))
    return found


def scales(worker: Any) -> list[torch.Tensor]:
    return [scale.data.clone() for _, scale in quantised(worker)]


def put_scales(worker: Any, kept: Sequence[torch.Tensor]) -> None:
    for (_, scale), old in zip(quantised(worker), kept, strict=True):
        scale.data.copy_(old)


def drop_a_scale(worker: Any) -> None:
    """Cast the first FP8 weight's values to E4M3 without its scale, which stays."""
    weight, scale = quantised(worker)[0]
    rows, columns = weight.shape
    wide = scale.data.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    weight.data.copy_((weight.data.float() * wide).to(torch.float8_e4m3fn))


def invert_a_scale(worker: Any) -> None:
    quantised(worker)[0][1].data.reciprocal_()


def put_kv_scales(worker: Any, value: float) -> None:
    """Write one value over all KV scales, as a refit or a wake-up may."""
    for layer in model_of(worker).modules():
        for part in ("_k_scale", "_v_scale"):
            if isinstance(found := getattr(layer, part, None), torch.Tensor):
                found.fill_(value)
                if hasattr(layer, f"{part}_float"):
                    setattr(layer, f"{part}_float", value)
