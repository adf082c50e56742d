"""Several KV-cache groups in one pool: against vLLM's own Scheduler, step by step, and what must hold without it."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installed_vllm import VLLM
from runs_of_steps import assert_runs_add_up, total
from scheduled_batches import FAMILIES, Case, blocks_needed, case

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture.mixers import CacheKind
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.schedule.windows import next_change, pairs_read, tokens_read
from fp8plan.model.workload import Batch
from fp8plan.version import has

COMPARED = ("prefill_tokens", "decode_requests", "used_blocks", "preemptions")
SEEDS = int(os.environ.get("FP8PLAN_GROUP_SEEDS", "4"))


def rules(made: Case) -> CacheRules:
    """Those of the installed vLLM, with the case's own retention."""
    return CacheRules.of(VLLM)._replace(retain_all=made.retain_all)


def run(made: Case, longest_run: int = 2**62) -> Schedule:
    return schedule(made.batch, made.pool, made.limits, longest_run, groups=made.groups, rules=rules(made))


@pytest.mark.vllm
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=() if seed < 2 else pytest.mark.slow)
        for family in FAMILIES
        for seed in range(SEEDS if family in ("window", "state", "checkpoint") else SEEDS // 4)
    ],
)
def test_every_step_equals_vllms_scheduler(family: str, seed: int, async_scheduling: bool) -> None:
    import vllm_oracle

    if family.startswith("checkpoint") and not has(VLLM, "Mamba 2 has a checkpoint block"):
        pytest.skip("this vLLM has no checkpoint blocks")
    made = case(seed, family, async_scheduling)
    real = vllm_oracle.run(*made.batch, made.pool, made.limits, made.groups, made.retain_all)
    simulated = run(made, longest_run=1)
    rows = zip(*(getattr(simulated, column).tolist() for column in COMPARED), strict=True)
    assert list(rows) == [tuple(step) for step in real]


@pytest.mark.parametrize(
    ("version", "checkpoints", "prefilled"),
    [
        ("0.30", 0, [[32, 7 + 7 + 7, 0], [48, 0]]),
        ("0.32", 0, [[32, 7, 7, 7, 0], [32, 16, 0]]),
        ("0.33", 0, [[32, 7 + 7 + 7, 0], [32, 16, 0]]),
        ("0.32", 1, [[39, 7, 7, 0], [48, 0]]),
        ("0.33", 1, [[39, 7 + 7, 0], [48, 0]]),
    ],
)
def test_states_at_the_end_of_a_prompt_by_version(version: str, checkpoints: int, prefilled: list[list[int]]) -> None:
    """Three samples of a prompt of 39 tokens, and a prompt of whole blocks, in blocks of 16."""
    limits = EngineLimits(
        max_num_seqs=8, max_num_batched_tokens=400, enable_prefix_caching=True, async_scheduling=False
    )
    groups = (Spec("full", 16), Spec("state", 16, checkpoints=checkpoints))
    for (length, samples), expected in zip(((39, 3), (48, 1)), prefilled, strict=True):
        prompts, ids = np.full(samples, length), np.zeros(samples, int)
        plan = schedule(Batch(prompts, np.full(samples, 9), ids), 100, limits, 1, groups, CacheRules.of(version))
        assert plan.prefill_tokens[: len(expected)].tolist() == expected


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    return case(draw(st.integers(1000, 10**6)), family, draw(st.booleans()))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_runs_of_steps_add_up_to_the_single_steps(made: Case) -> None:
    single, runs = run(made, longest_run=1), run(made)
    first = assert_runs_add_up(runs, single)
    for some, each in zip(runs.windows, single.windows, strict=True):
        np.testing.assert_array_equal(some.decode_kv_tokens, np.add.reduceat(each.decode_kv_tokens, first))
        np.testing.assert_array_equal(some.prefill_kv_tokens, np.add.reduceat(each.prefill_kv_tokens, first))
        np.testing.assert_array_equal(some.prefill_pairs, np.add.reduceat(each.prefill_pairs, first))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_tokens_are_conserved_and_limits_hold(made: Case) -> None:
    batch, plan = made.batch, run(made)
    served = total(plan, "prefill_tokens") + total(plan, "decode_requests")
    wanted = int((batch.prompts + batch.responses - 1).sum())
    assert served == wanted + plan.recomputed_tokens.sum() - plan.cached_tokens.sum()
    assert total(plan, "sampled_requests") == batch.responses.sum()
    assert plan.finished.sum() == len(batch.prompts)
    assert plan.used_blocks.max() <= made.pool
    assert plan.used_blocks.min() >= len(made.groups)  # a request that runs has a block of each
    assert plan.running.max() <= made.limits.max_num_seqs
    assert (plan.prefill_tokens + plan.decode_requests).max() <= made.limits.max_num_batched_tokens


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(0, 10**6), st.booleans())
def test_blocks_wanted_is_a_pool_with_the_same_schedule(made: Case, more: int, roomy: bool) -> None:
    if roomy:
        made = made._replace(pool=sum(blocks_needed(made.batch, g, made.limits) for g in made.groups) * 60)
    plan = run(made)
    if plan.blocks_wanted is None:
        return
    assert plan.blocks_wanted <= made.pool
    other = run(made._replace(pool=plan.blocks_wanted + more % (2 * made.pool)))
    for column in ("steps", "prefill_tokens", "decode_requests", "used_blocks"):
        np.testing.assert_array_equal(getattr(plan, column), getattr(other, column))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_window_that_holds_all_reads_all(made: Case) -> None:
    wide = int((made.batch.prompts + made.batch.responses).max())
    groups = (Spec("full", 16), Spec("sliding", 16, wide), Spec("chunked", 16, wide))
    pool = 3 * sum(blocks_needed(made.batch, group, made.limits) for group in groups)
    plan = run(made._replace(groups=groups, pool=pool))
    read = plan.decode_kv_tokens * plan.steps + plan.decode_requests * (plan.steps * (plan.steps - 1) // 2)
    assert [work.kind for work in plan.windows] == ["sliding", "chunked"]
    for work in plan.windows:
        np.testing.assert_array_equal(work.decode_kv_tokens, read)
        np.testing.assert_array_equal(work.prefill_kv_tokens, plan.prefill_kv_tokens)
        np.testing.assert_array_equal(work.prefill_pairs, plan.prefill_pairs)


def positions_read(group: Spec, query: int) -> range:
    start = query // group.window * group.window if group.kind == "chunked" else max(0, query - group.window + 1)
    return range(start, query + 1)


@given(st.sampled_from(["sliding", "chunked"]), st.integers(1, 40), st.integers(0, 100), st.integers(1, 60))
def test_chunks_read_what_their_queries_look_at(kind: CacheKind, window: int, before: int, tokens: int) -> None:
    group = Spec(kind, 16, window)
    looks = [positions_read(group, query) for query in range(before, before + tokens)]
    assert pairs_read(group, before, before + tokens) == sum(map(len, looks))
    assert tokens_read(group, before, before + tokens) == len(set().union(*looks))


@given(
    st.sampled_from(["full", "sliding", "chunked", "state"]),
    st.integers(1, 70),
    st.integers(0, 200),
    st.integers(0, 1),
)
def test_no_block_comes_free_before_the_next_change(kind: CacheKind, window: int, computed: int, lag: int) -> None:
    group = Spec(kind, 16, window if kind in ("sliding", "chunked") else 0)

    def first_held(tokens: int) -> int:
        """The first block at the step that computes a token after `tokens`."""
        processed = tokens - lag
        if kind == "state":
            return max(0, processed - 1) // 16
        if kind != "full" and processed >= 0:
            return positions_read(group, processed).start // 16
        return 0

    change = next_change(group, computed, lag)
    assert change > computed
    until = min(change, computed + 300)
    assert all(first_held(tokens) == first_held(computed) for tokens in range(computed + 1, until))


def one(groups: tuple[Spec, ...], pool: int, caching: bool, **settings: int | bool) -> Schedule:
    limits = replace(EngineLimits(async_scheduling=False, enable_prefix_caching=caching), **settings)  # type: ignore[arg-type]
    return schedule(Batch(np.array([100]), np.array([61]), np.array([0])), pool, limits, 1, groups=groups)


def test_a_window_frees_blocks_while_its_request_decodes() -> None:
    plan = one((Spec("full", 16), Spec("sliding", 16, 32)), 100, caching=False)
    assert plan.used_blocks[0] == 7 + 7
    assert plan.used_blocks[-1] == 10 + 2  # tokens 128 to 159


def test_a_request_holds_one_state_without_prefix_caching_and_two_for_a_while_with_it() -> None:
    groups = (Spec("full", 16), Spec("state", 16))
    full = np.array([*range(7, 11)])
    assert set(one(groups, 100, caching=False).used_blocks) == set(full + 1)
    assert set(one(groups, 100, caching=True).used_blocks) == {
        6 + 1,
        7 + 1,
        7 + 2,
        8 + 1,
        8 + 2,
        9 + 1,
        9 + 2,
        10 + 1,
        10 + 2,
    }


def test_what_is_not_modelled_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"block sizes \[16, 32\]; with prefix caching only one size"):
        one((Spec("full", 16), Spec("sliding", 32, 64)), 100, caching=True)
    with pytest.raises(ConfigError, match="a model without attention is not modelled"):
        one((Spec("state", 16),), 100, caching=True)


def test_a_request_that_can_never_fit_is_an_error() -> None:
    groups = (Spec("full", 16), Spec("sliding", 16, 32))
    tight = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    one(groups, 14, caching=False, **tight)  # 10, and 31 + 16 tokens in 3 + 1
    with pytest.raises(CapacityError, match=r"161 tokens.*needs 14 KV blocks in 2 groups.*pool has 13"):
        one(groups, 13, caching=False, **tight)
