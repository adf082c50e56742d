"""The front: Python between the trainer and the engine's process, and the seconds that it adds to a rollout.

A front passes response tokens on, and takes seconds for each. `vllm serve` also passes requests on, and the engine
cannot begin one that has not arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import Array, Cost, p_norm, paced, times, zero
from fp8plan.model.profile.profile import HOST_PACE, Profile

# Programs that call the engine. "server" is a vLLM server that TRL asks. "-stock" is the same program without fp8plan.
# verl-stock has the seconds of verl's log (timing_s/gen). HTTP is `vllm serve`, asked for whole answers with log-probs.
OWN = "own"  # a loop around `LLM.generate` or `RolloutEngine`, as profiles are measured: no front
HTTP = "server-http"
INSIDE = (OWN, "verl", "verl-stock", "trl", "trl-stock", "server", "server-stock", HTTP)
ONE_FOR_ALL = ("server", "server-stock")  # one front for all replicas; the others have one for each


class Passing(NamedTuple):
    """The work that passes a front in each row of steps; arrays of shape (rows,).

    engine:   seconds of the engine's steps
    tokens:   response tokens that pass: those of this engine, or of all replicas with one front
    prompts:  prompt tokens of the requests that this engine serves for the first time
    requests: number of all its requests
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
    take the root of the sum of squares. `start_seconds` come once, in the first row. `_over_http` is the queue of
    `vllm serve`. docs/evidence/trainers.md has the measurements.
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
    takes `thread_seconds`. The engine does not wait for tokens: those that are left pass after the last step. vLLM's
    front end is `AsyncLLM` (vllm/v1/engine/async_llm.py); the engine pushes its outputs to it.
    """
    rows = passing.engine.size
    new_requests = passing.requests * passing.prompts / max(float(passing.prompts.sum()), 1.0)
    requests = times(new_requests, *profile.named(f"front.{HTTP}.request_seconds"))
    requests = requests + times(passing.prompts, *profile.named(f"front.{HTTP}.prompt_token_seconds"))
    requests = paced(requests, HOST_PACE, profile)
    tokens = paced(times(passing.tokens, *profile.named(f"front.{HTTP}.thread_seconds")), HOST_PACE, profile)

    # Arrays of (rows + 1,) have the end of the last row, too.
    arrived = np.cumsum(requests.seconds)
    begins = np.append(0.0, np.cumsum(passing.engine))  # if no row waits
    late = np.where(passing.prompts > 0, arrived - begins[:-1], 0.0)
    waited = np.maximum.accumulate(np.maximum(late, 0.0))  # by this row and all before it
    left = np.append(np.cumsum(tokens.seconds[::-1])[::-1], 0.0)  # seconds of the tokens of this row and all after it

    # The rollout ends when the front does. It works without a pause from the begin of some row on: from row 0, with all
    # requests before the tokens, or from a later one. At `rows` it has no token left when the engine ends.
    ends = begins + np.append(waited, waited[-1]) + left
    ends[0] = arrived[-1] + left[0]
    busy_from = int(np.argmax(ends))

    # The row whose requests came last counts all requests until then, and the engine only after it.
    awaited = rows - 1 if busy_from == 0 else int(np.argmax(late[: busy_from + 1]))
    waits = busy_from == 0 or late[awaited] > 0
    row = np.arange(rows)
    in_engine = row < busy_from
    if waits:
        in_engine &= row >= awaited
    in_front = (row <= awaited) & waits
    added = np.diff(waited, prepend=0.0)
    added[-1] += ends[busy_from] - (begins[-1] + waited[-1])
    cost = Cost(added, requests.scaled(in_front.astype(np.float64)).partials)
    cost = cost.plus_partials(tokens.scaled((row >= busy_from).astype(np.float64)).partials)
    return Front(cost, in_engine.astype(np.float64))


def wait_seconds(inside: str, profile: Profile) -> float:
    """Seconds of an RL step from a rollout's last token until the trainer goes on."""
    return profile.coefficients.get(f"front.{inside}.wait_seconds", 0.0)
