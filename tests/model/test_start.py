"""Whatever a plan writes starts in vLLM: configuration, layers, KV blocks and CUDA graphs, on GPUs that are not here.

One process starts all cases, as importing vLLM takes longer than most of them.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from family_configs import INSIDE, config_of
from installed_vllm import VLLM
from kv_families import FAMILIES as KV_FAMILIES

from benchmarks.starts.cases import KINDS, RESULTS, Case, cases_of, kinds, run
from fp8plan import jsonl
from fp8plan.model.architecture.families import FAMILIES
from fp8plan.runtime.apply.weight_sync.fixed_scales import FIXED_SCALES, LIVE_SCALES, has_fixed_scales
from fp8plan.version import at_least

pytestmark = pytest.mark.vllm

# Each family on two of them, with room for the largest.
LARGE_GPUS = ("a100_sxm", "h200_sxm", "b200", "rtx_pro_6000", "a40", "h200_sxm", "b300", "l40s")
# What published configs have and transformers' config classes have dropped; and fewer layers of the slowest.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "flex_olmo": {"num_hidden_layers": 1},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"block_dim": 2560, "block_ff_dim": 12288, "conv_dim": 2560},
    "exaone_moe": {"sliding_windows": [128] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "expert_ffn_hidden_size": 256},
    "mimo_v2_flash": {
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_qk_norm": True},
}
NOT_BUILT = {
    "mistral4": "read from params.json, and built as deepseek_v3",
    "apertus": "copies numbers while it is built",
}
NAMES = [name for name in FAMILIES if name not in (*INSIDE, *NOT_BUILT)]
KV_FAMILY = {"kimi_linear": "Kimi-Linear-48B"}  # whose config class is not transformers'
LAYERS = 4
FP8 = "fp8_block+fp8_kv"
Started = list[tuple[Case, dict[str, Any]]]


def family(name: str, folder: Path) -> Path:
    """Write a family's config with few layers, and return its folder."""
    from transformers import AutoModelForCausalLM

    place = folder / name
    if name in KV_FAMILY:
        place.mkdir()
        (place / "config.json").write_text(json.dumps(KV_FAMILIES[KV_FAMILY[name]]))
        return place
    config = config_of(name, {"num_hidden_layers": LAYERS} | FIELDS.get(name, {}))
    if name == "mimo_v2_flash":
        config.hybrid_layer_pattern = [int(kind == "sliding_attention") for kind in config.layer_types]
    own = AutoModelForCausalLM._model_mapping[type(config)].__name__
    config.architectures = [{"phimoe": "PhiMoEForCausalLM"}.get(name, own)]
    config.save_pretrained(place)
    return place


def families(folder: Path) -> list[Case]:
    """Each family in BF16 on one GPU, and with FP8 weights and cache on the next."""
    gpus, cases = cycle(LARGE_GPUS), []
    for name in NAMES:
        place = family(name, folder)
        for precision in ("bf16", FP8):
            cases += [x for x in cases_of(name, place, VLLM, (next(gpus),)) if x.precision == precision]
    shorter = cases_of("values shorter than keys", folder / "mimo_v2_flash", VLLM, ("h200_sxm", "rtx_pro_6000"))
    return cases + [case for case in shorter if case.precision == FP8]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """The cases that a plan does not refuse, and vLLM's results."""
    folder = tmp_path_factory.mktemp("starts")
    cases = [*kinds(folder, VLLM), *families(folder)]
    results = run(cases, folder)
    return [(case, results[case.key]) for case in cases if case.key in results]


def test_whatever_is_planned_starts(started: Started) -> None:
    assert len(started) > 250
    assert {case.kind for case, _ in started} >= {*(kind.name for kind in KINDS), *NAMES}
    assert not [(*case.key, result["step"], result["error"]) for case, result in started if "error" in result]


def test_the_planned_pool_is_vllms(started: Started) -> None:
    """In tokens, as the size of a block depends on the kernel; and in blocks, if each request needs one of its own."""
    for case, result in started:
        planned, blocks = case.memory.kv, result["num_blocks"]
        if planned.keeps_states:
            assert case.memory.num_gpu_blocks == blocks, case.key
            assert case.setup.limits.max_num_seqs <= blocks, case.key
        if planned.block_size:  # a model of states alone has none
            tokens = planned.block_size * case.memory.num_gpu_blocks
            assert result["block_size"] * blocks == pytest.approx(tokens, rel=1e-4), case.key


def test_what_is_said_of_the_scales_holds_for_every_kernel_that_vllm_selects(started: Started) -> None:
    """And an engine that is planned with scales of one kind is accepted by fp8plan at its start, with those."""
    for case, result in (pair for pair in started if pair[0].scales):
        if case.scales == "not synced":
            assert not {*LIVE_SCALES, *FIXED_SCALES}.intersection(result["attention"]), case.key
            continue
        facts = {"attention": result["attention"], "cudagraph_mode": result["cudagraph_mode"]}
        runs = "fixed" if has_fixed_scales(facts) else "measured"
        assert runs == case.scales, case.key


def test_each_kind_of_scales_and_each_kernel_of_the_plan_is_met(started: Started) -> None:
    met = {name for case, result in started for name in result["attention"] if case.scales not in ("", "not synced")}
    known = {*LIVE_SCALES, *FIXED_SCALES} - {"CPUAttentionBackendImpl"}
    of_later = {"FlashAttentionDiffKVImpl", "TritonAttentionDiffKVImpl"}
    assert known - met == (set() if at_least(VLLM, (0, 32)) else of_later)
    assert {case.scales for case, _ in started} == {"", "measured", "fixed", "not synced"}


def test_the_committed_table_is_what_runs(started: Started) -> None:
    rows = jsonl.rows(RESULTS)
    if rows[0]["vllm"] != VLLM.partition("+")[0]:
        pytest.skip(f"the table is of vLLM {rows[0]['vllm']}; python -m benchmarks.starts makes it")
    known = {(row["kind"], row["gpu"], row["precision"]): row for row in rows}
    results = {case.key: case.row(result, rows[0]["vllm"]) for case, result in started if case.key in known}
    assert results == {key: row for key, row in known.items() if "refused" not in row}
