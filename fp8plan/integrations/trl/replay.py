"""Router replay in TRL: the routes of a rollout on their way from the engine's outputs to the trainer's forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8plan.errors import ConfigError
from fp8plan.runtime.replay import replayed
from fp8plan.runtime.routes import padded_routes

Routes = Sequence[Any]  # of each sequence, as an engine returns them
OFF = "or router_replay=False"


def refuse_replay(args: Any, turns: bool, model: Any) -> None:
    """Raise ConfigError for a trainer that cannot replay the engine's experts.

    args:  the GRPOConfig
    turns: rollouts have turns, of tools, of environments or of the user's own function
    model: the policy
    """
    if args.vllm_mode != "colocate":
        raise ConfigError(
            f"router_replay is True, and TRL's server returns no experts; type: vllm_mode='colocate', {OFF}"
        )
    if args.torch_compile:
        raise ConfigError(f"router_replay is True, and torch_compile has none; type: torch_compile=False, {OFF}")
    if turns:
        raise ConfigError(
            "router_replay is True, and the turns of tools, environments and rollout_func have routes of their own; "
            f"allowed: none of these three, {OFF}"
        )
    with replayed(model, None):  # raises for a model without known routers
        pass


def refuse_other(routes: Routes, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless the routes have all tokens of these sequences but the last one of each."""
    returned = [len(each) for each in routes]
    needed = [len(prompt) + len(completion) - 1 for prompt, completion in zip(prompts, completions, strict=True)]
    if returned != needed:
        raise ConfigError(
            f"the engine returned routes of {returned[:4]} tokens for sequences that need {needed[:4]}; allowed: "
            f"prompts that TRL hands on as they are, {OFF}"
        )


class Replays:
    """The routes of the batch that a trainer scores now.

    routes:    None: the model's own choice
    differing: the share of the last rollout's scored tokens for which the policy's own routers pick other experts;
               None: nothing was replayed
    """

    def __init__(self) -> None:
        self.routes: Routes | None = None
        self.differing: float | None = None

    @contextmanager
    def of(self, routes: Routes | None) -> Iterator[None]:
        """Let the forwards in `scoring` use these routes; None: the model's own choice."""
        self.routes, before = routes, self.routes
        try:
            yield
        finally:
            self.routes = before

    def take(self, routes: Routes) -> None:
        """Let the next forwards use these routes, until the surrounding `of` ends."""
        self.routes, self.differing = routes, None

    @contextmanager
    def scoring(self, model: Any, attention_mask: torch.Tensor, completion: int) -> Iterator[None]:
        """Replay in this `with`, if there are routes.

        attention_mask: (batch, prompt + completion); prompts are padded on the left, completions on the right
        completion:     columns of the completions
        """
        if self.routes is None:
            yield
            return
        prompt = attention_mask[:, :-completion]
        routes = padded_routes(self.routes, _tokens(self.routes, prompt, completion))
        with replayed(model, routes) as replay:
            yield
        if self.differing is None:  # of the policy, which is scored first
            scored = torch.zeros_like(attention_mask)
            scored[:, prompt.shape[1] - 1 : -1] = attention_mask[:, -completion:]  # the inputs of the scored tokens
            self.differing = replay.differing(scored).tokens if scored.any() else float("nan")


def _tokens(routes: Routes, prompt_mask: torch.Tensor, completion: int) -> torch.Tensor:
    """Return a mask of the sequences' tokens, (batch, prompt + completion).

    TRL's own mask leaves out completions that were cut off, if it is asked to.
    """
    columns = torch.arange(prompt_mask.shape[1] + completion, device=prompt_mask.device)
    starts = prompt_mask.shape[1] - prompt_mask.sum(-1, keepdim=True)
    lengths = torch.tensor([[len(each) + 1] for each in routes], device=prompt_mask.device)
    return (columns >= starts) & (columns < starts + lengths)
