"""The front: Python between the trainer and the engine's process, and the seconds that it adds to a rollout.

A front passes response tokens on, and takes seconds for each. `vllm serve` also passes requests on, and the engine
cannot begin one that has not arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, p_norm, paced, times, zero
from fp8plan.model.profile.profile import HOST_PACE, Profile

# Programs that call the engine. "server" is a vLLM server that TRL asks, and "-stock" the same program without fp8plan.
# verl-stock has the seconds of verl's log (timing_s/gen). HTTP is `vllm serve`, asked for whole answers with log-probs.
OWN = "own"  # a loop around `LLM.generate` or `RolloutEngine`, as profiles are measured: no front
HTTP = "server-http"
INSIDE = (OWN, "verl", "verl-stock", "trl", "trl-stock", "server", "server-stock", HTTP)
ONE_FOR_ALL = ("server", "server-stock")  # whose front is one for all replicas; `vllm serve` starts one for each


class Passing(NamedTuple):
    """The work of a front's engine in each row of steps; arrays of shape (rows,).

    engine:   seconds of the engine's steps
    tokens:   response tokens that they make
    prompts:  prompt tokens of the requests that they serve for the first time
    requests: number of all requests
    """

    engine: Array
    tokens: Array
    prompts: Array
    requests: int


class Front(NamedTuple):
    """The seconds that a front adds.

    cost:   of each row of steps
    slopes: d seconds of the rollout / d seconds of the engine in each row, shape (rows,)
    """

    cost: Cost
    slopes: Array


def front_kernels(inside: str) -> set[str]:
    """The kernels of a program's front, as prefixes of coefficients. inside: one of INSIDE"""
    return set() if inside == OWN else {f"front.{inside}"}


def front_of(inside: str, passing: Passing, profile: Profile) -> Front:
    """The seconds that the front adds to each row. inside: one of INSIDE

    `token_seconds` of each response token are added. `thread_seconds` of each overlap with the engine: together they
    take the root of the sum of squares. `start_seconds` come once, in the first row. docs/evidence/trainers.md has the
    measurements. `vllm serve` is a queue (`_over_http`).
    """
    if inside == HTTP:
        return _over_http(passing, profile)
    engine, tokens = passing.engine, passing.tokens
    total, slopes = zero(tokens), np.ones(tokens.shape)
    counts = {"token_seconds": tokens, "start_seconds": np.arange(tokens.size) == 0, "thread_seconds": tokens}
    for part, count in counts.items():
        coefficient = f"front.{inside}.{part}"
        if coefficient not in profile.coefficients:
            continue
        cost = times(np.asarray(count, dtype=np.float64), *profile.named(coefficient))
        if part == "thread_seconds":
            both = p_norm(2, Cost(engine, {}), cost)
            slopes = engine / np.where(both.seconds > 0, both.seconds, 1.0)  # d sqrt(e^2 + f^2) / d e
            cost = Cost(both.seconds - engine, both.partials)
        total = total + cost
    return Front(total, slopes)


def _over_http(passing: Passing, profile: Profile) -> Front:
    """The seconds that `vllm serve` adds to a rollout whose requests all come at once.

    Its front is one thread. Requests pass it one after another, each in `request_seconds` and its prompt's
    `prompt_token_seconds`. A row of steps waits for the requests that it serves for the first time. Each response token
    takes `thread_seconds`. The engine does not wait for that, so what is left to do is done after the last step. vLLM's
    front end is `AsyncLLM` (vllm/v1/engine/async_llm.py); the engine pushes its outputs to it.
    """
    rows = passing.engine.size
    each = passing.requests * passing.prompts / max(float(passing.prompts.sum()), 1.0)
    requests = times(each, *profile.named(f"front.{HTTP}.request_seconds"))
    requests = requests + times(passing.prompts, *profile.named(f"front.{HTTP}.prompt_token_seconds"))
    requests = paced(requests, HOST_PACE, profile)
    tokens = paced(times(passing.tokens, *profile.named(f"front.{HTTP}.thread_seconds")), HOST_PACE, profile)

    arrived = np.cumsum(requests.seconds)
    begun = np.append(0.0, np.cumsum(passing.engine))  # of each row, and of the end, if no row waited
    late = np.where(passing.prompts > 0, arrived - begun[:-1], 0.0)
    waited = np.maximum.accumulate(np.maximum(late, 0.0))
    left = np.append(np.cumsum(tokens.seconds[::-1])[::-1], 0.0)  # tokens to pass from each row on
    # The front has worked without a pause since some row began, or from the first request on, or it awaits the end.
    ends = begun + np.append(waited, waited[-1]) + left
    ends[0] = arrived[-1] + left[0]
    since = int(np.argmax(ends))

    last = rows - 1 if since == 0 else int(np.argmax(late[: since + 1]))  # the row whose requests came last
    waits = since == 0 or late[last] > 0
    at = np.arange(rows)
    counted = np.where((at < since) & (at >= (last if waits else 0)), 1.0, 0.0)
    partials = requests.scaled(np.where((at <= last) & waits, 1.0, 0.0)).partials
    added = np.diff(waited, prepend=0.0)
    added[-1] += ends[since] - (begun[-1] + waited[-1])
    cost = Cost(added, partials).plus_partials(tokens.scaled(np.where(at >= since, 1.0, 0.0)).partials)
    return Front(cost, counted)


def wait_seconds(inside: str, profile: Profile) -> float:
    """Seconds of an RL step from a rollout's last token until the trainer goes on."""
    return profile.coefficients.get(f"front.{inside}.wait_seconds", 0.0)
