"""The front: seconds of a trainer's Python between it and the engine, in rollouts, plans and anchors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.cost.front import HTTP, INSIDE, OWN, Passing, front_kernels, front_of
from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.profile.library import datasheet_profile, load_profile, with_kernels
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.rollout import Rollout, simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import Record, record_of
from fp8plan.model.workload import Workload

MODEL = "Qwen/Qwen3-0.6B"
WORK = Workload(32, 8, Fixed(64), Fixed(512), 0)
TOKENS = 32 * 8 * 512
H200, _ = load_profile("h200", "0.26.0")
SHEET = datasheet_profile(find_gpu("h200"))


def ran(inside: str, profile: Profile = H200, model: str = MODEL, **limits: Any) -> Rollout:
    setup = EngineSetup(model, "h200", "bf16", EngineLimits(**limits), inside)
    return simulate(setup.holding(576), WORK.batch(), profile).rollout


def record(inside: str, seconds: float, model: str = MODEL) -> Record:
    fields = {"model": model, "gpu": "h200", "engine_version": "0.26.0", "precision": "bf16", "inside": inside}
    lengths = {"prompt_lengths": [64] * 256, "response_lengths": [512] * 256, "seconds": seconds}
    return record_of(fields | lengths, 1, "line 1")


@pytest.mark.parametrize("inside", [name for name in INSIDE if name != OWN])
def test_every_front_has_seconds_for_each_token_on_a_gpu_and_on_a_cpu(inside: str) -> None:
    for gpu in ("h200", "cpu"):
        known = datasheet_profile(find_gpu(gpu)).coefficients
        assert sum(known.get(f"front.{inside}.{part}_seconds", 0) for part in ("token", "thread")) > 0


@pytest.mark.parametrize(("inside", "passing"), [("trl-stock", TOKENS // 2), ("server", TOKENS)])
def test_a_front_in_the_way_adds_its_time_for_the_tokens_that_pass_it(inside: str, passing: int) -> None:
    """Each of two replicas has half of the tokens. A server has one front for both."""
    alone, within = ran(OWN, data_parallel_size=2), ran(inside, data_parallel_size=2)
    more = passing * SHEET.coefficient(f"front.{inside}.token_seconds")
    assert within.makespan_s - alone.makespan_s == pytest.approx(more)
    assert within.parts["front"] == pytest.approx(more / within.makespan_s)
    assert "front" not in alone.parts
    assert within.timeline.seconds[-1] == pytest.approx(within.makespan_s)
    assert sum(within.rests_on["shares"].values()) == pytest.approx(1)
    assert within.rests_on["kernels"]["front"]["imported"] == pytest.approx(within.parts["front"])


@pytest.mark.parametrize("model", [MODEL, "Qwen/Qwen3-14B"])
def test_a_front_beside_the_engine_adds_less_the_slower_the_engine_is(model: str) -> None:
    alone, within = ran(OWN, model=model).makespan_s, ran("verl", model=model).makespan_s
    thread = TOKENS * SHEET.coefficient("front.verl.thread_seconds")
    both = float(np.hypot(alone, thread))  # of steps that are all alike
    assert max(alone, thread) < within < alone + thread
    assert within == pytest.approx(both, rel=0.02)


@pytest.mark.parametrize(
    ("inside", "name"),
    [
        ("verl", "front.verl.thread_seconds"),
        ("verl", "gpu.pace"),
        ("verl", "host.pace"),
        ("server", "front.server.token_seconds"),
        ("server-http", "front.server-http.thread_seconds"),
        ("server-http", "front.server-http.request_seconds"),
        ("server-http", "gpu.pace"),
        ("server-http", "host.pace"),
    ],
)
def test_the_derivatives_are_those_of_the_makespan(inside: str, name: str) -> None:
    known = with_kernels(H200, find_gpu("h200"), front_kernels(inside))
    within = ran(inside, known)
    moved = replace(known, coefficients=known.coefficients | {name: known.coefficient(name) * 1.001})
    slope = np.log(ran(inside, moved).makespan_s / within.makespan_s) / np.log(1.001)
    assert within.log_gradient[name] == pytest.approx(slope, rel=0.02)


def over_http(engine: list[float], prompts: list[float], tokens: list[float]) -> tuple[list[float], list[float]]:
    """Seconds that a server adds to rows which serve two requests in all, and their slopes.

    A request takes 1 s, a prompt token 0.1 s, and a response token 1 s.
    """
    facts = {"request_seconds": 1.0, "prompt_token_seconds": 0.1, "thread_seconds": 1.0}
    known = {f"front.server-http.{name}": value for name, value in facts.items()} | {"host.pace": 1.0}
    work = Passing(np.array(engine), np.array(tokens), np.array(prompts), 2)
    front = front_of(HTTP, work, replace(SHEET, coefficients=SHEET.coefficients | known))
    return front.cost.seconds.tolist(), front.slopes.tolist()


def test_a_row_waits_until_its_requests_have_passed_the_server() -> None:
    """Each request has 10 prompt tokens, so the server passes one every 2 s."""
    assert over_http([0.5, 0.5, 9.0], [10, 10, 0], [0, 0, 0]) == ([2.0, 1.5, 0.0], [0.0, 1.0, 1.0])
    assert over_http([0.5, 5.0, 9.0], [10, 0, 10], [0, 0, 0]) == ([2.0, 0.0, 0.0], [1.0, 1.0, 1.0])


def test_tokens_that_a_server_has_still_to_pass_come_after_the_last_step() -> None:
    assert over_http([3.0, 4.0], [20, 0], [0, 3]) == ([4.0, 0.0], [1.0, 1.0])  # both requests took 4 s
    assert over_http([3.0, 4.0], [20, 0], [0, 6]) == ([4.0, 2.0], [1.0, 0.0])
    assert over_http([3.0, 4.0], [20, 0], [6, 6]) == ([4.0, 5.0], [0.0, 0.0])  # it worked all the time: 4 + 12 s


def test_short_requests_take_longer_over_http_and_long_ones_less_so() -> None:
    setup = EngineSetup("Qwen/Qwen3-8B", "h200", "bf16", EngineLimits(max_num_seqs=256))
    slower = []
    for prompt, answer in ((64, 16), (256, 128), (2048, 1024)):
        batch = Workload(512, 1, Fixed(prompt), Fixed(answer)).batch()
        own, server = (
            simulate(replace(setup, inside=inside).holding(8192), batch, H200).rollout.makespan_s
            for inside in (OWN, HTTP)
        )
        slower.append(server / own)
    assert slower == sorted(slower, reverse=True)
    assert slower[0] > 1.2
    assert slower[-1] == pytest.approx(1, abs=0.02)


def test_each_replica_of_a_server_has_its_own_front() -> None:
    """vLLM starts as many front ends as replicas."""
    one, two = ran("server-http"), ran("server-http", data_parallel_size=2)
    in_front = [run.parts["front"] * run.makespan_s for run in (one, two)]
    assert in_front[1] < 0.8 * in_front[0]


def test_a_server_on_a_slower_host_takes_longer() -> None:
    slow, fast = (ran("server-http", H200.on_host(loop_s)) for loop_s in (6e-4, 2e-4))
    in_front = [run.parts["front"] * run.makespan_s for run in (slow, fast)]
    assert in_front[0] > 2 * in_front[1]


def test_a_server_passes_a_large_sample_as_it_passes_all() -> None:
    setup = EngineSetup(MODEL, "h200", "bf16", EngineLimits(), "server-http").holding(128)
    seconds = []
    for requests in (15_000, 60_000):
        run = simulate(setup, Workload(requests, 1, Fixed(32), Fixed(32)).batch(), H200).rollout
        assert (run.simulated < 1) == (requests > 20_000)
        seconds.append(run.makespan_s / requests)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_the_fronts_error_widens_the_interval() -> None:
    name = "front.server-stock.token_seconds"
    sure = replace(
        H200,
        coefficients=H200.coefficients | {name: SHEET.coefficient(name)},
        log_covariance=H200.log_covariance | {name: {name: 0.0}},
    )
    unsure, certain = ran("server-stock"), ran("server-stock", sure)
    assert unsure.makespan_s == certain.makespan_s
    assert unsure.makespan_low_s < certain.makespan_low_s < certain.makespan_high_s < unsure.makespan_high_s


def test_a_plan_is_inside_of_the_program_that_it_is_for() -> None:
    for target, gpus, inside in (("vllm", 1, "own"), ("verl", 2, "verl"), ("trl", 1, "trl"), ("trl", 2, "server")):
        assert plan(MODEL, "h200", WORK, target=target, gpus=gpus, precisions=["bf16"]).inside == inside
    chosen = plan(MODEL, "h200", WORK, target="verl", inside="own", precisions=["bf16"])
    assert chosen.inside == "own"
    assert Plan.from_json(chosen.to_json()) == chosen
    for name in ("slime", ""):
        with pytest.raises(ConfigError, match=f"inside is '{name}'; allowed: own, verl"):
            plan(MODEL, "h200", WORK, inside=name)


def test_an_rl_step_waits_until_verl_looks_for_the_answers() -> None:
    own, verl = (
        plan(MODEL, "h200", WORK, inside=name, precisions=["bf16"], trainer=StepTimes(train_s=1, logprob_s=1)).select()
        for name in ("own", "verl")
    )
    wait = SHEET.coefficient("front.verl.wait_seconds")
    longer = (verl.makespan_s or 0) - (own.makespan_s or 0)
    assert (verl.rl_step_s or 0) - (own.rl_step_s or 0) == pytest.approx(wait + longer)


def test_a_slow_front_is_learnt_for_its_program() -> None:
    name, front = "front.server-stock.token_seconds", "server-stock"
    usual = ran(front).makespan_s
    anchor = anchored(H200, EngineSetup(MODEL, "h200").shape, "0.26.0", [record(front, 1.3 * usual)] * 3)
    corrected = anchor.applied(H200)
    assert 1.05 < corrected.coefficient(name) / SHEET.coefficient(name) < 1.6
    moved, alone = (ran(x, corrected).makespan_s / ran(x).makespan_s for x in (front, OWN))
    assert 1.1 < moved < 1.3
    assert alone < moved


def test_a_step_whose_time_is_mostly_front_teaches_less_about_the_gpu() -> None:
    model = "Qwen/Qwen3-8B"
    shape = EngineSetup(model, "h200").shape
    shifts = [
        anchored(SHEET, shape, "0.26.0", [record(x, 1.2 * ran(x, SHEET, model).makespan_s, model)]).shifts["gpu.pace"]
        for x in (OWN, "server-stock")
    ]
    assert 0 < shifts[1] < 0.7 * shifts[0]


def test_the_sentences_say_what_the_front_takes() -> None:
    observed = [record("verl", 1.4 * ran("verl").makespan_s)]
    reasons = plan(MODEL, "h200", WORK, inside="verl", precisions=["bf16"], observed=observed).reasons
    assert any("The front end (--inside) takes" in sentence for sentence in reasons)
    assert any("front end takes" in sentence and "us a token, not 20" in sentence for sentence in reasons)
