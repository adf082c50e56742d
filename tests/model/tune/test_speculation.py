"""Speculative decoding: the schedule against vLLM's own scheduler, and the time with drafts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import schedule_with, simulate, step_batch
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.tune.speculation import (
    METHODS,
    NGRAM_ON_GPU,
    Speculation,
    in_tokens,
    in_units,
    limits_in_units,
    pool_in_units,
    speculated,
    speculation_of,
)
from fp8plan.model.workload import Batch, Workload
from fp8plan.version import has

MODEL, GPU, VERSION = "Qwen/Qwen3-8B", find_gpu("h200"), "0.26.0"
PROFILE = load_profile(GPU, VERSION)[0]
AMPLE = 10**4  # blocks


class Steady(Speculation):
    """Drafts of which each step accepts the same number: `gained` is whole."""

    __slots__ = ()

    @property
    def gained(self) -> float:
        return 1.0 + round(self.acceptance * self.tokens)


def steady(tokens: int, accepted: int, method: str = "ngram") -> Speculation:
    return Steady(accepted / max(tokens, 1), tokens, method)


def random_batch(seed: int, starved: bool) -> tuple[Batch, int, EngineLimits]:
    """64 requests of 16 prompts, odd seeds with prefix caching. A starved pool holds a quarter of those that run."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 300, 16).repeat(4), rng.lognormal(4.7, 0.8, 64).astype(np.int64) + 1
    limits = EngineLimits(
        max_num_seqs=24, max_num_batched_tokens=8192, enable_prefix_caching=bool(seed % 2), async_scheduling=False
    )
    return Batch(prompts, np.minimum(responses, 800), np.arange(16).repeat(4)), 200 if starved else AMPLE, limits


def kv_of(pool: int, limits: EngineLimits) -> KvPlan:
    return EngineSetup("Qwen/Qwen3-0.6B", GPU, "bf16", limits, engine_version=VERSION).kv_plan(pool + 1)


def planned(batch: Batch, pool: int, limits: EngineLimits, drafts: Speculation) -> Schedule:
    """The schedule with a row for each step."""
    kv = kv_of(pool, limits)
    work, scaled = in_units(batch, drafts), limits_in_units(limits, drafts)
    return in_tokens(schedule_with(work, pool_in_units(kv, drafts), scaled, longest_run=1), batch, kv, drafts)


def vllms(batch: Batch, pool: int, limits: EngineLimits, drafts: Speculation, accepted: Callable[[], int]) -> list[Any]:
    import vllm_oracle

    lookahead = drafts.slots - drafts.queries
    return vllm_oracle.run(*batch, pool, limits, drafts=vllm_oracle.Drafts(drafts.tokens, accepted, lookahead))


YIELDS = [(1, 1), (3, 3), (3, 1), (3, 0), (7, 3), (15, 7)]  # drafts, and those that are accepted


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize(("tokens", "accepted"), YIELDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_step_is_that_of_vllms_scheduler(seed: int, tokens: int, accepted: int, method: str) -> None:
    """In a step with prompts, a request may hold the blocks of its next step. Siblings share them, if prompts do."""
    batch, pool, limits = random_batch(seed, starved=False)
    drafts = steady(tokens, accepted, method)
    plan, real = planned(batch, pool, limits, drafts), vllms(batch, pool, limits, drafts, lambda: accepted)
    assert plan.num_steps == len(real)
    assert (plan.decode_requests * drafts.queries).tolist() == [step.decode_tokens for step in real]
    assert plan.num_preemptions == sum(step.preemptions for step in real) == 0
    prefill, used = (np.array([getattr(step, name) for step in real]) for name in ("prefill_tokens", "used_blocks"))
    np.testing.assert_array_equal(plan.prefill_tokens > 0, prefill > 0)
    assert plan.prefill_tokens.sum() == pytest.approx(prefill.sum(), rel=0.07 if limits.enable_prefix_caching else 1e-3)
    most = plan.running * -(-drafts.slots // limits.block_size)
    assert (np.abs(plan.used_blocks - used) <= most).all()
    if not limits.enable_prefix_caching:
        np.testing.assert_array_equal(plan.used_blocks[prefill == 0], used[prefill == 0])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tokens", "accepted"), [*YIELDS[:2], *(pytest.param(*x, marks=pytest.mark.slow) for x in YIELDS[2:4])]
)
def test_a_starved_pool_preempts_about_as_often_as_vllms(tokens: int, accepted: int) -> None:
    drafts, plans, steps = steady(tokens, accepted), [], []
    for seed in range(4):
        batch, pool, limits = random_batch(seed, starved=True)
        plans.append(planned(batch, pool, limits, drafts))
        steps.append(vllms(batch, pool, limits, drafts, lambda: accepted))
    preempted = sum(step.preemptions for real in steps for step in real)
    assert sum(plan.num_preemptions for plan in plans) == pytest.approx(preempted, rel=0.25)
    assert preempted > 100
    for plan, real in zip(plans, steps, strict=True):
        assert plan.num_steps == pytest.approx(len(real), rel=0.05)


@pytest.mark.vllm
@pytest.mark.parametrize(("acceptance", "tokens"), [(0.3, 2), (0.6, 3), (0.8, 5)])
def test_a_rate_is_the_mean_of_random_acceptance(acceptance: float, tokens: int) -> None:
    drafts, rng = Speculation(acceptance, tokens), np.random.default_rng(0)

    def accepted() -> int:
        return int(np.argmin([*(rng.random(tokens) < acceptance), False]))

    batch, pool, limits = random_batch(2, starved=False)
    plan, real = planned(batch, pool, limits, drafts), vllms(batch, pool, limits, drafts, accepted)
    assert plan.decode_requests.sum() * drafts.queries == pytest.approx(sum(s.decode_tokens for s in real), rel=0.02)
    assert plan.num_steps == pytest.approx(len(real), rel=0.05)
    assert plan.used_blocks.max() == pytest.approx(max(step.used_blocks for step in real), rel=0.05)


@pytest.mark.vllm
def test_methods_are_vllms() -> None:
    from vllm.config.speculative import EagleModelTypes, NgramGPUTypes, SpeculativeConfig

    for name, method in METHODS.items():
        asynchronous = name in (*get_args(EagleModelTypes), *get_args(NgramGPUTypes))
        assert method.asynchronous == asynchronous
        assert method.head == SpeculativeConfig.use_eagle(type("Config", (), {"method": name}))


@pytest.mark.vllm
def test_vllm_drafts_n_grams_where_it_says() -> None:
    from vllm import __version__
    from vllm.config import VllmConfig

    refused = inspect.getsource(VllmConfig._get_v2_model_runner_unsupported_features)
    assert ("ngram" in refused) != has(__version__, NGRAM_ON_GPU)


def engine(model: str = MODEL, **limits: Any) -> EngineSetup:
    return EngineSetup(model, GPU, "bf16", EngineLimits(**limits).holding(4096), engine_version=VERSION)


def seconds(batch: Batch, *drafts: Any, setup: EngineSetup | None = None) -> float:
    setup = setup or engine()
    if not drafts:
        return simulate(setup, batch, PROFILE).rollout.makespan_s
    return speculated(setup, batch, PROFILE, Speculation(*drafts)).makespan_s


BATCH = Workload(8, 8, Fixed(256), LogNormal(400, 0.7, 1500)).batch()


@pytest.mark.parametrize(
    "model", [MODEL, "Qwen/Qwen3-30B-A3B", "google/gemma-3-12b-it", "deepseek-ai/DeepSeek-V2-Lite"]
)
@pytest.mark.parametrize("method", METHODS)
def test_no_drafts_are_no_speculation(method: str, model: str) -> None:
    setup = engine(model, max_cudagraph_capture_size=512)
    assert seconds(BATCH, 0.6, 0, method, setup=setup) == pytest.approx(seconds(BATCH, setup=setup), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_drafts_that_nobody_accepts_only_cost_and_more_acceptance_gains_more(method: str, tokens: int) -> None:
    times = [seconds(BATCH, acceptance, tokens, method) for acceptance in (0, 0.3, 0.6, 0.8, 1)]
    assert times[0] > seconds(BATCH)
    assert all(before > after for before, after in pairwise(times))
    assert times[0] / times[-1] <= 1 + tokens + 0.05  # a rollout has steps that gain nothing: prompts


def test_drafts_gain_less_in_a_larger_batch_until_they_lose() -> None:
    gains = []
    for requests in (4, 64, 512):
        batch = Workload(requests, 1, Fixed(64), Fixed(400)).batch()
        gains.append(seconds(batch) / seconds(batch, 0.6, 3, "ngram_gpu"))
    assert gains[0] > 1.8 > gains[1] > 1.2 > gains[2]
    assert gains[2] < 0.9


def test_a_draft_head_takes_time_and_memory() -> None:
    free, head = (speculated(engine(), BATCH, PROFILE, Speculation(0.6, 3, name)) for name in ("ngram_gpu", "mtp"))
    assert head.makespan_s > free.makespan_s
    assert head.parts["draft"] > 0.1
    assert "draft" not in free.parts
    assert sum(head.parts.values()) == pytest.approx(1)
    tight = engine(gpu_memory_utilization=0.135)
    free, head = (speculated(tight, BATCH, PROFILE, Speculation(0.6, 3, name)) for name in ("ngram_gpu", "mtp"))
    assert head.timeline.used_blocks.max() < free.timeline.used_blocks.max()  # the head takes room from the pool


def test_host_scheduling_waits_for_ngrams() -> None:
    assert not Speculation(0.6).limits(engine()).async_scheduling
    newer = replace(engine(), engine_version="0.33.0")
    assert Speculation(0.6).limits(newer).async_scheduling
    on_cpu = EngineSetup(MODEL, find_gpu("cpu"), "bf16", EngineLimits(max_model_len=4096), engine_version="0.33.0")
    assert not Speculation(0.6).limits(on_cpu).async_scheduling
    assert seconds(BATCH, 0.6, 3, "ngram") > seconds(BATCH, 0.6, 3, "ngram_gpu")


def test_the_output_is_that_of_the_responses() -> None:
    rollout = speculated(engine(), BATCH, PROFILE, Speculation(0.6))
    assert rollout.output_tokens == BATCH.responses.sum()
    assert rollout.timeline.output_tokens.sum() == pytest.approx(BATCH.responses.sum(), rel=0.01)


def test_a_step_with_drafts_has_rows_for_each_and_reads_kv_once() -> None:
    batch, pool, limits = random_batch(0, starved=False)
    drafts, plain = steady(3, 3), steady(0, 0)
    steps, alone = (step_batch(planned(batch, pool, limits, x)) for x in (drafts, plain))
    last, first = -1, int(np.argmin(steps.prefill_tokens))
    assert steps.decode_requests[last] == 1
    assert steps.sampled_requests[last] == steps.queries == 4
    assert steps.decode_kv_tokens[first] == pytest.approx(alone.decode_kv_tokens[first], rel=0.05)


@pytest.mark.parametrize("queries", [1, 2, 3, 8])
def test_graphs_hold_whole_requests(queries: int) -> None:
    model = engine().step_model(PROFILE)
    requests = np.array([1, 5, 17, 100])
    work = [requests, 500 * requests, *[0 * requests] * 4, requests * queries]
    padded = model.padded(replace(step_batch(planned(*random_batch(0, False), steady(0, 0))), **_steps(work, queries)))
    assert (padded >= requests * queries).all()
    held = requests * queries <= 512 // queries * queries
    assert (padded[held] % queries == 0).all()


def _steps(work: list[Any], queries: int) -> dict[str, Any]:
    from fp8plan.model.cost.base import QUANTITIES

    return dict(zip(QUANTITIES, work, strict=True)) | {"queries": queries, "follows": None}


def test_as_many_requests_keep_budget_and_graphs() -> None:
    setup = engine(max_num_seqs=512, max_num_batched_tokens=1024)
    limits = Speculation(0.6, 3).limits(setup)
    assert limits.max_num_batched_tokens == 2048
    assert limits.max_cudagraph_capture_size == 2048
    assert Speculation(0.6, 3).limits(engine(enforce_eager=True)).max_cudagraph_capture_size is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.2,), r"acceptance is 1.2; allowed: a share of drafts in \[0, 1\]"),
        ((0.5, -1), "num_speculative_tokens is -1; allowed: a whole number of at least 0"),
        ((0.5, 3, "magic"), "speculative method is 'magic'; allowed: ngram, ngram_gpu, mtp, eagle3"),
    ],
)
def test_other_values_are_errors(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Speculation(*arguments)


def test_what_cannot_be_weighed_is_an_error() -> None:
    assert speculation_of() is None
    assert speculation_of(0.5, tokens=2) == Speculation(0.5, 2)
    with pytest.raises(ConfigError, match=r"give --acceptance 0\.6"):
        speculation_of(tokens=2)
    with pytest.raises(ConfigError, match="recurrent layers keep a state for each draft"):
        search(
            TuneRequest(
                "Qwen/Qwen3-Next-80B-A3B-Instruct", "h200", Workload(2, 2, 16, 32), speculation=Speculation(0.5)
            )
        )
