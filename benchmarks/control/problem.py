"""A small exact policy-gradient problem: sequences of tokens from a tabular softmax policy.

State s (what the text so far amounts to), action a (the next token), s' = successor[s, a], reward[s, a], TOKENS tokens
per sequence. The trainer's policy is softmax(logits[s]). The exact gradient of the expected return follows from one
backward pass (values) and one forward pass (visits); the estimator is GRPO's: one advantage per sequence, its return
less the mean return of the others in the batch, on each of its tokens.

The rollout policy is the trainer's with noise on the logits, drawn for every token (a real engine's rounding errors
depend on the whole prefix, which hardly ever repeats) and, in part, for every state and step (the weights' rounding).
So, as in the real thing, token-level weights are exact for a token given its prefix, and never for the prefix itself or
for what follows the token: even untruncated they leave a bias, and no threshold is perfect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STATES, ACTIONS, TOKENS = 8, 6, 12
SHARED = 0.25  # share of the noise's variance that belongs to the state, not to the token
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Problem:
    """successor, reward, start_logits: (STATES, ACTIONS). All sequences start in state 0."""

    successor: NDArray[np.int64]
    reward: Floats
    start_logits: Floats


class Mismatched(NamedTuple):
    """The perturbation of the rollout policy in one step.

    sigma:      standard deviation of the noise on each logit
    tail_share: share of tokens with noise `tail_sigma` instead (an expert or a KV scale that went wrong)
    student:    the noise that tokens do not share has a strength of its own in each token, as Student's t with two
                degrees of freedom has: sigma is then a scale, and there is no finite variance
    """

    sigma: float
    tail_share: float = 0.0
    tail_sigma: float = 0.0
    student: bool = False


class Batch(NamedTuple):
    """states, actions, log_ratio (train - rollout): (seeds, sequences, TOKENS); returns: (seeds, sequences)."""

    states: NDArray[np.int64]
    actions: NDArray[np.int64]
    log_ratio: Floats
    returns: Floats


def make_problem(seed: int) -> Problem:
    """Logits of standard deviation 2: like a language model's, most tokens are nearly certain and some are not."""
    rng = np.random.default_rng(seed)
    successor = rng.integers(STATES, size=(STATES, ACTIONS))
    return Problem(successor, rng.normal(size=(STATES, ACTIONS)), 2.0 * rng.normal(size=(STATES, ACTIONS)))


def log_policy(logits: Floats) -> Floats:
    """log softmax over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def exact(problem: Problem, logits: Floats) -> tuple[float, Floats]:
    """(expected return, its gradient by the logits: (STATES, ACTIONS))."""
    policy = np.exp(log_policy(logits))
    action_values = np.empty((TOKENS, STATES, ACTIONS))
    value = np.zeros(STATES)
    for t in reversed(range(TOKENS)):
        action_values[t] = problem.reward + value[problem.successor]
        value = (policy * action_values[t]).sum(-1)
    visits = np.eye(STATES)[0]
    gradient = np.zeros((STATES, ACTIONS))
    for t in range(TOKENS):
        mean = (policy * action_values[t]).sum(-1, keepdims=True)
        gradient += visits[:, None] * policy * (action_values[t] - mean)
        visits = np.bincount(problem.successor.ravel(), (visits[:, None] * policy).ravel(), minlength=STATES)
    return float(value[0]), gradient


def training_path(problem: Problem, steps: int, rate: float) -> list[Floats]:
    """The trainer's logits before each step of exact gradient ascent: the same run for every method."""
    path = [problem.start_logits]
    while len(path) < steps:
        path.append(path[-1] + rate * exact(problem, path[-1])[1])
    return path


def sample(
    problem: Problem, logits: Floats, noise: Mismatched, seeds: int, sequences: int, rng: np.random.Generator
) -> Batch:
    """`seeds` independent batches from the rollout policy. logits: (STATES, ACTIONS), or one such array per seed."""
    train = np.broadcast_to(log_policy(logits), (seeds, STATES, ACTIONS))
    shape = (seeds, sequences)
    shared = noise.sigma * SHARED**0.5 * rng.standard_normal((seeds, STATES, ACTIONS))
    row = np.arange(seeds)[:, None]
    state = np.zeros(shape, np.int64)
    states, actions = np.empty((2, *shape, TOKENS), np.int64)
    log_ratio, returns = np.empty((*shape, TOKENS)), np.zeros(shape)
    for t in range(TOKENS):
        scale = np.full(shape, noise.sigma * (1 - SHARED) ** 0.5, np.float32)
        if noise.student:
            scale /= np.sqrt(rng.standard_exponential(shape)).astype(np.float32)  # float64: never 0
        if noise.tail_share:
            scale[rng.random(shape) < noise.tail_share] = noise.tail_sigma
        fresh = rng.standard_normal((*shape, ACTIONS), np.float32) * scale[..., None]
        rollout = log_policy(train[row, state] + shared[row, state] + fresh)
        cumulative = np.exp(rollout).cumsum(-1)
        drawn = rng.random(shape)[..., None] * cumulative[..., -1:]
        action = (drawn > cumulative[..., :-1]).sum(-1)
        states[..., t], actions[..., t] = state, action
        log_ratio[..., t] = train[row, state, action] - np.take_along_axis(rollout, action[..., None], -1)[..., 0]
        returns += problem.reward[state, action]
        state = problem.successor[state, action]
    return Batch(states, actions, log_ratio, returns)


def estimate(logits: Floats, batch: Batch, weights: Floats) -> Floats:
    """The estimated gradients, (seeds, STATES, ACTIONS): mean over sequences of advantage x sum over tokens of weight x
    grad log pi_train.

    weights: (seeds, sequences, TOKENS)
    """
    seeds, sequences = batch.returns.shape
    others = (batch.returns.sum(-1, keepdims=True) - batch.returns) / (sequences - 1)
    terms = weights * (batch.returns - others)[..., None] / sequences
    key = (np.arange(seeds)[:, None, None] * STATES + batch.states) * ACTIONS + batch.actions
    sums = np.bincount(key.ravel(), terms.ravel(), minlength=seeds * STATES * ACTIONS)
    chosen = sums.reshape(seeds, STATES, ACTIONS)
    return chosen - np.exp(log_policy(logits)) * chosen.sum(-1, keepdims=True)
