"""Families unlike Qwen3: after a sync every bit, every KV scale and every log-prob is that of a fresh engine.

Sliding windows, latent attention, gated delta nets, Mamba 2, attention sinks, routers in FP32, fused checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_families import FAMILIES, SHARED, Family, checkpoint, generate_at_width, weights
from tiny_models import CALIBRATION, Outputs, generate, params, started

from fp8plan.errors import ConfigError
from fp8plan.model.precision import find_precision
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.kv_scales import Scales
from fp8plan.runtime.apply.weight_sync.report import SyncReport

pytestmark = pytest.mark.vllm

QUICK = [
    ("deepseek_v3", "fp8_block"),
    ("gpt_oss", "fp8_kv"),
    ("qwen3_next", "fp8_block+fp8_kv"),
]  # latents, sinks, states
CASES = [(name, precision) for name, family in FAMILIES.items() for precision in family.precisions]
# The reasons for what vLLM's CPU build packs: linears, embeddings and experts that are not quantised, and only these.
PACKED = ("a reload also sets cpu_linear", "vLLM keeps no weight of the checkpoint's shape", "in its own way")


class Live(NamedTuple):
    """The state of a running engine: checksums of all parameters, KV scales, and its outputs."""

    digests: dict[str, int]
    kv_scales: Scales | None
    outputs: Outputs


class Case(NamedTuple):
    family: str
    precision: str
    engine: RolloutEngine
    fresh: dict[str, Live]

    def sync(self, which: str) -> SyncReport:
        return self.engine.sync_weights(weights(self.family, which), kv_prompts=CALIBRATION)


def live(engine: RolloutEngine) -> Live:
    return Live(on_worker(engine, "fp8plan_digests")["ok"], engine.state.kv_scales, generate(engine))


def on_worker(engine: RolloutEngine, method: Any, *arguments: Any) -> Any:
    return engine.llm.collective_rpc(method, args=arguments)[0]


@pytest.fixture(scope="module", params=params(CASES, QUICK))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family, preset = request.param
    # Where the CPU has AMX vLLM would take a kernel of latent attention that drops the weights it was made of.
    settings = {"attention_backend": "CPU_MLA"} if family.startswith("deepseek") else {}
    folders = {which: checkpoint(family, which) for which in "ab"}  # vLLM may change transformers' classes later
    with started(folders["b"], "b", preset, **settings) as engine:
        fresh = live(engine)
    with started(folders["a"], "a", preset, **settings) as engine:
        yield Case(family, preset, engine, {"a": live(engine), "b": fresh})


def test_a_sync_gives_what_a_fresh_engine_has(case: Case) -> None:
    before, after = case.fresh["a"], case.fresh["b"]
    assert before.outputs != after.outputs
    same = [name for name, digest in before.digests.items() if digest and digest == after.digests[name]]
    assert [name for name in same if not name.endswith("_scale_inv")] == []  # the largest of a block may be the same
    report = case.sync("b")
    assert live(case.engine) == after
    assert_in_place(report, FAMILIES[case.family], case)
    assert on_worker(case.engine, params_past_loaders) == (OAI_PARAMS if case.family == "gpt_oss" else set())
    if report.kv_scales is not None:
        assert len(report.kv_scales) == FAMILIES[case.family].attention
        assert all(scale != 1.0 for scales in report.kv_scales.values() for scale in scales)

    state = case.engine.state
    state.settings = replace(state.settings, in_place=False)  # vLLM's own reload
    report = case.sync("a")
    assert report.in_place == 0
    assert live(case.engine) == before


@pytest.mark.parametrize(
    "case", [("dense_first", "fp8_block+fp8_kv"), ("odd_heads", "fp8_block")], indirect=True, ids=lambda case: case[0]
)
def test_linears_without_whole_blocks_run_in_bf16_by_the_emitted_patterns(case: Case) -> None:
    """The engine starts, generates and is synced (above); here, what it runs as."""
    left = FAMILIES[case.family].left
    found = on_worker(case.engine, quantised_linears)
    assert {name for name, quantised in found.items() if not quantised} == set(left)
    assert sum(found.values()) >= 2
    ignore = case.engine.launch.kwargs["quantization_config"]["ignore"]
    assert len(ignore) == 2  # routers, and these
    assert all(isfinite(logprob) for output in case.fresh["a"].outputs for logprob in output[1])


# What vLLM keeps in FP32: the ends of the checkpoint's names and of vLLM's, and what its loader makes of the tensor.
WIDE = {
    "glm4_moe": ("e_score_correction_bias", "e_score_correction_bias", lambda sent: sent),
    "deepseek_v3": ("e_score_correction_bias", "e_score_correction_bias", lambda sent: sent),
    "qwen3_next": ("A_log", "A_log", lambda sent: sent),
    "nemotron_h": ("A_log", ".A", lambda sent: -sent.exp()),
}
WIDE_CASES = [(name, "bf16") for name in WIDE] + [("glm4_moe", "fp8_block+fp8_kv"), ("deepseek_v3", "fp8_block")]


@pytest.mark.parametrize("case", params(WIDE_CASES, WIDE_CASES[-1:]), indirect=True)
def test_float32_is_kept_where_vllm_keeps_it_and_rounded_elsewhere(case: Case) -> None:
    import torch

    theirs, ours, loaded = WIDE[case.family]
    sent = weights(case.family, "b")
    wide = {name: tensor.float() * (1 + 2**-12) for name, tensor in sent.items() if name.endswith(theirs)}
    assert wide
    assert all((tensor != tensor.bfloat16().float()).any() for tensor in wide.values())
    state = case.engine.state
    settings = state.settings
    state.settings = replace(settings, samples=len(sent), in_place=True)
    try:
        report = case.engine.sync_weights(sent | wide, kv_prompts=CALIBRATION)
    finally:
        state.settings = settings
    assert report.compared > 0
    live = on_worker(case.engine, parameters_ending, ours)
    assert len(live) == len(wide)
    for (_, found), name in zip(sorted(live.items()), sorted(wide), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found.flatten(), loaded(wide[name]).flatten())

    before, outputs = on_worker(case.engine, "fp8plan_digests")["ok"], generate(case.engine)
    norm = "model.norm.weight" if "model.norm.weight" in sent else next(x for x in sent if "norm" in x)
    for name in (norm, next(name for name in sent if name.endswith("o_proj.weight"))):
        report = case.engine.sync_weights(sent | wide | {name: sent[name].float()}, kv_prompts=CALIBRATION)
        assert report.rounded == 1
        assert on_worker(case.engine, "fp8plan_digests")["ok"] == before
        assert generate(case.engine) == outputs
    case.sync("b")


def parameters_ending(worker: Any, name: str) -> dict[str, Any]:
    """Values of the parameters whose names end so."""
    found = worker.model_runner.get_model().named_parameters()
    return {which: tensor.detach().clone() for which, tensor in found if which.endswith(name)}


def quantised_linears(worker: Any) -> dict[str, bool]:
    """Linears and experts, without routers and lm_head -> whether they are in FP8."""
    methods = {name: getattr(module, "quant_method", None) for name, module in worker.get_model().named_modules()}
    kinds = {name: type(method).__name__ for name, method in methods.items() if method is not None}
    beside = ("gate", "lm_head", "embed_tokens", "attn")
    return {name: "Fp8" in kind for name, kind in kinds.items() if not name.endswith(beside)}


@pytest.mark.parametrize(
    ("family", "says"),
    [("odd_heads", "shape '[-1, 320]' is invalid"), ("gpt_oss", "The size of tensor a (384) must match")],
)
def test_vllm_cannot_pad_the_width_of_a_model_with_experts(family: str, says: str, tmp_path: Path) -> None:
    """So fp8plan.model.shards refuses FP8 weights for it. In a process of its own, as the engine dies half started, or
    in its first step, which a GPU's engine runs at the start."""
    import warm_processes  # it imports vLLM

    code, said = warm_processes.output(generate_at_width, family, "320", log=tmp_path / "log")
    assert code != 0
    assert "ran" not in said.splitlines()
    assert says in said


OAI_PARAMS = {"sinks", "w13_weight", "w13_bias", "w2_weight", "w2_bias"}


def params_past_loaders(worker: Any) -> set[str]:
    """Parameters that model code fills itself."""
    return {param for prepared, _ in worker._fp8plan_live._prepared.values() for _, param in prepared.past}


def assert_in_place(report: SyncReport, family: Family, case: Case) -> None:
    """All that is not packed on a CPU is written in place, except for what the family names."""
    quantised = find_precision(case.precision).weights == "fp8_block"
    reasons = {
        kind.split(" / ")[0]: why
        for kind, why in report.why_reloaded.items()
        if not ("Unquantized" in kind and why.endswith(PACKED))
    }
    assert reasons == {kind: why for kind, why in family.reloaded.items() if quantised or why != SHARED}
    assert report.in_place > (report.reloaded if quantised and not family.left else 0)
    assert report.compared > 0


@pytest.mark.parametrize("case", [("gpt_oss", "bf16")], indirect=True, ids=["gpt_oss"])
def test_a_module_that_vllms_reload_does_not_see_is_refused(case: Case) -> None:
    """gpt-oss copies to its parameters past their loaders: vLLM's own reload then keeps the old weights, silently."""
    case.sync("a")
    sinks = "model.layers.0.attn"

    def reload(worker: Any) -> None:
        from fp8plan.runtime.apply.worker.vllm_reload import NativeReload

        native = NativeReload(worker)  # and is not told
        native.open()
        native.load(weights("gpt_oss", "b").items())
        with pytest.raises(ConfigError, match=rf"vLLM's reload did not load {sinks}"):
            native.close([sinks, "model.norm"])

    on_worker(case.engine, reload)
    found = on_worker(case.engine, "fp8plan_digests")["ok"]
    assert found[f"{sinks}.sinks"] == case.fresh["a"].digests[f"{sinks}.sinks"]
    case.sync("b")
    assert live(case.engine) == case.fresh["b"]
