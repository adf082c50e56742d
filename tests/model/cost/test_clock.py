"""The table of step seconds beside the model that filled it, on rows as schedules and turns make them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.cost.base import QUANTITIES, FloatArray, IntArray, StepBatch, WindowReads, joined
from fp8plan.model.cost.clock import Clock
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.profile.profile import Profile, precision_pace
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.schedule.windows import pairs_read, tokens_read
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch

SUM, STEP = 0.001, 0.01  # largest relative errors: of the sum over all steps, and of one step
SLOW_HOST = 1.2e-3  # seconds of its loop
DENSE, EXPERTS, HYBRID = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "nvidia/Nemotron-H-8B-Base-8K"
WINDOWED, LATENT = "allenai/Olmo-3-1025-7B", "moonshotai/Moonlight-16B-A3B-Instruct"
PRECISIONS = ("bf16", "fp8_block+fp8_kv")


def profile_of(name: str) -> tuple[Gpu, Profile]:
    """The GPU and profile of "measured", "slow host", "datasheet", or of a GPU."""
    if name == "datasheet":
        return find_gpu("h100"), datasheet_profile(find_gpu("h100"))
    gpu = find_gpu("h200" if name in ("measured", "slow host") else name)
    profile, _ = load_profile(gpu)
    return gpu, profile.on_host(SLOW_HOST) if name == "slow host" else profile


def engine(name: str, precision: str, machine: str = "measured", **limits: object) -> tuple[StepModel, KvPlan]:
    gpu, profile = profile_of(machine)
    own = EngineLimits.for_gpu(gpu, **limits) if limits else None  # type: ignore[arg-type]
    setup, memory = EngineSetup(name, gpu, precision, own).placed()
    return setup.step_model(profile, memory=memory), memory.kv


def windows_of(kv: KvPlan) -> list[Spec]:
    return list({(spec.kind, spec.window): spec for spec in kv.specs if spec.window}.values())


def closed_batch(prompts: int, samples: int, prompt: int, response: int) -> Batch:
    """Prompts and responses of lognormal lengths around these medians."""
    rng = np.random.default_rng(prompts)
    ids = np.repeat(np.arange(prompts), samples)
    lengths = rng.lognormal(np.log(prompt), 0.5, prompts).astype(np.int64) + 1
    responses = rng.lognormal(np.log(response), 0.8, len(ids)).astype(np.int64) + 1
    return Batch(lengths[ids], np.minimum(responses, 16000), ids)


def turn_rows(steps: int, model: StepModel, windows: Sequence[Spec] = (), equal: bool = False) -> StepBatch:
    """Steps of 64 to 512 decoding requests beside up to 4 chunks of 200 to 3,000 tokens with a long cached context.

    equal: all decoding requests are equally long, and all chunks too
    """
    rng = np.random.default_rng(steps)
    budget, most = int(model.limits.max_num_batched_tokens), min(512, int(model.limits.max_num_seqs) - 4)
    rows: list[tuple[int, ...]] = []
    reads: list[list[tuple[int, ...]]] = [[] for _ in windows]
    for _ in range(steps):
        contexts = rng.integers(1, 2 * rng.integers(1000, 16000), rng.integers(min(64, most), most + 1))
        chunks = rng.integers(0, 5)
        new, before = rng.integers(200, 3000, chunks), rng.integers(500, 24000, chunks)
        if equal:
            contexts[:], new[:], before[:] = contexts[0], new[:1], before[:1]
        fitting = np.cumsum(new) <= budget - len(contexts)
        new, before = new[fitting], before[fitting]
        pairs, ends = new * before + new * (new + 1) // 2, int(rng.integers(0, len(new) + 1))
        of_chunks = new.sum(), len(new), (new + before).sum(), pairs.sum()
        rows.append((len(contexts), contexts.sum(), *of_chunks, len(contexts) + ends))
        spans = list(zip(before.tolist(), (before + new).tolist(), strict=True))
        for window, read in zip(windows, reads, strict=True):
            decoded = sum(tokens_read(window, at - 1, at) for at in contexts.tolist())
            prefilled = sum(tokens_read(window, *span) for span in spans)
            read.append((decoded, prefilled, sum(pairs_read(window, *span) for span in spans)))
    within = tuple(WindowReads(x.kind, x.window, *columns(read)) for x, read in zip(windows, reads, strict=True))
    return StepBatch(*columns(rows), windows=within, follows=np.ones(steps, dtype=bool))


def columns(rows: list[tuple[int, ...]]) -> IntArray:
    return np.array(rows, dtype=np.int64).T


def workloads(model: StepModel, kv: KvPlan) -> Iterator[tuple[StepBatch, IntArray | int]]:
    """Steps of three closed batches and of turns, and how often each runs."""
    for shape in ((4, 16, 200, 4000), (64, 8, 400, 1500), (256, 4, 3000, 300)):
        plan = schedule_with(closed_batch(*shape), kv, model.limits)
        yield step_batch(plan), plan.steps
    yield turn_rows(200, model, windows_of(kv)), 1


def clocked(clock: Clock, batch: StepBatch, leads: bool = True) -> FloatArray:
    """Seconds of the steps by the clock. leads: the host's lead is passed on from step to step"""
    table = np.stack([getattr(batch, name) for name in QUANTITIES], axis=1).tolist()
    windows = [list(zip(x.decode_kv_tokens, x.prefill_pairs, strict=True)) for x in batch.windows]
    seconds, ahead = [], 0.0
    for row, work in enumerate(table):
        requests, kv_tokens, *rest = work  # of mean steps, in which the KV tokens may be a fraction
        if not leads or batch.follows is None or not batch.follows[row]:
            ahead = 0.0
        reads = [window[row] for window in windows]
        step, ahead = clock.step(int(requests), kv_tokens, *(int(x) for x in rest), reads, ahead)
        seconds.append(step)
    return np.array(seconds)


def assert_as_the_model(model: StepModel, clock: Clock, batch: StepBatch, times: IntArray | int = 1) -> None:
    by_model, by_clock = model.seconds(batch) * model.pace, clocked(clock, batch)
    np.testing.assert_allclose(by_clock, by_model, rtol=STEP)
    assert (by_clock * times).sum() == pytest.approx((by_model * times).sum(), rel=SUM)


@pytest.mark.parametrize("machine", ["measured", "slow host", "datasheet"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [DENSE, EXPERTS, HYBRID, WINDOWED])
def test_schedules_and_turns_take_as_long_as_by_the_model(name: str, precision: str, machine: str) -> None:
    model, kv = engine(name, precision, machine)
    clock = Clock.of(model, [(window.kind, window.window) for window in windows_of(kv)])
    for batch, times in workloads(model, kv):
        assert_as_the_model(model, clock, batch, times)


@pytest.mark.parametrize(
    ("name", "machine", "limits"),
    [
        (DENSE, "slow host", {"async_scheduling": False}),
        (DENSE, "slow host", {"enforce_eager": True}),
        (DENSE, "measured", {"max_num_batched_tokens": 2048, "max_num_seqs": 256}),
        (EXPERTS, "slow host", {"enable_return_routed_experts": True}),
        (EXPERTS, "measured", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
        (LATENT, "measured", {"tensor_parallel_size": 2}),
        (DENSE, "b200", {}),
        (DENSE, "l40s", {}),
        ("Qwen/Qwen3-0.6B", "cpu", {}),
        ("Qwen/Qwen3-0.6B", "cpu", {"async_scheduling": False}),
    ],
)
def test_other_engines_take_as_long_as_by_the_model(name: str, machine: str, limits: dict[str, object]) -> None:
    model, kv = engine(name, "bf16", machine, **limits)
    clock = Clock.of(model)
    for batch, times in workloads(model, kv):
        assert_as_the_model(model, clock, batch, times)


def test_chunks_of_unequal_lengths_take_as_long_as_by_the_model() -> None:
    """Latent attention projects every latent of the contexts, and hits of the prefix cache leave short chunks."""
    model, _ = engine(LATENT, "bf16", tensor_parallel_size=2)
    new, before = np.array([12000, *[5] * 80]), np.array([0, *[3000] * 80])
    pairs = new * before + new * (new + 1) // 2
    work = (0, 0, new.sum(), len(new), (new + before).sum(), pairs.sum(), len(new))
    assert_as_the_model(model, Clock.of(model), StepBatch(*columns([work])))


def test_a_step_without_the_lead_of_the_host_takes_longer() -> None:
    model, _ = engine(EXPERTS, "bf16", "slow host")
    clock, rows = Clock.of(model), turn_rows(100, model)
    assert_as_the_model(model, clock, replace(rows, follows=None))
    assert clocked(clock, rows, leads=False).sum() > 1.02 * clocked(clock, rows).sum()


def test_windows_that_the_clock_is_not_told_of_read_as_if_requests_were_equally_long() -> None:
    model, kv = engine(WINDOWED, "bf16")
    (window,) = windows_of(kv)
    equal, mixed = (turn_rows(100, model, [window], equal) for equal in (True, False))
    clock = Clock.of(model)
    by_clock = [clocked(clock, replace(rows, windows=())).sum() for rows in (equal, mixed)]
    assert by_clock[0] == pytest.approx(model.seconds(equal).sum(), rel=0.002)
    assert by_clock[1] == pytest.approx(model.seconds(replace(mixed, windows=())).sum(), rel=0.002)
    assert by_clock[1] > 1.005 * model.seconds(mixed).sum()


def test_windows_without_their_reads_are_an_error() -> None:
    model, kv = engine(WINDOWED, "bf16")
    (window,) = windows_of(kv)
    clock = Clock.of(model, [(window.kind, window.window)])
    with pytest.raises(ValueError, match="shorter"):
        clock.step(8, 800, 0, 0, 0, 0, 8)
    with pytest.raises(ValueError, match="longer"):
        Clock.of(model).step(8, 800, 0, 0, 0, 0, 8, [(800, 0)])


def test_the_pace_of_rollouts_scales_every_step() -> None:
    model, _ = engine(DENSE, "bf16")
    name = precision_pace(model.precision.name)
    values = model.profile.coefficients | {name: 1.25}
    slower = replace(model, profile=replace(model.profile, coefficients=values))
    assert slower.pace == pytest.approx(1.25 * model.pace)
    rows = turn_rows(20, model)
    np.testing.assert_allclose(clocked(Clock.of(slower), rows), 1.25 * clocked(Clock.of(model), rows))


def test_contexts_beyond_the_last_depth_go_on_in_a_line() -> None:
    model, _ = engine(DENSE, "fp8_block+fp8_kv")
    decodes = (4, 4 * 500_000, 0, 0, 0, 0, 4)
    chunk = (0, 0, 512, 1, 512 + 500_000, 512 * 500_000 + 512 * 513 // 2, 1)
    assert_as_the_model(model, Clock.of(model), joined([StepBatch(*columns([row])) for row in (decodes, chunk)]))


@pytest.mark.parametrize("name", [DENSE, EXPERTS])
def test_a_clock_is_made_in_a_second_and_holds_two_megabytes(name: str) -> None:
    model, _ = engine(name, "fp8_block+fp8_kv")
    before = time.process_time()
    clock = Clock.of(model)
    assert time.process_time() - before < 1.0
    arrays = [getattr(clock, x) for x in clock.__slots__ if isinstance(getattr(clock, x), np.ndarray)]
    assert all(array.dtype == np.float64 for array in arrays)
    assert sum(array.nbytes for array in arrays) < 2e6
