"""Every fault of a sync names what is wrong and leaves a defined state: old weights serving, or none until a whole sync.

What the manifest shows is refused before anything is sent; what only the stream shows makes the engine refuse to generate.
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
from fp8plan.runtime.manifest import manifest_of

pytestmark = pytest.mark.vllm

Tensors = dict[str, Any]
ATTENTION = "model.layers.1.self_attn"
UP = {"dense": "model.layers.1.mlp.up_proj.weight", "moe": f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"}
DOWN = {kind: name.replace("up_proj", "down_proj") for kind, name in UP.items()}
Q, K = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
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


# --- what the manifest shows: (what is sent, what the error says) of a kind of model --------------------------------


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


Fault = tuple[Callable[[Tensors], Any], str]
IN_MANIFEST: dict[str, Callable[[str], Fault]] = {
    "a part of qkv missing": lambda kind: (without(K), f"missing: {K}; "),
    "a part of gate_up missing": lambda kind: (without(UP[kind]), f"missing: {UP[kind]}; "),
    "too few rows": lambda kind: (changed(Q, lambda t: t[:-1]), rf"{Q} has shape \[255, 256\]; allowed: \[256, 256\]"),
    "transposed": lambda kind: (changed(DOWN[kind], lambda t: t.t()), rf"{DOWN[kind]} has shape \[\d+, \d+\]; allowed"),
    "float32": lambda kind: (changed(UP[kind], lambda t: t.float()), f"{UP[kind]} is float32; allowed: bfloat16"),
    "a float32 norm": lambda kind: (changed(NORM, lambda t: t.float()), f"{NORM} is float32; allowed: bfloat16"),
    "unknown": lambda kind: (lambda tensors: tensors | {"model.layers.9.x": tensors[NORM]}, "unknown: model.layers.9.x"),
    "twice": lambda kind: (lambda tensors: [*tensors.items(), (UP[kind], tensors[UP[kind]])], f"twice: {UP[kind]}; "),
    "empty": lambda kind: (lambda tensors: {}, "manifest is empty; allowed: every tensor"),
    "no triples": lambda kind: (lambda tensors: [("a", "b", "c")], r"list of \(name, dtype, shape\)|pairs"),
    "fp8": lambda kind: (lambda tensors: quantised(tensors, [Q]), f"{Q} is float8_e4m3fn, and this engine takes BF16"),
}


@pytest.mark.parametrize("fault", [name for name in IN_MANIFEST if name != "no triples"])
def test_what_the_manifest_shows_leaves_the_old_weights_serving(subject: Subject, fault: str) -> None:
    spoil, says = IN_MANIFEST[fault](subject.kind)
    with pytest.raises(SyncError, match=f"{says}.*{OLD_SERVE}"):
        subject.engine.sync_weights(spoil(subject.sends()))
    assert subject.serves("a")
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")
