"""The requests of a rollout, as vllm.LLM.generate takes them, to be dealt out to replicas."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8plan.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts, with vLLM's SamplingParams: one for all, one for each, or None for the model's own; and what else
    generate takes, the same for all."""

    prompts: Sequence[Any]
    params: Any
    more: Mapping[str, Any]

    @classmethod
    def of(cls, prompts: Any, params: Any, more: Mapping[str, Any]) -> Requests:
        """Read the arguments of generate. Raises ConfigError for what cannot be dealt out."""
        single = isinstance(prompts, (str, Mapping)) or (isinstance(prompts, Sequence) and _is_tokens(prompts))
        found = [prompts] if single else list(prompts)
        if isinstance(params, Sequence) and len(params) != len(found):
            raise ConfigError(f"{len(params)} sampling_params for {len(found)} prompts; allowed: one, or one for each")
        if listed := [name for name, value in more.items() if isinstance(value, (list, tuple))]:
            raise ConfigError(f"{', '.join(listed)}: a list, which is not dealt out to replicas; allowed: one for all")
        return cls(found, params, more)

    def take(self, chosen: Sequence[int]) -> tuple[list[Any], Any, dict[str, Any]]:
        """Return what a replica's generate is given for these requests."""
        params = [self.params[at] for at in chosen] if isinstance(self.params, Sequence) else self.params
        return [self.prompts[at] for at in chosen], params, dict(self.more)

    def loads(self, expected: Sequence[float]) -> list[float]:
        """Return the response tokens of each request over its samples, given those expected of one response; no more
        than it may have."""
        each = self.params if isinstance(self.params, Sequence) else [self.params] * len(self.prompts)
        found = []
        for tokens, params in zip(expected, each, strict=True):
            most = getattr(params, "max_tokens", None)
            found.append((tokens if most is None else min(tokens, most)) * (getattr(params, "n", None) or 1))
        return found

    @property
    def names(self) -> list[Hashable]:
        """The identity of each prompt."""
        return [name_of(prompt) for prompt in self.prompts]


def name_of(prompt: Any) -> Hashable:
    """Return what tells a prompt from others: its text or its token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return prompt if isinstance(prompt, str) else tuple(prompt or ())


def _is_tokens(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
