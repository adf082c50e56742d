"""The turns of a response: what the model generated, and what a tool or a user put between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_logs import skyrl_batch, skyrl_dump
from trl_runs import model as words_model

from fp8plan.importers.records import import_rollouts
from fp8plan.importers.turn_boundaries import masked, split

FIRST, OUTPUT, LAST = "I call the tool.", "42 and more", "It is 42."
TURNS = {
    "qwen": f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{OUTPUT}\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen, as verl decodes": f"user\n<tool_response>\n{OUTPUT}\n</tool_response>\nassistant\n",
    "two outputs": "user\n<tool_response>\n1\n</tool_response>\n"
    f"<tool_response>\n{OUTPUT}\n</tool_response>\nassistant\n",
    "a role of tools": f"<|im_start|>tool\n{OUTPUT}<|im_end|>\n<|im_start|>assistant\n",
    "llama": f"<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n{OUTPUT}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama, as verl decodes": f"ipython\n\n{OUTPUT}assistant\n\n",
    "gemma": f"<start_of_turn>user\n{OUTPUT}<end_of_turn>\n<start_of_turn>model\n",
    "glm": f"<|observation|>\n{OUTPUT}<|assistant|>\n",
    "deepseek": f"<｜tool▁outputs▁begin｜>{OUTPUT}<｜tool▁outputs▁end｜>",
    "mistral": f"[TOOL_RESULTS]{OUTPUT}[/TOOL_RESULTS]",
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_a_whole_turn_of_another_is_not_generated(turn: str) -> None:
    generated, between, unclear = split(FIRST + turn + "Again." + turn + LAST)
    assert len(generated) == 3
    assert generated[0].startswith(FIRST)
    assert generated[2] == LAST
    assert OUTPUT not in "".join(generated)
    assert [OUTPUT in text for text in between] == [True, True]
    assert not unclear


@pytest.mark.parametrize(
    ("text", "unclear"),
    [
        (f"{FIRST} {LAST}", False),
        ("The user asks the assistant\nfor a tool.", False),
        ("Then <|im_start|>user begins a turn.", True),
        ("Its output stands in <tool_response>.", True),
        ("<|start_header_id|>ipython<|end_header_id|>", True),
        ("user\nGo on.\nassistant\nIt is 42.", True),
        ("<search>x</search><information>42</information>", True),
        ("", False),
    ],
)
def test_text_that_mentions_a_marker_is_generated(text: str, unclear: bool) -> None:
    assert split(text) == ([text], [], unclear)


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ([1, 1, 0, 0, 0, 1, 0, 0], (0, ((2, 3, None), (1, 0, 0.0)))),
        ([True, True], (0, ((2, 0, 0.0),))),
        ([1.0, 0.0, 1.0], (0, ((1, 1, None), (1, 0, 0.0)))),
        ([0, 0, 1, 0], (2, ((1, 0, 0.0),))),
        ([0, 0], None),
        ([], None),
        ([1, 2], None),
        ([[1]], None),
        ("11", None),
        (None, None),
        (7, None),
    ],
)
def test_a_mask_goes_to_its_last_generated_token(mask: Any, turns: Any) -> None:
    assert masked(mask) == turns


def dump(folder: Path, *outputs: str, **more: Any) -> Path:
    rows = [{"input": "w1 w2", "output": output} | more for output in outputs]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


WORDS = "w1 w2 w3\nuser\n<tool_response>\nw4 w4 w4 w4 w4\n</tool_response>\nassistant\nw5 w6"


@pytest.mark.verl
def test_verls_text_of_several_turns_is_taken_apart(tmp_path: Path) -> None:
    found = import_rollouts("verl", dump(tmp_path, WORDS, "w1 w2"), tokenizer=words_model())
    (record,) = found.records
    assert record["prompt_lengths"] == [2, 2]
    assert record["response_lengths"] == [5, 2]
    (first, last), single = record["turns"]
    assert (first[0], last) == (3, [2, 0, 0.0])
    assert first[1] >= 5
    assert first[2] is None
    assert single == [[2, 0, 0.0]]
    assert "unclear_responses" not in record
    assert found.notes[0].startswith("1 of 2 responses have several turns. ")
    assert found.notes[1].endswith("plan --workload FILE --tool-s lognormal:mean=2,sigma=1,max=60")


@pytest.mark.verl
def test_verls_response_that_ends_with_a_tool_has_no_turn_after_it(tmp_path: Path) -> None:
    cut = WORDS.removesuffix("w5 w6")
    (record,) = import_rollouts("verl", dump(tmp_path, cut, WORDS), tokenizer=words_model()).records
    assert [len(turns) for turns in record["turns"]] == [1, 2]
    assert record["response_lengths"] == [3, 5]


@pytest.mark.verl
def test_verls_single_turns_have_no_new_fields_and_no_note(tmp_path: Path) -> None:
    found = import_rollouts("verl", dump(tmp_path, "w1 w2 w3", "w1"), tokenizer=words_model())
    assert found.records[0]["response_lengths"] == [3, 1]
    assert not {"turns", "unclear_responses"} & set(found.records[0])
    assert len(found.notes) == 1  # on the fields that are not known


@pytest.mark.verl
def test_a_mask_in_verls_dump_goes_before_its_text(tmp_path: Path) -> None:
    folder = dump(tmp_path, WORDS, response_mask=[1] * 4 + [0] * 9 + [1] * 2 + [0] * 5)
    (record,) = import_rollouts("verl", folder, tokenizer=words_model()).records
    assert (record["response_lengths"], record["turns"]) == ([6], [[[4, 9, None], [2, 0, 0.0]]])


@pytest.mark.verl
def test_a_marker_alone_counts_as_generated_with_a_note(tmp_path: Path) -> None:
    found = import_rollouts("verl", dump(tmp_path, "w1 <tool_response> w2", *["w1"] * 3), tokenizer=words_model())
    assert found.records[0]["unclear_responses"] == 1
    assert "turns" not in found.records[0]
    assert found.notes[0].startswith("1 of 4 responses (25.0%) may hold tool output")


@pytest.mark.verl
def test_trainers_means_are_compared_with_what_they_count(tmp_path: Path) -> None:
    folder = dump(tmp_path, WORDS, response_mask=[1] * 6 + [0] * 9 + [1])
    for mean, told in ((16, False), (7, True)):
        (folder / "log.jsonl").write_text(json.dumps({"step": 1, "data": {"response_length/mean": mean}}))
        found = import_rollouts("verl", folder, tokenizer=words_model(), log=folder / "log.jsonl")
        assert any("a response has" in note for note in found.notes) is told


def skyrl(folder: Path, *masks: list[int]) -> Any:
    tensors, metadata = skyrl_batch([([5, 6], [1] * len(mask)) for mask in masks], padding=1)
    width = max(map(len, masks))
    rows = [[0.0] * (width - len(mask)) + [float(x) for x in mask] for mask in (*masks, masks[0])]
    tensors["loss_mask"] = torch.tensor(rows)
    skyrl_dump(folder / "global_step_1_training_input.pkl", tensors, metadata)
    return import_rollouts("skyrl", folder)


def test_skyrls_loss_mask_tells_generated_tokens(tmp_path: Path) -> None:
    found = skyrl(tmp_path, [1, 1, 0, 0, 0, 1], [1, 1], [1, 0, 1, 0])
    (record,) = found.records
    assert (record["prompt_lengths"], record["response_lengths"]) == ([2] * 3, [3, 2, 2])
    single, last = [[2, 0, 0.0]], [1, 0, 0.0]
    assert record["turns"] == [[[2, 3, None], last], single, [[1, 1, None], last]]
    assert found.notes[0].startswith("2 of 3 responses have several turns. Tools and users added 36.4% of")


def test_a_response_that_skyrl_took_out_of_the_loss_is_generated(tmp_path: Path) -> None:
    (record,) = skyrl(tmp_path, [1, 1, 1], [0, 0, 0]).records
    assert record["response_lengths"] == [3, 3]
    assert not {"turns", "unclear_responses"} & set(record)
    (record,) = skyrl(tmp_path, [1, 0, 1], [0, 0, 0]).records
    assert (record["response_lengths"], record["unclear_responses"]) == ([2, 3], 1)
    assert record["turns"] == [[[1, 1, None], [1, 0, 0.0]], [[3, 0, 0.0]]]


def test_a_batch_of_skyrl_without_a_readable_loss_mask_is_unclear(tmp_path: Path) -> None:
    for mask in (None, torch.ones(4, 4, dtype=torch.bfloat16)):
        tensors, metadata = skyrl_batch([([5], [1, 2])] * 4)
        tensors["loss_mask"] = mask
        skyrl_dump(tmp_path / "global_step_1_training_input.pkl", tensors, metadata)
        found = import_rollouts("skyrl", tmp_path)
        assert found.records[0]["unclear_responses"] == 4
        assert "lack their mask" in found.notes[0]
