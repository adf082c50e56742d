"""After a sync, tokens and log-probs equal those of an engine freshly started on the same weights, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from installed_vllm import VLLM
from tiny_models import (
    BLOCK_SIZE,
    CALIBRATION,
    KINDS,
    LAYERS,
    LONG_PROMPT,
    Outputs,
    checkpoint,
    generate,
    params,
    prompt_logprobs,
    quantised,
    started_beside_references,
    weights,
)

import fp8plan
from fp8plan.errors import SyncError
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.manifest import manifest_of
from fp8plan.runtime.apply.weight_sync.procedure import MOST_PREPARED
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.version import at_least

pytestmark = pytest.mark.vllm

# Modules with weights: an embedding, a head and a last norm; in each layer qkv, o, two norms beside it and two inside
# attention, and then gate_up and down, or a router and its experts.
MODULES = 3 + LAYERS * 8
# Of ragged, the 320 inputs of down_proj are no whole blocks.
ROUTERS = ("ReplicatedLinear", "GateLinear")  # names of their classes; the latter from 0.31 on
QUANTISED = {"dense": LAYERS * 4, "tied": LAYERS * 4, "ragged": LAYERS * 3, "moe": LAYERS * 3}


class Case(NamedTuple):
    kind: str
    precision: str
    engine: RolloutEngine
    references: dict[str, Outputs]


CASES = [(kind, name) for kind in KINDS for name in PRESETS] + [("ragged", "fp8_block")]


@pytest.fixture(scope="module", params=params(CASES))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with started_beside_references(*request.param) as (engine, references):
        yield Case(*request.param, engine, references)


def test_five_syncs_alternate_between_two_sets_of_weights(case: Case) -> None:
    assert case.references["a"] != case.references["b"]
    for version, which in enumerate("babab", 1):
        report = case.engine.sync_weights(weights(case.kind, which), kv_prompts=CALIBRATION)
        assert generate(case.engine) == case.references[which]
        assert report.version == version
        assert_reported(report, case)


def assert_reported(report: SyncReport, case: Case) -> None:
    sent = weights(case.kind, "a")
    assert (report.tensors, report.bytes) == (len(sent), sum(tensor.nbytes for tensor in sent.values()))
    assert report.compared > 0
    phases = {
        name: report.seconds[name] for name in ("prepare", "begin", "load", "finish", "kv_scales", "reset", "score")
    }
    assert set(report.seconds) == {*phases, "check", "total"}
    assert sum(phases.values()) <= report.seconds["total"]
    assert 0 < report.seconds["check"] < phases["begin"] + phases["load"] + phases["finish"]
    assert report.in_place + report.reloaded == sum(report.layers.values())
    chosen = find_precision(case.precision)
    fp8_modules = QUANTISED[case.kind] if chosen.weights == "fp8_block" else 0
    assert report.layers.get("float8_e4m3fn", 0) == fp8_modules
    missed = case.kind == "ragged" and report.weight_error is None  # of its FP8 only o_proj is in place: few to sample
    if fp8_modules and not missed:
        assert report.weight_error == pytest.approx(0.0265, abs=0.0015)  # E4M3 by block; 3.7 % were E8M0
    else:
        assert report.weight_error is None
    assert (report.kv_scales is not None) == (chosen.kv == "fp8")
    assert report.kv_source == ("calibration prompts" if chosen.kv == "fp8" else None)


def test_facts_name_the_kernels_and_the_router_stays_bf16(case: Case) -> None:
    layers = case.engine.facts["layers"]
    fp8 = {kind: count for kind, count in layers.items() if "Fp8" in kind}
    assert sum(fp8.values()) == (QUANTISED[case.kind] if find_precision(case.precision).weights == "fp8_block" else 0)
    if case.kind == "moe":
        router = [kind for kind in layers if kind.startswith(ROUTERS)]
        assert [(kind.split(" / ")[1], layers[kind]) for kind in router] == [("UnquantizedLinearMethod", LAYERS)]
    assert case.engine.facts["kv_cache_dtype"].startswith("fp8") == (find_precision(case.precision).kv == "fp8")


def test_facts_say_whether_routes_of_experts_are_returned(fp8: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.31 has moved the field; `EngineArgs` writes it to either place."""
    assert not fp8.engine.facts["routed_experts"]
    config = fp8.engine.llm.llm_engine.vllm_config
    place = config.aux_output_config if at_least(VLLM, (0, 31)) else config.model_config
    monkeypatch.setattr(place, "enable_return_routed_experts", True)
    assert fp8.engine.llm.collective_rpc("fp8plan_facts")[0]["ok"]["routed_experts"]


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.slow)])
def fp8(request: pytest.FixtureRequest) -> Iterator[Case]:
    """For what does not depend on the precision."""
    with started_beside_references(request.param, "fp8_block") as (engine, references):
        yield Case(request.param, "fp8_block", engine, references)


@pytest.fixture
def settings(fp8: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the engine other SyncSettings for one test, as if it had been started with them."""
    return lambda **changes: monkeypatch.setattr(
        fp8.engine.state, "settings", replace(fp8.engine.state.settings, **changes)
    )


def shuffled(tensors: dict[str, Any]) -> dict[str, Any]:
    names = list(tensors)
    random.Random(0).shuffle(names)
    return {name: tensors[name] for name in names}


class Source:
    """The part of a vLLM WeightSource that a sync uses."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors.items())


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": lambda tensors: list(tensors.items()),
    "generator": lambda tensors: (pair for pair in tensors.items()),
    "shuffled": shuffled,
    "shuffled generator": lambda tensors: (pair for pair in shuffled(tensors).items()),
    "source": Source,
    "on a graph": lambda tensors: {name: tensor.requires_grad_() * 1 for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_source_gives_the_same_weights(fp8: Case, form: str) -> None:
    for which in "ba":
        report = fp8.engine.sync_weights(FORMS[form](weights(fp8.kind, which)))
        assert generate(fp8.engine) == fp8.references[which]
        assert report.tensors == len(weights(fp8.kind, which))


def test_an_order_of_its_own_every_time_is_not_remembered_for_ever(fp8: Case) -> None:
    tensors = weights(fp8.kind, "b")
    for seed in range(MOST_PREPARED + 2):
        names = random.Random(seed).sample(list(tensors), len(tensors))
        fp8.engine.sync_weights({name: tensors[name] for name in names})
    assert generate(fp8.engine) == fp8.references["b"]
    assert len(fp8.engine.state.prepared) == MOST_PREPARED
    assert sorted(checked.number for checked in fp8.engine.state.prepared.values()) == list(range(MOST_PREPARED))


def test_a_generator_with_its_own_manifest(fp8: Case) -> None:
    for which in "ba":
        tensors = shuffled(weights(fp8.kind, which))
        fp8.engine.sync_weights((pair for pair in tensors.items()), manifest=list(manifest_of(tensors) or ()))
        assert generate(fp8.engine) == fp8.references[which]


def test_a_trainers_own_module_as_vllms_source(fp8: Case) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from vllm.distributed.weight_transfer.base import ModuleSource

    for which in "ba":
        module = AutoModelForCausalLM.from_pretrained(checkpoint(fp8.kind, which), dtype="auto")
        if fp8.kind == "moe":  # transformers 5 holds the experts of a layer fused, its checkpoints have them apart
            with pytest.raises(
                SyncError,
                match=r"unknown: model.layers.0.mlp.experts.gate_up_proj.*revert_weight_conversion.*old weights serve",
            ):
                fp8.engine.sync_weights(ModuleSource(module))
            fp8.engine.sync_weights(revert_weight_conversion(module, module.state_dict()))
        else:
            fp8.engine.sync_weights(ModuleSource(module))
        assert generate(fp8.engine) == fp8.references[which]


def test_a_tied_models_state_dict_may_bring_its_head(case: Case) -> None:
    if case.kind != "tied":
        pytest.skip("has a head of its own")
    for which in "ba":
        tensors = weights("tied", which)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        case.engine.sync_weights(tensors, kv_prompts=CALIBRATION)
        assert generate(case.engine) == case.references[which]


def untied(tensors: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    """A tied model's tensors with a head that was trained on its own, in this order."""
    head = tensors["model.embed_tokens.weight"] * 1.01
    tensors = tensors | {"lm_head.weight": head}
    return {name: tensors.pop(name) for name in order} | tensors


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
APART = f"{HEAD} and {EMBEDDING} differ, and the engine has one storage for both"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (EMBEDDING, HEAD)], ids=["head first", "head last"])
def test_a_tied_model_does_not_take_two_values(
    case: Case, in_place: bool, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.kind != "tied":
        pytest.skip("has a head of its own")
    engine = case.engine
    monkeypatch.setattr(engine.state, "settings", replace(engine.state.settings, in_place=in_place, chunk_bytes=1))
    engine.sync_weights(weights("tied", "a"), kv_prompts=CALIBRATION)
    for form in (dict, FORMS["generator"]):
        sent = untied(weights("tied", "b"), order)
        with pytest.raises(SyncError, match=f"{APART}.*Tie them"):
            engine.sync_weights(form(sent), manifest=manifest_of(sent), kv_prompts=CALIBRATION)
        engine.sync_weights(weights("tied", "a"), kv_prompts=CALIBRATION)
        assert generate(engine) == case.references["a"]


def test_the_doctor_names_the_two_values_of_a_tied_model(case: Case) -> None:
    if case.kind != "tied":
        pytest.skip("has a head of its own")
    tensors = weights("tied", "a")
    case.engine.sync_weights(tensors, kv_prompts=CALIBRATION)
    tied = tensors | {HEAD: tensors[EMBEDDING].clone()}
    for given, faults in ((tied, {}), (untied(tensors, ()), {"untied_weights": f"{HEAD} and {EMBEDDING} of the"})):
        found = {one.fault: one.says for one in fp8plan.doctor(case.engine, weights=given).faults}
        assert found.keys() == faults.keys()
        assert all(found[name].startswith(text) for name, text in faults.items())


@pytest.mark.parametrize("order", [dict, shuffled], ids=["in order", "shuffled"])
def test_small_messages_hold_complete_modules(
    fp8: Case, settings: Callable[..., None], order: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    settings(chunk_bytes=1)
    for which in "ba":
        report = fp8.engine.sync_weights(order(weights(fp8.kind, which)))
        assert generate(fp8.engine) == fp8.references[which]
        assert report.chunks == MODULES  # a message each: qkv, gate_up and a layer's experts are never split
    settings(chunk_bytes=300_000)
    assert 1 < fp8.engine.sync_weights(weights(fp8.kind, "a")).chunks < MODULES


def digests_of(engine: RolloutEngine) -> dict[str, int]:
    (answer,) = engine.llm.collective_rpc("fp8plan_digests")
    return answer["ok"]


def test_fp8_tensors_and_their_scales_give_the_same_as_bf16(fp8: Case, settings: Callable[..., None]) -> None:
    full = fp8.engine.sync_weights(weights(fp8.kind, "a"))
    digests = digests_of(fp8.engine)
    names = [name for name in weights(fp8.kind, "a") if "_proj." in name]
    settings(weights_in="fp8_block")
    for which in "ba":
        report = fp8.engine.sync_weights(quantised(weights(fp8.kind, which), names))
        assert generate(fp8.engine) == fp8.references[which]
        assert report.compared > 0
        assert report.bytes == sum(tensor.nbytes for tensor in quantised(weights(fp8.kind, "a"), names).values())
        assert report.bytes < 0.7 * full.bytes
    assert digests_of(fp8.engine) == digests


def test_the_prefix_cache_is_empty_after_a_sync(fp8: Case) -> None:
    fp8.engine.sync_weights(weights(fp8.kind, "a"))
    cached = [cached_tokens(fp8.engine) for _ in range(2)]
    assert cached == [0, BLOCK_SIZE]  # it works
    fp8.engine.sync_weights(weights(fp8.kind, "b"))
    assert cached_tokens(fp8.engine) == 0


def cached_tokens(engine: RolloutEngine) -> int | None:
    return engine.generate([{"prompt_token_ids": LONG_PROMPT}])[0].num_cached_tokens


def test_a_scored_sequence_must_agree_with_the_trainer(fp8: Case) -> None:
    fp8.engine.sync_weights(weights(fp8.kind, "a"))
    trainers = prompt_logprobs(fp8.engine, LONG_PROMPT)
    report = fp8.engine.sync_weights(weights(fp8.kind, "a"), scored=Scored(LONG_PROMPT, trainers))
    assert report.scored_k3 == pytest.approx(0, abs=1e-9)
    with pytest.raises(SyncError, match=r"differ from the trainer's: k3 .* refuses to generate"):
        fp8.engine.sync_weights(weights(fp8.kind, "b"), scored=Scored(LONG_PROMPT, trainers))
    assert not fp8.engine.serving
    fp8.engine.sync_weights(weights(fp8.kind, "a"), scored=Scored(LONG_PROMPT, trainers))
    assert generate(fp8.engine, cold=True) == fp8.references["a"]


def test_vllms_own_reload_gives_the_same_as_writing_in_place(fp8: Case, settings: Callable[..., None]) -> None:
    report = fp8.engine.sync_weights(weights(fp8.kind, "a"))
    assert report.in_place > report.reloaded  # on a CPU the embedding and lm_head are packed, and so reloaded
    router = {"vLLM keeps no weight of the checkpoint's shape"} if fp8.kind == "moe" else set()
    assert set(report.why_reloaded.values()) == {"a reload also sets cpu_linear"} | router
    digests = digests_of(fp8.engine)
    settings(in_place=False)  # the file's last test: vLLM's reload leaves the experts' kernel with tensors of its own
    for which in "ba":
        report = fp8.engine.sync_weights(weights(fp8.kind, which))
        assert (report.in_place, report.reloaded, report.compared) == (0, MODULES, 0)
        assert generate(fp8.engine) == fp8.references[which]
    assert digests_of(fp8.engine) == digests  # every bit of every parameter, not only what these prompts show
