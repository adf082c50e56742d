"""Two real replicas under Ray: the same weights and scales in both, also when one dies in the middle of a sync."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from tiny_models import BLOCK_SIZE, CALIBRATION, PROMPTS, TOKENS, checkpoint, cpu_plan, weights

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.weight_sync.calls import Rpc, rpc
from fp8plan.runtime.apply.weight_sync.nccl import RemoteSource
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

CHUNK = 300_000  # bytes: a few modules
COPIES = [{"prompt_token_ids": PROMPTS[1]}] * 4


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    """Ray on this machine, whose workers find the tests' own modules."""
    import ray

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(planted.__file__).parent), before]))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield ray
    ray.shutdown()
    os.environ["PYTHONPATH"] = before


class Fresh:
    """A freshly started engine on the weights a: its bits, its scales and its words."""

    def __init__(self, fleet: RolloutFleet) -> None:
        self.bits = digests(fleet)[0]
        fleet.recalibrate_kv(kv_prompts=CALIBRATION)
        self.scales = fleet.kv_scales()[0]
        self.words = said(fleet)[0]


@pytest.fixture(scope="module")
def started(ray_here: Any) -> Iterator[tuple[RolloutFleet, Fresh]]:
    sync = SyncSettings(chunk_bytes=CHUNK, rollback="cpu")
    made = RolloutFleet.from_plan(
        cpu_plan("fp8_kv"), str(checkpoint("dense", "a")), replicas=2, sync=sync, skip_tokenizer_init=True
    )
    with made as fleet:
        yield fleet, Fresh(fleet)
    with pytest.raises(LostEngineError, match="shut down"):
        fleet.generate(COPIES)


@pytest.fixture
def fleet(started: tuple[RolloutFleet, Fresh]) -> RolloutFleet:
    return started[0]


@pytest.fixture
def fresh(started: tuple[RolloutFleet, Fresh]) -> Fresh:
    return started[1]


def digests(fleet: RolloutFleet) -> list[dict[str, int]]:
    """A checksum of every parameter, of each replica that lives."""
    found: list[dict[str, int]] = fleet.ask(rpc("fp8plan_digests"))
    return found


def said(fleet: RolloutFleet) -> list[Any]:
    """Tokens and log-probs that each replica samples, one request at a time: the same batches give the same bits."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    found: list[Any] = []
    for number in fleet.serves:
        words = []
        for prompt in PROMPTS:
            asked = ([{"prompt_token_ids": prompt}], how, {}, "alone")
            (request,), _ = fleet._members.collect(fleet._members.submit("generate", {number: asked}))[number]
            (one,) = request.outputs
            words.append([(token, row[token].logprob) for token, row in zip(one.token_ids, one.logprobs, strict=True)])
        found.append(words)
    return found


def sync(fleet: RolloutFleet, which: str, **more: Any) -> Any:
    return fleet.sync_weights(weights("dense", which), kv_prompts=CALIBRATION, **more)


def kill(fleet: RolloutFleet, number: int) -> None:
    """End a replica's process, as the kernel does when memory runs out."""
    living = sorted(fleet._members.living)
    os.kill(fleet.pids[living.index(number)], signal.SIGKILL)  # type: ignore[attr-defined]


def know_processes(fleet: RolloutFleet) -> None:
    """Ask for the processes before a sync, in the middle of which nobody may be asked."""
    fleet.pids = fleet.ask(rpc(planted.process))  # type: ignore[attr-defined, arg-type]


def is_like_a_fresh_one(fleet: RolloutFleet, fresh: Fresh, replicas: int = 2) -> None:
    """Parameters bit for bit, KV scales, and words."""
    assert digests(fleet) == [fresh.bits] * replicas
    assert fleet.kv_scales() == [fresh.scales] * replicas
    assert said(fleet) == [fresh.words] * replicas


def test_two_syncs_leave_in_both_what_a_fresh_engine_has(fleet: RolloutFleet, fresh: Fresh) -> None:
    report = sync(fleet, "b")
    ours, theirs = digests(fleet)
    assert ours == theirs != fresh.bits
    assert said(fleet)[0] == said(fleet)[1] != fresh.words
    assert (report.version, report.chunks > 3, len(report.checks)) == (1, True, 2)
    assert all(check["compared"] for check in report.checks)
    assert sync(fleet, "a").version == 2
    is_like_a_fresh_one(fleet, fresh)


def test_both_are_patched_and_a_new_one_gets_all(
    fleet: RolloutFleet, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.state, "settings", replace(fleet.state.settings, delta="cpu"))
    assert not sync(fleet, "b").patched
    tensors = weights("dense", "b")
    for number in (0, 1):
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 0.25
        report = fleet.sync_weights(tensors, kv_prompts=CALIBRATION)
        assert (report.patched, report.tensors) == (True, 1)
        ours, theirs = digests(fleet)
        assert ours == theirs
        know_processes(fleet)
        kill(fleet, number)
        fleet.replace(number)
        assert not fleet.sync_weights(tensors, kv_prompts=CALIBRATION).patched
        assert digests(fleet) == [ours, ours]
    assert sync(fleet, "a").patched
    is_like_a_fresh_one(fleet, fresh)
    fleet.state.base = None


def test_scales_are_the_largest_that_any_replica_saw(fleet: RolloutFleet, fresh: Fresh) -> None:
    first, second = CALIBRATION
    alone = []
    for prompt in (first, second):
        fleet.recalibrate_kv(kv_prompts=[prompt, prompt])
        alone.append(fleet.kv_scales()[0])
    fleet.recalibrate_kv(kv_prompts=[first, second])  # one for each replica
    assert alone[0] != alone[1]
    wanted = {layer: {part: max(x[layer][part] for x in alone) for part in parts} for layer, parts in alone[0].items()}
    assert fleet.kv_scales() == [wanted] * 2 == [fresh.scales] * 2


def test_a_rollout_is_routed_by_lengths_and_compared_with_the_static_split(fleet: RolloutFleet) -> None:
    from vllm import SamplingParams

    lengths = [40, 40, 4, 4, 4, 4]
    each = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [{"prompt_token_ids": [n, n + 1, n + 2]} for n in range(6)]
    outputs = fleet.generate(prompts, each, expected_lengths=lengths)
    assert [list(output.prompt_token_ids) for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    routing = fleet.routing
    assert routing is not None
    assert routing.replicas[0] != routing.replicas[1]
    assert (routing.routed_tokens, routing.static_tokens) == (48, 84)
    assert set(routing.replica_seconds) == {0, 1}
    assert max(routing.replica_seconds.values()) <= routing.observation.seconds
    fleet.generate(prompts, each)  # their lengths are known by now
    assert fleet.routing is not None
    assert (fleet.routing.replicas, list(fleet.routing.expected)) == (routing.replicas, lengths)
    record = fleet.rollout_record()
    assert (record["data_parallel"], record["response_lengths"]) == (2, lengths)
    assert record["routing"]["static_tokens"] == 84
    assert set(fleet.verdicts) == {0, 1}
    assert fleet.verdict in fleet.verdicts.values()
    written: list[Any] = []
    Monitor(engine=fleet, sinks=[Callback(written.append)]).step(np.zeros((1, 2)), np.zeros((1, 2)))
    assert (written[0]["data_parallel"], written[0]["response_lengths"]) == (2, lengths)


def test_turns_return_to_the_replica_that_has_their_prefix(fleet: RolloutFleet) -> None:
    """A trajectory that is named as another one goes where its prefix is not, and computes it again."""
    from vllm import SamplingParams

    sync(fleet, "a")  # an empty prefix cache
    four = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    first = [[(11 * row + 3 * n) % 1000 for n in range(BLOCK_SIZE - 2)] for row in range(4)]
    for names, kept_blocks in ((None, 4), (["a", "b", "c", "d"], 4), (["b", "c", "d", "a"], 2)):
        turns, hits = first, list[Any]()
        fleet.sync_weights(weights("dense", "a"), kv_prompts=CALIBRATION)
        for ids in (names and ["a", "b", "c", "d"], names):
            outputs = fleet.generate([{"prompt_token_ids": turn} for turn in turns], four, trajectory_ids=ids)
            turns = [[*turn, *output.outputs[0].token_ids, 5] for turn, output in zip(turns, outputs, strict=True)]
            assert fleet.observation is not None
            hits.append(fleet.observation.prefix_cache_hits)
        assert hits == [0, kept_blocks * BLOCK_SIZE]
        assert fleet.routing is not None
        assert (fleet.routing.returning, fleet.routing.kept) == (4, 4)
        assert f"{kept_blocks * BLOCK_SIZE / (4 * (BLOCK_SIZE + 3)):.0%} of the prompts' tokens" in str(fleet.routing)


def test_copies_of_a_prompt_get_different_responses_on_both(fleet: RolloutFleet) -> None:
    from vllm import SamplingParams

    outputs = fleet.generate(COPIES, SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True))
    assert fleet.routing is not None
    assert list(fleet.routing.replicas) == [0, 0, 1, 1]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(COPIES)


def test_what_one_replica_refuses_none_serves(fleet: RolloutFleet, fresh: Fresh) -> None:
    sync(fleet, "a")
    told = Rpc(planted.refuse_the_next_finish)
    fleet._members.collect(fleet._members.submit("answer", {1: (told,)}))
    with pytest.raises(SyncError, match=r"replica 1: a planted fault; the old weights serve"):
        sync(fleet, "b")
    is_like_a_fresh_one(fleet, fresh)
    with pytest.raises(SyncError, match=r"the manifest is empty.*the old weights serve"):
        fleet.sync_weights({})
    assert fleet.serves == [0, 1]


def test_replicas_that_have_not_met_the_trainer_take_nothing_from_it(fleet: RolloutFleet) -> None:
    remote = RemoteSource((), lambda: None)
    with pytest.raises(SyncError, match=r"connect\(fleet.join_transfer, workers=2\)\. Nothing was sent"):
        fleet.sync_weights(remote)


def test_what_a_guard_asks_for_is_done_in_all(fleet: RolloutFleet, fresh: Fresh) -> None:
    from vllm import SamplingParams

    fleet.generate(COPIES, SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True))
    fleet.apply(Action.RECALIBRATE_KV)  # on sequences of that rollout
    first, second = fleet.kv_scales()
    assert first == second != fresh.scales
    fleet.recalibrate_kv(kv_prompts=CALIBRATION)


def test_errors_of_a_request_reach_the_caller_and_harm_nobody(fleet: RolloutFleet) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="maximum context length is 256 tokens"):
        fleet.generate([*COPIES, {"prompt_token_ids": [1] * 5000}])
    assert len(fleet.generate(COPIES)) == len(COPIES)
    with pytest.raises(ConfigError, match="replica 2; allowed: 0 to 1"):
        fleet.replace(2)


def test_too_many_replicas_for_this_machine_are_refused(fleet: RolloutFleet) -> None:
    with pytest.raises(ConfigError, match=r"3 replicas of 1 CPU\(s\) each .* has 2 CPU\(s\); allowed: replicas=2"):
        RolloutFleet.from_plan(cpu_plan("bf16"), str(checkpoint("dense", "a")), replicas=3)
    with pytest.raises(ConfigError, match=r"did not get free in 0.5 s; free now, on all hosts: 0 CPU"):
        RolloutFleet.from_plan(cpu_plan("bf16"), str(checkpoint("dense", "a")), replicas=1, wait_s=0.5)


def test_a_replica_killed_in_a_stream_is_left_out_and_replaced(fleet: RolloutFleet, fresh: Fresh) -> None:
    sync(fleet, "b")
    know_processes(fleet)

    def stream() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(weights("dense", "a").items()):
            if number == 24:  # some messages are out
                kill(fleet, 1)
            yield pair

    with pytest.warns(RuntimeWarning, match=r"replica 1 of the fleet is lost: .*type: fleet.replace\(1\)"):
        fleet.sync_weights(stream(), kv_prompts=CALIBRATION)
    assert (fleet.serves, list(fleet.deaths)) == ([0], [1])
    is_like_a_fresh_one(fleet, fresh, replicas=1)
    fleet.replace(1)
    assert (fleet.serves, fleet.waiting, fleet.deaths) == ([0], [1], {})
    sync(fleet, "b")
    assert fleet.serves == [0, 1]
    sync(fleet, "a")
    is_like_a_fresh_one(fleet, fresh)


def test_the_requests_of_a_replica_that_dies_are_answered_by_the_other(fleet: RolloutFleet) -> None:
    from vllm import SamplingParams

    know_processes(fleet)
    how = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
    prompts = [{"prompt_token_ids": [n, n + 1, n + 2]} for n in range(24)]
    submit, begun = fleet._members.submit, time.monotonic()

    def submitting(method: str, arguments: Any) -> Any:
        found = submit(method, arguments)
        if method == "generate" and 0 in arguments:
            kill(fleet, 0)
        return found

    fleet._members.submit = submitting  # type: ignore[method-assign]
    try:
        with pytest.warns(RuntimeWarning, match="replica 0 of the fleet is lost"):
            outputs = fleet.generate(prompts, how)
    finally:
        fleet._members.submit = submit  # type: ignore[method-assign]
    assert time.monotonic() - begun < 60
    assert [len(output.outputs[0].token_ids) for output in outputs] == [200] * 24
    assert fleet.routing is not None
    assert (fleet.routing.rerouted, set(fleet.routing.replicas)) == (12, {1})


def test_once_none_is_left_the_fleet_refuses(fleet: RolloutFleet) -> None:
    know_processes(fleet)
    kill(fleet, 1)
    with (
        pytest.warns(RuntimeWarning, match="replica 1 of the fleet is lost"),
        pytest.raises(NotServingError, match=r"4 of 4 requests are unanswered.*replica 0: .*; replica 1: "),
    ):
        fleet.generate(COPIES)
    with pytest.raises(NotServingError, match="the next sync_weights starts it again"):
        fleet.generate(COPIES)
    with pytest.raises(NotServingError, match="the next sync_weights starts it again"):
        fleet.replace(0)
