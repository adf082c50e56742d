"""TRL's GRPO on a CPU with fp8plan's trainer: what goes wrong inside of TRL, or is set in its configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy
from typing import Any, Final

import torch
from frozen_imports import freeze_imports
from trl_runs import SETTINGS, model, share_of_even

import fp8plan
from fp8plan.errors import Fp8PlanError

from .lab import Failure, Signs, row_of
from .own_loop import put_kv_scales
from .policy import RATE, checkpoint

STEPS: Final = 4
TRAINING: Final = SETTINGS | {"learning_rate": RATE, "temperature": 0.8, "max_steps": STEPS}
PROMPT: Final = 132  # tokens, longer than a block of the KV cache


class Kept:
    """A sink of a Monitor that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def open(self) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class TrlLab:
    """One trainer for all failures: each begins with the first weights, and a controller that has seen nothing."""

    def __init__(self, trainer: Any, kept: Kept) -> None:
        self.trainer, self.kept, self.signs = trainer, kept, Signs()
        self.generation = trainer.vllm_generation
        self._first = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        self._begun = trainer.monitor.state
        self._undo: list[Callable[[], None]] = []
        self.train()
        self.examine()
        self.signs = Signs(known=set(self.signs.found))

    def put(self, thing: Any, name: str, value: Any) -> None:
        """Change an attribute until the failure's end."""
        before = vars(thing).get(name, self)

        def back() -> None:
            vars(thing).pop(name) if before is self else setattr(thing, name, before)

        self._undo.append(back)
        setattr(thing, name, value)

    def train(self) -> None:
        """STEPS steps."""
        before = len(self.kept.records)
        self.trainer.train()
        for record in self.kept.records[before:]:
            for alarm in record["alarms"]:
                self.signs.alarm(alarm)
            if record["decision"] == "no_data":
                self.signs.add("decision", "no_data", record["reason"])

    def examine(self) -> None:
        """The doctor, with the policy's weights."""
        policy = {name: x.detach().bfloat16() for name, x in self.trainer.model.named_parameters()}
        for one in fp8plan.doctor(self.trainer.rollout_engine, weights=policy).faults:
            self.signs.add("doctor", str(one.fault), one.says)

    def after_sync(self, act: Callable[[], Any]) -> None:
        """Do something after each of the trainer's syncs."""
        sync = self.generation.sync_weights

        def both() -> None:
            sync()
            act()

        self.put(self.generation, "sync_weights", both)

    def returned(self, change: Callable[[list[Any]], list[Any]]) -> None:
        """Change what TRL gets from vLLM. change: [prompts, completions, log-probs, their tokens] -> the same"""
        generate = self.generation.generate
        self.put(self.generation, "generate", lambda **how: tuple(change(list(generate(**how)))))

    def dropout(self, share: float) -> None:
        for module in self.trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = share

    def run(self, failure: Failure) -> dict[str, Any]:
        """Inject one failure. Returns its row of results, without its setting."""
        self.signs, before = Signs(known=self.signs.known), len(self.kept.records)
        with torch.no_grad():
            for name, parameter in self.trainer.model.named_parameters():
                parameter.copy_(self._first[name])
        self.trainer.monitor.state = self._begun
        self.trainer._last_loaded_step = -1
        self.trainer.optimizer = self.trainer.lr_scheduler = None  # TRL makes others, of the learning rate of now
        self._undo = []
        try:
            failure.inject(self)
            self.train()
        except Fp8PlanError as error:
            self.signs.add("refusal", type(error).__name__, str(error))
        except (RuntimeError, ValueError) as error:  # of TRL itself: then it is not silent
            self.signs.add("error of TRL", type(error).__name__, str(error))
        try:
            self.examine()
        except Fp8PlanError as error:
            self.signs.add("refusal", type(error).__name__, str(error))
        finally:
            for back in reversed(self._undo):
                back()
        return row_of(failure, self.signs, k3_of(self.kept.records[before:]))


def k3_of(records: list[dict[str, Any]]) -> list[float]:
    return [x for record in records if (x := record["metrics"].get("rollout_corr/k3_kl")) is not None]


@contextmanager
def lab() -> Iterator[TrlLab]:
    """A lab on a fresh trainer, calm."""
    kept = Kept()
    with tempfile.TemporaryDirectory() as folder, trainer(Path(folder), kept) as made:
        yield TrlLab(made, kept)


@contextmanager
def trainer(folder: Path, kept: Kept, **settings: Any) -> Iterator[Any]:
    """fp8plan's GRPOTrainer on the first policy. settings: of GRPOConfig"""
    from datasets import Dataset
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer

    freeze_imports()
    torch.set_num_threads(1)
    args = GRPOConfig(output_dir=str(folder), **(TRAINING | settings))
    rows = [" ".join(f"w{(7 * row + word) % 1000}" for word in range(PROMPT)) for row in range(64)]
    prompts = Dataset.from_dict({"prompt": rows})
    made = GRPOTrainer(policy(), share_of_even, args, prompts, plan="auto", choice="fp8_kv", sinks=[kept])
    try:
        for module in made.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        yield made
    finally:
        made.monitor.close()
        made.rollout_engine.shutdown()


def policy() -> str:
    """The folder of the first policy, with a tokenizer."""
    path, words = checkpoint("plain"), Path(model())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (words / name).exists():
            copy(words / name, path)
    return str(path)


def configured(failure: Failure, **settings: Any) -> dict[str, Any]:
    """A failure that is a setting of GRPOConfig: a trainer of its own, and its steps. Returns the row."""
    kept, signs = Kept(), Signs()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with trainer(Path(folder), kept, **settings) as made:
                made.train()
        except Fp8PlanError as error:
            signs.add("refusal", type(error).__name__, str(error))
    for record in kept.records:
        for alarm in record["alarms"]:
            signs.alarm(alarm)
    return row_of(failure, signs, k3_of(kept.records))


# The failures


def sync_skipped(lab: TrlLab) -> None:
    """TRL learns ten times as fast, and its syncs do nothing."""
    lab.trainer.vllm_generation.sync_weights()
    lab.put(lab.generation, "sync_weights", lambda: None)
    lab.put(lab.trainer.args, "learning_rate", 10 * RATE)


def engine_of_the_checkpoint(lab: TrlLab) -> None:
    """After each sync the engine has the first weights again."""
    first = {name: x.bfloat16() for name, x in lab._first.items()}
    lab.put(lab.trainer.args, "learning_rate", 10 * RATE)
    lab.after_sync(lambda: lab.trainer.rollout_engine.sync_weights(first))


def kv_scales_unit(lab: TrlLab) -> None:
    lab.after_sync(lambda: lab.trainer.rollout_engine.llm.collective_rpc(put_kv_scales, args=(1.0,)))


def prefix_cache_not_reset(lab: TrlLab) -> None:
    lab.put(lab.trainer.rollout_engine, "_reset_prefix_cache", lambda: None)
    lab.put(lab.trainer.args, "learning_rate", 10 * RATE)


def trainer_temperature(lab: TrlLab) -> None:
    lab.put(lab.generation, "temperature", 0.5)


def dropout_on(lab: TrlLab) -> None:
    lab.dropout(0.1)
    lab._undo.append(lambda: lab.dropout(0.0))


def logprobs(change: Callable[[list[list[float | None]]], list[list[float | None]]]) -> Callable[[TrlLab], None]:
    """Change a completion's log-probs. change: [its tokens][1] -> the same"""

    def inject(lab: TrlLab) -> None:
        lab.returned(lambda seen: [*seen[:2], [change(rows) for rows in seen[2]], seen[3]])

    return inject


def responses_reordered(lab: TrlLab) -> None:
    lab.returned(lambda seen: [*seen[:2], [*seen[2][1:], *seen[2][:1]], seen[3]])


def retokenised(lab: TrlLab) -> None:
    """Every third token of a completion comes back as another."""
    lab.returned(
        lambda seen: [
            seen[0],
            [[t if n % 3 else (t * 3) % 1000 for n, t in enumerate(ids)] for ids in seen[1]],
            *seen[2:],
        ]
    )


def double_bos(lab: TrlLab) -> None:
    generate = lab.generation.generate
    lab.put(
        lab.generation,
        "generate",
        lambda prompts, **how: generate(prompts=[[1, *prompt] for prompt in prompts], **how),
    )


FAILURES: Final = (
    Failure("sync_skipped", "TRL's syncs do nothing", sync_skipped),
    Failure("engine_of_the_checkpoint", "after each sync the engine has the first weights", engine_of_the_checkpoint),
    Failure("kv_scales_unit", "KV scales are 1.0 after each sync", kv_scales_unit),
    Failure("prefix_cache_not_reset", "a sync does not reset the prefix cache", prefix_cache_not_reset),
    Failure("trainer_temperature", "sampled at 0.5, scored at 0.8", trainer_temperature),
    Failure("dropout_on", "dropout of 0.1 in attention", dropout_on),
    Failure(
        "nan_weights",
        "vLLM's log-probs are NaN, which TRL turns into ratios of 1",
        logprobs(lambda x: [[None]] * len(x)),
    ),
    Failure("certain_logprobs", "all log-probs are 0.0", logprobs(lambda x: [[0.0]] * len(x))),
    Failure("missing_logprobs_as_zero", "the last 4 log-probs are 0.0", logprobs(lambda x: [*x[:-4], *[[0.0]] * 4])),
    Failure("logprobs_shifted", "log-probs are one place later", logprobs(lambda x: [x[-1], *x[:-1]])),
    Failure("responses_reordered", "each completion has the log-probs of the next", responses_reordered),
    Failure("retokenised", "a third of the tokens come back as others", retokenised),
    Failure("double_bos", "the engine's prompts begin with one more token", double_bos),
)
CONFIGURED: Final = {
    Failure("top_p", "GRPOConfig(top_p=0.8)", print): {"top_p": 0.8},
    Failure("top_k", "GRPOConfig(top_k=5)", print): {"top_k": 5},
    Failure("min_p", "GRPOConfig(min_p=0.1)", print): {"min_p": 0.1},
    Failure("repetition_penalty", "GRPOConfig(repetition_penalty=1.1)", print): {"repetition_penalty": 1.1},
}
