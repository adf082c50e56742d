"""Router replay: the trainer's forward uses the experts that the engine picked for each token (R3, arXiv 2510.11370).

    outputs = engine.generate(prompts, params, routed_experts=True)
    routes = fp8plan.padded_routes([o.outputs[0].routed_experts for o in outputs], attention_mask)
    with fp8plan.replayed(policy, routes) as replay:
        logits = policy(input_ids, attention_mask).logits
    loss(logits).backward()
    replay.differing(mask)                  # how often the policy's own routers would have picked other experts

The weights of the replayed experts are the trainer's own: a router's logits become weights as in the model's own code,
so gradients reach the router. Needs torch and one of the routers in RULES. Neither an engine nor vLLM is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from fp8plan.errors import ConfigError
from fp8plan.runtime.routes import UNKNOWN, Differing, share_differing

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def _mixtral(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(dim=-1).gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True)


def _qwen3_moe(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    if router.norm_topk_prob:
        return _qwen3_5_moe(router, logits, experts)
    return _probabilities(logits, experts).to(logits.dtype)


def _qwen3_5_moe(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = _probabilities(logits, experts)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype)


def _probabilities(logits: Tensor, experts: Tensor) -> Tensor:
    import torch

    return logits.softmax(dim=-1, dtype=torch.float).gather(1, experts)


def _gpt_oss(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(dim=1, dtype=logits.dtype)


def _glm4_moe(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    scale: float = router.routed_scaling_factor
    return weights * scale


# Class of a router in transformers -> the weights of given experts, from the router's logits: (tokens, experts) and
# (tokens, experts per token). Each computes as `forward` of its class (transformers 5.17 to 5.23), to the bit.
Rule = Callable[[Any, "Tensor", "Tensor"], "Tensor"]
RULES: Final[Mapping[str, Rule]] = {
    "Qwen3MoeTopKRouter": _qwen3_moe,
    "Qwen2MoeTopKRouter": _qwen3_moe,
    "Qwen3NextTopKRouter": _qwen3_moe,
    "OlmoeTopKRouter": _qwen3_moe,
    "Qwen3_5MoeTopKRouter": _qwen3_5_moe,
    "Qwen3VLMoeTextTopKRouter": _qwen3_5_moe,
    "MixtralTopKRouter": _mixtral,
    "GptOssTopKRouter": _gpt_oss,
    "Glm4MoeTopkRouter": _glm4_moe,
    "Glm4MoeLiteTopkRouter": _glm4_moe,
    "DeepseekV3TopkRouter": _glm4_moe,
}


@contextmanager
def replayed(model: Module, routes: Tensor | None) -> Iterator[Replay]:
    """Let the forwards in this `with` use these experts, and record the model's own choice.

    model:  a transformers model with one of the routers in RULES, bare or wrapped (PEFT, DDP, FSDP)
    routes: (batch, length, layers, experts per token), whole numbers; UNKNOWN where the model's own choice stays. The
            layers are all hidden layers of the model, as vLLM returns them; those without experts are not read.
            None: the model's own choice everywhere

    Forwards take the tokens in order, so a batch may be cut into micro-batches of whole rows. The backward pass may
    come after the `with`: what gradient checkpointing recomputes uses the same experts. Raises ConfigError for a model
    without such routers, for routes of other shapes, and if the forwards had fewer or more tokens than the routes.
    """
    routers = _routers_of(model)
    replay = Replay(routers, routes)
    with routers.following(replay):
        yield replay
    replay.refuse_rest()


def has_routers(model: Module) -> bool:
    """Return True if `replayed` takes this model."""
    try:
        _routers_of(model)
    except ConfigError:
        return False
    return True


class Replay:
    """The routing of the forwards in one `with` of `replayed`. routes: as given there"""

    def __init__(self, routers: Routers, routes: Tensor | None) -> None:
        if routes is not None:
            routers.refuse(routes)
        self.routes = routes
        self._routers = routers
        self._done: list[Forward] = []

    @property
    def own_choice(self) -> Tensor:
        """Experts that the model's own routers picked: int16, UNKNOWN in layers without experts.

        With a replay they saw hidden states that the replayed experts computed. Shape: that of the routes; (tokens,
        layers, experts per token) without any.
        """
        import torch

        if not self._done:
            raise ConfigError("no forward has run; call the model in the `with`")
        own = torch.cat([self._routers.stacked(forward.own) for forward in self._done])
        return own if self.routes is None else own.reshape(self.routes.shape)

    def differing(self, mask: Tensor | None = None) -> Differing:
        """Return how often the model's own routers would have picked other experts than those of the routes.

        mask: (batch, length), the tokens to count; None: all. Raises ConfigError as `share_differing`.
        """
        if self.routes is None:
            raise ConfigError("nothing was replayed; call share_differing with two routings")
        return share_differing(self.routes, self.own_choice, mask)

    def begin(self) -> Forward:
        """Return a new forward. Its routes begin after those of the last one."""
        routes = None if self.routes is None else self.routes.flatten(0, 1)
        return Forward(routes, self._tokens)

    def end(self, forward: Forward) -> None:
        """Keep a forward that has come to its end. Raises ConfigError if a router was not called in it."""
        missing = len(self._routers.rules) - len(forward.own)
        if missing:
            raise ConfigError(
                f"{missing} of {len(self._routers.rules)} routers were not called as modules, so nothing was replayed "
                "there; allowed: a forward of the whole model that was not compiled before, and without kernels in "
                "place of modules with experts"
            )
        self._done.append(forward)

    def refuse_rest(self) -> None:
        """Raise ConfigError if the forwards had fewer tokens than the routes."""
        if self.routes is not None:
            expected = self.routes.shape[0] * self.routes.shape[1]
            if self._tokens != expected:
                raise ConfigError(
                    f"the routes have {expected} tokens, and the forwards had {self._tokens}; pass the routes of these "
                    "forwards"
                )

    @property
    def _tokens(self) -> int:
        """Tokens of the forwards that have ended."""
        return sum(forward.tokens for forward in self._done)


class Forward:
    """One forward of the model: its tokens' routes, and the routers' own choice."""

    def __init__(self, routes: Tensor | None, start: int) -> None:
        self._routes, self._start = routes, start
        self.own: dict[int, Tensor] = {}

    @property
    def tokens(self) -> int:
        return len(next(iter(self.own.values()), ()))

    def experts(self, layer: int, own: Tensor) -> Tensor | None:
        """Return the experts to use in a layer; None: the model's own. own: (tokens, experts per token)"""
        if self._routes is None:
            return None
        end = self._start + len(own)
        if end > len(self._routes):
            raise ConfigError(
                f"the routes have {len(self._routes)} tokens, and the forwards have {end} or more; pass the routes of "
                "these forwards"
            )
        used = self._routes[self._start : end, layer].to(own)  # layers may lie on several GPUs
        return used.where(used != UNKNOWN, own)


class Routers:
    """The routers of one model, and the hooks that replace their choice.

    The hooks act in the forwards of a `with`, and in their backward pass: gradient checkpointing runs the routers again
    there.
    """

    def __init__(self, backbone: Any, routers: Sequence[tuple[int, Module]]) -> None:
        """Take the routers with the numbers of their layers. PEFT may hold several of a layer, of which one runs."""
        self.rules = {layer: RULES[type(router).__name__] for layer, router in routers}
        self.routers = routers
        self._backbone: ref[Module] = ref(backbone)  # a key of _ROUTERS, which must not keep it alive
        self._layers = len(backbone.layers)
        first: Any = routers[0][1]
        self._top_k, self._experts = first.top_k, first.num_experts
        self._hooks: list[Any] = []
        self._replay: Replay | None = None  # of the `with` that is open
        self._forward: Forward | None = None  # the forward whose routers run now
        self._recomputing = False

    def refuse(self, routes: Tensor) -> None:
        """Raise ConfigError for routes of another shape than this model's, and for impossible experts."""
        import torch

        shape = tuple(routes.shape)
        if len(shape) != 4 or shape[2:] != (self._layers, self._top_k):
            raise ConfigError(
                f"the routes have the shape {shape}; allowed: (batch, length, {self._layers}, {self._top_k}), for all "
                f"{self._layers} hidden layers and {self._top_k} experts per token of this model"
            )
        if routes.dtype not in (torch.int16, torch.int32, torch.int64):
            raise ConfigError(
                f"the routes have the dtype {routes.dtype}; allowed: torch.int16, as padded_routes returns"
            )
        used = routes[:, :, sorted(self.rules)]
        if used.numel() and not UNKNOWN <= used.min() <= used.max() < self._experts:
            raise ConfigError(
                f"the routes name experts {used.min()} to {used.max()}; allowed: 0 to {self._experts - 1}, and "
                f"{UNKNOWN} for a token without"
            )
        # An engine that did not capture a layer returns zeros. A router never picks an expert twice.
        if self._top_k > 1 and ((used[..., 0] == used[..., 1]) & (used[..., 0] != UNKNOWN)).any():
            raise ConfigError(
                "the routes name an expert twice for a token; allowed: the experts of all layers that have any, as the "
                "engine returned them"
            )

    def stacked(self, own: Mapping[int, Tensor]) -> Tensor:
        """Return one forward's choice as (tokens, layers, experts per token)."""
        import torch

        some = next(iter(own.values()))
        unknown = torch.full_like(some, UNKNOWN)
        return torch.stack([own.get(layer, unknown).to(some.device) for layer in range(self._layers)], dim=1)

    @contextmanager
    def following(self, replay: Replay) -> Iterator[None]:
        """Let the forwards in this `with` follow a replay. Raises ConfigError inside another one."""
        if self._replay is not None:
            raise ConfigError("routes are replayed or recorded in this model already; end that `with` first")
        self._leave_backward()
        self._replay = replay
        backbone: Any = self._backbone()
        hooks = [
            backbone.register_forward_pre_hook(lambda *_: self._begin(replay)),
            backbone.register_forward_hook(lambda *args: self._end(replay, args[-1])),
        ]
        self._attach()
        try:
            yield
        finally:
            self._replay = self._forward = None
            for hook in hooks:
                hook.remove()
            self._detach()

    def _attach(self) -> None:
        if not self._hooks:
            self._hooks = [router.register_forward_hook(partial(self._routed, layer)) for layer, router in self.routers]

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _routed(self, layer: int, router: Module, _: Any, output: Any) -> Any:
        """Return a router's output with the experts to use: logits, weights, experts."""
        import torch

        if self._recomputing and torch._C._current_graph_task_id() == -1:
            self._leave_backward()  # that backward pass was broken off by an exception
        forward = self._forward
        if forward is None:
            return None
        logits, weights, own = output
        if not self._recomputing:
            forward.own[layer] = own.to(torch.int16)
        experts = forward.experts(layer, own)
        if experts is None:
            return None
        return logits, self.rules[layer](router, logits, experts).to(weights.dtype), experts

    def _begin(self, replay: Replay) -> None:
        if not self._recomputing:
            self._forward = replay.begin()

    def _end(self, replay: Replay, output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is None or self._recomputing:
            return
        replay.end(forward)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter_backward(forward))

    def _enter_backward(self, forward: Forward) -> None:
        """Let recomputed layers follow a forward from now on. Called before gradients reach its layers.

        Autograd goes back through several forwards one after the other, the last one first.
        """
        from torch.autograd import Variable

        if not self._recomputing:
            self._recomputing = True
            self._attach()
            Variable._execution_engine.queue_callback(self._leave_backward)
        self._forward = forward

    def _leave_backward(self) -> None:
        if self._recomputing:
            self._recomputing, self._forward = False, None
            if self._replay is None:
                self._detach()


# The part of a model that holds its layers -> its Routers. Two `with`s of one model share them.
_ROUTERS: Final[WeakKeyDictionary[Module, Routers]] = WeakKeyDictionary()


def _routers_of(model: Module) -> Routers:
    """Return the routers of a model. Raises ConfigError if it has none of RULES."""
    named = {name: module for name, module in model.named_modules() if type(module).__name__ in RULES}
    places = [re.match(r"(?:(.*)\.)?layers\.(\d+)\.", name) for name in named]
    if not named or None in places:
        raise ConfigError(
            f"{type(model).__name__} has no router that can be replayed; allowed: models of transformers 5.17 or later "
            f"with one of {', '.join(RULES)}"
        )
    parents = {place[1] or "" for place in places if place}
    if len(parents) > 1:
        raise ConfigError(
            f"{type(model).__name__} has routers in {', '.join(sorted(parents))}; pass one of these parts"
        )
    backbone = model.get_submodule(parents.pop())
    layers = (int(place[2]) for place in places if place)
    routers = list(zip(layers, named.values(), strict=True))
    if backbone not in _ROUTERS or _ROUTERS[backbone].routers != routers:  # PEFT may wrap a router later
        _ROUTERS[backbone] = Routers(backbone, routers)
    return _ROUTERS[backbone]


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a forward's output."""
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
