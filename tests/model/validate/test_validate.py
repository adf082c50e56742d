"""Validation: records made from the predictor itself have no error, and every figure follows from its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import ROUTING, Validation, validate
from fp8plan.model.workload import Workload

MODEL = "Qwen/Qwen3-0.6B"
WORK = Workload(10, 6, LogNormal(40, 0.5, 90), LogNormal(120, 0.9, 600), seed=5)
BATCH = WORK.batch()
VERSION = "0.26.0"
RECORD: dict[str, Any] = {
    "model": MODEL,
    "gpu": "h200_sxm",
    "engine": "vllm",
    "engine_version": VERSION,
    "precision": "bf16",
    "prompt_lengths": BATCH.prompts.tolist(),
    "prompt_ids": BATCH.prompt_ids.tolist(),
    "response_lengths": BATCH.responses.tolist(),
    "seconds": 1.0,
}


def validated(tmp_path: Path, *changes: dict[str, Any], **options: Any) -> Validation:
    """The validation of RECORD with each of `changes`; a value of None takes the key away."""
    rows = [{key: value for key, value in (RECORD | change).items() if value is not None} for change in changes]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return validate(read_records(path), **options)


def predicted(tmp_path: Path, **change: Any) -> float:
    seconds: float = validated(tmp_path, change).records[0]["predicted_s"]
    return seconds


@pytest.mark.parametrize("precision", ["bf16", "fp8_block+fp8_kv"])
@pytest.mark.parametrize(("pool", "loop"), [(None, None), (60 * 16, None), (None, 6e-4)])
def test_a_record_predicts_what_the_planner_predicts(
    tmp_path: Path, precision: str, pool: int | None, loop: float | None
) -> None:
    """The same rollout on either way: kv_cache_tokens counts vLLM's null block, num_gpu_blocks does not."""
    limits = EngineLimits(num_gpu_blocks=None if pool is None else pool // 16 - 1)
    prediction = predict(
        PlanRequest(
            MODEL, "h200", WORK, limits=limits, precisions=[precision], host_loop_s=loop, engine_version=VERSION
        )
    )
    choice = prediction.plan.choices[0]
    (row,) = validated(tmp_path, {"precision": precision, "kv_cache_tokens": pool, "host_loop_s": loop}).records
    assert row["predicted_s"] == pytest.approx(choice.makespan_s, rel=1e-12)
    assert row["predicted_low_s"] == pytest.approx(choice.makespan_low_s, rel=1e-12)
    assert row["predicted_high_s"] == pytest.approx(choice.makespan_high_s, rel=1e-12)
    assert row["predicted_kv_cache_tokens"] == choice.kv_cache_tokens
    assert row["predicted_preemptions"] == choice.preemptions
    if pool is not None:
        assert choice.kv_cache_tokens == pool
        assert choice.preemptions is not None
        assert choice.preemptions > 0


def test_the_errors_are_those_of_the_measured_seconds(tmp_path: Path) -> None:
    seconds = predicted(tmp_path)
    exact = validated(tmp_path, {"seconds": seconds})
    assert exact.records[0]["error"] == exact.makespan_mape == exact.makespan_worst == 0
    slow = validated(tmp_path, {"seconds": 1.1 * seconds}, {"seconds": seconds / 1.3})
    assert slow.records[0]["error"] == pytest.approx(-0.0909, abs=1e-4)
    assert slow.records[1]["error"] == pytest.approx(0.3)
    assert slow.makespan_mape == pytest.approx((0.0909 + 0.3) / 2, abs=1e-4)
    assert slow.makespan_worst == pytest.approx(0.3)


def test_coverage_is_the_share_inside_the_interval(tmp_path: Path) -> None:
    row = validated(tmp_path, {}).records[0]
    low, high = row["predicted_low_s"], row["predicted_high_s"]
    found = validated(tmp_path, *({"seconds": s} for s in (low * 0.99, low * 1.01, high * 0.99, high * 1.01)))
    assert found.coverage == 0.5
    assert found.interval_median_halfwidth == pytest.approx((high - low) / 2 / row["predicted_s"])


def test_a_group_is_one_workload_with_the_same_limits_whatever_the_precision_and_pool(tmp_path: Path) -> None:
    same: list[dict[str, Any]] = [
        {},
        {"precision": "fp8_kv"},
        {"precision": "fp8_block", "kv_cache_tokens": 4096},
        {"seconds": 3.0, "preemptions": 4, "boot": "another"},
        {"gpu": "h200"},  # another name of the same GPU
        {"prompt_ids": [f"p{i}" for i in RECORD["prompt_ids"]]},  # other names of the same prompts
        {"max_num_seqs": 1024, "tensor_parallel": 1},  # what is the default anyway
    ]
    other: list[dict[str, Any]] = [
        {"max_num_seqs": 8},
        {"max_model_len": 5000},
        {"gpu_memory_utilization": 0.5},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"enforce_eager": True},
        {"block_size": 32},
        {"max_num_batched_tokens": 2048},
        {"tensor_parallel": 2},
        {"data_parallel": 2},
        {"gpu": "h100"},
        {"engine_version": "0.27.0"},
        {"model": "Qwen/Qwen3-1.7B"},
        {"response_lengths": RECORD["response_lengths"][::-1]},
        {"prompt_ids": None},
    ]
    found = validated(tmp_path, *same, *other)
    names = [row["group"] for row in found.records]
    assert len(set(names[: len(same)])) == 1
    assert len(set(names)) == 1 + len(other)
    assert [group["group"] for group in found.groups] == list(dict.fromkeys(names))
    assert [group["records"] for group in found.groups] == [len(same)] + [1] * len(other)


def test_missing_keys_take_vllms_defaults_for_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rows = [RECORD, RECORD | {"gpu": "l40s"}, RECORD | {"max_num_seqs": None, "enforce_eager": True}]
    path.write_text("\n".join(map(json.dumps, rows)))
    big, small, eager = (record.limits for record in read_records(path))
    assert big == EngineLimits.for_gpu(find_gpu("h200")).holding(BATCH.longest)
    assert small == EngineLimits.for_gpu(find_gpu("l40s")).holding(BATCH.longest)
    assert small.max_num_seqs < big.max_num_seqs
    assert (eager.max_num_seqs, eager.enforce_eager) == (big.max_num_seqs, True)


def test_every_limit_of_a_record_is_used(tmp_path: Path) -> None:
    given = {
        "gpu_memory_utilization": 0.5, "max_model_len": 900, "max_num_seqs": 33, "max_num_batched_tokens": 77,
        "block_size": 32, "enable_prefix_caching": False, "async_scheduling": False, "enforce_eager": True,
        "tensor_parallel": 2, "data_parallel": 3, "kv_cache_tokens": 3200,
    }  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD | given))
    (record,) = read_records(path)
    assert record.limits == EngineLimits(0.5, 900, 33, 77, 32, False, 2, 3, False, True, True, 99)


def test_a_pool_counted_in_blocks_is_taken_as_it_is(tmp_path: Path) -> None:
    """Blocks may be larger than the tokens that were asked for say."""
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD | {"kv_cache_tokens": 16_000, "num_gpu_blocks": 101, "block_size": 16}))
    (record,) = read_records(path)
    assert record.limits.num_gpu_blocks == 100


def test_an_imposed_pool_decides_and_a_null_one_is_predicted(tmp_path: Path) -> None:
    rows = validated(tmp_path, {"kv_cache_tokens": 960}, {}, {"kv_cache_tokens": 10**6}).records
    assert [row["predicted_kv_cache_tokens"] for row in rows][::2] == [960, 10**6]
    assert rows[1]["predicted_kv_cache_tokens"] > 10**6  # 130 GB of 114,688 bytes a token
    assert rows[0]["predicted_preemptions"] > 0
    assert rows[1]["predicted_preemptions"] == rows[2]["predicted_preemptions"] == 0
    assert rows[0]["predicted_s"] > rows[1]["predicted_s"]


def test_what_was_measured_is_kept_beside_what_is_predicted(tmp_path: Path) -> None:
    measured = {"preemptions": 7, "measured_kv_cache_tokens": 12345, "reward": 0.5, "seconds": 2}
    (row,) = validated(tmp_path, measured | {"extra": {"a": [1, None]}}).records
    assert measured.items() <= row.items()
    assert row["extra"] == {"a": [1, None]}
    assert row["predicted_preemptions"] == 0
    assert not {"prompt_lengths", "response_lengths", "prompt_ids"} & row.keys()  # long, and in the file already
    assert row["line"] == 1


def test_speedups_are_in_points_against_the_median_bf16_record(tmp_path: Path) -> None:
    ours = {p: predicted(tmp_path, precision=p) for p in ("bf16", "fp8_block", "fp8_kv")}
    found = validated(
        tmp_path,
        {"seconds": 9.0},
        {"seconds": 3.0},
        {"precision": "fp8_block", "seconds": 2.0},
        {"seconds": 2.0},
        {"precision": "fp8_kv", "seconds": 1.0},
        {"precision": "fp8_kv", "seconds": 0.5, "max_num_seqs": 4},  # a group of its own, without bf16
    )
    full, alone = found.groups
    assert alone["speedups"] == []
    assert [(s["line"], s["precision"]) for s in full["speedups"]] == [(3, "fp8_block"), (5, "fp8_kv")]
    assert [s["measured_speedup"] for s in full["speedups"]] == [1.5, 3.0]
    for entry in full["speedups"]:
        assert entry["predicted_speedup"] == pytest.approx(ours["bf16"] / ours[entry["precision"]])
    errors = [100 * (ours["bf16"] / ours["fp8_block"] - 1.5), 100 * (ours["bf16"] / ours["fp8_kv"] - 3.0)]
    assert [s["error_points"] for s in full["speedups"]] == pytest.approx(errors)
    assert found.speedup_mae_points == pytest.approx(np.abs(errors).mean())
    assert found.speedup_worst_points == pytest.approx(np.abs(errors).max())
    assert full["fastest_measured"] == "fp8_kv"
    assert full["fastest_predicted"] == min(ours, key=lambda p: ours[p])


def test_a_predicted_speedup_has_its_interval_which_is_the_planners(tmp_path: Path) -> None:
    rows = validated(tmp_path, {}, {"precision": "fp8_kv"}, {"precision": "fp8_block+fp8_kv"}, {})
    plan = predict(PlanRequest(MODEL, "h200", WORK, engine_version=VERSION)).plan
    gains = rows.groups[0]["speedups"]
    assert [gain["precision"] for gain in gains] == ["fp8_kv", "fp8_block+fp8_kv"]
    for gain in gains:
        planned = plan.select(gain["precision"]).gain
        said = [gain[f"predicted_speedup{end}"] for end in ("", "_low", "_high")]
        assert said == pytest.approx(planned)
        assert said[1] < said[0] < said[2]


def test_without_a_bf16_record_there_is_no_speedup_to_be_wrong_about(tmp_path: Path) -> None:
    found = validated(tmp_path, {"precision": "fp8_block"})
    assert found.speedup_mae_points is found.speedup_worst_points is None
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_prompts_shared_by_id_save_prefill(tmp_path: Path) -> None:
    long = {"prompt_lengths": [8000] * 4, "response_lengths": [50] * 4}
    # Staggered by the limit of two at once: the later two find the first one's blocks.
    seconds = [predicted(tmp_path, **long, max_num_seqs=2, prompt_ids=ids) for ids in ([0, 0, 0, 0], [0, 1, 2, 3])]
    assert seconds[0] < 0.9 * seconds[1]
    assert predicted(tmp_path, **long, max_num_seqs=2, prompt_ids=None) == seconds[1]


def test_replicas_share_the_batch(tmp_path: Path) -> None:
    one, three = (predicted(tmp_path, data_parallel=n) for n in (1, 3))
    assert three < one


def test_progress_sees_every_record(tmp_path: Path) -> None:
    seen: list[int] = []

    def watch(items: Any) -> Any:
        for record in items:
            seen.append(record.line)
            yield record

    validated(tmp_path, {}, {"seconds": 2}, progress=watch)
    assert seen == [1, 2]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"\n{json.dumps(RECORD)}\n\n{json.dumps(RECORD)}\n\n")
    assert [record.line for record in read_records(path)] == [2, 4]
    path.write_text(f"{json.dumps(RECORD)}\n\n{{}}\n")
    with pytest.raises(ConfigError, match=r"line 3 of .* lacks model, gpu"):
        read_records(path)


def test_an_error_while_predicting_names_the_line_and_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*'int4'"):
        validated(tmp_path, {}, {"precision": "int4"})


def test_a_record_says_its_version_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    (row,) = validated(tmp_path, {"schema_version": "1.4", "later": [1]}).records
    assert row["later"] == [1]
    told = r"line 2 of .*records\.jsonl has schema 2\.0; this is fp8plan .*, which reads schema 1\.x: type: pip install"
    with pytest.raises(ConfigError, match=told):
        validated(tmp_path, {}, {"schema_version": "2.0"})
    with pytest.raises(ConfigError, match=r"line 1 of .*: schema_version is 2; allowed: text such as '1\.\d+'"):
        validated(tmp_path, {"schema_version": 2})


def test_an_unknown_caller_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2 of .*: inside is 'slime'; allowed: own, verl"):
        validated(tmp_path, {}, {"inside": "slime"})


def test_own_loops_and_records_without_a_caller_are_one_group(tmp_path: Path) -> None:
    rows = validated(tmp_path, {}, {"precision": "fp8_block", "inside": "own"}).records
    assert len({row["group"] for row in rows}) == 1


def test_engines_with_other_cuda_graphs_are_groups_of_their_own() -> None:
    """Their rollouts are no baseline for each other."""
    file = Path(__file__).parents[3] / "benchmarks" / "results" / "above_graphs" / "rollouts.jsonl"
    records = [x for x in read_records(file) if x.fields["model"] == "Qwen/Qwen3-1.7B"]
    groups = {(x.group, x.limits.max_cudagraph_capture_size) for x in records}
    assert {size for _, size in groups} == {None, 1024}
    assert len(groups) == len({group for group, _ in groups}) == 5


def test_experts_drawn_by_vllms_simulation_are_named_where_it_costs_time(tmp_path: Path) -> None:
    experts = {"model": "Qwen/Qwen3-30B-A3B", "env": {ROUTING: "uniform_random"}}
    (warning,) = [x for x in validated(tmp_path, experts | {"engine_version": "0.33.0"}).warnings if ROUTING in x]
    assert warning.startswith("Qwen/Qwen3-30B-A3B was measured with")
    for other in ({"engine_version": "0.26.0"}, {"engine_version": "0.33.0", "env": {}}):
        assert not [x for x in validated(tmp_path, experts | other).warnings if ROUTING in x]
    dense = {"engine_version": "0.33.0", "env": experts["env"]}
    assert not [x for x in validated(tmp_path, dense).warnings if ROUTING in x]
