"""The trainer's side of a GRPO step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.learning.grpo import Batch, Sample, batch_of
from benchmarks.learning.policies.table import TINY
from benchmarks.learning.policies.tasks import Problem
from benchmarks.learning.policies.teach import new_model
from benchmarks.learning.trainer import Trainer
from fp8plan.runtime.replay import replayed


@pytest.fixture(scope="module", params=["qk_norm", "moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    new_model(request.param, TINY).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def batch() -> Batch:
    chance = torch.Generator().manual_seed(0)
    samples = []
    for row in range(8):
        tokens = torch.randint(256, (3 + row % 4,), generator=chance).tolist()
        samples.append(Sample(Problem([row // 4, 7], None), tokens, [-5.0] * len(tokens)))
    return batch_of(samples, [0.1 * (row % 4) for row in range(8)], group=4)


def trainer(path: Path, micro_tokens: int = 10_000, rate: float = 1e-3) -> Trainer:
    return Trainer(path, "cpu", rate, 1.0, 0.2, 1.0, micro_tokens)


def gradients(of: Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in of.policy.parameters() if p.grad is not None])


def test_micro_batches_change_no_gradient(checkpoint: Path, batch: Batch) -> None:
    whole, parts = trainer(checkpoint), trainer(checkpoint, micro_tokens=16)
    old, weights = whole.logprobs(batch), torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(parts.logprobs(batch), old, atol=1e-4)
    for one in (whole, parts):
        one._gradients(batch, old, batch.mask, weights)
    assert torch.allclose(gradients(parts), gradients(whole), rtol=1e-3, atol=1e-6)


def test_an_update_makes_what_was_rewarded_likelier(checkpoint: Path, batch: Batch) -> None:
    policy = trainer(checkpoint)
    old = policy.logprobs(batch)
    policy.update(batch, old, batch.mask, None)
    change = ((policy.logprobs(batch) - old) * batch.mask).sum(1)
    assert float((change * batch.advantages.squeeze(1)).sum()) > 0
    masked = trainer(checkpoint)
    masked.update(batch, old, torch.zeros_like(batch.mask), None)
    assert torch.equal(masked.logprobs(batch), trainer(checkpoint).logprobs(batch))


def test_timing_changes_nothing(checkpoint: Path, batch: Batch) -> None:
    policy = trainer(checkpoint)
    before = policy.logprobs(batch)
    assert min(policy.timed(batch)) > 0
    assert torch.equal(policy.logprobs(batch), before)
    assert all(p.grad is None for p in policy.policy.parameters())


def test_the_engine_gets_the_checkpoints_tensors(checkpoint: Path) -> None:
    written, sent = load_file(checkpoint / "model.safetensors"), trainer(checkpoint).tensors()
    assert set(sent) == set(written)
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())


def test_noise_is_a_share_of_each_matrix_and_repeats(checkpoint: Path) -> None:
    policy = trainer(checkpoint)
    clean, noisy, again = policy.tensors(), policy.tensors(0.1, seed=3), policy.tensors(0.1, seed=3)
    for name, tensor in clean.items():
        assert torch.equal(noisy[name], again[name])
        error = (noisy[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert float(error) == pytest.approx(0.1 if tensor.dim() == 2 else 0.0, rel=0.05)


def test_a_trainer_goes_on_from_its_state(checkpoint: Path, batch: Batch, tmp_path: Path) -> None:
    one = trainer(checkpoint)
    old = one.logprobs(batch)
    one.update(batch, old, batch.mask, None)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other = trainer(checkpoint)
    state: dict[str, Any] = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(state)
    for policy in (one, other):
        policy.update(batch, old, batch.mask, None)
    assert torch.equal(one.logprobs(batch), other.logprobs(batch))


@pytest.mark.parametrize("checkpoint", ["moe"], indirect=True)
def test_replayed_experts_change_the_log_probs_and_are_counted(checkpoint: Path, batch: Batch) -> None:
    mine = trainer(checkpoint)
    with replayed(mine.policy, None) as record:
        own = mine.logprobs(batch)
    routes = record.own_choice.view(*batch.tokens.shape, *record.own_choice.shape[-2:])
    with_routes = batch._replace(routes=routes)
    assert torch.equal(mine.logprobs(with_routes), own)
    assert mine.routing_differs(with_routes) == 0.0
    experts = int(routes.max()) + 1
    others = batch._replace(routes=(routes + 1) % experts)
    assert not torch.equal(mine.logprobs(others), own)
    assert mine.routing_differs(others) > 0.5
    assert mine.logprobs(others).shape == own.shape
    last = torch.arange(len(routes)), batch.first + batch.mask.sum(1) - 1  # no token is scored with their experts
    routes = routes.clone()
    routes[last] = (routes[last] + 1) % experts
    assert mine.routing_differs(batch._replace(routes=routes)) == 0.0
