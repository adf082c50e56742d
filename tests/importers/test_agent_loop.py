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
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_conversations import templates, tokenizer
from tiny_models import checkpoint
from verl_parts import Served, planned, serving, small

from fp8plan import cli
from fp8plan.model.validate.records import recorded_workload

pytestmark = [pytest.mark.verl, pytest.mark.trl, pytest.mark.vllm]

PROMPTS, SAMPLES, MOST_TURNS = 2, 4, 5
CONTEXT = 4096  # tokens, half of them for the prompt: Qwen3's words on tools have 700 bytes
FACTORS = r'\{"a": [1-9][0-9]{0,4}, "b": [1-9][0-9]{0,4}\}'
CALL = rf'\n<tool_call>\n\{{"name": "multiply", "arguments": {FACTORS}\}}\n</tool_call>'
CALLS, MAY_CALL = f"[a-z ]{{1,9}}{CALL}", f"[a-z ]{{1,9}}({CALL})?"
TOOL_S = 0.05
TOOL = f'''
import asyncio

from verl.tools.function_tool import function_tool

@function_tool
async def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep({TOOL_S})
    return f"The result is {{a * b}}, as multiplied by the tool."
'''


EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = "[{name: agent_with_mask, _target_: with_mask.AgentWithMask}]"
WITH_MASK = """
from verl_turns import LoggedToolAgent

class AgentWithMask(LoggedToolAgent):
    async def run(self, *args, **more):
        output = await super().run(*args, **more)
        padding = [0] * (self.response_length - len(output.response_mask))
        output.extra_fields["response_mask"] = output.response_mask + padding
        return output

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(ground_truth in solution_str), "response_mask": extra_info["response_mask"]}
"""


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
    folder:  has the engine's model/, and the loops' own log in trajectories/
    """

    batch: Any
    turns: list[list[tuple[int, int]]]
    prompts: list[int]
    folder: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "tool.py").write_text(TOOL)
    (folder / "with_mask.py").write_text(WITH_MASK)
    (folder / "agents.yaml").write_text(AGENTS)
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
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": folder / "agents.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "agent_with_mask",
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
        at.setenv("TRAJECTORIES", str(folder / "trajectories"))
        at.syspath_prepend(folder)
        at.syspath_prepend(EXAMPLES)
        client = Client(served)
        batch = asyncio.run(rollout(small(*overrides), client, import_module("with_mask")))
    rows = [
        row[mask == 1].tolist()
        for row, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    by_row = [requests for row in rows for requests in client.outputs.values() if tokens_of(requests[-1]) == row]
    assert len(by_row) == len(rows) == len(client.outputs)
    prompts = [len(requests[0].prompt_token_ids) for requests in by_row]
    return Ran(batch, [turns_of(requests) for requests in by_row], prompts, folder)


def tokens_of(output: Any) -> list[int]:
    """The tokens of a request, with those of its answer."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def turns_of(outputs: list[Any]) -> list[tuple[int, int]]:
    """(generated, tool) tokens of each request of a trajectory."""
    lengths = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]
    tool = [after - prompt - generated for (prompt, generated), (after, _) in pairwise(lengths)]
    return [(generated, added) for (_, generated), added in zip(lengths, [*tool, 0], strict=True)]


async def rollout(config: Any, client: Client, mask: Any) -> Any:
    """What verl's worker makes of prompts. mask: the module with the reward"""
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
    trainer.tokenizer, trainer.global_steps = AutoTokenizer.from_pretrained(ran.folder / "model"), 1
    trainer._init_dump_executor()
    ran.batch.batch["token_level_scores"], figures = extract_reward(ran.batch)
    trainer._log_rollout_data(ran.batch, figures if with_mask else {}, {}, str(folder))
    trainer._shutdown_dump_executor()


@pytest.mark.parametrize("source", ["dump with masks", "dump", "log of trajectories"])
def test_a_plan_has_the_turns_that_ran(
    ran: Ran, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert max(map(len, ran.turns)) >= SAMPLES  # as many calls less one
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fp8plan", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return capsys.readouterr().out

    plan, waits = ["plan", ran.folder / "model", "--gpu", "h200", "--workload", "run.jsonl", "--json"], {}
    if source == "log of trajectories":
        command("import", "jsonl", ran.folder / "trajectories", "-o", "run.jsonl")
    else:
        dump(ran, tmp_path / "dump", source == "dump with masks")
        command("import", "verl", "dump", "--tokenizer", ran.folder / "model", "-o", "run.jsonl")
        plan, waits = [*plan, "--tool-s", 2], {"tool_s": 2}
    of_plan = json.loads(command(*plan))["workload"]
    assert (of_plan["prompts"], of_plan["samples"]) == (PROMPTS, SAMPLES)
    batch = recorded_workload("run.jsonl", **waits)[0].batch()
    assert batch.turns is not None
    tokens = list(zip(batch.turns.generated.tolist(), batch.turns.tool.tolist(), strict=True))
    turns = [tokens[first:last] for first, last in pairwise(batch.turns.first)]
    goes_on = np.concatenate([np.arange(len(each)) < len(each) - 1 for each in turns])
    if source == "dump":  # the text lacks the ends of its turns
        off = np.concatenate(turns) - np.concatenate(ran.turns)
        assert list(map(len, turns)) == list(map(len, ran.turns))
        assert (abs(off) <= (1, 3)).all()
        return
    by_end = source == "log of trajectories"  # the loops log in the order in which they end
    assert (sorted(turns) if by_end else turns) == (sorted(ran.turns) if by_end else ran.turns)
    generated = [tokens for each in ran.turns for tokens, _ in each]
    assert of_plan["response_tokens"] == sum(generated)
    assert of_plan["mean_turn_tokens"] == np.mean(generated)
    if by_end:
        assert batch.prompts.tolist() == ran.prompts
        assert (batch.turns.wait_s[goes_on] > TOOL_S).all()
    else:
        assert (abs(batch.prompts - ran.prompts) <= 2).all()  # their text lacks the ends of turns
        assert (batch.turns.wait_s[goes_on] == 2).all()
