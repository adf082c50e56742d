"""The doctor on what a run has written, and on the answers of a server that is none."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.doctor.over_http.answers import Completion, Info, facts_of, output_of, samples, total
from fp8plan.runtime.watch.controller.alarms import MEANINGS, Alarm
from fp8plan.runtime.watch.guard.prefix_cache import PrefixUse, lost_prefixes

# As a Monitor's record has them (fp8plan.schemas.RunRecord).
RECORD: dict[str, Any] = {
    "step": 4,
    "metrics": {"rollout_corr/k3_kl": 2e-3, "fp8plan/kl_limit": 1e-2},
    "model": "Qwen/Qwen3-8B",
    "gpu": "h200_sxm",
    "engine_version": "0.26.0",
    "precision": "fp8_block",
    "kernel_backends": {"gemm.fp8_block": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"},
    "e8m0": False,
    "enforce_eager": False,
    "prompt_lengths": [8] * 40,
    "response_lengths": [9] * 40,
    "seconds": 1.0,
    "preemptions": 0,
}


def faults(file: Path, *rows: dict[str, Any]) -> dict[str | None, str]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {one.fault: one.says for one in fp8plan.doctor(str(file)).faults}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"e8m0": True}, "e8m0_on"),
        ({"enforce_eager": True}, "graphs_off"),
        ({"preemptions": 30}, "preemption_storm"),
        ({"kernel_backends": {"gemm.fp8_block": "MarlinFP8ScaledMMLinearKernel"}}, "wrong_kernel"),
        ({"metrics": {"rollout_corr/k3_kl": 0.2, "fp8plan/kl_limit": 1e-2}}, "mismatch_high"),
    ],
)
def test_a_monitors_run_file(tmp_path: Path, changes: dict[str, Any], fault: str | None) -> None:
    assert list(faults(tmp_path / "run.jsonl", RECORD, RECORD | changes)) == ([fault] if fault else [])


def told(file: Path, *rows: dict[str, Any]) -> dict[str, tuple[str, str]]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = fp8plan.doctor(str(file))
    assert found.target == f"{file}, step {rows[-1]['step']}"
    return {one.check: (one.state.value, one.says) for one in found.findings}


def test_a_run_file_whose_lengths_were_cut_tells_the_rest(tmp_path: Path) -> None:
    cut = {name: value for name, value in RECORD.items() if not name.endswith("_lengths")}
    found = told(tmp_path / "run.jsonl", cut)
    assert found["precision"] == ("ok", "fp8_block")
    assert found["kernels"] == ("ok", "gemm.fp8_block FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
    assert found["e8m0"] == ("ok", "scales are FP32")
    assert found["preemption"] == ("ok", "none since step 4 began")
    found = told(tmp_path / "run.jsonl", cut | {"preemptions": 30})
    assert found["preemption"] == ("unknown", "30 since step 4 began; in how many requests is not told")


def test_a_run_file_tells_the_hits_of_the_prefix_cache(tmp_path: Path) -> None:
    counted = {"prefix_cache_queries": 500_000, "prefix_cache_hits": 2_500}
    state, says = told(tmp_path / "run.jsonl", RECORD | counted)["prefix_hits"]
    assert (state, says.partition(" were")[0]) == ("warning", "0.5% of 500,000 tokens since step 4 began")
    state, says = told(tmp_path / "run.jsonl", RECORD | counted | {"enable_prefix_caching": False})["prefix_hits"]
    assert (state, says.partition(",")[0]) == ("warning", "prefix caching is off")


def test_lost_prefixes_are_told_as_the_guard_told_them(tmp_path: Path) -> None:
    lost = lost_prefixes(PrefixUse(500_000, 300_000, repeated=450_000, expected=0.3))
    assert lost is not None
    assert lost.says == "30% of the prompt tokens were computed again; the cache holds 67% of what waits"
    causes = [{"cause": "tail", "sentence": "a tail"}, {"cause": "prefix", "sentence": lost.sentence, "lost_s": 3.0}]
    counted = {"prefix_cache_queries": 500_000, "prefix_cache_hits": 300_000}
    (tmp_path / "run.jsonl").write_text(json.dumps(RECORD | counted | {"guard": {"verdict": {"causes": causes}}}))
    named = next(one for one in fp8plan.doctor(str(tmp_path / "run.jsonl")).findings if one.check == "prefix_hits")
    assert named.state.value == "warning"
    assert named.says == f"60.0% of 500,000 tokens since step 4 began were in the prefix cache; {lost.says}"
    assert named.todo == lost.todo == "run fewer trajectories at once, or give the KV cache more room"
    causes.pop()
    assert told(tmp_path / "run.jsonl", RECORD | counted)["prefix_hits"][0] == "ok"


def test_a_monitor_without_an_engine_knows_no_preemptions(tmp_path: Path) -> None:
    found = told(tmp_path / "run.jsonl", {"step": 4, "metrics": RECORD["metrics"]})
    assert found["preemption"][1].startswith("no record counts preemptions: a Monitor knows rollouts from its engine")
    assert found["mismatch"][0] == "ok"


def line(row: Any) -> str:
    """A row as JSON, with 1e999 for infinity, which a JSON reader takes for it."""
    return json.dumps(row).replace("Infinity", "1e999") + "\n"


def metrics(**figures: float | None) -> dict[str, Any]:
    names = {"k3": "rollout_corr/k3_kl", "limit": "fp8plan/kl_limit"}
    return {names.get(name, f"fp8plan/{name}"): value for name, value in figures.items()}


FINE = metrics(k3=2e-3, limit=1e-2, tokens=900.0, invalid=0.0)


def mismatch(file: Path, last: dict[str, Any]) -> tuple[str | None, str]:
    """(fault or state, text) of a run whose steps before the last are healthy."""
    rows = [*({"step": n, "metrics": FINE} for n in range(6)), {"step": 6, "metrics": last}]
    file.write_text("".join(line(row) for row in rows))
    (finding,) = [one for one in fp8plan.doctor(file).findings if one.check == "mismatch"]
    return finding.fault or finding.state.value, finding.says


@pytest.mark.parametrize(
    ("last", "fault", "says"),
    [
        (FINE, "ok", "k3 2.0e-03 per token, limit 1.0e-02"),
        (FINE | metrics(k3=None), "invalid_logprobs", "k3 of step 6 is no finite number"),
        (FINE | metrics(k3=math.inf), "invalid_logprobs", "k3 of step 6 is no finite number"),
        (FINE | metrics(k3=None, tokens=0.0), "unknown", "step 6 has no valid token"),
        (metrics(limit=1e-2, tokens=900.0), "unknown", "step 6 logs none; in step 5, the last that does: k3 2.0e-03"),
        ({}, "unknown", "step 6 logs none; in step 5"),
        (metrics(k3=None), "invalid_logprobs", "k3 of step 6"),
        # As records were while a step without a valid token was called perfect, and as they are now.
        (metrics(k3=0.0, limit=1e-2, tokens=0.0, invalid=900.0), "invalid_logprobs", "900 of 900 tokens of step 6"),
        (metrics(k3=None, limit=None, tokens=0.0, invalid=9e5), "invalid_logprobs", "900,000 of 900,000 tokens"),
        (
            metrics(k3=2e-3, limit=1e-2, tokens=470.0, invalid=530.0),
            "invalid_logprobs",
            "530 of 1,000 tokens of step 6",
        ),
        (metrics(k3=2e-3, limit=1e-2, tokens=9e5, invalid=2.0), "ok", "2 of 900,002 tokens of step 6"),
        (metrics(k3=2e-3, limit=None), "ok", "limit 3.0e-02"),
        (metrics(k3=0.2, limit=math.inf), "mismatch_high", "limit 3.0e-02"),
    ],
)
def test_the_last_step_decides(tmp_path: Path, last: dict[str, Any], fault: str, says: str) -> None:
    found = mismatch(tmp_path / "run.jsonl", last)
    assert found[0] == fault
    assert says in found[1]


ABSENT = st.none() | st.sampled_from([math.nan, math.inf])


@given(last=st.dictionaries(st.sampled_from(sorted(FINE)), ABSENT | st.floats(0, 1e3)))
def test_a_step_without_a_figure_is_never_fine(last: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        state, _ = mismatch(tmp_path_factory.mktemp("run") / "run.jsonl", last)
    except ConfigError as error:  # NaN is no JSON
        state = str(error)
    k3 = last.get("rollout_corr/k3_kl")
    complete = k3 is not None and math.isfinite(k3) and last.get("fp8plan/tokens") != 0
    assert complete or state != "ok"


def test_figures_that_steps_lost_do_not_hide_a_mismatch_before_them(tmp_path: Path) -> None:
    rows = [{"step": 1, "metrics": metrics(k3=0.5, limit=1e-2)}, {"step": 2, "metrics": {}}]
    assert list(faults(tmp_path / "run.jsonl", *rows)) == ["mismatch_high"]


def test_the_kl_by_cause(tmp_path: Path) -> None:
    parts = [
        {"causes": ["staleness"], "kl": 4e-3, "low": 3e-3, "high": 5e-3},
        {"causes": ["precision", "routing"], "kl": 2e-3, "low": 0.0, "high": 4e-3},
    ]
    (tmp_path / "run.jsonl").write_text(line({"step": 1, "metrics": FINE, "attribution": parts}))
    (finding,) = [one for one in fp8plan.doctor(tmp_path / "run.jsonl").findings if one.check == "mismatch"]
    assert finding.says.endswith("; KL 6e-3: 4e-3 staleness, 2e-3 precision or routing")
    record = {"step": 1, "metrics": FINE | {"fp8plan/routing_differs": 0.94}, "attribution": parts}
    (tmp_path / "run.jsonl").write_text(line(record))
    (finding,) = [one for one in fp8plan.doctor(tmp_path / "run.jsonl").findings if one.check == "mismatch"]
    assert finding.says.endswith("precision or routing; routers of trainer and engine disagree on 94.0% of the tokens")


def test_a_run_beside_an_fp8_trainer(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(line(RECORD))
    for precision, state in (("fp8_block", "ok"), ("fp8_block_pow2", "fault"), (None, "unknown")):
        diagnosis = fp8plan.doctor(tmp_path / "run.jsonl", trainer_precision=precision)
        (finding,) = [one for one in diagnosis.findings if one.check == "trainer"]
        assert finding.state.value == state
    with pytest.raises(ConfigError, match="trainer_precision is 'fp8'; allowed: bf16, fp8_block"):
        fp8plan.doctor(tmp_path / "run.jsonl", trainer_precision="fp8")


def alarmed(file: Path, *alarms: list[str]) -> dict[str | None, tuple[str, str]]:
    """Fault -> (state, text) of a run whose steps had these alarms."""
    file.write_text("".join(line({"step": 10 + n, "metrics": FINE, "alarms": x}) for n, x in enumerate(alarms)))
    found = [one for one in fp8plan.doctor(file).findings if one.check == "alarm"]
    return {one.fault: (one.state.value, one.says) for one in found}


def test_alarms_of_the_last_steps_are_faults(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    assert alarmed(file, [], []) == {None: ("ok", "none in 2 steps")}
    found = alarmed(file, [], ["kl"], ["kl", "unit_mean"], [])
    assert found["alarm_kl"] == ("fault", "kl in step 12, and in 2 of the last 4 steps: smoothed KL above its limit")
    assert found["alarm_unit_mean"][1].startswith("unit_mean in step 12: the ratios' mean is not 1")
    assert alarmed(file, ["hunger"])["alarm_hunger"] == ("fault", "hunger in step 10: not known to this fp8plan")


def test_an_alarm_of_long_ago_is_a_warning(tmp_path: Path) -> None:
    found = alarmed(tmp_path / "run.jsonl", ["tail"], ["tail"], *[[] for _ in range(10)])
    expected = "tail in 2 of 12 steps, last in step 11: too many tokens with extreme ratios"
    assert found == {"alarm_tail": ("warning", expected)}


def test_steps_that_a_checkpoint_took_back_sounded_nothing(tmp_path: Path) -> None:
    rows = [(1, []), (2, ["broken"]), (3, ["broken"]), (2, [])]
    records = [{"step": step, "metrics": FINE, "alarms": names} for step, names in rows]
    assert faults(tmp_path / "run.jsonl", *records) == {}


@pytest.mark.parametrize("alarm", Alarm)
def test_every_alarm_is_explained(tmp_path: Path, alarm: Alarm) -> None:
    (tmp_path / "run.jsonl").write_text(line({"step": 3, "metrics": FINE, "alarms": [alarm.value]}))
    (fault,) = fp8plan.doctor(tmp_path / "run.jsonl").faults
    assert (fault.says, fault.todo) == (f"{alarm} in step 3: {MEANINGS[alarm].says}", MEANINGS[alarm].remedy)


@pytest.mark.parametrize(
    "changes",
    [
        {"alarms": 5},
        {"alarms": [1]},
        {"kernel_backends": [1]},
        {"attribution": [{"kl": "x"}]},
        {"precision": ["a"]},
        {"versions": {"1": json.loads("[" * 700 + "]" * 700)}},
        {"schema_version": "9.0"},
    ],
)
def test_a_record_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"step 4 of .*run.jsonl"):
        faults(tmp_path / "run.jsonl", RECORD | changes)


@pytest.mark.parametrize("changes", [{"alarms": [1]}, {"kernel_backends": [1]}, {"precision": ["a"]}])
def test_so_is_an_earlier_one_that_tells_of_the_engine(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"step 4 of .*run.jsonl"):
        faults(tmp_path / "run.jsonl", RECORD | changes, {"step": 5, "metrics": FINE})


def test_a_compressed_run_file(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "run.jsonl.gz", "wt") as file:
        file.write(json.dumps(RECORD) + "\n")
    assert fp8plan.doctor(tmp_path / "run.jsonl.gz").observed.runs == "fp8_block"


def test_a_step_without_a_rollout_leaves_the_last_rollout(tmp_path: Path) -> None:
    later = {"step": 5, "metrics": {"rollout_corr/k3_kl": 1e-3}}
    assert list(faults(tmp_path / "run.jsonl", RECORD | {"e8m0": True}, later)) == ["e8m0_on"]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"rollout_corr/k3_kl": 0.5}, ["mismatch_high"]),
        ({"rollout_corr/k3_kl": 0.001}, []),
        ({"sampling/sampling_logp_difference/mean": 0.4}, ["mismatch_high"]),  # pi / 4 x 0.16 = 0.13
        ({"sampling/sampling_logp_difference/mean": 0.02}, []),
        ({"rollout_corr/k3_kl": None}, ["invalid_logprobs"]),
        ({"rollout_corr/k3_kl": 1e999}, ["invalid_logprobs"]),
        ({"rollout_corr/k3_kl": "NaN"}, ["invalid_logprobs"]),
        ({"sampling/sampling_logp_difference/mean": None}, ["invalid_logprobs"]),
    ],
)
def test_a_trainers_log(tmp_path: Path, figures: dict[str, float], expected: list[str]) -> None:
    healthy = dict.fromkeys(figures, 0.001)
    rows = [{"step": 1, "data": healthy}, {"step": 2, "data": figures}]
    (tmp_path / "log.jsonl").write_text("".join(line(row) for row in rows))
    assert [one.fault for one in fp8plan.doctor(tmp_path / "log.jsonl").faults] == expected


@pytest.mark.parametrize("word", ["nan", "inf", "np.float64(nan)"])
def test_a_console_whose_last_figure_is_no_number(tmp_path: Path, word: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(f"step:1 - rollout_corr/k3_kl:0.001\nstep:2 - rollout_corr/k3_kl:{word} - actor/lr:1e-06\n")
    assert [one.fault for one in fp8plan.doctor(path).faults] == ["invalid_logprobs"]


def test_a_last_step_that_logs_no_kl_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("step:1 - rollout_corr/k3_kl:0.001\nstep:2 - val/acc:0.5\n")
    (finding,) = [one for one in fp8plan.doctor(path).findings if one.check == "mismatch"]
    assert (finding.state.value, finding.says[:21]) == ("unknown", "step 2 logs none; in ")


def test_a_number_counts_before_null_in_another_row_of_its_step(tmp_path: Path) -> None:
    """W&B writes a row for each call of log, with null for what others logged."""
    rows = [{"_step": 1, "rollout_corr/k3_kl": 0.001}, {"_step": 1, "rollout_corr/k3_kl": None, "reward": 1.0}]
    assert faults(tmp_path / "log.jsonl", *rows) == {}


def test_a_log_without_a_kl_says_what_to_switch_on(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "data": {"reward": 1.0}}\n')
    with pytest.raises(ConfigError, match=r"algorithm.rollout_correction; TRL: use_vllm"):
        fp8plan.doctor(tmp_path / "log.jsonl")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"127.0.0.1:9/v1/models does not answer: .*refused; give the URL of a vllm serve that runs"
    ):
        fp8plan.doctor("http://127.0.0.1:9")


# Lines and answers of a vLLM 0.30 server with an FP8 KV cache and --enforce-eager, shortened.
METRICS = """# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:cache_config_info{block_size="128",cache_dtype="fp8",engine="0"} 1.0
"""
INFO = {
    "vllm_config": {
        "model_config": {
            "enforce_eager": True,
            "logprobs_mode": "raw_logprobs",
            "quantization": None,
            "enable_return_routed_experts": False,
        },
        "compilation_config": {"cudagraph_mode": 0},
        "device_config": {"device": "cpu"},
        "parallel_config": {"is_moe_model": True},
        "weight_transfer_config": {"backend": "sparse_nccl"},
    }
}


def test_a_servers_own_pages_are_read() -> None:
    found = samples(METRICS)
    assert total(found, "vllm:num_preemptions_total") == 3
    assert total(found, "vllm:request_success_total") == 9
    with pytest.raises(ConfigError, match="/metrics has no vllm:other_total"):
        total(found, "vllm:other_total")
    assert facts_of(msgspec.convert(INFO, Info), found) == {
        "enforce_eager": True,
        "logprobs_mode": "raw_logprobs",
        "cudagraph_mode": "NONE",
        "device": "cpu",
        "e8m0": None,
        "quantization": None,
        "experts": True,
        "routed_experts": False,
        "weight_transfer": "sparse_nccl",
        "kv_cache_dtype": "fp8",
    }
    later = {"vllm_config": {"model_config": {}, "aux_output_config": {"enable_return_routed_experts": True}}}  # 0.31
    assert facts_of(msgspec.convert(later, Info), {})["routed_experts"]
    graphs = {"vllm_config": {"compilation_config": {"cudagraph_mode": [2, 1]}}}
    assert facts_of(msgspec.convert(graphs, Info), {}) == {"cudagraph_mode": "FULL_AND_PIECEWISE"}


def test_a_completion_is_read_as_vllms_own_output() -> None:
    choice = {
        "token_ids": [584],
        "logprobs": {"token_logprobs": [-7.2], "top_logprobs": [{"token_id:584": -7.2, "token_id:3": -1.0}]},
        "prompt_logprobs": [None, {"6": {"logprob": -7.0, "rank": 257}}],
    }
    answer = {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    asked = {"logprobs": 1, "prompt_logprobs": 0}
    output = output_of(msgspec.convert(answer, Completion), [5, 6], asked)
    assert output.outputs[0].logprobs[0][584].logprob == -7.2
    assert output.prompt_logprobs[1][6].logprob == -7.0
    assert output.num_cached_tokens == 128
    bare = {"choices": [choice | {"logprobs": None, "prompt_logprobs": None}], "usage": {}}
    output = output_of(msgspec.convert(bare, Completion), [5, 6], {})
    assert (output.outputs[0].logprobs, output.num_cached_tokens) == ([], None)
