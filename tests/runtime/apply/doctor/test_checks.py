"""Every check by itself, on what was observed of an H200 engine: a healthy one, and one with each fault planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp8plan.model.emit.trainers import TRAINERS
from fp8plan.runtime.apply.doctor.checks import CHECKS, findings
from fp8plan.runtime.apply.doctor.observed import Compared, Logged, Observed, RankWeights, State, Temperatures
from fp8plan.runtime.apply.doctor.trainer_checks import routing, trainer
from fp8plan.runtime.apply.worker.facts import preset_of
from fp8plan.runtime.watch.guard.observation import WAY_BACK

FACTS: dict[str, Any] = {
    "vllm_version": "0.26.0",
    "device": "cuda",
    "layers": {"QKVParallelLinear / Fp8PerBlockOnlineLinearMethod / FlashInferFp8DeepGEMM": 36, "RMSNorm": 73},
    "kernels": {"gemm": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "moe": "TRITON"},
    "attention": ["FlashAttentionImpl"],
    "e8m0": False,
    "kv_cache_dtype": "fp8",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "enforce_eager": False,
    "logprobs_mode": "processed_logprobs",
    "routers": {"bfloat16": 48},
    "weights": 7,
    "quantization": "fp8_per_block",
    "experts": True,
    "routed_experts": True,
    "prefix_caching": True,
    "weight_transfer": "fp8plan",
}
SCALES = {f"layers.{n}": {"q": 1.0, "k": 0.02, "v": 0.01, "k_host": 0.02, "v_host": 0.01} for n in range(3)}
SOUND = RankWeights(unsound={}, changed=[], differ=[], compared=290, of=290)
LOG = Logged(step=7, k3=2e-3, k3_step=7, limit=1e-2, tokens=900.0, invalid=0.0, steps=range(1, 8))
HEALTHY = Observed(
    target="an engine on two GPUs",
    gpu="h200_sxm",
    precision="fp8_block+fp8_kv",
    trainer_precision="bf16",
    runs="fp8_block+fp8_kv",
    ranks=[FACTS, FACTS],
    kernels={
        "gemm.fp8_block": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "moe.fp8_block": "TRITON",
        "attention.fp8": "FlashAttentionImpl",
    },
    measured_kernels={
        "gemm.fp8_block": "flashinfer_deep_gemm",
        "moe.fp8_block": "triton",
        "attention.fp8": "flash_attn_3",
    },
    kv_scales=SCALES,
    kv_amax={layer: [3.0, 8.0, 4.0] for layer in SCALES},
    preemptions=3,
    requests=512,
    prefix_cache_queries=400_000,
    prefix_cache_hits=300_000,
    version=7,
    weights=[SOUND, SOUND],
    decode=Compared(256, 0.02, 8e-4),
    prefix=Compared(16, 0.01, 2e-4, cached=4096),
    temperatures=Temperatures(0.6, 0.6, 0.02, 0.02),
    log=LOG,
)


def facts(**changes: Any) -> dict[str, Any]:
    return {"ranks": [FACTS | changes] * 2}


def ranks(second: RankWeights) -> dict[str, Any]:
    return {"weights": [SOUND, second]}


def test_fixed_scales_of_one_are_no_fault_until_they_clip() -> None:
    ones = {x: {"q": 1.0, "k": 1.0, "v": 1.0} for x in SCALES}
    fixed = replace(HEALTHY, kv_scales=ones, **facts(attention=["FlashInferImpl"]))
    assert "kv_scales_unit" not in faults_of(fixed)
    clips = replace(fixed, kv_amax={"layers.2": [3.0, 900.0, 9.0]})
    assert "kv_scales_clip" in faults_of(clips)


# fault -> (what is observed then, and what its finding must say)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "kv_scales_unit": ({"kv_scales": {x: {"q": 1.0, "k": 1.0, "v": 1.0} for x in SCALES}}, "1.0 in all 3 layers"),
    "kv_scales_torn": ({"kv_scales": SCALES | {"layers.1": SCALES["layers.1"] | {"v_host": 1.0}}}, "layers.1"),
    "kv_scales_clip": ({"kv_amax": {"layers.2": [3.0, 8.0, 9.0]}}, "layers.2 has seen 2.01 times"),
    "e8m0_on": (facts(e8m0=True), "rounded twice"),
    "router_quantised": (facts(routers={"bfloat16": 2, "float8_e4m3fn": 46}), "46 in float8_e4m3fn"),
    "graphs_off": (facts(enforce_eager=True), "enforce_eager is set"),
    "graphs_piecewise": (facts(cudagraph_mode="PIECEWISE"), "PIECEWISE"),
    "preemption_storm": ({"preemptions": 300}, "300 in 512 requests"),
    "prefix_caching_off": (facts(prefix_caching=False), "turns of a trajectory and samples of a prompt"),
    "prefix_cache_missed": ({"prefix_cache_hits": 3_999}, "1.0% of 400,000 tokens since the engine's start were in"),
    "wrong_kernel": (
        {"kernels": {"gemm.fp8_block": "MarlinFP8ScaledMMLinearKernel"}},
        "measured with flashinfer_deep_gemm",
    ),
    "wrong_precision": ({"runs": "fp8_kv"}, "planned: fp8_block+fp8_kv"),
    "sparse_sync": (facts(weight_transfer="sparse_nccl"), "sparse_nccl writes patches into fp8_block weights without"),
    "router_replay_off": (facts(routed_experts=False), "weights are fp8_block, and the routes of experts are not"),
    "recipes_differ": (
        {"trainer_precision": "fp8_block_pow2"},
        "scales that are powers of two, and the engine FP8 in blocks, with FP32 scales: each rounds to numbers",
    ),
    "trainer_fp8_alone": (
        {"trainer_precision": "fp8_block", "runs": "fp8_kv", "precision": "fp8_kv", **facts(e8m0=None)},
        "FP32 scales, and the engine BF16: the trainer's rounding adds to the mismatch",
    ),
    "not_serving": ({"refusal": "a sync has begun and not ended"}, "refuses to generate: a sync has begun"),
    "decode_differs": ({"decode": Compared(256, 1.5, 0.8)}, "k3 8.0e-01"),
    "prefix_cache_stale": ({"prefix": Compared(16, 2.0, 1.1, cached=4096)}, "of other weights"),
    "trainer_temperature": ({"temperatures": Temperatures(0.6, 1.01, 0.4, 0.02)}, "are at temperature 1.01, rollouts"),
    "trainer_differs": ({"temperatures": Temperatures(0.6, 0.61, 0.9, 0.88)}, "0.90 nats off the engine's"),
    "engine_temperature": (facts(logprobs_mode="raw_logprobs"), "samples at 0.6"),
    "mismatch_high": ({"log": replace(LOG, k3=0.3)}, "limit 1.0e-02"),
    "invalid_logprobs": ({"log": replace(LOG, tokens=0.0, invalid=900.0)}, "invalid log-probs: 900 of 900 tokens"),
    "alarm_tail": (
        {"log": replace(LOG, alarms={"tail": [2, 7]})},
        "tail in step 7, and in 2 of the last 7 steps: too many",
    ),
}
# Faults of weights, which may show in more than one way.
STALE: dict[str, tuple[dict[str, Any], str]] = {
    "by its number": ({"ranks": [FACTS, FACTS | {"weights": 6}]}, "rank 1 serves 6; weights 7 should serve"),
    "by its tensors": (ranks(replace(SOUND, differ=[f"t{n}" for n in range(280)])), "rank 1 serves other weights"),
}
CORRUPTED: dict[str, tuple[dict[str, Any], str]] = {
    "by the trainer's": (ranks(replace(SOUND, differ=["layers.7.mlp.down_proj.weight"])), "down_proj.weight (rank 1)"),
    "by NaN": (
        ranks(replace(SOUND, unsound={"layers.7.norm.weight": "NaN or Inf"})),
        "norm.weight: NaN or Inf (rank 1)",
    ),
    "by an earlier look": (ranks(replace(SOUND, changed=["layers.7.o_proj.weight"])), "no sync has come between"),
}


def faults_of(seen: Observed) -> dict[str, str]:
    """Names of the faults that are found, with what is said of them."""
    return {one.fault: one.says for one in findings(seen) if one.state == State.FAULT and one.fault is not None}


def test_a_healthy_engine_has_no_fault_and_nothing_is_unknown() -> None:
    assert {one.check: one.state for one in findings(HEALTHY)} == dict.fromkeys(
        [*(check.__name__ for check in CHECKS), "alarm"], State.OK
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_alone(name: str) -> None:
    changes, says = FAULTS[name]
    (found,) = [one for one in findings(replace(HEALTHY, **changes)) if one.state != State.OK]
    assert found.fault == name
    assert says in found.says
    assert found.todo


@pytest.mark.parametrize(("changes", "says"), STALE.values(), ids=STALE)
def test_stale_weights_on_one_rank(changes: dict[str, Any], says: str) -> None:
    found = faults_of(replace(HEALTHY, **changes))
    assert list(found) == ["stale_weights"]
    assert says in found["stale_weights"]


@pytest.mark.parametrize(("changes", "says"), CORRUPTED.values(), ids=CORRUPTED)
def test_one_corrupted_layer(changes: dict[str, Any], says: str) -> None:
    found = faults_of(replace(HEALTHY, **changes))
    assert list(found) == ["corrupted_layer"]
    assert says in found["corrupted_layer"]


@pytest.mark.parametrize(
    ("told", "sync", "routing"),
    [
        ({"weight_transfer": "sparse_nccl", "quantization": "fp8"}, "fault", "unknown"),
        ({"weight_transfer": "sparse_nccl", "layers": {"X / Fp8LinearMethod": 1}}, "fault", "unknown"),
        ({"weight_transfer": "sparse_nccl", "quantization": None}, "ok", "unknown"),
        ({"weight_transfer": "sparse_nccl"}, "unknown", "unknown"),
        ({"weight_transfer": "nccl", "quantization": "fp8"}, "ok", "unknown"),
        ({"weight_transfer": None, "quantization": "fp8"}, "ok", "unknown"),
        ({"quantization": "fp8", "experts": True, "routed_experts": False}, "unknown", "warning"),
        ({"quantization": None, "experts": True, "routed_experts": False}, "unknown", "ok"),
        ({"quantization": "fp8", "experts": True}, "unknown", "unknown"),
        ({"experts": True, "routed_experts": False}, "unknown", "unknown"),
        ({"experts": False}, "unknown", "ok"),
    ],
)
def test_what_a_server_tells_of_its_weight_updates_and_routes(told: dict[str, Any], sync: str, routing: str) -> None:
    found = {one.check: one for one in findings(Observed(target="a server", ranks=[told]))}
    assert (found["sync"].state.value, found["routing"].state.value) == (sync, routing)
    assert all(found[name].todo for name in ("sync", "routing") if found[name].state.value in ("fault", "warning"))


# trainer's precision, what the engine has, its GPU -> state; then words of what it says and of what to type
BF16_ENGINE: dict[str, Any] = {"runs": "bf16"}
POW2_ENGINE: dict[str, Any] = facts(e8m0=True)
HELD_ENGINE: dict[str, Any] = facts(e8m0=True, held_e8m0=True)
TENSOR_ENGINE: dict[str, Any] = {"runs": None, "ranks": [{"quantization": "fp8_per_tensor", "e8m0": None}]}
LAYERS_ENGINE, CHECKPOINT, AWQ_ENGINE = (
    {"runs": None, "ranks": [{"quantization": name, "e8m0": e8m0, "layers": {f"Linear / {method} / K": 3}}]}
    for name, e8m0, method in (
        ("fp8", None, "Fp8PerTensorOnlineLinearMethod"), ("fp8", False, "Fp8LinearMethod"), ("awq", None, "AWQ"),
    )
)  # fmt: skip
UNSEEN: dict[str, Any] = {"runs": None, "ranks": [], "unseen": {"ranks": "hidden; type: open it"}}
UNTOLD: dict[str, Any] = UNSEEN | {"ranks": [{"quantization": "fp8"}]}
ENGINE_0, ENGINE_1 = (f"export VLLM_USE_DEEP_GEMM_E8M0={value}, before vLLM is imported" for value in "01")
SIDES: list[tuple[str | None, dict[str, Any], str, str, list[str]]] = [
    ("fp8_block", {}, "ok", "both sides have FP8 in blocks, with FP32 scales", []),
    ("fp8_block_pow2", POW2_ENGINE, "ok", "both sides have FP8 in blocks, with scales that are powers", []),
    ("fp8_tensor", TENSOR_ENGINE, "ok", "both sides have FP8 with one scale for each matrix", []),
    ("fp8_tensor", LAYERS_ENGINE, "ok", "both sides have FP8 with one scale for each matrix", []),
    ("fp8_block", LAYERS_ENGINE, "fault", "the engine FP8 with one scale", ["tensorwise"]),
    ("fp8_block", CHECKPOINT, "ok", "both sides have FP8 in blocks, with FP32 scales", []),
    ("fp8_block", POW2_ENGINE | {"gpu": "b200"}, "fault", "each rounds", ["FP32_SCALES=0"]),
    ("fp8_block", HELD_ENGINE, "fault", "each rounds", ["FP32_SCALES=0"]),
    ("fp8_block", AWQ_ENGINE, "unknown", "weights are awq, whose scales are none that the doctor compares", []),
    ("fp8_block", UNTOLD, "unknown", "hidden", ["open it"]),
    ("bf16", BF16_ENGINE, "ok", "both sides have BF16", []),
    ("bf16", {}, "ok", "adds to the mismatch", []),
    ("fp8_tensor", BF16_ENGINE, "warning", "adds to the mismatch", ["run the rollout with FP8 weights"]),
    ("fp8_block_pow2", {}, "fault", "each rounds", ["FP32_SCALES=1", f"; or in the engine: {ENGINE_1}"]),
    ("fp8_block", POW2_ENGINE, "fault", "each rounds", ["FP32_SCALES=0", f"; or in the engine: {ENGINE_0}"]),
    ("fp8_tensor", {}, "fault", "one scale for each matrix, and the engine FP8 in blocks", ["FP32_SCALES=1"]),
    ("fp8_block", TENSOR_ENGINE, "fault", "the engine FP8 with one scale", ["--fp8-recipe tensorwise"]),
    (None, {}, "unknown", "is not told", ["--trainer-precision bf16|fp8_block|fp8_block_pow2|fp8_tensor"]),
    ("fp8_block", UNSEEN, "unknown", "hidden", ["open it"]),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "changes", "state", "says", "todo"), SIDES)
def test_trainer_and_engine_round_alike(
    theirs: str | None, changes: dict[str, Any], state: str, says: str, todo: list[str]
) -> None:
    found = trainer(replace(HEALTHY, trainer_precision=theirs, **changes))
    assert (found.check, found.state.value) == ("trainer", state)
    assert says in found.says
    assert all(words in (found.todo or "") for words in todo)
    assert bool(found.todo) == bool(todo)
    if changes.get("gpu") == "b200" or changes == HELD_ENGINE:  # whose engine has one kind of scales
        assert "in the engine" not in (found.todo or "")


def test_the_way_to_replay_is_told_for_every_trainer() -> None:
    todo = routing(replace(HEALTHY, **facts(routed_experts=False))).todo
    assert todo is not None
    for other in TRAINERS:
        assert f"{other.name}: {' '.join(other.router_replay)}" in todo


def test_power_of_two_scales_on_hopper_are_no_fault_beside_a_trainer_with_them() -> None:
    assert faults_of(replace(HEALTHY, trainer_precision="fp8_block_pow2", **POW2_ENGINE)) == {}


CUTLASS = "runs on CUTLASS; the profile was measured with"
TORN = "the host's copy is another than the device's in {}: what reads it uses old scales"
TWO_TO_THE_MINUS_5 = {"q": 1.0, "k": 2**-5, "v": 2**-5, "k_host": 2**-5, "v_host": 2**-5}
# (what is observed; the check; its state; what it says, word for word). Amounts are those of the bounds.
SAID: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "one kernel in linears": (
        {},
        "precision",
        "ok",
        "fp8_block+fp8_kv: linears Fp8PerBlockOnlineLinearMethod / FlashInferFp8DeepGEMM, KV cache fp8",
    ),
    "a cache alone, as planned": (
        {"runs": None, "ranks": [{"kv_cache_dtype": "fp8"}], "unseen": {"ranks": "hidden; type: open it"}},
        "precision",
        "unknown",
        "KV cache fp8; weights are not told",
    ),
    "a cache alone, without a plan": (
        {"runs": None, "precision": None, "ranks": [{"kv_cache_dtype": "fp8"}]},
        "precision",
        "unknown",
        "KV cache fp8; weights are not told",
    ),
    "weights that are not quantised": (
        {"runs": None, "ranks": [{"kv_cache_dtype": "fp8", "quantization": None}]},
        "precision",
        "fault",
        "weights are not quantised, KV cache fp8; planned: fp8_block+fp8_kv",
    ),
    "weights alone, not quantised": (
        {"runs": None, "ranks": [{"quantization": None}]},
        "precision",
        "fault",
        "weights are not quantised; planned: fp8_block+fp8_kv",
    ),
    "quantised weights without a plan for them": (
        {"runs": None, "precision": "fp8_kv", "ranks": [{"kv_cache_dtype": "fp8", "quantization": "fp8"}]},
        "precision",
        "fault",
        "quantization fp8, KV cache fp8; planned: fp8_kv",
    ),
    "a quantisation of one kind": (
        {"runs": None, "ranks": [{"kv_cache_dtype": "fp8", "quantization": "fp8_per_block"}]},
        "precision",
        "ok",
        "quantization fp8_per_block, KV cache fp8",
    ),
    "a quantisation of several kinds": (
        {"runs": None, "ranks": [{"kv_cache_dtype": "fp8", "quantization": "fp8"}]},
        "precision",
        "unknown",
        "quantization fp8, KV cache fp8; this may be fp8_block or another format",
    ),
    "a format that only checkpoints have": (
        {"runs": None, "precision": "fp8_channel", "ranks": [{"kv_cache_dtype": "auto", "quantization": "fp8"}]},
        "precision",
        "unknown",
        "quantization fp8, KV cache auto; this may be fp8_channel or another format",
    ),
    "layers without a cache": (
        {"runs": None, "ranks": [{"layers": {"X / Fp8PerBlockOnlineLinearMethod": 1}}]},
        "precision",
        "unknown",
        "linears Fp8PerBlockOnlineLinearMethod; the KV cache's dtype is not told",
    ),
    "a cache alone, not as planned": (
        {"runs": None, "ranks": [{"kv_cache_dtype": "auto"}]},
        "precision",
        "fault",
        "KV cache auto; planned: fp8_block+fp8_kv",
    ),
    "layers of no preset": (
        {"runs": None, "ranks": [{"layers": {"X / Fp8LinearMethod": 1}, "kv_cache_dtype": "fp8"}]},
        "precision",
        "fault",
        "linears Fp8LinearMethod, KV cache fp8; planned: fp8_block+fp8_kv",
    ),
    "a preset alone": ({"ranks": []}, "precision", "ok", "fp8_block+fp8_kv"),
    "no precision": ({"runs": None, "ranks": [], "unseen": {"ranks": "down"}}, "precision", "unknown", "down"),
    "no kernel": ({"kernels": {}}, "kernels", "ok", "none that vLLM names"),
    "two kernels": (
        {"kernels": {"gemm.fp8_block": "CUTLASS", "moe.fp8_block": "CUTLASS"}},
        "kernels",
        "fault",
        f"gemm.fp8_block {CUTLASS} flashinfer_deep_gemm; moe.fp8_block {CUTLASS} triton: {WAY_BACK['moe']}",
    ),
    "kernels that nothing is known to compare with": (
        {"kernels": {"gemm.fp8_block": "CUTLASS"}, "measured_kernels": None,
         "unseen": {"measured_kernels": "no profile of it; type: calibrate"}},
        "kernels", "unknown", "gemm.fp8_block CUTLASS; not compared: no profile of it",
    ),
    "no FP8 weights": (facts(e8m0=None), "e8m0", "ok", "no blockwise FP8 weights"),
    "no router": (facts(routers={}), "router", "ok", "no router"),
    "graphs are set": (facts(), "cuda_graphs", "ok", "FULL_AND_PIECEWISE"),
    "graphs are not told": (
        facts(cudagraph_mode=None), "cuda_graphs", "unknown", "enforce_eager is not set; cudagraph_mode is not told",
    ),
    "graphs by one fact": (
        {"ranks": [{"enforce_eager": False}]},
        "cuda_graphs",
        "unknown",
        "enforce_eager is not set; cudagraph_mode is not told",
    ),
    "graphs by the other": ({"ranks": [{"cudagraph_mode": "FULL"}]}, "cuda_graphs", "ok", "FULL"),
    "scales not told": (
        {"kv_scales": {}, "unseen": {"kv_scales": "the cache sleeps"}}, "kv_scales", "unknown", "the cache sleeps",
    ),
    "one layer's scales are 1.0": (
        {"kv_scales": SCALES | {"layers.0": {"k": 1.0, "v": 1.0}}, "kv_amax": None},
        "kv_scales",
        "ok",
        "0.01 to 1 in 3 layers",
    ),
    "room by the largest": (
        {"kv_amax": {"layers.0": [3.0, 4.0, 2.0], "layers.1": [3.0, 8.0, 4.0], "layers.2": [0.0, 0.0, 0.0]}},
        "kv_scales",
        "ok",
        "0.01 to 0.02 in 3 layers, with room for 1.12 times what was seen",
    ),
    "as much as may clip": (
        {"kv_scales": {"layers.0": TWO_TO_THE_MINUS_5}, "kv_amax": {"layers.0": [0.0, 1.25 * 448 * 2**-5, 0.0]}},
        "kv_scales",
        "ok",
        "0.0312 to 0.0312 in 1 layers, with room for 0.80 times what was seen",
    ),
    "the worst that clips": (
        {"kv_amax": {"layers.0": [3.0, 12.0, 4.0], "layers.2": [3.0, 8.0, 9.0]}},
        "kv_scales",
        "fault",
        "layers.0, layers.2 clip: layers.2 has seen 2.01 times what its scale holds",
    ),
    "hosts that round": (
        {"kv_scales": SCALES | {"layers.1": SCALES["layers.1"] | {"k_host": 0.02 * (1 + 0.8e-6)}}, "kv_amax": None},
        "kv_scales",
        "ok",
        "0.01 to 0.02 in 3 layers",
    ),
    "hosts that do not": (
        {"kv_scales": {x: SCALES[x] | {"k_host": 0.02 * (1 + 1.2e-6)} for x in SCALES}},
        "kv_scales",
        "fault",
        TORN.format("layers.0, layers.1, layers.2"),
    ),
    "more hosts than are named": (
        {"kv_scales": {f"layers.{n}": SCALES["layers.0"] | {"v_host": 1.0} for n in range(6)}},
        "kv_scales",
        "fault",
        TORN.format("layers.0, layers.1, layers.2, layers.3 and 2 more"),
    ),
    "no preemption": ({"preemptions": 0, "requests": None}, "preemption", "ok", "none since the engine's start"),
    "a preemption in unknown requests": (
        {"preemptions": 1, "requests": None},
        "preemption",
        "unknown",
        "1 since the engine's start; in how many requests is not told",
    ),
    "unknown preemptions": (
        {"preemptions": None, "unseen": {"counts": "no metrics"}}, "preemption", "unknown", "no metrics",
    ),
    "no request": (
        {"preemptions": 0, "requests": 0},
        "preemption",
        "unknown",
        "no request has finished since the engine's start",
    ),
    "seldom": ({"preemptions": 25, "requests": 500}, "preemption", "ok", "25 in 500 requests since the engine's start"),
    "as many hits as a template makes": (
        {"prefix_cache_hits": 4_000},
        "prefix_hits",
        "ok",
        "1.0% of 400,000 tokens since the engine's start were in the prefix cache",
    ),
    "too few tokens for hits": (
        {"prefix_cache_queries": 99_999, "prefix_cache_hits": 0},
        "prefix_hits",
        "ok",
        "0.0% of 99,999 tokens since the engine's start were in the prefix cache",
    ),
    "unknown hits": (
        {"prefix_cache_hits": None, "unseen": {"counts": "no metrics"}}, "prefix_hits", "unknown", "no metrics",
    ),
    "often": (
        {"preemptions": 26, "requests": 500},
        "preemption",
        "fault",
        "26 in 500 requests since the engine's start: each computes its request's tokens again",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "check", "state", "says"), SAID.values(), ids=SAID)
def test_what_is_said_at_each_bound(changes: dict[str, Any], check: str, state: str, says: str) -> None:
    (found,) = [one for one in findings(replace(HEALTHY, **changes)) if one.check == check]
    assert (found.state.value, found.says) == (state, says)


@pytest.mark.parametrize("gpu", ["h200_sxm", "a GPU that nobody knows", None])
def test_powers_of_two_are_a_fault_unless_the_gpu_is_known_to_want_them(gpu: str | None) -> None:
    assert list(faults_of(replace(HEALTHY, gpu=gpu, **facts(e8m0=True)))) == ["e8m0_on"]


@pytest.mark.parametrize(
    ("gpu", "says"), [("cpu", "raise VLLM_CPU_KVCACHE_SPACE,"), ("h200_sxm", "raise gpu_memory_utilization or")]
)
def test_more_memory_for_the_cache_is_asked_for_by_the_names_of_the_device(gpu: str, says: str) -> None:
    (found,) = [one for one in findings(replace(HEALTHY, gpu=gpu, preemptions=300)) if one.fault == "preemption_storm"]
    assert found.todo is not None
    assert found.todo.startswith(says)


def test_two_faults_are_both_named() -> None:
    seen = replace(HEALTHY, **FAULTS["preemption_storm"][0], **FAULTS["kv_scales_unit"][0])
    assert set(faults_of(seen)) == {"kv_scales_unit", "preemption_storm"}


def test_what_was_not_seen_is_unknown_with_its_reason_and_no_fault() -> None:
    found = findings(Observed(target="nothing", unseen={"ranks": "it does not tell", "decode": "it is down"}))
    said = {one.check: one.says for one in found if one.state == State.UNKNOWN}
    assert not [one for one in found if one.state == State.FAULT]
    assert {"kernels", "e8m0", "router", "kv_scales", "cuda_graphs", "preemption", "weights"} <= set(said)
    assert said["e8m0"] == "it does not tell"
    assert said["decode"] == "it is down"


@pytest.mark.parametrize(
    ("changes", "check", "says"),
    [
        ({"gpu": "b200", **facts(e8m0=True)}, "e8m0", "as b200 multiplies them"),
        (HELD_ENGINE, "e8m0", "as the checkpoint's"),
        ({"gpu": "cpu", **facts(enforce_eager=True)}, "cuda_graphs", "none on a CPU"),
        ({"runs": "fp8_block", "precision": "fp8_block", **facts(kv_cache_dtype="auto")}, "kv_scales", "not FP8"),
        ({"kv_amax": {x: [3.0, 11.0, 4.0] for x in SCALES}}, "kv_scales", "room for 0.81 times"),
        ({"prefix": Compared(16, 9.0, 9.0, cached=0)}, "prefix_cache", "none of 16 prompts was cached"),
        ({"kernels": {}, "measured_kernels": None}, "kernels", "none that vLLM names"),
        (ranks(replace(SOUND, compared=97, of=102)), "weights", "387 of 392 tensors"),
    ],
)
def test_what_is_no_fault(changes: dict[str, Any], check: str, says: str) -> None:
    (found,) = [one for one in findings(replace(HEALTHY, **changes)) if one.check == check]
    assert found.state == State.OK
    assert says in found.says


def test_a_refusal_that_names_its_remedy_is_not_answered_with_another() -> None:
    (found,) = [one for one in findings(replace(HEALTHY, refusal="it is paused; type: resume")) if one.fault]
    assert (found.fault, found.todo) == ("not_serving", "resume")
    assert found.says == "the engine refuses to generate: it is paused"


@pytest.mark.parametrize(
    ("layers", "dtype", "preset"),
    [
        (["X / UnquantizedLinearMethod"], "auto", "bf16"),
        (["X / UnquantizedLinearMethod"], "fp8_e4m3", "fp8_kv"),
        (["X / Fp8PerBlockOnlineLinearMethod / K"], "auto", "fp8_block"),
        (["X / Fp8PerBlockOnlineLinearMethod / K"], "fp8", "fp8_block+fp8_kv"),
        (["X / Fp8PerTensorOnlineLinearMethod / K"], "fp8", None),
    ],
)
def test_the_preset_that_facts_describe(layers: list[str], dtype: str, preset: str | None) -> None:
    assert preset_of({"layers": dict.fromkeys(layers, 1), "kv_cache_dtype": dtype}) == preset
    assert preset_of({"kv_cache_dtype": dtype}) is None
