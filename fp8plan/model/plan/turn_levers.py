"""Levers on a rollout of turns: trajectories at once, prefix caching, replicas that keep trajectories, and a cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.rollout import Rollout, makespans, rollout
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.targets import words_at_once

CAP: Final = 0.95  # quantile of the lengths at which responses are cut


def turn_levers(scene: Scene) -> Iterator[Lever]:
    yield from _at_once(scene)
    yield from _caching(scene)
    yield from cap(scene)


def _at_once(scene: Scene) -> Iterator[Lever]:
    """Fewer and more trajectories at once: the number is halved and doubled, as long as that saves time."""
    batch = scene.request.batch
    for factor in (0.5, 2.0):
        number, planned = _climbed(scene, factor)
        if number == batch.at_once:
            continue
        after = rollout(planned, scene.base.model)
        words, name = at_once_words(scene, number), f"{number:,} trajectories at once"
        setting = f"{words['fp8plan']} instead of {batch.at_once:,}"
        yield scene.lever(name, setting, words, after, _hits(scene, after))


def at_once_words(scene: Scene, number: int) -> dict[str, str]:
    """Program -> its words for so many trajectories at once."""
    samples, replicas = scene.request.workload.samples_per_prompt, scene.choice.setup.limits.data_parallel_size
    return {"fp8plan": f"--concurrent {number}", **words_at_once(number, samples, replicas)}


def _climbed(scene: Scene, factor: float) -> tuple[int, Sequence[Schedule]]:
    """The fastest number of trajectories at once among the plan's, multiplied by the factor once, twice and so on.
    The schedules with it stand beside it.

    The search ends at the first that is slower than the one before. If none is faster than the plan's own, the first is
    priced; if there is no other number, the plan's own is returned.
    """
    batch, replicas = scene.request.batch, scene.choice.setup.limits.data_parallel_size
    number, best_s = batch.at_once, scene.before.makespan_s
    best: tuple[int, Sequence[Schedule]] = number, scene.base.schedules
    while True:
        following = min(int(number * factor), len(batch.prompts))
        if following == number or following < replicas:
            return best
        number = following
        planned = scene.base.rescheduled(batch.at_most(number))
        seconds = makespans([planned], scene.base.model)[0]
        if seconds >= best_s:
            return (number, planned) if best[0] == batch.at_once else best
        best, best_s = (number, planned), seconds


def _caching(scene: Scene) -> Iterator[Lever]:
    """Prefix caching off or on, and trajectories that return to any replica."""
    batch, limits = scene.request.batch, scene.choice.setup.limits
    on, replicas = limits.enable_prefix_caching, limits.data_parallel_size
    if on and limits.enable_return_routed_experts:  # they need the cache
        return
    try:
        other = scene.run(batch, enable_prefix_caching=not on)
    except (CapacityError, ConfigError):  # vLLM or the scheduler's model has no such cache for these layers
        return
    if on:
        name, setting, flag = "prefix caching off", "each turn computes all its tokens", "--no-enable-prefix-caching"
    else:
        name, setting, flag = "prefix caching on", "turns find the tokens before them", "--enable-prefix-caching"
    yield scene.lever(name, setting, {"vllm": flag}, other, _hits(scene, other))
    if not on or replicas == 1:
        return
    away = 1 - 1 / replicas
    added_s = away * (other.makespan_s - scene.before.makespan_s)
    after = replace(other, makespan_s=scene.before.makespan_s + added_s)
    name, setting = "trajectories return to any replica", f"at random; the plan keeps them on their {replicas} replicas"
    price = f"{away:.0%} of the returns find no prefix, and are taken to cost that share of prefix caching off"
    yield scene.lever(name, setting, {}, after, price)


def _hits(scene: Scene, after: Rollout) -> str:
    """The words for the prefixes that a lever keeps or loses."""
    assert after.turns is not None
    assert scene.before.turns is not None
    new, old = (f"{turns['hit_share']:.0%}" for turns in (after.turns, scene.before.turns))
    return f"prefix hits stay {new}" if new == old else f"prefix hits {new} instead of {old}"


def cap(scene: Scene) -> Iterator[Lever]:
    """Stop the longest responses, or trajectories with what tools add, at the quantile CAP of the lengths."""
    batch = scene.request.batch
    lengths = batch.lengths - batch.prompts
    most = int(np.quantile(lengths, CAP))
    cut = lengths > most
    if not cut.any():
        return
    shorter = batch.stopped_at(most)
    lost = 1 - shorter.responses.sum() / batch.responses.sum()
    subject, after = "responses", scene.run(shorter)
    settings = {"vllm": "max_tokens", "verl": "data.max_response_length", "trl": "max_completion_length"}
    if batch.turns is not None:
        subject = "trajectories"
        del settings["vllm"]  # it counts the tokens of one turn
    price = f"{cut.mean():.0%} of the {subject} have no end, {lost:.0%} of the tokens are lost"
    words = {program: f"{word}={most}" for program, word in settings.items()}
    yield scene.lever(f"cap at {most:,} tokens", f"the {CAP:.0%} quantile of the lengths", words, after, price)
