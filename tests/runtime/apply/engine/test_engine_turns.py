"""Rollouts of turns on the real vLLM: what is observed, recorded and predicted of them, and lost prefixes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_imports import freeze_imports
from tiny_models import BLOCK_SIZE, VOCABULARY, checkpoint, cpu_plan, forget_groups

import fp8plan
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.watch.guard.causes import lost_prefixes_in
from fp8plan.runtime.watch.guard.observation import Observation
from fp8plan.runtime.watch.guard.prefix_cache import OFF, Lost
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

pytestmark = pytest.mark.vllm

PROMPT, GENERATED, TOOL = BLOCK_SIZE + 12, BLOCK_SIZE + 2, 20  # tokens
WAIT_S = 0.1
# Tokens in full blocks that earlier prompts and turns have computed: of a sample beside another, and of its next turns.
ENDS = (PROMPT + GENERATED, PROMPT + 2 * GENERATED + TOOL)
REPEATED = 2 * BLOCK_SIZE + 4 * sum((tokens - 1) // BLOCK_SIZE * BLOCK_SIZE for tokens in ENDS)
ASKED = 4 * (3 * PROMPT + 3 * GENERATED + 3 * TOOL)


@contextmanager
def started(prefix_caching: bool) -> Iterator[RolloutEngine]:
    freeze_imports()
    torch.set_num_threads(1)
    forget_groups()
    made = cpu_plan("bf16", max_model_len=1024, enable_prefix_caching=prefix_caching)
    engine = RolloutEngine.from_plan(made, str(checkpoint("dense", "a")), skip_tokenizer_init=True)
    try:
        yield engine
    finally:
        engine.shutdown()


def rolled_out(
    engine: RolloutEngine, first: int, rewritten: bool = False, generated: int = GENERATED, tool: int = TOOL
) -> Observation:
    """Three turns of two samples of two prompts.

    first:     a token that no other rollout's prompts begin with
    rewritten: each prompt has other tokens in the place of the answers
    """
    from vllm import SamplingParams

    how = SamplingParams(temperature=1.0, max_tokens=generated, ignore_eos=True)
    contexts = [[first, sample // 2, *[(7 * n) % VOCABULARY for n in range(PROMPT - 2)]] for sample in range(4)]
    with engine.rollout():
        for turn in range(3):
            if turn:
                time.sleep(WAIT_S)
            outputs = engine.generate([{"prompt_token_ids": tokens} for tokens in contexts], how)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            if rewritten:
                answers = [[sample] * generated for sample in range(4)]
            added = [5 + turn] * tool
            contexts = [[*tokens, *answer, *added] for tokens, answer in zip(contexts, answers, strict=True)]
    seen = engine.observation
    assert seen is not None
    return seen


def lost(engine: RolloutEngine) -> Lost | None:
    assert engine.verdict is not None, engine.guard_off
    return lost_prefixes_in(engine.verdict.causes)


def test_turns_are_observed_and_predicted_as_they_ran(tmp_path: Path) -> None:
    records = list[Any]()
    with started(prefix_caching=True) as engine:
        monitor = Monitor(engine=engine, sinks=[Callback(records.append)])
        seen = rolled_out(engine, 1)
        assert [[turn[:2] for turn in turns] for turns in seen.every_turn] == [
            [(GENERATED, TOOL), (GENERATED, TOOL), (GENERATED, 0)]
        ] * 4
        waits = [turn[2] or 0.0 for turns in seen.every_turn for turn in turns[:-1]]
        assert WAIT_S <= min(waits) <= max(waits) < seen.seconds - WAIT_S
        assert (list(seen.prompt_lengths), list(seen.prompt_ids or ())) == ([PROMPT] * 4, [0, 0, 1, 1])
        assert (seen.concurrent, seen.rewritten_tokens) == (None, 0)
        assert (seen.prefix_cache_queries, seen.prefix_cache_hits) == (ASKED, REPEATED)
        assert lost(engine) is None
        tokens = seen.output_tokens
        step = monitor.step(-torch.ones(tokens), -torch.ones(tokens), lengths=[tokens])
        assert step.verdict is not None

        again = rolled_out(engine, 2, rewritten=True)
        assert [[turn[:2] for turn in turns] for turns in again.every_turn] == [
            [turn[:2] for turn in turns] for turns in seen.every_turn
        ]
        assert again.rewritten_tokens == 4 * 2 * GENERATED
        kept = REPEATED - 4 * 2 * BLOCK_SIZE  # without a block of each answer
        assert (again.prefix_cache_queries, again.prefix_cache_hits) == (ASKED, kept)
        named = lost(engine)
        assert named is not None
        share = (REPEATED - kept) / ASKED
        assert named.says == (
            f"{share:.0%} of the prompt tokens were computed again, 0% predicted; {8 * GENERATED / ASKED:.0%} stand in "
            "the place of an answer, and are other tokens than it"
        )
        told = next(one for one in fp8plan.doctor(engine).findings if one.check == "prefix_hits")
        assert (told.fault, told.todo) == ("prefix_cache_missed", named.todo)
        assert told.says.endswith(f" tokens since the last rollout began were in the prefix cache; {named.says}")
    (tmp_path / "run.jsonl").write_text(json.dumps(records[0]))
    (row,) = validate(read_records(tmp_path / "run.jsonl", include_first=True)).records
    assert row["prefix_hits"] == pytest.approx(REPEATED / ASKED)
    assert row["predicted_prefix_hits"] == pytest.approx(REPEATED / ASKED)
    assert row["predicted_s"] > 2 * WAIT_S


def test_turns_without_a_prefix_cache_are_named() -> None:
    with started(prefix_caching=False) as engine:
        seen = rolled_out(engine, 1, generated=4, tool=3 * BLOCK_SIZE)  # prompts take most of the time
        assert [len(turns) for turns in seen.every_turn] == [3] * 4
        assert not seen.prefix_cache_hits
        named = lost(engine)
        assert named is not None, engine.verdict
        assert named.says.startswith(OFF.says)
        assert named.todo == OFF.todo
        told = next(one for one in fp8plan.doctor(engine).findings if one.check == "prefix_hits")
        assert (told.fault, told.says, told.todo) == ("prefix_caching_off", OFF.says, OFF.todo)
