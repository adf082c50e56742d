"""Every fault of a sync names what is wrong and leaves a defined state: the old weights serve, or none until a whole sync.

What the manifest shows is refused before anything is sent; what only the stream shows makes the engine refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import (
    EXPERTS,
    LAYERS,
    PROMPTS,
    Outputs,
    answer,
    checkpoint,
    cpu_plan,
    generate,
    quantised,
    started,
    started_beside_references,
    weights,
)

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.engine import RolloutEngine
from fp8plan.runtime.weight_sync import SyncSettings

torch = pytest.importorskip("torch")
E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.vllm

Tensors = dict[str, Any]
ATTENTION = "model.layers.1.self_attn"
UP = {"dense": "model.layers.1.mlp.up_proj.weight", "moe": f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"}
DOWN = {kind: name.replace("up_proj", "down_proj") for kind, name in UP.items()}
Q, K = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
PROJECTION = "model.layers.0.mlp.*proj.weight"
PARTS = {
    kind: {
        "a norm": NORM,
        "a norm in attention": f"{ATTENTION}.k_norm.weight",
        "qkv": K,
        "gate_up": UP[kind],
        "down": DOWN[kind],
        "embedding": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
    }
    for kind in UP
}
OLD_SERVE = "Nothing was sent; the old weights serve"


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine
    references: dict[str, Outputs]

    def sends(self) -> Tensors:
        """Good new weights, to be spoilt."""
        return weights(self.kind, "b")

    def serves(self, which: str) -> bool:
        return self.engine.serving and answer(self.engine, PROMPTS[0]) == self.references[which][0]


@pytest.fixture(scope="module", params=["dense", "moe"])
def started_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with started_beside_references(request.param, "fp8_block") as (engine, references):
        yield Subject(request.param, engine, references)


@pytest.fixture
def subject(started_subject: Subject) -> Subject:
    """An engine that serves the weights a."""
    started_subject.engine.sync_weights(weights(started_subject.kind, "a"))
    return started_subject


@pytest.fixture
def settings(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the engine other SyncSettings for one test, as if it had been started with them."""
    state = subject.engine.state
    return lambda **changes: monkeypatch.setattr(state, "settings", replace(state.settings, **changes))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def renamed(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {f"{other}_" if other == name else other: tensor for other, tensor in tensors.items()}


# What is sent, and what the error says, for a kind of model.
Fault = Callable[[str], tuple[Callable[[Tensors], Any], str]]

IN_MANIFEST: dict[str, Fault] = {
    "a part of qkv missing": lambda kind: (without(K), f"missing: {K}; "),
    "a part of gate_up missing": lambda kind: (without(UP[kind]), f"missing: {UP[kind]}; "),
    "too few rows": lambda kind: (changed(Q, lambda t: t[:-1]), rf"{Q} has shape \[255, 256\]; allowed: \[256, 256\]"),
    "transposed": lambda kind: (changed(DOWN[kind], lambda t: t.t()), rf"{DOWN[kind]} has shape \[\d+, \d+\]; allowed"),
    "float32": lambda kind: (changed(UP[kind], lambda t: t.float()), f"{UP[kind]} is float32; allowed: bfloat16"),
    "a float32 norm": lambda kind: (changed(NORM, lambda t: t.float()), f"{NORM} is float32; allowed: bfloat16"),
    "unknown": lambda kind: (renamed(NORM), f"unknown: {NORM}_; allowed"),
    "twice": lambda kind: (lambda tensors: [*tensors.items(), (K, tensors[K])], f"twice: {K}; allowed"),
    "empty": lambda kind: (lambda tensors: {}, "manifest is empty; allowed: every tensor"),
    "fp8": lambda kind: (lambda tensors: quantised(tensors, [Q]), f"{Q} is float8_e4m3fn, and this engine takes BF16"),
}


@pytest.mark.parametrize("fault", IN_MANIFEST)
def test_what_the_manifest_shows_leaves_the_old_weights_serving(subject: Subject, fault: str) -> None:
    spoil, says = IN_MANIFEST[fault](subject.kind)
    refused(subject, spoil(subject.sends()), says)


def refused(subject: Subject, sent: Any, says: str) -> None:
    """The error of sending it says so, the weights a serve, and a whole sync still works."""
    with pytest.raises(SyncError, match=f"{says}.*{OLD_SERVE}"):
        subject.engine.sync_weights(sent)
    assert subject.serves("a")
    subject.engine.state.settings, now = SyncSettings(), subject.engine.state.settings
    subject.engine.sync_weights(subject.sends())
    subject.engine.state.settings = now
    assert subject.serves("b")


# Where no checkpoint lies beside the engine, vLLM's own loaders are asked what they take.
IN_DRY_RUN: dict[str, Fault] = {
    "a part of qkv missing": lambda kind: (
        without(K),
        rf"missing: 32768 of 131072 elements of {ATTENTION}.qkv_proj.weight, which got .*{Q}",
    ),
    "a part of gate_up missing": lambda kind: (
        without(UP[kind]),
        r"missing: \d+ of \d+ elements of model.layers.1.mlp.",
    ),
    "a norm missing": lambda kind: (without(NORM), f"missing: 256 of 256 elements of {NORM}, which got nothing"),
    "lm_head missing": lambda kind: (without("lm_head.weight"), "missing: .* of lm_head.weight, which got nothing"),
    "too few rows": lambda kind: (changed(Q, lambda t: t[:-1]), rf"does not take {Q} of shape \[255, 256\]"),
    "too many rows": lambda kind: (changed(Q, lambda t: t.repeat(2, 1)), rf"does not take {Q} of shape \[512, 256\]"),
    "transposed": lambda kind: (changed(DOWN[kind], lambda t: t.t()), f"does not take {DOWN[kind]}"),
    "half an expert or MLP": lambda kind: (changed(UP[kind], lambda t: t[: len(t) // 2]), UP[kind]),
    "unknown": lambda kind: (renamed(NORM), f"{NORM}_"),
}


@pytest.mark.parametrize("fault", IN_DRY_RUN)
def test_vllms_loaders_are_asked_where_no_checkpoint_is_known(
    subject: Subject, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.engine.state, "expected", None)
    spoil, says = IN_DRY_RUN[fault](subject.kind)
    refused(subject, spoil(subject.sends()), says)


def test_a_bare_iterator_needs_a_manifest_or_a_checkpoint(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.engine.state, "expected", None)
    refused(subject, iter(subject.sends().items()), r"an iterator does not say .* allowed: manifest=\[")
    with pytest.raises(SyncError, match=rf"not a list of \(name, dtype, shape\).*{OLD_SERVE}"):
        subject.engine.sync_weights(iter(subject.sends().items()), manifest=["lm_head.weight"])


def in_fp8(tensors: Tensors) -> Tensors:
    return quantised(tensors, [name for name in tensors if "_proj." in name])


# Into an engine that takes FP8 and scales.
IN_FP8: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "bf16": (lambda tensors: tensors, rf"{PROJECTION} is bfloat16"),
    "one in bf16, with scales": (lambda tensors: in_fp8(tensors) | {Q: tensors[Q]}, f"{Q} is bfloat16"),
    "scales missing": (lambda tensors: without(f"{Q}_scale_inv")(in_fp8(tensors)), f"missing: {Q}_scale_inv"),
    "scales without weight": (lambda tensors: without(Q)(in_fp8(tensors)), f"missing: {Q};"),
    "scales of another shape": (
        lambda tensors: changed(f"{Q}_scale_inv", lambda t: t[:, :1])(in_fp8(tensors)),
        rf"{Q}_scale_inv has shape \[2, 1\]; allowed: \[2, 2\]",
    ),
    "scales in bf16": (
        lambda tensors: changed(f"{Q}_scale_inv", lambda t: t.bfloat16())(in_fp8(tensors)),
        f"{Q}_scale_inv is bfloat16; allowed: float32",
    ),
    "a norm in fp8": (lambda tensors: changed(NORM, lambda t: t.to(E4M3))(in_fp8(tensors)), f"{NORM} is float8_e4m3fn"),
}


@pytest.mark.parametrize("fault", IN_FP8)
def test_an_engine_that_takes_fp8_says_what_is_not(subject: Subject, fault: str, settings: Callable[..., None]) -> None:
    settings(weights_in="fp8_block")
    spoil, says = IN_FP8[fault]
    refused(subject, spoil(subject.sends()), says)


def broken(tensors: Tensors, after: int, error: BaseException | None = None) -> Iterator[tuple[str, Any]]:
    """A stream that raises after some tensors, or just ends."""
    for number, pair in enumerate(tensors.items()):
        if number == after:
            if error is not None:
                raise error
            return
        yield pair


def streamed(change: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
    """Tensors that are not as announced: the manifest is the checkpoint's, the stream another."""

    def stream(tensors: Tensors) -> Iterator[tuple[str, Any]]:
        sent = change(tensors)
        yield from sent.items() if isinstance(sent, dict) else sent

    return stream


def poisoned(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def poison(tensor: Any) -> Any:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return changed(name, poison)


IN_STREAM: dict[str, Fault] = {
    **{
        f"{value} in {part}": lambda kind, value=value, part=part: (
            poisoned(PARTS[kind][part], value),
            f"not finite: {PARTS[kind][part]} ",
        )
        for value in (math.nan, math.inf, -math.inf)
        for part in PARTS["dense"]
    },
    "it raises": lambda kind: (lambda tensors: broken(tensors, 20, RuntimeError("a rank is lost")), "a rank is lost; "),
    "it ends early": lambda kind: (lambda tensors: broken(tensors, 20), r"announced and not sent: .* in all\)"),
    "a tensor less": lambda kind: (streamed(without(UP[kind])), rf"announced and not sent: {UP[kind]} \(1 in all\)"),
    "a tensor more": lambda kind: (
        streamed(lambda tensors: {"model.x": tensors[NORM]} | tensors),
        "model.x was not announced",
    ),
    "a tensor twice": lambda kind: (
        streamed(lambda tensors: [(NORM, tensors[NORM]), *tensors.items()]),
        f"{NORM} came twice",
    ),
    "another shape": lambda kind: (
        streamed(changed(DOWN[kind], lambda t: t[1:])),
        rf"{DOWN[kind]} is torch.bfloat16 \[255, \d+\]; announced: torch.bfloat16 \[256, \d+\]",
    ),
    "another dtype": lambda kind: (
        streamed(changed(DOWN[kind], lambda t: t.float())),
        f"{DOWN[kind]} is torch.float32 .*; announced: torch.bfloat16",
    ),
    "no tensor": lambda kind: (streamed(changed(NORM, lambda t: None)), "NoneType"),
}


@pytest.mark.parametrize("messages", ["one message", "many messages"])
@pytest.mark.parametrize("fault", IN_STREAM)
def test_what_the_stream_shows_stops_the_engine_until_a_whole_sync(
    subject: Subject, fault: str, messages: str, settings: Callable[..., None]
) -> None:
    if messages == "many messages":
        settings(chunk_bytes=1)
    spoil, says = IN_STREAM[fault](subject.kind)
    with pytest.raises(SyncError, match=f"{says}.*refuses to generate until a complete sync_weights"):
        subject.engine.sync_weights(spoil(subject.sends()))
    assert not subject.engine.serving
    with pytest.raises(NotServingError, match=f"sync of weights .* failed: {says}.*call sync_weights with all weights"):
        subject.engine.generate([{"prompt_token_ids": [1, 2]}])
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")
