"""Router replay in TRL: every forward over a rollout's batch uses the experts that the engine picked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EXPERTS, LAYERS, cpu_plan
from trl_runs import COMPLETION, PROMPT, SETTINGS, logged, model, started, trainer_of

from fp8plan.errors import ConfigError
from fp8plan.model.risk.remedies import Remedies

pytestmark = pytest.mark.trl
TOP_K, STEPS = 2, 2


@contextmanager
def experts_used(policy: Any) -> Iterator[list[tuple[bool, torch.Tensor]]]:
    """For each forward of the policy: if it has gradients, and the experts that its layers computed, [tokens, layers,
    experts per token]. A recomputed forward, whose layers come in the other order, is one, too."""
    calls: list[list[tuple[bool, torch.Tensor]]] = [[] for _ in policy.model.layers]

    def note(number: int, inputs: Any) -> None:
        calls[number].append((torch.is_grad_enabled(), inputs[1]))

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs, number=number: note(number, inputs))
        for number, layer in enumerate(policy.model.layers)
    ]
    whole: list[tuple[bool, torch.Tensor]] = []
    yield whole
    for hook in hooks:
        hook.remove()
    for forward in zip(*calls, strict=True):
        whole.append((forward[0][0], torch.stack([experts for _, experts in forward], dim=1)))


def known(routes: list[Any]) -> set[bytes]:
    """The routes of each sequence's tokens, as sets of experts."""
    return {np.sort(part, axis=-1).astype(np.int64).tobytes() for part in routes}


@pytest.mark.vllm
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_forwards_use_the_engines_experts(tmp_path: Path, checkpointing: bool) -> None:
    """TRL shuffles the batch and cuts it into two between scoring and the loss. Checkpointing recomputes the routers
    after the loss function has returned."""
    plan = replace(cpu_plan("bf16"), model=model("moe"))
    plan = replace(plan, remedies=replace(plan.remedies, router_replay=True))
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    settings |= {"gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    settings |= {"generation_kwargs": {"ignore_eos": True}}  # all sequences have one length
    returned: list[Any] = []
    with started(tmp_path, plan=plan, policy=model("moe"), **settings) as trainer:
        generate = trainer.vllm_generation.llm.generate

        def generated(*args: Any, **more: Any) -> Any:
            outputs = generate(*args, **more)
            returned.extend(trainer.vllm_generation.llm.routes)
            return outputs

        trainer.vllm_generation.llm.generate = generated
        with experts_used(trainer.model) as used:
            trainer.train()
        assert [part.shape for part in returned] == [(PROMPT + COMPLETION - 1, LAYERS, TOP_K)] * len(returned)
        assert len(returned) == 16 * STEPS
        assert max(part.max() for part in returned) < EXPERTS
        rows = [
            (grad, row)
            for grad, experts in used
            for row in experts.reshape(-1, PROMPT + COMPLETION, LAYERS, TOP_K)[:, :-1]
        ]
        assert {grad for grad, _ in rows} == {False, True}
        recomputed = 2 if checkpointing else 1
        assert sum(grad for grad, _ in rows) == 16 * STEPS * recomputed
        assert {row.sort(dim=-1).values.numpy().tobytes() for _, row in rows} == known(returned)
        differing = logged(trainer, "fp8plan/routing_differs")
        assert len(differing) == STEPS
        assert all(0 <= share < 0.5 for share in differing)
        assert max(logged(trainer, "fp8plan/k3_kl")) < 1e-3
        assert trainer.rollout_engine.facts["routed_experts"]
        assert (trainer.vllm_generation.llm.routes, trainer._replays.routes) == ([], None)  # nothing keeps them


@pytest.mark.vllm
def test_trainers_that_cannot_replay_say_what_to_type() -> None:
    from fp8plan.integrations.trl.replay import refuse_other, refuse_replay

    args = SimpleNamespace(vllm_mode="colocate", torch_compile=False)
    for wrong in ({"vllm_mode": "server"}, {"torch_compile": True}):
        todo = f"type: {next(iter(wrong))}=.*, or router_replay=False"
        with pytest.raises(ConfigError, match=todo):
            refuse_replay(SimpleNamespace(**(vars(args) | wrong)), False, None)
    with pytest.raises(ConfigError, match="tools, environments and rollout_func"):
        refuse_replay(args, True, None)
    with pytest.raises(ConfigError, match="Linear has no router that can be replayed"):
        refuse_replay(args, False, torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"routes of \[3\] tokens for sequences that need \[4\]"):
        refuse_other([np.zeros((3, 1, 1))], [[1, 2]], [[3, 4, 5]])


def test_router_replay_belongs_to_a_plan() -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match="sinks and router_replay belong to a plan"):
        GRPOTrainer("model", router_replay=True)


@pytest.mark.vllm
def test_a_dense_policy_is_refused_before_its_engine_starts(tmp_path: Path) -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no router that can be replayed"):
        trainer_of(GRPOTrainer, tmp_path, plan="auto", router_replay=True)


@pytest.mark.parametrize(("gpu", "counts"), [("h200", True), ("cpu", False)])
def test_a_plan_made_at_the_start_counts_on_the_replay(
    gpu: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer, mixin

    made: dict[type, Any] = {}
    monkeypatch.setattr(mixin, "plan_of_words", lambda words, timed: made.update(words))
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer._router_replay, trainer.args = True, GRPOConfig(str(tmp_path), **SETTINGS)
    trainer._prompt_lengths = dict  # type: ignore[method-assign]
    generation: Any = SimpleNamespace(model=SimpleNamespace(name_or_path=model("moe")))
    trainer._plan_for(generation, gpu, None)
    assert Remedies(**made[Remedies]).router_replay is counts
