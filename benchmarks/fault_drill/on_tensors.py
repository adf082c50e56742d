"""Faults of a trainer's tensors: values, names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from .drill import Scene, Tensors
from .fault import FROM_A_TRAINER, OLD, REFUSES, SERVER, Fault

NORM: Final = "model.layers.2.input_layernorm.weight"
DOWN: Final = "model.layers.2.mlp.down_proj.weight"  # among the last, so that much has been written when it comes
Q: Final = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Spoil = Callable[[Tensors], Any]


def sent(spoil: Spoil) -> Callable[[Scene], None]:
    return lambda scene: scene.send(spoil(scene.tensors())) and None


def valued(name: str, value: float) -> Spoil:
    """One value of a tensor."""

    def spoil(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[7] = value
        return tensors

    return spoil


def changed(name: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda tensors: tensors | {name: change(tensors[name])}


def breaking_off(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """A trainer's iterator with an error of its own."""
    from fp8plan.errors import ConfigError

    for number, pair in enumerate(tensors.items()):
        if number == 24:
            raise ConfigError("the trainer's own gather has failed")
        yield pair


def _fault(name: str, how: str, spoil: Spoil, says: str, *left_out: str) -> Fault:
    """The Publisher refuses before it writes. An engine may have written some tensors by then."""
    ways = {place: way for place, way in FROM_A_TRAINER.items() if place not in left_out}
    reasons = dict.fromkeys(left_out, "a client of the server's lifecycle announces all tensors before it sends any")
    return Fault(name, "tensors", how, sent(spoil), ways, (OLD, REFUSES), says, reasons)


def names(tensor: str) -> str:
    return tensor.replace(".", r"\.")


FAULTS: Final = (
    _fault("nan", "a NaN in a matrix", valued(DOWN, float("nan")), names(DOWN)),
    _fault("infinity", "an infinity in a norm", valued(NORM, float("-inf")), names(NORM)),
    _fault("zeros", "a matrix of zeros", changed(DOWN, lambda x: x * 0), names(DOWN)),
    _fault("name_not_sent", "a norm is not sent", lambda t: {n: x for n, x in t.items() if n != NORM},
           f"(missing|not sent): .*{names(NORM)}"),
    _fault("name_not_known", "a tensor that the model has not", lambda t: t | {"model.extra.weight": t[NORM]},
           r"model\.extra\.weight"),
    _fault("name_sent_twice", "a norm comes twice", lambda t: [*t.items(), (NORM, t[NORM] * 2)], names(NORM)),
    _fault("names_swapped_shapes", "a matrix of another one's shape",
           lambda t: t | {DOWN: t["model.layers.2.mlp.up_proj.weight"]}, names(DOWN)),
    _fault("float16", "a matrix in float16", changed(Q, lambda x: x.half()), names(Q)),
    _fault("integers", "a norm in int64", changed(NORM, lambda x: x.long()), names(NORM)),
    _fault("e4m3_without_scale", "a norm in E4M3", changed(NORM, lambda x: x.to(_e4m3())), names(NORM)),
    _fault("shape", "a matrix without its last row", changed(Q, lambda x: x[:-1].clone()), names(Q)),
    _fault("tied_head", "a tied model's head that differs from its embedding",
           lambda t: t | {HEAD: t[EMBEDDING] * 1.5}, f"{names(HEAD)} and {names(EMBEDDING)} differ"),
    _fault("iterator", "the trainer's iterator breaks off", breaking_off, "the trainer's own gather has failed",
           SERVER),
)  # fmt: skip


def _e4m3() -> Any:
    import torch

    return torch.float8_e4m3fn
