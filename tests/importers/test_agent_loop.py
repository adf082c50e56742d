"""verl's own agent loop with a tool, from its dump to a record and a workload. The answers are written here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_conversations import templates, tokenizer
from trainer_logs import VERL_WRITERS, verl_writer

from fp8plan import jsonl
from fp8plan.importers.records import import_rollouts
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.validate.records import recorded_workload

pytestmark = [pytest.mark.verl, pytest.mark.trl]

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
SCRIPTS = [[f"Let me see.\n{CALL}", CALL, "It is 12.<|im_end|>"], ["I know: 12.<|im_end|>"]]


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"The result is {a * b}, as multiplied by the tool."


class Server(NamedTuple):
    """A server that answers from a script, and keeps the numbers of tokens that it was sent and generated."""

    encode: Any
    script: list[str]
    seen: list[tuple[int, int]]

    async def generate(self, prompt_ids: list[int], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        answer = self.encode(self.script[len(self.seen)], add_special_tokens=False)["input_ids"]
        self.seen.append((len(prompt_ids), len(answer)))
        return TokenOutput(token_ids=answer)


def ran(own: Any, script: list[str]) -> tuple[Any, list[tuple[int, int]]]:
    """The output of verl's loop for a script, and (prompt, generated) tokens of each request."""
    from omegaconf import OmegaConf
    from transformers.utils import get_json_schema
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import FunctionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.utils.dataset.rl_dataset import RLHFDataset

    turns = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": "hermes"}
    turns |= {"max_tool_response_length": 256, "tool_response_truncate_side": "middle"}
    rollout = {"multi_turn": turns, "prompt_length": 512, "response_length": 4096, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    tool = FunctionTool("multiply", multiply, OpenAIFunctionToolSchema(**get_json_schema(multiply)))
    server = Server(own, script, [])

    async def run() -> Any:
        loop = ToolAgentLoop(
            DictConfigWrap(config), server, own, None, RLHFDataset, DictConfigWrap(OmegaConf.create({})),
            tools=ToolListWrap([tool]),
        )  # fmt: skip
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "What is 3 times 4?"}])

    return asyncio.run(run()), server.seen


@pytest.mark.parametrize("with_mask", [True, False])
def test_verls_agent_loop_comes_back_as_it_ran(tmp_path: Path, with_mask: bool) -> None:
    own = tokenizer(templates()["qwen3"])
    own.save_pretrained(tmp_path / "tokenizer")
    outputs, ran_turns = [], []
    for script in SCRIPTS:
        output, seen = ran(own, script)
        outputs.append(output)
        prompts = [prompt for prompt, _ in seen]
        tools = [after - prompt - tokens for (prompt, tokens), after in zip(seen[:-1], prompts[1:], strict=True)]
        generated = [tokens for _, tokens in seen]
        ran_turns.append([(tokens, tool, 2.0) for tokens, tool in zip(generated, [*tools, 0], strict=True)])
    assert [len(turns) for turns in ran_turns] == [3, 1]
    decoded = [own.batch_decode([x.prompt_ids for x in outputs], skip_special_tokens=True)]
    decoded += [own.batch_decode([x.response_ids for x in outputs], skip_special_tokens=True)]
    masks = {"response_mask": [x.response_mask for x in outputs]} if with_mask else {}
    (tmp_path / "dump").mkdir()
    verl_writer(VERL_WRITERS[0])(*decoded, ["12"] * 2, [1.0] * 2, masks, str(tmp_path / "dump"), 1)
    assert ("response_mask" in json.loads((tmp_path / "dump" / "1.jsonl").read_text().splitlines()[0])) is with_mask

    found = import_rollouts("verl", tmp_path / "dump", tokenizer=str(tmp_path / "tokenizer"))
    (tmp_path / "run.jsonl").write_bytes(b"".join(map(jsonl.line, found.records)))
    workload, _ = recorded_workload(tmp_path / "run.jsonl", tool_s=2.0)
    table, expected = workload.batch().turns, TurnTable.of(ran_turns)
    assert table is not None
    assert table.first.tolist() == expected.first.tolist()
    assert table.wait_s.tolist() == expected.wait_s.tolist()
    if with_mask:
        assert table.generated.tolist() == expected.generated.tolist()
        assert table.tool.tolist() == expected.tool.tolist()
    else:  # the text lacks the end of an answer, and markers of the template
        assert (abs(table.generated - expected.generated) <= 1).all()
        assert (abs(table.tool - expected.tool) <= 20).all()
