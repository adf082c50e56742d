"""The front: Python between the trainer and the engine's process, and the seconds that it adds to a rollout.

A front passes response tokens on, and takes seconds for each. A server also passes requests to the engine, one after
another. The engine cannot begin a request that has not arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, p_norm, paced, times, zero
from fp8plan.model.profile.profile import HOST_PACE, Profile

# Programs that call the engine. "server" is a vLLM server that TRL asks, and "-stock" the same program without fp8plan.
# verl-stock has the seconds of verl's log (timing_s/gen). "server-http" is `vllm serve`, asked over HTTP for whole
# answers with log-probs; "server-http-stream" sends each token when it is made.
OWN = "own"  # a loop around `LLM.generate` or `RolloutEngine`, as profiles are measured: no front
HTTP = ("server-http", "server-http-stream")
INSIDE = (OWN, "verl", "verl-stock", "trl", "trl-stock", "server", "server-stock", *HTTP)
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
    measurements. Requests take `request_seconds` and `prompt_token_seconds`, and then arrive (`_arrivals`).
    """
    engine, tokens = passing.engine, passing.tokens
    total, slopes = zero(tokens), np.ones(tokens.shape)
    counts = {"token_seconds": tokens, "start_seconds": np.arange(tokens.size) == 0, "thread_seconds": tokens}
    for part, count in counts.items():
        coefficient = f"front.{inside}.{part}"
        if coefficient not in profile.coefficients:
            continue
        cost = times(np.asarray(count, dtype=np.float64), *profile.named(coefficient))
        if inside in HTTP:
            cost = paced(cost, HOST_PACE, profile)
        if part == "thread_seconds":
            both = p_norm(2, Cost(engine, {}), cost)
            slopes = engine / np.where(both.seconds > 0, both.seconds, 1.0)  # d sqrt(e^2 + f^2) / d e
            cost = Cost(both.seconds - engine, both.partials)
        total = total + cost
    if inside in HTTP:
        return _arrivals(inside, passing, Front(total, slopes), profile)
    return Front(total, slopes)


def _arrivals(inside: str, passing: Passing, front: Front, profile: Profile) -> Front:
    """The front, and the seconds that the engine waits for requests which all come at once.

    The schedule has all requests at the start. A row waits until those that it serves for the first time have passed
    the front. So the last row that waits begins when its requests have arrived, however long the rows before took.
    """
    each = passing.requests * passing.prompts / max(float(passing.prompts.sum()), 1.0)
    work = times(each, *profile.named(f"front.{inside}.request_seconds"))
    work = work + times(passing.prompts, *profile.named(f"front.{inside}.prompt_token_seconds"))
    work = paced(work, HOST_PACE, profile)
    rows = passing.engine + front.cost.seconds
    begun = np.cumsum(rows) - rows
    late = np.where(passing.prompts > 0, np.cumsum(work.seconds) - begun, 0.0)
    waited = np.maximum.accumulate(np.maximum(late, 0.0))
    waits = np.diff(waited, prepend=0.0)
    last = int(np.flatnonzero(waits)[-1]) if waits.any() else -1
    at = np.arange(rows.size)
    before = np.where(at <= last, 1.0, 0.0)  # rows whose requests the last wait is for
    after = np.where(at < last, 0.0, 1.0)  # rows whose own seconds count
    partials = {name: partial * after for name, partial in front.cost.partials.items()}
    cost = Cost(front.cost.seconds + waits, partials)
    return Front(cost.plus_partials(work.scaled(before).partials), front.slopes * after)


def wait_seconds(inside: str, profile: Profile) -> float:
    """Seconds of an RL step from a rollout's last token until the trainer goes on."""
    return profile.coefficients.get(f"front.{inside}.wait_seconds", 0.0)
