"""verl's own agent loop with a tool and a real engine: the turns of its dump, and of a plan, are those that ran."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_conversations import templates, tokenizer
from tiny_models import checkpoint
from verl_parts import Served, planned, serving, small

from fp8plan import cli
from fp8plan.model.turns import TurnTable
from fp8plan.model.validate.records import recorded_workload

pytestmark = [pytest.mark.verl, pytest.mark.trl, pytest.mark.vllm]

PROMPTS, SAMPLES, MOST_TURNS = 2, 4, 5
CONTEXT = 4096  # tokens, half of them for the prompt: Qwen3's words on tools have 700 bytes
FACTORS = r'\{"a": [1-9][0-9]{0,4}, "b": [1-9][0-9]{0,4}\}'
CALL = rf'\n<tool_call>\n\{{"name": "multiply", "arguments": {FACTORS}\}}\n</tool_call>'
CALLS, MAY_CALL = f"[a-z ]{{1,9}}{CALL}", f"[a-z ]{{1,9}}({CALL})?"
TOOL = '''
from verl.tools.function_tool import function_tool

@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"The result is {a * b}, as multiplied by the tool."
'''


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "import.md"


class Client:
    """The client of verl's agent loops, before one engine.

    A random model calls no tool. So its answers keep to a grammar, within which it samples. Trajectory n has to call
    the tool in its first n % SAMPLES turns, and may call it later.

    outputs: what the engine put out at the end of each request, by trajectory
    """

    def __init__(self, served: Served) -> None:
        self.served, self.outputs = served, defaultdict[str, list[Any]](list)
        engine = served.server.engine
        self._generate, engine.generate = engine.generate, self._heard

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        turn, trajectory = len(self.outputs[request_id]), list(self.outputs).index(request_id)
        grammar = StructuredOutputsParams(regex=CALLS if turn < trajectory % SAMPLES else MAY_CALL)
        params = sampling_params | {"structured_outputs": grammar}
        request = self.served.server.generate(prompt_ids, params, f"{request_id}/{turn}")
        return await asyncio.wrap_future(self.served.begin(request))

    async def _heard(self, *, request_id: str, **request: Any) -> AsyncIterator[Any]:
        async for output in self._generate(request_id=request_id, **request):
            if output.finished:
                self.outputs[request_id.partition("/")[0]].append(output)
            yield output


class Ran(NamedTuple):
    """A batch of verl's agent loops.

    batch:   verl's, with the mask of its responses as a figure of the reward
    turns:   (generated, tool) tokens of each turn, by trajectory of the batch, as the engine counted them
    prompts: tokens of each first request, likewise
    model:   the folder of the engine's model
    """

    batch: Any
    turns: list[list[tuple[int, int]]]
    prompts: list[int]
    model: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "tool.py").write_text(TOOL)
    (folder / "with_mask.py").write_text(GUIDE.read_text().partition("```python\n")[2].partition("```")[0])
    model = shutil.copytree(checkpoint("dense", "a"), folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    tokenizer(templates()["qwen3"]).save_pretrained(model)
    plan = planned("bf16")
    limits = replace(plan.limits, max_model_len=CONTEXT, num_gpu_blocks=2 * plan.limits.num_gpu_blocks)
    words = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.max_model_len": CONTEXT,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent_with_mask",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": MOST_TURNS,
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": folder / "tool.py",
        "data.max_prompt_length": CONTEXT // 2,
        "data.max_response_length": CONTEXT // 2,
    }
    overrides = [f"{name}={value}" for name, value in words.items()]
    with (
        serving(replace(plan, model=str(model), limits=limits), *overrides) as served,
        pytest.MonkeyPatch.context() as at,
    ):
        at.syspath_prepend(folder)
        client = Client(served)
        batch = asyncio.run(rollout(small(*overrides), client, import_module("with_mask")))
    rows = [
        row[mask == 1].tolist()
        for row, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    by_row = [requests for row in rows for requests in client.outputs.values() if tokens_of(requests[-1]) == row]
    assert len(by_row) == len(rows) == len(client.outputs)
    prompts = [len(requests[0].prompt_token_ids) for requests in by_row]
    return Ran(batch, [turns_of(requests) for requests in by_row], prompts, model)


def tokens_of(output: Any) -> list[int]:
    """The tokens of a request, with those of its answer."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def turns_of(outputs: list[Any]) -> list[tuple[int, int]]:
    """(generated, tool) tokens of each request of a trajectory."""
    ends = [len(tokens_of(output)) for output in outputs]
    begins = [len(output.prompt_token_ids) for output in outputs]
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    tool = [begin - end for begin, end in zip(begins[1:], ends, strict=False)]
    return list(zip(generated, [*tool, 0], strict=True))


async def rollout(config: Any, client: Client, mask: Any) -> Any:
    """What verl's worker makes of prompts. mask: the module of the import's guide, whose loop and reward are used"""
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    numbers = [n for n in range(PROMPTS) for _ in range(SAMPLES)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": f"What is {n} times 4?"}] for n in numbers],
        "data_source": ["products" for _ in numbers],
        "reward_model": [{"ground_truth": str(4 * n)} for n in numbers],
        "extra_info": [{} for _ in numbers],
    }
    worker = AgentLoopWorker(config, client)
    manager = NaiveRewardManager(config, worker.tokenizer, mask.compute_score)
    worker.reward_loop_worker_handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=manager.run_single))]
    rows = DataProto.from_dict(non_tensors={name: np.fromiter(each, object) for name, each in columns.items()})
    return await worker.generate_sequences(rows)


def dump(ran: Ran, folder: Path, with_mask: bool) -> None:
    """Have verl's trainer log the rollout."""
    from transformers import AutoTokenizer
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.reward import extract_reward

    trainer = object.__new__(RayPPOTrainer)
    trainer.tokenizer, trainer.global_steps = AutoTokenizer.from_pretrained(ran.model), 1
    trainer._init_dump_executor()
    ran.batch.batch["token_level_scores"], figures = extract_reward(ran.batch)
    trainer._log_rollout_data(ran.batch, figures if with_mask else {}, {}, str(folder))
    trainer._shutdown_dump_executor()


@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "text"])
def test_a_plan_has_the_turns_that_ran(
    ran: Ran, with_mask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [len(turns) for turns in ran.turns]
    assert max(counts) >= SAMPLES  # as many calls less one
    dump(ran, tmp_path / "dump", with_mask)
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fp8plan", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return capsys.readouterr().out

    command("import", "verl", "dump", "--tokenizer", ran.model, "-o", "run.jsonl")
    planned = command("plan", ran.model, "--gpu", "h200", "--workload", "run.jsonl", "--tool-s", 2, "--json")
    workload, _ = recorded_workload("run.jsonl", tool_s=2)
    batch, expected = workload.batch(), TurnTable.of([(*turn, 2.0) for turn in turns] for turns in ran.turns)
    assert batch.turns is not None
    assert np.diff(batch.turns.first).tolist() == counts
    assert batch.turns.wait_s.tolist() == expected.wait_s.tolist()
    assert (abs(batch.prompts - ran.prompts) <= 2).all()  # text lacks the markers of its ends
    of_plan = json.loads(planned)["workload"]
    assert (of_plan["prompts"], of_plan["samples"]) == (PROMPTS, SAMPLES)
    if with_mask:
        assert batch.turns.generated.tolist() == expected.generated.tolist()
        assert batch.turns.tool.tolist() == expected.tool.tolist()
        assert of_plan["response_tokens"] == expected.generated.sum()
        assert of_plan["mean_turn_tokens"] == expected.generated.mean()
    else:
        assert (abs(batch.turns.generated - expected.generated) <= 1).all()
        assert (abs(batch.turns.tool - expected.tool) <= 3).all()
