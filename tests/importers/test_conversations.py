"""Conversations of TRL, counted by chat templates: what the assistant wrote is generated, and nothing else is."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fp8plan.errors import ConfigError
from fp8plan.importers.counter import Counter
from fp8plan.importers.logged import Request
from fp8plan.importers.notes import NO_TOOLS, UNUSED_TOOLS
from fp8plan.importers.records import import_rollouts

pytestmark = pytest.mark.trl

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALLS = [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 1234567, "b": 7654321}}}]
USER = {"role": "user", "content": "How much is it?"}
REASONING = "because " * 60


def templates() -> dict[str, str]:
    """The chat templates that TRL ships, of models that people train; none where it is not installed."""
    trl = find_spec("trl")
    if trl is None:
        return {}
    return {path.stem: path.read_text() for path in Path(str(trl.origin)).parent.glob("chat_templates/*.jinja")}


def tokenizer(template: str) -> Any:
    """A tokenizer for which a byte is a token, but for the markers of Qwen's template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(bytes_)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "bos_token": "<|bos|>"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = template
    return found


def measured(template: str, completion: list[dict[str, Any]], tools: Any = None) -> tuple[Any, list[str]]:
    notes: list[str] = []
    counter = Counter(tokenizer(template), False, tools, notes.append)
    (found,) = counter.measured([Request([USER], completion)])
    return found, notes


TURNS = {
    "reasoning": f"<think>\n{REASONING.strip()}\n</think>\n\nIt is 9.<|im_end|>",
    "a call": "<think>\nHm.\n</think>\n\n"
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call><|im_end|>',
    "two calls": "<think>\nHm.\n</think>\n\nNow:"
    + '\n<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": "é\\"x"}}\n</tool_call>' * 2
    + "<|im_end|>",
}


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training"])
@pytest.mark.parametrize("text", TURNS.values(), ids=TURNS)
def test_what_trl_made_messages_of_has_as_many_tokens_as_were_generated(template: str, text: str) -> None:
    """The way of a real run: tokens, TRL's `parse_response`, messages, and back to a number of tokens."""
    from trl.chat_template_utils import add_response_schema, parse_response

    own = add_response_schema(tokenizer(templates()["qwen3"]))
    ids = own(text, add_special_tokens=False)["input_ids"]
    message = parse_response(own, ids, prefix=own("<|im_start|>assistant\n")["input_ids"])
    assert set(message) > {"role", "content"}  # it was taken apart
    found, _ = measured(templates()[template], [message], TOOLS)
    (turn,) = found.turns
    assert turn.generated == len(ids)


@pytest.mark.parametrize("template", sorted(templates()))
def test_each_template_counts_the_assistants_words_and_no_others(template: str) -> None:
    """Whatever a template can write: of what it leaves out, the bare text is counted."""
    text, field = templates()[template], "thinking" if "thinking" in templates()[template] else "reasoning_content"
    first = {"role": "assistant", "content": "", field: REASONING, "tool_calls": CALLS}
    output = {"role": "tool", "name": "multiply", "content": "result " * 500}
    last = {"role": "assistant", "content": "answer " * 80}
    found = Counter(tokenizer(text), False, TOOLS, str)._texts(Request([USER], [first, output, last]))
    turns, (others,), _ = found
    assert others.count("result") == 500
    assert len(turns) == 2
    for part in ("because", "multiply", "1234567", "7654321"):
        assert part in turns[0]
    assert turns[0].count("because") == 60
    assert turns[1].count("answer") == 80
    assert "result" not in "".join(turns)
    assert "How much" not in "".join(turns)
    assert len("".join(turns)) < len(REASONING) + len("answer " * 80) + 500  # markers are short


def logged(folder: Path, prompt: Any, completions: list[Any]) -> None:
    """A file as TRL's `log` writes it."""
    table = {"step": 1, "prompt": [prompt] * len(completions), "completion": completions, "advantage": 0.0}
    pd.DataFrame(table).to_parquet(folder / "completions_00001.parquet")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    tokenizer(templates()["qwen3"]).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_tools_go_into_every_prompt_and_their_output_into_no_response(tmp_path: Path, qwen: str) -> None:
    said = {"role": "assistant", "content": "It is 9."}
    called = {"role": "assistant", "content": "", "reasoning_content": REASONING, "tool_calls": CALLS}
    output = {"role": "tool", "name": "multiply", "content": "9" * 3000}
    logged(tmp_path, [USER], [[said], [called, output, said]])  # Parquet gives each message the other's keys
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    without = import_rollouts("trl", tmp_path, tokenizer=qwen)
    found = import_rollouts("trl", tmp_path, tokenizer=qwen, tools=tmp_path / "tools.json")
    short, long = found.records[0]["response_lengths"]
    assert len("It is 9.") < short < 50
    assert len(REASONING) + short < long < len(REASONING) + short + 150
    assert without.records[0]["response_lengths"] == [short, long]
    definitions = found.records[0]["prompt_lengths"][0] - without.records[0]["prompt_lengths"][0]
    assert definitions > len(json.dumps(TOOLS[0]))
    assert without.notes[0] == NO_TOOLS
    assert found.notes[0].startswith("1 of 2 responses have several turns. ")
    single, (called_tool, answered) = found.records[0]["turns"]
    assert single == [[short, 0, 0.0]]
    assert 3000 <= called_tool[1] < 3020
    assert called_tool[0] + answered[0] == long
    assert (called_tool[2], answered[1:]) == (None, [0, 0.0])
    assert NO_TOOLS not in found.notes


def test_text_in_parts_is_text(tmp_path: Path, qwen: str) -> None:
    parts = [{"type": "text", "text": "How much "}, {"type": "text", "text": "is it?"}]
    whole = [{"role": "assistant", "content": "It is 9."}]
    lengths = []
    for content in ("How much is it?", parts):
        logged(tmp_path, [{"role": "user", "content": content}], [whole])
        lengths.append(import_rollouts("trl", tmp_path, tokenizer=qwen).records[0]["prompt_lengths"])
    assert lengths[0] == lengths[1]


def test_tools_that_no_template_took_are_told(tmp_path: Path, qwen: str) -> None:
    logged(tmp_path, "plain", ["text"])
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    assert UNUSED_TOOLS in import_rollouts("trl", tmp_path, tokenizer=qwen, tools=tmp_path / "tools.json").notes


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read .*tools.json: No such file"),
        ("", "tools.json is not JSON"),
        ("{}", "holds no list of tools; allowed: a JSON list"),
        ("[]", "holds no list of tools"),
        ('["multiply"]', "holds no list of tools"),
    ],
)
def test_a_file_without_tools_is_refused(tmp_path: Path, qwen: str, content: str | None, told: str) -> None:
    logged(tmp_path, [USER], [[{"role": "assistant", "content": "9"}]])
    if content is not None:
        (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        import_rollouts("trl", tmp_path, tokenizer=qwen, tools=tmp_path / "tools.json")
