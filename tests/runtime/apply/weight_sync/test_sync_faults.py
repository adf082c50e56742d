"""Every fault of a sync names what is wrong and leaves a defined state: old weights serve, or none until a whole sync.

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
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

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


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.slow)])
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
    "float16": lambda kind: (changed(UP[kind], lambda t: t.half()), f"{UP[kind]} is float16; allowed: bfloat16"),
    "a float64 norm": lambda kind: (changed(NORM, lambda t: t.double()), f"{NORM} is float64; allowed: bfloat16"),
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
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")


@pytest.mark.parametrize("way", ["dict", "iterator"])
def test_a_policy_in_fp32_is_rounded_and_said_once(subject: Subject, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("fp8plan.runtime.apply.weight_sync.procedure.warn", said.append)
    monkeypatch.setattr(subject.engine.state, "said_rounded", False)
    for _ in range(2):
        sent = {name: tensor.float() for name, tensor in weights(subject.kind, "b").items()}
        report = subject.engine.sync_weights(sent if way == "dict" else iter(sent.items()))
        assert report.rounded == len(sent)
        assert f"{len(sent)} rounded from FP32" in str(report)
        assert subject.serves("b")
    assert len(said) == 1
    assert subject.engine.sync_weights(weights(subject.kind, "a")).rounded == 0


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


def module(tensors: Tensors) -> Any:
    return torch.nn.Linear(2, 2)


def given(value: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: value


# What is no source of tensors at all, or holds something that cannot be sent.
NO_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "None": (given(None), "the tensors are None; allowed: a dict of names to tensors"),
    "a module": (module, r"the tensors are of type Linear; allowed: .*type model\.state_dict\(\)"),
    "a string": (given("model.safetensors"), "the tensors are of type str; allowed"),
    "a number": (given(3), "the tensors are of type int; allowed"),
    "a tensor": (lambda tensors: tensors[NORM], "the tensors are of type Tensor"),
    "a generator that was not called": (lambda tensors: lambda: iter(tensors.items()), "type its call"),
    "tensors without names": (lambda tensors: list(tensors.values()), "gave a value of type Tensor"),
    "names that are numbers": (lambda tensors: dict(enumerate(tensors.values())), "gave a name of type int"),
    "names alone": (list, "gave a value of type str"),
    "a value of None": (changed(NORM, given(None)), f"{NORM} is of type NoneType; allowed: a torch.Tensor"),
    "an array": (changed(NORM, lambda t: t.float().numpy()), f"{NORM} is of type ndarray; allowed"),
    "a meta tensor": (changed(NORM, lambda t: t.to("meta")), f"{NORM} is on the meta device and has no values"),
    "a sparse tensor": (changed(Q, lambda t: t.to_sparse()), rf"{Q} is sparse \(torch.sparse_coo\); .*to_dense\(\)"),
    "a quantised tensor": (
        changed(Q, lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)),
        rf"{Q} is quantised \(torch.qint8\); .*dequantize\(\)",
    ),
    "an empty iterator": (given(iter(())), "announced and not sent"),
    "an iterator that fails at once": (lambda tensors: broken(tensors, 0, RuntimeError("a rank is lost")), "a rank is"),
    "an iterator of meta tensors": (
        lambda tensors: ((name, tensor.to("meta")) for name, tensor in tensors.items()),
        "on the meta device",
    ),
}


@pytest.mark.parametrize("fault", NO_TENSORS)
def test_what_cannot_be_sent_leaves_the_old_weights_serving(subject: Subject, fault: str) -> None:
    spoil, says = NO_TENSORS[fault]
    with pytest.raises(SyncError, match=f"({says}).*the old weights serve"):
        subject.engine.sync_weights(spoil(subject.sends()))
    assert subject.serves("a")


@pytest.mark.parametrize(
    ("scored", "says"),
    [
        (([1, 2], [-1.0]), r"scored is of type tuple; allowed: Scored\(token ids, log-probs\)"),
        (Scored([1, 2, 3], [-1.0]), "1 log-probs for 3 tokens; allowed: one for each but the first"),
        (Scored([1], []), "0 log-probs for 1 tokens"),
        (Scored([1, 10_000], [-1.0]), "scored: prompt 0, token 1 is id 10000; allowed: 0 to 1,023, the model's"),
        (Scored([1] * 1000, [-1.0] * 999), "scored: prompt 0 has 1,000 tokens; allowed: 1 to 255, as max"),
        (Scored([1, 2], [math.nan]), "scored: a log-prob is not finite"),
        (Scored("ab", [-1.0]), "scored: no list of token ids"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_scored_leaves_the_old_weights_serving(subject: Subject, scored: Any, says: str) -> None:
    with pytest.raises(SyncError, match=f"{says}.*{OLD_SERVE}"):
        subject.engine.sync_weights(subject.sends(), scored=scored)
    assert subject.serves("a")


def in_fp8(tensors: Tensors) -> Tensors:
    return quantised(tensors, [name for name in tensors if "_proj." in name])


# Into an engine that takes FP8 and scales.
SCALE = f"{Q}_scale_inv"
IN_FP8: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "bf16": (lambda tensors: tensors, rf"{PROJECTION}(_scale_inv| is bfloat16)"),
    "one in bf16, with scales": (lambda tensors: in_fp8(tensors) | {Q: tensors[Q]}, f"{Q} is bfloat16"),
    "scales missing": (lambda tensors: without(SCALE)(in_fp8(tensors)), f"missing: {SCALE}; "),
    "scales without weight": (lambda tensors: without(Q)(in_fp8(tensors)), f"missing: {Q}; "),
    "scales of another shape": (
        lambda tensors: changed(SCALE, lambda t: t[:, :1])(in_fp8(tensors)),
        rf"{SCALE} has shape \[2, 1\]; allowed: \[2, 2\]",
    ),
    "scales in bf16": (lambda tensors: changed(SCALE, lambda t: t.bfloat16())(in_fp8(tensors)), f"{SCALE} is bfloat16"),
    "a norm in fp8": (lambda tensors: changed(NORM, lambda t: t.to(E4M3))(in_fp8(tensors)), NORM),
}


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.slow)])
def started_for_fp8(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with started_beside_references(request.param, "fp8_block", weights_in="fp8_block") as (engine, references):
        yield Subject(request.param, engine, references)


@pytest.mark.parametrize("fault", IN_FP8)
def test_an_engine_that_takes_fp8_says_what_is_not(started_for_fp8: Subject, fault: str) -> None:
    kind, engine, _ = started_for_fp8
    engine.sync_weights(in_fp8(weights(kind, "a")))
    spoil, says = IN_FP8[fault]
    with pytest.raises(SyncError, match=f"{says}.*{OLD_SERVE}"):
        engine.sync_weights(spoil(weights(kind, "b")))
    assert started_for_fp8.serves("a")


@pytest.mark.parametrize("name", [Q, SCALE])
def test_fp8_and_scales_must_be_finite(started_for_fp8: Subject, name: str) -> None:
    kind, engine, _ = started_for_fp8
    sent = in_fp8(weights(kind, "b"))
    sent[name].view(-1)[1:2] = math.nan
    with pytest.raises(SyncError, match=rf"not finite: {name}.*refuses to generate"):
        engine.sync_weights(sent)
    assert not engine.serving
    engine.sync_weights(in_fp8(weights(kind, "b")))
    assert started_for_fp8.serves("b")


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


POISONED = {
    "a norm": NORM,
    "a norm in attention": f"{ATTENTION}.k_norm.weight",
    "qkv": K,
    "gate_up": UP,
    "down": DOWN,
    "embedding": "model.embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "router": "model.layers.1.mlp.gate.weight",
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", POISONED)
def test_what_is_not_finite_is_named(subject: Subject, part: str, value: float) -> None:
    name = POISONED[part]
    name = name if isinstance(name, str) else name[subject.kind]
    if name not in subject.sends():  # a dense model has no router
        name = NORM
    stops(subject, poisoned(name, value)(subject.sends()), rf"not finite: {name}")


def stops(subject: Subject, sent: Any, says: str) -> None:
    """The error of sending it says so, nothing is generated, and a whole sync heals."""
    with pytest.raises(SyncError, match=f"{says}.*refuses to generate until a complete sync"):
        subject.engine.sync_weights(sent)
    assert not subject.engine.serving
    with pytest.raises(NotServingError, match=f"failed: .*{says}.*; call sync_weights with all weights"):
        subject.engine.generate([{"prompt_token_ids": [1, 2]}])
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")


IN_STREAM: dict[str, Fault] = {
    "it raises": lambda kind: (lambda tensors: broken(tensors, 20, RuntimeError("a rank is lost")), "a rank is lost; "),
    "it ends early": lambda kind: (lambda tensors: broken(tensors, 20), r"announced and not sent: .* more"),
    "a tensor less": lambda kind: (streamed(without(UP[kind])), rf"announced and not sent: {UP[kind]}"),
    "a tensor more": lambda kind: (streamed(lambda tensors: {"x.y": tensors[NORM]} | tensors), "x.y was not announced"),
    "a tensor twice": lambda kind: (
        streamed(lambda tensors: [(NORM, tensors[NORM]), *tensors.items()]),
        f"{NORM} came twice",
    ),
    "another shape": lambda kind: (
        streamed(changed(DOWN[kind], lambda t: t[1:])),
        rf"{DOWN[kind]} is torch.bfloat16 \[255, \d+\]; announced: torch.bfloat16 \[256, \d+\]",
    ),
    "another dtype": lambda kind: (
        streamed(changed(DOWN[kind], lambda t: t.half())),
        f"{DOWN[kind]} is torch.float16 .*; announced: torch.bfloat16",
    ),
    "no tensor": lambda kind: (streamed(changed(NORM, lambda t: None)), f"{NORM} is of type NoneType; allowed"),
    "a meta tensor": lambda kind: (streamed(changed(NORM, lambda t: t.to("meta"))), f"{NORM} is on the meta device"),
}


# Faults of a stream that is one message which only its end shows, and of many messages which the first one has.
WRITTEN_AT_ONCE = ("it ends early", "a tensor less")
IN_THE_FIRST = ("a tensor more",)


@pytest.mark.parametrize("fault", IN_STREAM)
def test_what_the_stream_shows_stops_the_engine_if_some_was_written(
    subject: Subject, fault: str, settings: Callable[..., None]
) -> None:
    settings(chunk_bytes=1)
    spoil, says = IN_STREAM[fault](subject.kind)
    (kept if fault in IN_THE_FIRST else stops)(subject, spoil(subject.sends()), says.removesuffix("; "))


@pytest.mark.parametrize("fault", IN_STREAM)
def test_what_a_message_shows_before_it_is_sent_leaves_the_old_weights(subject: Subject, fault: str) -> None:
    spoil, says = IN_STREAM[fault](subject.kind)
    (stops if fault in WRITTEN_AT_ONCE else kept)(subject, spoil(subject.sends()), says.removesuffix("; "))


def kept(subject: Subject, sent: Any, says: str) -> None:
    """The error of sending it says so, nothing was written, and the old weights serve to the bit."""
    with pytest.raises(SyncError, match=f"{says}.*; the old weights serve$"):
        subject.engine.sync_weights(sent)
    assert subject.serves("a")
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")


def test_the_trainers_own_error_is_the_cause(subject: Subject) -> None:
    lost = RuntimeError("a rank is lost")
    with pytest.raises(SyncError) as caught:
        subject.engine.sync_weights(broken(subject.sends(), 20, lost))
    assert caught.value.__cause__ is lost


def test_an_interrupt_stays_one_and_stops_the_engine(subject: Subject, settings: Callable[..., None]) -> None:
    settings(chunk_bytes=1)
    with pytest.raises(KeyboardInterrupt):
        subject.engine.sync_weights(broken(subject.sends(), 20, KeyboardInterrupt()))
    assert not subject.engine.serving
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")


def test_what_the_manifest_shows_heals_nothing(subject: Subject, settings: Callable[..., None]) -> None:
    settings(chunk_bytes=1)
    with pytest.raises(SyncError):
        subject.engine.sync_weights(broken(subject.sends(), 20))
    with pytest.raises(SyncError, match="the manifest is empty") as caught:
        subject.engine.sync_weights({})
    assert not subject.engine.serving
    assert "old weights serve" not in str(caught.value)


def test_a_second_sync_waits_for_the_first(subject: Subject) -> None:
    def stream() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(subject.sends().items()):
            if number == 20:
                with pytest.raises(SyncError, match="another sync is running"):
                    subject.engine.sync_weights(weights(subject.kind, "a"))
                with pytest.raises(NotServingError, match="a sync is running"):
                    subject.engine.generate([{"prompt_token_ids": [1, 2]}])
            yield pair

    subject.engine.sync_weights(stream())
    assert subject.serves("b")


def test_a_sync_waits_for_running_requests(subject: Subject) -> None:
    from vllm import SamplingParams

    engine = subject.engine.llm.llm_engine
    engine.add_request("7", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))
    try:
        with pytest.raises(SyncError, match=f"1 requests are running; finish or abort them.*{OLD_SERVE}"):
            subject.engine.sync_weights(subject.sends())
        assert subject.engine.serving
    finally:
        engine.abort_request(["7"])
    assert subject.serves("a")
    subject.engine.sync_weights(subject.sends())
    assert subject.serves("b")


KEPT = [(kind, in_place) for kind in UP for in_place in (True, False)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (kind, in_place),
            id=f"{kind}-{'in place' if in_place else 'reloaded'}",
            marks=() if kind == "dense" else pytest.mark.slow,
        )
        for kind, in_place in KEPT
    ],
)
def keeping(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine that keeps a copy of its weights during a sync, and gets them in many messages."""
    kind, in_place = request.param
    settings = {"rollback": "cpu", "in_place": in_place, "chunk_bytes": 1}
    with started_beside_references(kind, "fp8_block", **settings) as (engine, references):
        yield Subject(kind, engine, references)


@pytest.mark.parametrize("fault", ["it raises", "a tensor less", "not finite", "not as scored"])
def test_a_copy_that_is_kept_comes_back(keeping: Subject, fault: str) -> None:
    keeping.engine.sync_weights(weights(keeping.kind, "a"))
    assert keeping.serves("a")
    spoil, says = IN_STREAM[fault](keeping.kind) if fault in IN_STREAM else (poisoned(Q, math.nan), "not finite")
    scored = Scored([1, 2, 3], [-50.0, -50.0]) if fault == "not as scored" else None
    if scored:
        spoil, says = lambda tensors: tensors, "differ from the trainer's"
    with pytest.raises(SyncError, match=f"{says}.*the old weights serve"):
        keeping.engine.sync_weights(spoil(keeping.sends()), scored=scored)
    assert keeping.engine.serving
    assert generate(keeping.engine) == keeping.references["a"]
    keeping.engine.sync_weights(keeping.sends())
    assert keeping.serves("b")


def test_a_copy_that_does_not_fit_leaves_the_old_weights(keeping: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no memory left")

    keeping.engine.sync_weights(weights(keeping.kind, "a"))
    with monkeypatch.context() as patch:
        patch.setattr("fp8plan.runtime.apply.worker.live_weights.Snapshot", full)
        with pytest.raises(SyncError, match="no memory left; the old weights serve"):
            keeping.engine.sync_weights(keeping.sends())
    assert keeping.engine.serving
    assert generate(keeping.engine) == keeping.references["a"]
    keeping.engine.sync_weights(keeping.sends())
    assert keeping.serves("b")


def test_a_copy_of_weights_that_did_not_serve_does_not_serve_either(keeping: Subject) -> None:
    keeping.engine.sync_weights(weights(keeping.kind, "a"))
    keeping.engine.sleep(level=2)  # drops the weights on a GPU; a CPU does nothing, and the engine refuses all the same
    keeping.engine.wake_up()
    assert not keeping.engine.serving
    with pytest.raises(SyncError, match="refuses to generate until a complete sync"):
        keeping.engine.sync_weights(broken(keeping.sends(), 20))
    assert not keeping.engine.serving
    keeping.engine.sync_weights(keeping.sends())
    assert keeping.serves("b")


# --- what an engine is started with ---------------------------------------------------------------------------------


def test_first_and_last_layers_stay_bf16_when_asked() -> None:
    kept = {"precision": "fp8_block", "keep_bf16": (1, 1)}
    with started("dense", "b", **kept) as engine:
        reference = generate(engine)
    with started("dense", "a", **kept) as engine:
        kinds = engine.facts["layers"]
        assert sum(count for kind, count in kinds.items() if "Fp8" in kind) == 4 * (LAYERS - 2)
        assert sum(count for kind, count in kinds.items() if "UnquantizedLinearMethod" in kind) == 4 * 2
        report = engine.sync_weights(weights("dense", "b"))
        assert report.layers["float8_e4m3fn"] == 4 * (LAYERS - 2)
        assert generate(engine) == reference


@pytest.mark.parametrize("first", [0, 1])
def test_attention_outputs_stay_bf16_when_asked_and_nothing_else(first: int) -> None:
    def in_bf16(model: Any) -> list[str]:
        methods = {name: type(getattr(part, "quant_method", None)).__name__ for name, part in model.named_modules()}
        return [name for name, method in methods.items() if method == "UnquantizedLinearMethod"]

    kept = {"precision": "fp8_block", "keep_bf16": (first, 0, "o_proj")}
    with started("dense", "b", **kept) as engine:
        reference = generate(engine)
    with started("dense", "a", **kept) as engine:
        (names,) = engine.llm.apply_model(in_bf16)
        linears = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
        every = [(layer, name) for layer in range(LAYERS) for name in linears]
        expected = [f"model.layers.{i}.{name}" for i, name in every if i < first or name == "self_attn.o_proj"]
        assert names == expected
        assert engine.sync_weights(weights("dense", "b")).layers["float8_e4m3fn"] == 4 * LAYERS - len(expected)
        assert generate(engine) == reference


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"choice": 9}, "there is no choice 9; allowed: 0 to 3"),
        ({"choice": "fp4"}, r"the plan has no 'fp4'; allowed: bf16, fp8_block, fp8_kv"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2; allowed: 1: a sync reaches one replica"),
        ({"enable_eplb": True}, "enable_eplb is True; allowed: False"),
        ({"mode": "thread"}, "mode is 'thread'; allowed: inprocess, multiprocess"),
        ({"dtype": "float16"}, "dtype come from the plan; allowed: another choice"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "kv_cache_dtype, quantization come from the plan"),
        ({"keep_bf16": (-1, 0)}, r"keep_bf16 is \(-1, 0\); allowed: two counts"),
        ({"keep_bf16": (2, 2)}, "the model has 3 layers"),
        ({"keep_bf16": (0, 0, "q_proj")}, r"keep_bf16 is \(0, 0, 'q_proj'\); allowed: two counts"),
        ({"keep_bf16": (0, 0, "o_proj"), "choice": 0}, "bf16 has no FP8 weights; leave it out"),
        ({"keep_bf16": (1, 0), "choice": 0}, "bf16 has no FP8 weights; leave it out"),
    ],
)
def test_what_cannot_be_started_is_refused_before_it_starts(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RolloutEngine.from_plan(cpu_plan("fp8_block"), str(checkpoint("dense", "a")), **arguments)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    config = json.loads((checkpoint("dense", "a") / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"is quantised already \(fp8\); allowed: the BF16 checkpoint"):
        RolloutEngine.from_plan(cpu_plan("fp8_block"), str(tmp_path))


@pytest.mark.parametrize("changes", [{"weights_in": "fp4"}, {"chunk_bytes": 0}, {"rollback": "gpu"}, {"samples": 0.5}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        SyncSettings(**changes)
