"""Trajectories of turns on an AsyncLLM: what each turn's prompt is, how long tools take, and how many run at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import turns as judged
from fp8plan import jsonl
from fp8plan.runtime.measure.rollouts import agents
from fp8plan.runtime.measure.rollouts import jobs as cell_files
from fp8plan.runtime.measure.rollouts import run as run_rollouts
from fp8plan.runtime.measure.rollouts.timed import turn_lag_s
from fp8plan.schemas import RolloutRecord, checked

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
TURNS = {
    "turns": "3",
    "turn_tokens": "fixed:10",
    "tool_tokens": "lognormal:mean=40,sigma=0.5,max=90",
    "tool_s": "fixed:0.05",
}
STEP_S = 0.02


class FakeLlm:
    """An engine whose requests take STEP_S and generate their position in the prompt."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 50)
        self.prompts: list[list[int]] = []
        self.running, self.most = 0, 0

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncGenerator[Any]:
        begun = asyncio.get_running_loop().time()
        self.prompts.append(prompt["prompt_token_ids"])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(STEP_S)
        self.running -= 1
        ended = asyncio.get_running_loop().time()
        tokens = list(range(100, 100 + params))
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens)], metrics=SimpleNamespace(queued_ts=begun, last_token_ts=ended)
        )


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> agents.AgentLoop:
    async def started(_: Any) -> FakeLlm:
        return FakeLlm()

    monkeypatch.setattr(agents, "_started", started)
    monkeypatch.setattr(agents, "sampling", lambda tokens: tokens)
    return agents.AgentLoop()


def prompts(*tokens: list[int]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": each} for each in tokens]


def test_a_turns_prompt_is_all_tokens_so_far(loop: agents.AgentLoop) -> None:
    loop.rollout(prompts([1, 2]), [[(3, 4, 0.0), (1, 0, 0.0), (2, 9, 5.0)]], None)
    first, second, third = loop.llm_engine.prompts
    assert first == [1, 2]
    assert second[:5] == [1, 2, 100, 101, 102]
    assert len(second) == 9
    assert max(second[5:]) < 50
    assert third == [*second, 100]


def test_trajectories_begin_in_order_and_only_so_many_run_at_once(loop: agents.AgentLoop) -> None:
    four = prompts([0], [1], [2], [3])
    outputs = loop.rollout(four, [[(1, 1, 0.0), (1, 0, 0.0)]] * 4, 2)
    assert [len(each) for each in outputs] == [2, 2, 2, 2]
    assert loop.llm_engine.most == 2
    assert [prompt[0] for prompt in loop.llm_engine.prompts] == [0, 1, 0, 1, 2, 3, 2, 3]
    loop.rollout(four, [[(1, 0, 0.0)]] * 4, None)
    assert loop.llm_engine.most == 4


def test_tools_sleep_and_the_rest_of_the_way_back_is_the_lag(loop: agents.AgentLoop) -> None:
    turns = [[(1, 1, 0.2), (1, 1, 0.0), (1, 0, 0.0)]]
    outputs = loop.rollout(prompts([7]), turns, None)
    first, second, _ = (output.metrics for (output,) in zip(*outputs, strict=True))
    assert second.queued_ts - first.last_token_ts >= 0.2
    assert 0 <= turn_lag_s(outputs, turns) < 0.2  # type: ignore[operator]
    assert turn_lag_s([each[:1] for each in outputs], turns) is None


def test_other_prompts_are_asked_all_at_once(loop: agents.AgentLoop) -> None:
    outputs = loop.generate(prompts([1], [2]), [4, 5])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 5]
    assert loop.llm_engine.most == 2


def cells(folder: Path, **row: Any) -> Path:
    """Cells of one workload, whose trajectories run one by one, so that nothing else decides what the cache keeps."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    work = {
        "name": "talk",
        "prompts": 3,
        "samples": 2,
        "prompt_lengths": "fixed:100",
        "seed": 1,
        "turns": TURNS | {"concurrent": 1},
    }
    setting = {
        "model": str(model),
        "gpu": "h200_sxm",
        "precisions": ["bf16"],
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enforce_eager": True,
        "kv_cache_tokens": 640,
        "workloads": [work | row],
    }
    file = folder / "cells.json"
    file.write_text(json.dumps([setting]))
    return file


def test_a_cell_of_turns_is_a_job_for_an_async_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.33.0")
    options = cell_files.Options(tmp_path / "out.jsonl", "full", False, {}, ())
    (job,) = cell_files.jobs(cells(tmp_path), options)
    (work,) = job["work"]
    assert job["fields"]["engine_mode"] == "AsyncLLM"
    assert work["concurrent"] == 1
    assert [len(turns) for turns in work["turns"]] == [3] * 6
    assert work["response_lengths"] == [30] * 6
    checked(json.loads(json.dumps(work)), RolloutRecord, "the job")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"turns": {"turn": "3"}}, "turns of workload 0 of setting 0 has unknown turn; allowed: concurrent, "),
        ({"turns": {"turns": "3"}}, "turns need --turn-tokens, --tool-tokens, --tool-s, too"),
        ({"response_lengths": "fixed:9"}, "the turns have lengths of their own"),
    ],
)
def test_bad_turns_are_one_clear_error(
    row: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_files, "engine_version", lambda: "0.33.0")
    file = cells(tmp_path, **row)
    assert run_rollouts.main(["--cells", str(file), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_engine_hits_as_many_tokens_as_predicted(tmp_path: Path) -> None:
    """From cells to records, and to the table of their errors. A cache of 19 blocks has lost some siblings' prompts."""
    file, output = cells(tmp_path), tmp_path / "out.jsonl"
    words = ["--cells", str(file), "--output", str(output), "--warmup", "full", "--trace", "--timeout", "400"]
    assert run_rollouts.main(words) == 0, (tmp_path / "out.tiny.bf16.log").read_text()[-3000:]
    (record,) = jsonl.rows(output)
    predicted = list(judged.predictions(file))
    (row,) = judged.compared([record | {"host_loop_s": 2.74e-4}], predicted)
    assert row["hit_error"] == pytest.approx(0, abs=0.01)
    assert record["generation_tokens"] == 180
    assert 0 < record["turn_lag_s"] < 0.1
    assert record["seconds"] > 6 * 2 * 0.05
    assert "talk" in judged.table([row])
