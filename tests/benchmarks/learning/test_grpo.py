"""The parts of a GRPO step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.learning.grpo import (
    Sample,
    advantages,
    batch_of,
    micro_batches,
    samples_of,
    token_losses,
    train_logprobs,
)
from benchmarks.learning.policies.table import TINY
from benchmarks.learning.policies.tasks import Problem
from benchmarks.learning.policies.teach import new_model
from fp8plan.runtime.routes import UNKNOWN


def sample(prompt: list[int], response: list[int]) -> Sample:
    return Sample(Problem(prompt, None), response, [-0.5 * (n + 1) for n in range(len(response))])


SAMPLES = [sample([1, 2], [3]), sample([1, 2], [4, 5, 6]), sample([7, 8, 9, 10], [11, 12]), sample([7], [3, 4, 5, 6])]
ROUTES = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)  # tokens, layers, experts per token


def test_advantages_are_of_a_group_and_zero_where_all_are_equal() -> None:
    found = advantages(torch.tensor([[0.0, 1.0, 0.5], [0.7, 0.7, 0.7]]))
    assert found[0].tolist() == pytest.approx([-1.0, 1.0, 0.0])
    assert found[1].tolist() == [0.0, 0.0, 0.0]
    assert advantages(torch.tensor([[0.3], [0.9]])).tolist() == [[0.0], [0.0]]
    shifted = advantages(torch.tensor([[5.0, 7.0, 6.0]]))
    assert shifted[0].tolist() == pytest.approx([-1.0, 1.0, 0.0])


def test_a_batch_is_padded_on_the_right() -> None:
    batch = batch_of(SAMPLES, [0.0, 1.0, 0.5, 0.5], group=2)
    assert batch.tokens.shape == (4, 6)
    assert batch.first.tolist() == [2, 2, 4, 1]
    assert batch.mask.sum(1).tolist() == [1, 3, 2, 4]
    assert batch.tokens[3].tolist() == [7, 3, 4, 5, 6, 0]
    assert batch.rollout_logprobs[2].tolist() == [-0.5, -1.0, 0.0, 0.0]
    assert batch.advantages.squeeze(1).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0])


def test_micro_batches_take_every_row_once() -> None:
    batch = batch_of(SAMPLES, [0.0] * 4, group=2)
    assert [list(range(4))[part] for part in micro_batches(batch, 18)] == [[0, 1, 2], [3]]
    assert len(list(micro_batches(batch, 1))) == 4  # a row that is too long comes alone


@pytest.mark.parametrize("kind", ["qk_norm", "moe"])
def test_log_probs_are_those_of_each_sequence_alone(kind: str) -> None:
    torch.manual_seed(0)
    policy = new_model(kind, TINY)
    batch = batch_of(SAMPLES, [0.0] * 4, group=2)
    with torch.no_grad():
        whole = train_logprobs(policy, batch, 0.7)
        for row, one in enumerate(SAMPLES):
            tokens = torch.tensor([[*one.problem.prompt, *one.tokens]])
            alone = (policy(tokens).logits / 0.7).log_softmax(-1)[0]
            first = len(one.problem.prompt)
            expected = [float(alone[first + n - 1, token]) for n, token in enumerate(one.tokens)]
            assert whole[row][: len(expected)].tolist() == pytest.approx(expected, abs=1e-4)
            assert not whole[row][len(expected) :].any()
        few = batch.rows(slice(0, 2))
        assert few.tokens.shape == (2, 5)
        assert torch.allclose(train_logprobs(policy, few, 0.7), whole[:2, :3], atol=1e-4)


def test_the_loss_is_the_policy_gradient_and_stops_beyond_the_clip() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = (old + torch.tensor([0.0, 0.5, 0.5, -0.5])).requires_grad_()
    losses = token_losses(new, old, torch.tensor([2.0, 1.0, -1.0, 1.0]), clip=0.2)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad[0] == -2.0  # -A at a ratio of 1
    assert new.grad[1] == 0.0  # a gain that is taken already
    assert float(new.grad[2]) == pytest.approx(math.exp(0.5))  # a loss is not clipped
    assert float(losses[1].detach()) == pytest.approx(-1.2)
    assert float(new.grad[3]) == pytest.approx(-math.exp(-0.5))


def test_an_engines_outputs_become_samples() -> None:
    def output(*tokens: int) -> Any:
        logprobs = [{token: SimpleNamespace(logprob=-0.1 * token), 99: SimpleNamespace(logprob=0)} for token in tokens]
        response = SimpleNamespace(token_ids=tokens, logprobs=logprobs, routed_experts=ROUTES[: len(tokens)])
        return SimpleNamespace(outputs=[response])

    problems = [Problem([1], "a"), Problem([2], "b")]
    samples = samples_of(problems, [output(3, 4), output(5)])
    assert [sample.problem.key for sample in samples] == ["a", "b"]
    assert samples[0].tokens == [3, 4]
    assert samples[0].logprobs == pytest.approx([-0.3, -0.4])
    assert samples[0].routes.tolist() == ROUTES[:2].tolist()


def test_a_batch_has_the_routes_of_its_samples_as_long_as_its_rows() -> None:
    routed = [
        sample._replace(routes=ROUTES[: len(sample.problem.prompt) + len(sample.tokens) - 1]) for sample in SAMPLES
    ]
    batch = batch_of(routed, [0.0] * 4, group=2)
    assert batch.routes is not None
    assert batch.routes.shape == (*batch.tokens.shape, 2, 2)
    assert batch.routes[1, :4].tolist() == ROUTES[:4].tolist()
    assert (batch.routes[1, 4:] == UNKNOWN).all()  # the last token, which was no input, and the padding
    few = batch.rows(slice(0, 2))
    assert few.routes is not None
    assert few.routes.shape[:2] == few.tokens.shape
    assert batch_of(SAMPLES, [0.0] * 4, group=2).routes is None
