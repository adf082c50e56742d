"""A step of TRL with several calls of `generate`: turns of an environment and evaluations, on a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from frozen_imports import freeze_imports
from trl_runs import SETTINGS, logged, model, share_of_even

from fp8plan.runtime.watch.guard.fallback import GuardSettings
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.sinks import JsonLines

pytestmark = pytest.mark.trl

STEPS, TURN = 5, 6  # steps, and tokens of a turn
TEMPLATE = (
    "{% for m in messages %}w1 {{ m.get('content') or '' }} {% for c in m.get('tool_calls') or [] %}"
    "w3 {{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }} {% endfor %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


class Environment:
    """An environment with a tool."""

    def reset(self, **_: Any) -> None: ...

    def look(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.

        Returns:
            Another word.
        """
        return "w9 w8 w7"


def parsed(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    """A response that calls the tool if its first token is even."""
    message: dict[str, Any] = {"role": "assistant", "content": "w5"}
    if ids[0] % 2 == 0:
        message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {"word": "w6"}}}]
    return message


@pytest.mark.slow
@pytest.mark.vllm
def test_turns_are_one_rollout_and_evaluations_none_and_advice_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[ModuleType], list[str]]
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig
    from trl.trainer import grpo_trainer

    from fp8plan.integrations.trl import GRPOTrainer
    from fp8plan.integrations.trl import mixin as module

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)
    freeze_imports()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model())
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {"type": "object"}
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{n} w{n + 1}"}] for n in range(16)]})
    settings = SETTINGS | {
        "max_steps": STEPS,
        "max_completion_length": 64,
        "max_tool_calling_iterations": 2,
        "generation_kwargs": {"max_tokens": TURN},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "per_device_eval_batch_size": 8,
    }
    trainer = GRPOTrainer(
        model(),
        share_of_even,
        GRPOConfig(output_dir=str(tmp_path), **settings),
        rows,
        rows.select(range(1)),
        tokenizer,
        environment_factory=Environment,
        plan="auto",
        choice="fp8_kv",
        sinks=[JsonLines(tmp_path / "run.jsonl")],
    )
    engine: Any = trainer.rollout_engine
    assert engine.guard is not None, engine.guard_off
    engine.guard.settings = GuardSettings(kl_limit=1e-12, patience=1, margin=1e9)
    calls, done, kept = list[str](), list[Any](), list[Any]()
    generate, apply, sync = engine.generate, engine.apply, engine.sync_weights

    def generated(*args: Any, **more: Any) -> Any:
        calls.append(engine._judge.how)
        return generate(*args, **more)

    def applied(action: Any, escalate: Any = None) -> None:
        if action != "none":
            done.append((len(kept), action.value))
        apply(action, escalate)

    def synced(*args: Any, **more: Any) -> Any:
        kept.append([len(sequence) for sequence in engine.last_sequences])
        return sync(*args, **more)

    for name, replacement in (("generate", generated), ("apply", applied), ("sync_weights", synced)):
        monkeypatch.setattr(engine, name, replacement)
    said = warnings_of(module)
    try:
        trainer.train()
        assert engine.launch.precision == "bf16"
        assert [action for _, action in done] == ["recalibrate_kv", "kv_to_bf16"]
        records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert len(records) == STEPS
        for record in records:
            assert sum(record["response_lengths"]) == record["metrics"]["fp8plan/tokens"]
            assert len(record["response_lengths"]) == 32
            assert sum(map(len, record["turns"])) > 32
            assert Sampling.of(record["sampling"]) == Sampling(trainer_temperature=1.0)
        states = [(record["guard"]["state"]["rung"], record["guard"]["state"]["taken"]) for record in records]
        assert states[:4] == [
            ("none", "none"),
            ("recalibrate_kv", "none"),
            ("kv_to_bf16", "recalibrate_kv"),
            ("kv_to_bf16", "kv_to_bf16"),
        ]
        assert logged(trainer, "fp8plan/fp8_kv") == [1.0, 1.0, 1.0, 0.0, 0.0]
        assert [text for text in said if "fp8plan has applied" in text] == [
            "fp8plan has applied recalibrate_kv; the engine runs fp8_kv",
            "fp8plan has applied kv_to_bf16; the engine runs bf16",
        ]
        assert calls[0] == "beside"  # the evaluation on start
        assert {"open", "beside"} == set(calls)
        assert kept[0] == []  # no evaluation's sequences
        assert all(max(lengths) > min(lengths) for lengths in kept[1:])  # sequences of several turns
    finally:
        assert trainer.monitor is not None
        trainer.monitor.close()
        engine.shutdown()


def trainer_with(engine: Any, training: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer that generates nothing. engine: its rollout_engine"""
    import trl

    from fp8plan.integrations.trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.rollout_engine, trainer.model = engine, SimpleNamespace(training=training)  # type: ignore[assignment]
    trainer.accelerator = SimpleNamespace(num_processes=1)  # type: ignore[assignment]
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", lambda self, prompts: engine.seen.append(engine.open))
    return trainer


class Opening:
    """An engine that knows whether a rollout is open."""

    def __init__(self) -> None:
        self.open, self.seen = False, list[bool]()

    def rollout(self) -> Any:
        return self

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, *_: object) -> None:
        self.open = False


@pytest.mark.parametrize("training", [True, False])
def test_the_trainer_opens_a_rollout_for_a_training_batch_alone(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Opening()
    trainer_with(engine, training, monkeypatch)._generate(["a prompt"])
    assert engine.seen == [training]


def test_a_servers_rollout_is_all_calls_of_its_client() -> None:
    """Also those of a rollout_func that asks the client itself."""
    from fp8plan.integrations.trl.client import Call
    from fp8plan.integrations.trl.server import ServerEngine
    from fp8plan.runtime.apply.engine.judge import Judge
    from fp8plan.runtime.apply.engine.rollout_log import Response

    engine = object.__new__(ServerEngine)
    engine.guard, engine.guard_off, engine._status = None, None, {"kv_cache_tokens": 640}
    engine._judge = Judge(engine)
    with engine.rollout():
        engine._count(Call(2.0, [Response([1, 2], [5] * 5), Response([1, 2], [6] * 6)], {"preemptions": 1}, Sampling()))
        engine._count(Call(1.0, [Response([1, 2, 9], [4] * 4)], {"preemptions": 2}, Sampling()))
    engine._count(Call(9.0, [Response([1], [7] * 50)], {"preemptions": 3}, Sampling(temperature=0.0)))
    seen = engine.observation
    assert seen is not None
    assert (list(seen.response_lengths), seen.preemptions, seen.kv_cache_tokens) == ([5, 6, 4], 3, 640)
    assert seen.sampling == Sampling()
    engine.shutdown()


def test_advice_that_no_engine_can_follow_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[ModuleType], list[str]]
) -> None:
    from fp8plan.integrations.trl import mixin as module
    from fp8plan.runtime.watch.guard.fallback import Action

    said = warnings_of(module)

    trainer = trainer_with(SimpleNamespace(launch=SimpleNamespace(precision="fp8_kv")), True, monkeypatch)
    trainer.accelerator.num_processes = 2
    for _ in range(3):
        trainer._advice = (Action.KV_TO_BF16, None)
        trainer._follow_advice()
    (text,) = said
    assert "advises a step down from fp8_kv" in text
