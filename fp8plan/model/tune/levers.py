"""The levers of a tuned plan, each with its gain, its price, and its setting in the words of each program.

A lever is simulated on the engine of the plan's choice, with all else as it is. Its gain is that of a rollout with as
many responses, or of the RL step where the step changes. Few levers were measured: `Lever.measured`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.cost.base import IntArray
from fp8plan.model.emit.vllm import precision_words, serve_flags
from fp8plan.model.limits import VERLS
from fp8plan.model.plan.choice import SpeedUp, power
from fp8plan.model.plan.scene import CONCURRENT, NOTHING, UNKNOWN, Lever, Scene
from fp8plan.model.plan.turn_levers import at_once_words, cap
from fp8plan.model.rollout import WHOLE, simulate
from fp8plan.model.tune.cut import WARM_UP, Partial, beside, bias, cut_after, drawn, partial_rollouts
from fp8plan.model.tune.remedies import remedy_levers
from fp8plan.model.tune.search import Tuned, in_words
from fp8plan.model.tune.speculation import Speculation, speculated
from fp8plan.model.tune.weight_sync import sync_levers
from fp8plan.model.workload import Batch

MORE: Final = (0.1, 0.25)  # shares of responses that are asked for beyond those that are needed
VERL: Final = "actor_rollout_ref.rollout"
IN_FLIGHT: Final = (0.1, 0.25, 0.5, 1.0, 2.0)  # the same shares, of asynchronous training
# Steps 2 to 8 and the first one of separate_async in benchmarks/results/verl_h100.jsonl.
LAGGING: Final = "unknown; a run of verl one version behind: KL k3 9.8e-3 to 1.8e-2 instead of 5.4e-3"


def levers(tuned: Tuned, scene: Scene) -> list[Lever]:
    """Every lever that is modelled, and the plan's own changes; those that save most come first."""
    every = [*_in_plan(tuned, scene), *_precisions(tuned, scene), *_order(scene), *_off_policy(scene)]
    every += [*_samples(scene), *_more_gpus(scene), *_speculative(scene, tuned.request.speculation)]
    every += [*sync_levers(scene), *remedy_levers(scene)]
    every += cap(scene) if scene.request.batch.turns is None else tuned.best.levers
    if scene.whole:
        every += [*_stopped(scene), *_partial(scene)]
    every = [replace(lever, of_turns=scene.request.batch.turns is not None) for lever in every]
    return sorted(every, key=lambda lever: -lever.saved_s[0])


def _in_plan(tuned: Tuned, scene: Scene) -> Iterator[Lever]:
    """The limits that the search changed, each alone set back."""
    for name, (old, new) in tuned.changes.items():
        try:
            without = scene.under({name: old})
        except (CapacityError, ConfigError):  # the other changes do not fit without this one
            continue
        words = {"vllm": " ".join(serve_flags({name: new}))}
        if name == CONCURRENT:
            words = at_once_words(scene, new)
        if word := next((word for word, limit in VERLS.items() if limit == name), None):
            words["verl"] = f"{VERL}.{word}={str(new).lower()}"
        setting = f"instead of {in_words(name, old)}"
        yield scene.lever(f"{name} {new}", setting, words, scene.before, NOTHING, before=without, in_plan=True)


FP8_PARTS: Final = {"weights": "FP8 weights", "kv": "FP8 KV cache"}  # part of a precision -> its name


def _precisions(tuned: Tuned, scene: Scene) -> Iterator[Lever]:
    """FP8 weights and an FP8 KV cache, each alone, against the same engine without."""
    own = scene.choice.setup
    for other in tuned.best.tried:
        differing = [x for x in FP8_PARTS if getattr(other.setup.precision, x) != getattr(own.precision, x)]
        if other.rollout is None or other.setup.limits.layout != own.limits.layout or len(differing) != 1:
            continue
        in_plan = getattr(own.precision, differing[0]) != "bf16"
        without, with_it = (other, scene.choice) if in_plan else (scene.choice, other)
        name, vllms = FP8_PARTS[differing[0]], precision_words(with_it.setup, without.setup.precision)
        words = ({"vllm": vllms} if vllms else {}) | dict.fromkeys(("verl", "trl"), "by fp8plan's engine")
        levels = with_it.expected.level, without.expected.level
        price = f"risk {levels[0]}"
        if levels[0] != levels[1]:
            price += f", {levels[1]} without"
        kl = f"KL k3 {power(with_it.expected.kl_k3)} instead of {power(without.expected.kl_k3)}"
        setting = f"the plan's {with_it.setup.precision.name}"
        yield scene.lever(name, setting, words, with_it.timed, price, without.timed, mismatch=kl, in_plan=in_plan)


def _stopped(scene: Scene) -> Iterator[Lever]:
    """More responses are asked for than are needed; the rest is aborted when enough have ended."""
    batch, setup = scene.request.batch, scene.choice.setup
    for share in MORE:
        more = beside(batch, drawn(batch, round(share * len(batch.prompts)), seed=0))
        planned = simulate(setup, more, scene.profile, memory=scene.base.memory).schedules
        if any(plan.sampled for plan in planned):
            return
        batches = more.split(setup.limits.data_parallel_size)
        cut = cut_after(len(batch.prompts), batches, planned, scene.base.model)
        lost = bias(more.responses, cut.ended)
        price = (
            f"bias to short answers: mean length {lost.mean_shift:+.0%}, {lost.long_lost:.0%} of the longest tenth lost"
        )
        words = {"vllm": "AsyncLLM.abort(request_id)"}
        setting = f"ask for {share:.0%} more responses, and abort the rest when enough have ended"
        yield scene.lever(f"stop the tail, {share:.0%} more", setting, words, cut.rollout, price)


def _partial(scene: Scene) -> Iterator[Lever]:
    """The same, but the responses that have not ended go on in the next step."""
    setup, share = scene.choice.setup, MORE[0]
    in_flight = math.ceil((1 + share) * len(scene.request.batch.prompts) / setup.limits.data_parallel_size)
    if in_flight > WHOLE or scene.request.batch.turns is not None:  # a sample, or turns that are cut in their midst
        return
    steps = partial_rollouts(scene.request.batch, share, setup, scene.base.memory.kv, scene.base.model)
    after = replace(steps.rollout, makespan_s=steps.seconds)
    price = f"{steps.old_share:.0%} of the tokens are older, by {steps.age:.1f} steps, at most {steps.most_age}"
    words = {"verl": "verl.experimental.fully_async_policy: async_training.partial_rollout=True"}
    setting = f"{share:.0%} more in flight, and what has not ended goes on in the next step"
    yield scene.lever(f"partial rollouts, {share:.0%} more", setting, words, after, price, mismatch=UNKNOWN)


def _off_policy(scene: Scene) -> Iterator[Lever]:
    """Training on one batch while the next is rolled out, in whole steps or as responses end."""
    times, batch = scene.request.trainer, scene.request.batch
    if times is None or scene.choice.step_s is None:
        return
    trainer = times.seconds(int(batch.lengths.sum()))
    apart = "the trainer needs GPUs of its own"
    whole = cache(lambda replicas: scene.run(batch, data_parallel_size=replicas).makespan_s)
    balance = _balance(scene, whole, trainer, 1)
    words = {"verl": "verl.experimental.one_step_off_policy", "trl": "experimental.async_grpo: max_staleness=1"}
    setting, price = "train on a batch while the next is rolled out", f"every token is a step old; {apart}; {balance}"
    alone_s = scene.base.rollout.makespan_s
    yield _overlapped(scene, trainer, alone_s, "one step off-policy", setting, words, price)
    if (fastest := _fastest_beside(scene, times.max_lag)) is None:
        return
    share, steps = fastest
    gone_on = cache(lambda replicas: _beside(scene, share, replicas, times.max_lag).seconds)
    price = f"tokens are {steps.lag:.1f} versions old, at most {steps.most_lag}; {apart}; "
    price += _balance(scene, gone_on, trainer, times.max_lag)
    flying, verl = round((1 + share) * len(batch.prompts)), "async_training"
    knobs = (f"{verl}.staleness_threshold={share:g}", f"{verl}.trigger_parameter_sync_step=1")
    words = {
        "verl": " ".join(("verl.experimental.fully_async_policy:", *knobs, f"{verl}.partial_rollout=True")),
        "trl": f"experimental.async_grpo: max_staleness={times.max_lag} max_inflight_tasks={flying}",
        "prime-rl": f"orchestrator.max_off_policy_steps={times.max_lag} orchestrator.concurrency.max_inflight={flying}",
    }
    setting = f"{share:.0%} more responses in flight; they go on under new weights, and their KV is computed anew"
    yield _overlapped(scene, trainer, steps.seconds, f"fully asynchronous, lag {steps.most_lag}", setting, words, price)


def _overlapped(scene: Scene, trainer: float, rollout_s: float, *named: Any) -> Lever:
    """The lever of a rollout of so many seconds beside the trainer: the step takes as long as the longer of the two.

    named: the lever's name, setting, words and price
    """
    choice, rollout = scene.choice, scene.choice.timed
    assert choice.step_s is not None
    rest = choice.step_s - trainer - rollout.makespan_s

    def ratio(pace: float) -> float:
        return (pace * rollout.makespan_s + trainer + rest) / (max(pace * rollout_s, trainer) + rest)

    low, high = (end / rollout.makespan_s for end in (rollout.makespan_low_s, rollout.makespan_high_s))
    ends = [ratio(x) for x in (low, min(max(trainer / rollout_s, low), high), high)]  # the gain is largest in between
    gain = SpeedUp(ratio(1.0), min(ends), max(ends))
    name, setting, words, price = named
    after = choice.step_s / gain.ratio
    return Lever(name, setting, words, choice.step_s, after, gain, price, LAGGING, step=True)


def _beside(scene: Scene, share: float, replicas: int, max_lag: int) -> Partial:
    """Steps beside the trainer, with this share of responses in flight beyond a batch."""
    setup = replace(scene.choice.setup, limits=replace(scene.choice.setup.limits, data_parallel_size=replicas))
    kv, warm_up = scene.base.memory.kv, max(WARM_UP, max_lag - 1)  # a lag beyond `max_lag` is seen
    return partial_rollouts(scene.request.batch, share, setup, kv, scene.base.model, warm_up)


def _fastest_beside(scene: Scene, max_lag: int) -> tuple[float, Partial] | None:
    """The share in flight with which steps are fastest, and those. Shares grow until steps become slower.

    None if tokens are more than `max_lag` versions behind with every share, if not all requests are simulated, and for
    turns, which would be cut in their midst.
    """
    best, replicas = None, scene.choice.setup.limits.data_parallel_size
    if scene.request.batch.turns is not None:
        return None
    for share in IN_FLIGHT:
        in_flight = math.ceil((1 + share) * len(scene.request.batch.prompts) / replicas)
        if not scene.whole or in_flight > WHOLE:  # its schedule would be a sample
            break
        steps = _beside(scene, share, replicas, max_lag)
        if steps.most_lag > max_lag or (best and steps.seconds >= best[1].seconds):
            break
        best = share, steps
    return best


def _balance(scene: Scene, seconds: Callable[[int], float], trainer: float, steps: int) -> str:
    """The words for the fewest rollout GPUs with which the rollout is no longer than training.

    seconds: of the rollout on so many replicas
    steps:   that a response may span
    """
    if scene.longest_alone_s > steps * trainer:
        times = f" {steps} times" if steps > 1 else ""
        return f"the longest response alone takes longer than training{times}"
    own, most = scene.choice.setup.limits.data_parallel_size, scene.request.batch.at_once
    too_few, enough = 0, min(most, max(1, math.floor(own * seconds(own) / trainer)))  # replicas seldom help more
    while seconds(enough) > trainer and enough < most:
        too_few, enough = enough, min(most, math.ceil(enough * min(2.0, seconds(enough) / trainer)))
    if seconds(enough) > trainer:
        return "no number of rollout GPUs balances it"
    enough = too_few + 1 + bisect_left(range(too_few + 1, enough), True, key=lambda n: seconds(n) <= trainer)
    gpus = enough * scene.choice.setup.limits.tensor_parallel_size
    return f"{gpus} rollout GPU(s) balance it ({seconds(enough):.3g} s)"


def _order(scene: Scene) -> Iterator[Lever]:
    """The same requests in another order."""
    batch, limits = scene.request.batch, scene.choice.setup.limits
    for setting, rows in orders(batch, limits.data_parallel_size).items():
        if np.array_equal(rows, np.arange(len(rows))):
            continue
        words, run = {"vllm": "the list given to generate()"}, scene.run(batch.take(rows))
        prices, served, before = list[str](), run.cached_tokens, scene.before.cached_tokens
        if served != before:
            prices.append(f"the prefix cache serves {served:,} tokens instead of {before:,}")
        if setting == "long responses first":
            prices.append("needs the lengths in advance: no forecast gains more")
        price = "; ".join(prices) or NOTHING
        yield scene.lever(f"order: {setting}", "the order of requests", words, run, price)


def orders(batch: Batch, replicas: int = 1) -> dict[str, IntArray]:
    """Orders of the requests by their names: the rows of the batch, replica by replica."""
    prompts = np.split(np.arange(len(batch.prompts)), np.flatnonzero(np.diff(batch.prompt_ids)) + 1)
    turn = np.concatenate([np.arange(len(rows)) for rows in prompts])
    by_length = sorted(prompts, key=lambda rows: -int(batch.prompts[rows[0]]))
    singly = np.array_split(np.argsort(-batch.responses, kind="stable"), len(batch.prompts))
    return {
        "samples of a prompt apart": np.argsort(turn, kind="stable"),
        "long prompts first": _dealt(by_length, replicas),
        "long responses first": _dealt(singly, replicas),
    }


def _dealt(pieces: Sequence[IntArray], replicas: int) -> IntArray:
    """The rows of pieces that are dealt to the replicas in turn, replica by replica."""
    return np.concatenate([rows for replica in range(replicas) for rows in pieces[replica::replicas]])


def _samples(scene: Scene) -> Iterator[Lever]:
    """Half and twice as many samples of each prompt, with the same responses."""
    batch = scene.request.batch
    _, firsts, counts = np.unique(batch.prompt_ids, return_index=True, return_counts=True)
    samples, prompts = int(counts[0]), len(counts)
    if (counts != samples).any():
        return
    turn = np.arange(len(batch.prompts)) - firsts[batch.prompt_ids]
    halves = batch._replace(prompt_ids=2 * batch.prompt_ids + 2 * turn // samples)
    pairs = batch.prompt_ids // 2
    doubled = batch._replace(prompts=batch.prompts[firsts[2 * pairs]], prompt_ids=pairs)
    for other, factor in ((halves, 0.5), (doubled, 2)):
        if (factor < 1 and (samples % 2 or samples < 4)) or (factor > 1 and prompts % 2):  # a group has two or more
            continue
        each, number = int(samples * factor), int(prompts / factor)
        price = f"{number:,} prompts a step instead of {prompts:,}: the effect on learning is unknown"
        words = {"verl": f"{VERL}.n={each} data.train_batch_size={number}", "trl": f"num_generations={each}"}
        after = scene.run(other)
        yield scene.lever(f"{each} samples per prompt", f"instead of {samples}", words, after, price)


def _more_gpus(scene: Scene) -> Iterator[Lever]:
    limits = scene.choice.setup.limits
    replicas = 2 * limits.data_parallel_size
    if replicas > scene.request.batch.at_once or scene.choice.setup.gpu.is_cpu:
        return
    rollout = scene.run(scene.request.batch, data_parallel_size=replicas)
    gpus = 2 * limits.gpus
    price = f"{2 * rollout.makespan_s / scene.before.makespan_s:.2f} times the GPU seconds"
    words = {"verl": f"trainer.nnodes * trainer.n_gpus_per_node={gpus}", "trl": f"{gpus} training processes"}
    setting = f"as replicas, instead of {gpus // 2}"
    yield scene.lever(f"{gpus} GPUs", setting, words, rollout, price)


def _speculative(scene: Scene, drafts: Speculation | None) -> Iterator[Lever]:
    """Drafts that the model verifies. Rejection sampling keeps its distribution, and log-probs are its own."""
    setup = scene.choice.setup
    if drafts is None:
        return
    try:
        rollout = speculated(setup, scene.request.batch, scene.profile, drafts)
    except CapacityError:  # there is no room for a draft head
        return
    price = "the distribution stays; derived from the costs of GEMMs and attention"
    if drafts.source.head:
        price += "; a head that no weight sync reaches is accepted less and less"
    limits, config = drafts.limits(setup), json.dumps(drafts.config)
    sizes = ("max_num_batched_tokens", "max_cudagraph_capture_size")
    changed = {name: getattr(limits, name) for name in sizes if getattr(limits, name) != getattr(setup.limits, name)}
    verl = f"+{VERL}.engine_kwargs.vllm.speculative_config"
    words = {
        "vllm": " ".join([f"--speculative-config '{config}'", *serve_flags(changed)]),
        "verl": " ".join(f"{verl}.{name}={value}" for name, value in drafts.config.items()),
        "trl": f"trl vllm-serve --speculative_config '{config}'",
    }
    if drafts.method == "mtp":
        mtp = {"enable": True, "enable_rollout": True, "num_speculative_tokens": drafts.tokens}
        words["verl"] = " ".join(f"actor_rollout_ref.model.mtp.{name}={value}" for name, value in mtp.items())
    setting = f"{drafts.gained:.2f} tokens a step at an acceptance of {drafts.acceptance:g}"
    name = f"speculative decoding by {drafts.method}, {drafts.tokens} drafts"
    yield scene.lever(name, setting, words, rollout, price)
