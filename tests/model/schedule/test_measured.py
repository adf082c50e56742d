"""Schedules of new families against the engine steps of an H200: models with windows, latents and recurrent states."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from measured_families import FAMILIES, NATIVE_MXFP4, planned_name

from fp8plan.model.calibrate.fit import measured_kv, read_traces
from fp8plan.model.rollout import schedule_with
from fp8plan.model.validate.records import Record, read_records


@cache
def rollouts() -> list[Record]:
    """The rollouts, those of gpt-oss with the model whose config can be read."""
    return [
        replace(record, fields={**record.fields, "model": planned_name(record.fields["model"])})
        for name in ("rollouts", "biased_routers", "held_out")
        for record in read_records(FAMILIES / f"{name}.jsonl")
    ]


@cache
def traces():
    return read_traces(FAMILIES.glob("*.trace.jsonl.gz"))


def plan_has_windows(record: Record) -> bool:
    return any(group.window for group in measured_kv(record).groups)


def name_of(record: Record) -> str:
    return "-".join((record.fields["model"].rpartition("/")[2], record.fields["precision"], record.fields["workload"]))


def test_many_rollouts_were_measured() -> None:
    assert len(rollouts()) == 154
    assert sum(record.fields["model"] == planned_name(NATIVE_MXFP4) for record in rollouts()) == 21


@pytest.mark.parametrize("record", rollouts(), ids=name_of)
def test_steps_hits_and_blocks_are_the_engines(record: Record) -> None:
    """The engine may take a step more: its first one has only the requests that have arrived. With workers in processes
    of their own, one more is in flight. Its blocks are read once a step, and those behind a window are gone by then:
    how many there are at most depends on what had arrived (4 prompts of 40 of Gemma's in FP8: 5.5% fewer).
    """
    kv, fields, trace = measured_kv(record), record.fields, traces()[record.fields["key"]]
    plan = schedule_with(record.batch, kv, record.limits, longest_run=1)
    more = 2 if record.limits.tensor_parallel_size > 1 else 1
    assert 0 <= fields["steps_with_output"] - int((plan.sampled_requests > 0).sum()) <= more
    assert plan.num_preemptions == fields["preemptions"] == 0
    assert plan.cached_tokens.sum() == fields["prefix_cache_hits"]
    used = np.array(trace["kv_usage"]) * kv.usable_blocks
    assert plan.used_blocks.max() == pytest.approx(used.max(), rel=0.06 if plan_has_windows(record) else 0.02)


@pytest.mark.parametrize("record", [x for x in rollouts() if x.fields["workload"] == "drain"], ids=name_of)
def test_a_pool_in_tokens_is_cut_into_the_engines_blocks(record: Record) -> None:
    """A Monitor's record has the block size that was asked for, and the engine's pool in tokens."""
    fields = {name: value for name, value in record.fields.items() if name != "num_gpu_blocks"}
    asked = replace(record, fields=fields, limits=replace(record.limits, block_size=16))
    found, real = measured_kv(asked), measured_kv(record)
    assert (found.num_blocks, found.groups) == (real.num_blocks, real.groups)
