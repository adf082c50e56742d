"""The baselines: what is asked of others, and the table that is made of their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aic
import baselines
import numpy as np
import pandas as pd
import pytest

from benchmarks.tables import baselines as baselines_table
from fp8plan.errors import ConfigError
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.rollout import step_batch
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated, validate

RECORD: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "gpu": "h200_sxm",
    "engine_version": "0.26.0",
    "precision": "bf16",
    "prompt_lengths": [100, 100, 100, 40],
    "prompt_ids": [0, 0, 1, 0],
    "response_lengths": [30, 90, 60, 8],
    "seconds": 1.0,
}


def record(tmp_path: Path, **changes: Any) -> Record:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD | changes))
    return read_records(path)[0]


class LinearEngine:
    """AIConfigurator's EngineHandle with step times that can be added up by hand: each sort of work has its price."""

    TOKEN, PREFILL_PAIR, KV = 3.0, 0.01, 0.5  # milliseconds

    def predict_decode_latency(self, batch: int, context: int, _: int) -> float:
        return self.TOKEN * batch + self.KV * batch * context

    def predict_prefill_latency(self, batch: int, length: int, prefix: int) -> float:
        return self.TOKEN * batch * (length - prefix) + self._pairs(batch, length, prefix)

    def mixed_step_breakdown(self, new: int, decode: int, context: int, _: int) -> tuple[float, float, float, float]:
        attention = self.KV * decode * context
        return np.nan, self.TOKEN * (new + decode), np.nan, attention

    def run_static_per_op(
        self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str
    ) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        assert (osl, mode) == (1, "static_ctx")
        pairs = self._pairs(batch_size, isl, prefix)
        return [("context_qkv_gemm", 1e9, 0.0, "silicon"), ("context_attention", pairs, 0.0, "silicon")], []

    def _pairs(self, batch: int, length: int, prefix: int) -> float:
        return self.PREFILL_PAIR * batch * (length - prefix) * (length + prefix) / 2


def test_a_step_is_priced_by_its_decodes_and_its_chunks() -> None:
    #                  decodes only, prefill only, both, nothing
    batch = StepBatch(
        decode_requests=np.array([4, 0, 2, 0]),
        decode_kv_tokens=np.array([400.0, 0, 100, 0]),
        prefill_tokens=np.array([0, 60, 30, 0]),
        prefill_requests=np.array([0, 2, 1, 0]),
        prefill_kv_tokens=np.array([0, 100, 30, 0]),
        prefill_pairs=np.array([0, 0, 0, 0]),
        sampled_requests=np.array([4, 2, 3, 0]),
    )
    two_chunks = 0.01 * 2 * (50**2 - 20**2) / 2  # 30 new tokens each, after 20
    expected = [3 * 4 + 0.5 * 400, 3 * 60 + two_chunks, 3 * 32 + 0.5 * 100 + 0.01 * 30**2 / 2, 0]
    assert aic.step_seconds(LinearEngine(), batch) * 1e3 == pytest.approx(expected)


def test_a_simulated_rollout_pays_for_every_token_once(tmp_path: Path) -> None:
    """With a price per token, what is left of the schedule is prompts less what is cached, and responses."""
    run = record(tmp_path)
    plan = simulated(run, datasheet_profile(find_gpu("h200"))).schedules[0]
    engine = LinearEngine()
    engine.KV = engine.PREFILL_PAIR = 0.0
    milliseconds = float(plan.steps @ aic.step_seconds(engine, step_batch(plan))) * 1e3
    prefilled = int((plan.steps * plan.prefill_tokens).sum())
    decoded = int((plan.steps * plan.decode_requests).sum())
    assert decoded == run.batch.responses.sum() - 4  # the first token of each comes with its prefill
    assert prefilled == run.batch.prompts.sum() - plan.cached_tokens.sum()
    assert milliseconds == pytest.approx(3 * (prefilled + decoded))


def test_cached_prompt_tokens_are_whole_blocks_of_prompts_seen_before(tmp_path: Path) -> None:
    assert aic.cached_prompt_tokens(record(tmp_path)).tolist() == [0, 96, 0, 32]
    assert aic.cached_prompt_tokens(record(tmp_path, enable_prefix_caching=False)).tolist() == [0, 0, 0, 0]
    assert aic.cached_prompt_tokens(record(tmp_path, prompt_ids=None)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("precision", ["bf16", "fp8_block+fp8_kv"])
def test_the_roofline_is_below_and_the_datasheet_profile_is_fp8plan_without_measurements(
    tmp_path: Path, precision: str
) -> None:
    run = record(tmp_path, precision=precision)
    prepared = simulated(run, datasheet_profile(find_gpu("h200")))
    bound, uncalibrated = (method(run, prepared)[0] for method in (baselines.roofline, baselines.datasheet))
    weights = 0.4e9 * (2 if precision == "bf16" else 1)  # at least: 0.44B parameters outside the embedding
    steps = run.batch.responses.max()
    assert steps * weights / 4.8e12 < bound < uncalibrated


def test_mended_tables_have_the_donors_fp8_block_gemms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "systems" / "data"
    (tmp_path / "systems" / "a_card.yaml").parent.mkdir()
    (tmp_path / "systems" / "a_card.yaml").touch()
    for engine, latency in (("vllm", 1.0), ("trtllm", 2.0)):
        rows = [{"gemm_dtype": x, "m": m, "latency": latency} for x in ("bfloat16", "fp8_block") for m in (1, 8)]
        path = data / "a_card" / "gemm" / engine / "1.0" / "gemm_perf.parquet"
        path.parent.mkdir(parents=True)
        pd.DataFrame(rows[engine == "trtllm" :]).to_parquet(path)  # the donor has fewer shapes
    shipped = data / "a_card" / "gemm" / "vllm" / "1.0" / "gemm_perf.parquet"
    before = shipped.read_bytes()
    monkeypatch.setattr(aic, "find_data", lambda: (data, "0.12.0"))
    monkeypatch.setattr(aic, "database_version", lambda gpu, engine: "1.0")
    assert aic.systems("a_card", "vllm") is None
    folder = aic.systems("a_card", "vllm+trtllm")
    assert folder is not None
    table = pd.read_parquet(Path(folder) / shipped.relative_to(tmp_path / "systems"))
    assert table.groupby("gemm_dtype").latency.unique().to_dict() == {"bfloat16": [1.0], "fp8_block": [2.0]}
    assert Path(folder, "a_card.yaml").is_file()
    assert shipped.read_bytes() == before
    assert aic.made_of("a_card", "vllm+trtllm") == "vllm 1.0 with fp8_block GEMMs of trtllm 1.0"


def test_no_path_of_this_machine_gets_into_a_message() -> None:
    message = "OOM: the model '/tmp/xyz-1/Qwen/Qwen3-8B'\n has no /opt/a.b/data.parquet for bf16/fp8 (tp=1)"
    assert baselines.without_paths(message) == "OOM: the model 'Qwen3-8B' has no data.parquet for bf16/fp8 (tp=1)"


def cell(precision: str, seconds: float, predicted: float, **more: Any) -> dict[str, Any]:
    return {"group": "g", "precision": precision, "seconds": seconds, "predicted_s": predicted, **more}


def line(method: str, precision: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    known = {"group": "g", "precision": precision, "kv_cache_tokens": None, "by": "tool 1.0", "date": "2026-01-01"}
    return {**known, "method": method, "predicted_s": seconds, **more}


ROWS = [cell("bf16", 10, 10), cell("fp8_kv", 5, 4), cell("bf16", 10.2, 10), cell("bf16", 9.9, 10)]


def answers() -> list[dict[str, Any]]:
    """Every method says 12 and 6 s, but one refuses bf16 and warns at fp8_kv, where its simulation says 20 and 5."""
    kept = [
        line(name, p, s)
        for name in baselines_table.LABELS
        for p, s in (("bf16", 12), ("fp8_kv", 6))
        if "vllm-" not in name
    ]
    refused = line("aic-vllm-estimate", "bf16", None, refusal="RuntimeError: OOM")
    warned = line("aic-vllm-estimate", "fp8_kv", 50, warning="too large")
    simulated = [line("aic-vllm-simulated", p, s) for p, s in (("bf16", 20), ("fp8_kv", 5))]
    return [*kept, refused, warned, *simulated]


def columns(text: str) -> dict[str, list[str]]:
    found = [[part.strip() for part in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("| ")]
    return dict(zip(["head", "fp8plan", *baselines_table.LABELS], found, strict=True))


def test_the_table_by_hand() -> None:
    text = baselines_table.table(ROWS, answers())
    found = columns(text)
    assert found["fp8plan"][1:] == ["2 of 2", "10.0%", "20.0%", "-10.0%", "0.0%", "20.0%", "50.0", "50.0", "1 of 1"]
    assert found["roofline"][1:] == ["2 of 2", "20.0%", "20.0%", "+20.0%", "20.0%", "20.0%", "0.0", "0.0", "1 of 1"]
    assert found["aic-vllm-estimate"][1:] == [
        "1 of 2, 1 warned", "900.0%", "900.0%", "+900.0%", "-", "900.0%", "-", "-", "-",
    ]  # fmt: skip
    simulated = ["2 of 2", "50.0%", "100.0%", "+50.0%", "100.0%", "0.0%", "200.0", "200.0", "1 of 1"]
    assert found["aic-vllm-simulated"][1:] == simulated
    assert found["aic-sglang-estimate"][1:] == found["roofline"][1:]
    assert "2 cells in 1 groups" in text
    assert "within 3.0%" in text  # 9.9 to 10.2 s around 10 s
    assert {len(row) for row in found.values()} == {10}


def test_the_standing_leaves_out_what_is_beyond_the_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two groups has too many requests. AIConfigurator refused one cell, so there is a row without it."""
    few, many = (record(tmp_path, prompt_ids=None, prompt_lengths=[9] * n, response_lengths=[9] * n) for n in (4, 513))
    rows = [row | {"gpu": "h200_sxm", "engine_version": "0.26.0", "group": few.group} for row in ROWS]
    rows.append(rows[0] | {"group": many.group, "predicted_s": 1e9})
    lines = [answer | {"group": few.group} for answer in answers()]
    for answer in lines:
        if answer["precision"] == "fp8_kv":
            answer["predicted_s"] = None
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in lines))
    monkeypatch.setattr(baselines_table, "HELD_OUT", ("one",))
    monkeypatch.setattr(baselines_table, "records", lambda name: [few, many])
    monkeypatch.setattr(baselines_table, "results", lambda name: tmp_path / "answers.jsonl")
    found = [line.strip("| ").split(" | ") for line in baselines_table.standing({"one": rows}).splitlines()[2:-2]]
    assert [row[:2] for row in found] == [["h200_sxm", "0.26.0"]] * 5
    assert [row[3:] for row in found] == [
        ["2 of 2", "10.0%", "50.0", "no"],  # fp8plan: 10 s are right, 4 s are 20% off
        ["1 of 2", "100.0%", "-", "no"],  # 20 s
        ["1 of 2", "20.0%", "-", "no"],  # 12 s
        ["1 of 2", "20.0%", "-", "no"],
        ["1 of 1", "0.0%", "-", "no"],  # fp8plan in BF16
    ]


def test_a_cell_that_nobody_was_asked_about_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"lacks 1 of 3 cells, first g, fp8_block; type: make baselines"):
        baselines_table.table([*ROWS, cell("fp8_block", 5, 5)], answers())


def test_lines_join_the_records_they_were_made_from(tmp_path: Path) -> None:
    """The cell of a line, written from a record, is the cell of that record's row in a validation."""
    run = record(tmp_path, kv_cache_tokens=4096)
    (row,) = validate([run]).records
    written = json.loads(json.dumps(baselines.cell(run)))
    assert baselines_table.cell_of(written) == baselines_table.cell_of(row) == (run.group, "bf16", 4096)
