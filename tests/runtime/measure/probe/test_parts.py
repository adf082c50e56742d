"""The parts of a probe: the reference's log-probs, batches and prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import checkpoint

from fp8plan.errors import ConfigError
from fp8plan.runtime.measure.probe import reference as reference_module
from fp8plan.runtime.measure.probe.reference import Reference, batches
from fp8plan.runtime.measure.probe.sampling import TASKS, Sampled, read_prompts, token_ids

torch = pytest.importorskip("torch")

# --- the reference --------------------------------------------------------------------------------------------------

ROWS = [
    Sampled(list(range(3, 3 + p)), list(range(50, 50 + r)), [0.0] * r) for p, r in ((1, 5), (9, 1), (4, 30), (7, 12))
]


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_scores_are_the_models_log_probs(kind: str) -> None:
    reference = Reference(str(checkpoint(kind, "a")))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind, "a"), dtype=torch.bfloat16)
    for row, scored in zip(ROWS, reference.score(ROWS, tokens_at_once=40).logprobs, strict=True):
        tokens = torch.tensor([[*row.prompt, *row.response]])
        with torch.no_grad():
            whole = model(tokens).logits.float().log_softmax(-1)[0]
        wanted = [whole[i - 1, tokens[0, i]].item() for i in range(len(row.prompt), tokens.shape[1])]
        assert scored.tolist() == pytest.approx(wanted, abs=0.1)
        assert scored.dtype == torch.float32


def test_pieces_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(str(checkpoint("dense", "a")))
    whole = torch.cat(reference.score(ROWS).logprobs)
    monkeypatch.setattr(reference_module, "LOGITS_BYTES", 3 * 1024 * reference_module.BYTES_PER_LOGIT)  # 3 tokens
    assert torch.cat(reference.score(ROWS).logprobs).tolist() == pytest.approx(whole.tolist(), abs=1e-2)


def test_a_temperature_divides_the_logits() -> None:
    reference = Reference(str(checkpoint("dense", "a")))
    hot = torch.cat(reference.score(ROWS, temperature=1e6).logprobs)
    assert hot.tolist() == pytest.approx([-np.log(1024)] * len(hot), abs=1e-3)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does something to its logits after lm_head"):
        Reference(str(tmp_path))


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 200))
def test_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    found = batches(lengths, budget)
    assert sorted(i for rows in found for i in rows) == list(range(len(lengths)))
    for rows in found:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= budget


# --- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: Sequence[Any] = [
        {"prompt_token_ids": [1, 2]},
        {"prompt": "text"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert read_prompts(file) == [[1, 2], "text", {"messages": rows[2]["messages"]}]


@pytest.mark.parametrize("line", ["[1, 2]", "{}", '{"prompt_token_ids": []}', '{"prompt_token_ids": ["1"]}', "text"])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ConfigError, match=r"^line 2 of .*prompts\.jsonl is .*; allowed: \{\"prompt_token_ids\""):
        read_prompts(file)


def test_texts_need_a_tokeniser_and_token_ids_do_not(tmp_path: Path) -> None:
    assert token_ids([[1, 2], [3]], str(tmp_path)) == [[1, 2], [3]]
    for token in (True, 1.5, "1", -1):
        with pytest.raises(ConfigError, match=r"^prompt 1, token 0 is .*; allowed: a whole number of at least 0"):
            token_ids([[1, 2], [token]], str(tmp_path))
    for prompts in (["text"], None):
        with pytest.raises(ConfigError, match=r"no tokeniser that loads .*prompt_token_ids"):
            token_ids(prompts, str(tmp_path))
    with pytest.raises(ConfigError, match="a prompt is empty"):
        token_ids([[1], []], str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # transformers makes an empty one of that
    with pytest.raises(ConfigError, match=r"no tokeniser that loads \(its vocabulary is empty.*--prompts FILE"):
        token_ids(None, str(tmp_path))


def test_messages_and_the_tasks_go_through_the_chat_template_and_texts_do_not(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "<user>": 1, "<assistant>": 2, "solve": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokeniser = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    tokeniser.chat_template = template + "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokeniser.save_pretrained(tmp_path)
    messages = {"messages": [{"role": "user", "content": "solve"}]}
    assert token_ids(["solve this", messages, [7]], str(tmp_path)) == [[3, 0], [1, 3, 2], [7]]
    tasks = token_ids(None, str(tmp_path))
    assert len(tasks) == len(TASKS)
    assert {(ids[0], ids[-1]) for ids in tasks} == {(1, 2)}
    assert token_ids(None, str(tmp_path), 12) == tasks[:12]
    assert token_ids([[1], [2], [3]], str(tmp_path), 2) == [[1], [2]]
