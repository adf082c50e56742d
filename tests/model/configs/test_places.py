"""A user names a model by a hub id or a path in any spelling. What holds no model gets one clear line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.configs import bundled_configs, find_config

MODEL = "Qwen/Qwen3-8B"
CONFIG = {key: value for key, value in bundled_configs()[MODEL].items() if not key.startswith("_")}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo: str, file: str) -> str:
        raise OSError("the hub was asked")

    hub = SimpleNamespace(
        constants=SimpleNamespace(HF_HUB_OFFLINE=True, ENDPOINT=""),
        try_to_load_from_cache=lambda repo, file: None,
        hf_hub_download=refuse,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


@pytest.mark.parametrize(
    "text",
    [
        f"https://huggingface.co/{MODEL}",
        f"https://huggingface.co/{MODEL}/",
        f"https://huggingface.co/{MODEL}/tree/main",
        f"https://huggingface.co/{MODEL}/blob/main/config.json",
        f"https://huggingface.co/{MODEL}/resolve/main/config.json?download=true",
        f"http://www.huggingface.co/{MODEL}/discussions#top",
        f"HuggingFace.co/{MODEL}",
        f"https://hf.co/{MODEL}?library=vllm",
        f"{MODEL}/",
        f"  {MODEL}\n",
        "Qwen3-8B/",
        MODEL.replace("/", "\\"),
    ],
)
def test_a_hub_id_in_another_spelling(text: str) -> None:
    assert find_config(text)[1] == MODEL


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_path_in_another_spelling_and_a_file_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding=encoding)
    monkeypatch.chdir(tmp_path)
    for text in (
        str(folder), f" {folder}/ ", str(folder / "config.json"), "my model", "./my model/",
        ".\\my model", "my model\\config.json",
    ):  # fmt: skip
        assert find_config(text)[:2] == (CONFIG, "my model"), text


def test_a_folder_named_as_a_bundled_model_is_told_by_its_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    monkeypatch.chdir(tmp_path)
    assert ModelShape.from_hf("Qwen3-8B/").num_layers == 3
    assert ModelShape.from_hf("Qwen3-8B").num_layers == 36


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 5000, r"model is 'xxx.*xxx' \(5,000 characters\); give a hub id"),
        ("owner/" + "x" * 3000, "model 'owner/xxx.*' is neither bundled nor available"),
        ("./" + "x" * 3000, "cannot be read .File name too long"),
        ("a\0b", "model is .*give a hub id"),
        ("Qwen/Qwen3-8B\nQwen/Qwen3-4B", "model is 'Qwen/Qwen3-8B.nQwen/Qwen3-4B'; give a hub id"),
        ("~nouser/x", "~nouser/x: there is no such user here"),
        ("C:\\models\\Qwen3-8B", "C:/models/Qwen3-8B/config.json: cannot be read"),
        ("https://huggingface.co", "not a page of a model on the hub; give a hub id"),
        ("https://huggingface.co/datasets/openai/gsm8k", "gsm8k': not a page of a model on the hub; give a hub id"),
        ("hf.co/spaces/Qwen/Qwen3-Demo", "not a page of a model on the hub; give a hub id"),
        ("https://huggingface.co/Qwen", "not a page of a model on the hub; give a hub id"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/v2", "tree/v2': names another revision, and fp8plan reads main"),
        ("https://example.org/Qwen/Qwen3-8B", "not a page of a model on the hub; give a hub id"),
        ("https://[", "not a page of a model on the hub; give a hub id"),
        ("file:///a%0Ab", "not a page of a model on the hub; give a hub id"),
        ("s3://bucket/Qwen3-8B", "not a page of a model on the hub; give a hub id"),
        ("somebody/Qwen3-8B-GGUF", r"llama.cpp quantised \(GGUF\); give the hub id of the BF16 model"),
        ("no-such-folder/Qwen3-8B-Q4_K_M.gguf", r"llama.cpp quantised \(GGUF\); give the hub id of the BF16 model"),
    ],
)
def test_what_is_no_model_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        find_config(text)
    assert "\n" not in str(error.value)


def adapter(base: Any) -> str:
    return json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})


# Files of a folder -> what the line says.
FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "an adapter": ({"adapter_config.json": adapter(MODEL)}, f"a LoRA adapter .*; type: fp8plan plan {MODEL}"),
    "an adapter of no name": ({"adapter_config.json": adapter(None)}, "a LoRA adapter .* merged into; give a hub id"),
    "a broken adapter": ({"adapter_config.json": "{"}, "a LoRA adapter .* merged into; give a hub id"),
    "Mistral's format": ({"params.json": "{}", "tekken.json": "{}"}, "Mistral's own format .*give its version with"),
    "weights of llama.cpp": ({"Qwen3-8B-Q4_K_M.gguf": "GGUF"}, "GGUF.*, and no config.json; give the hub id of the"),
    "a tokenizer": ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "a tokenizer alone.*; give a hub id"),
    "a pipeline": ({"model_index.json": "{}", "unet/config.json": "{}"}, "a diffusers pipeline .*language models"),
    "weights": ({"model.safetensors": ""}, "weights alone, and no config.json; put the model's config.json beside"),
    "a checkpoint below": ({"actor/huggingface/config.json": "{}"}, "the folder below that does: .*actor/hugging"),
    "nothing": ({}, "config.json: cannot be read .No such file or directory.; give a folder with a config.json"),
    "part of a pipeline": ({"config.json": '{"_diffusers_version": "1"}'}, "a part of a diffusers pipeline"),
    "an encoder": ({"config.json": json.dumps(CONFIG | {"model_type": "bert"})}, "an encoder, and writes no text"),
    "another JSON file": ({"config.json": '{"hello": 1}'}, "field 'model_type' is missing, .*give a hub id"),
    "a deep file": ({"config.json": '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"}, "nested too deeply"),
    "a list as a word": (
        {"config.json": json.dumps({"model_type": "qwen3_5", "text_config": {"model_type": [[["qwen3"]]]}})},
        "field 'text_config.model_type' is ...'qwen3'...; allowed: a word",
    ),
    "bytes": ({"config.json": "\u0000\x80"}, "not valid JSON .*download the model's config.json again"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_something_else_is_one_clear_line(name: str, tmp_path: Path) -> None:
    contents, message = FOLDERS[name]
    for file, text in contents.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        ModelShape.from_hf(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["notes.txt", "model-00001-of-00002.safetensors", "adapter_config.json"])
def test_a_file_that_is_no_config_is_one_clear_line(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=r"not a config\.json; give the folder|a LoRA adapter"):
        ModelShape.from_hf(tmp_path / file)


PARTS = (
    *("/", "\\", "~", ".", "..", ":", "%", "%0A", "@", "?", "#", "[", " ", "\n", "\0", "\u00e9", "\udcff"),
    *("https://", "file://", "hf://", "huggingface.co", "Qwen", "Qwen3-8B", "tree", "main", ".json", ".gguf"),
)
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


def no_error_but(call: Callable[[], object]) -> str:
    """The line of a ConfigError; "" if there is none."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@given(TEXTS)
def test_any_text_is_a_model_or_one_line(text: str) -> None:
    line = no_error_but(lambda: find_config(text))
    assert "\n" not in line
    assert not line or "give" in line or "fp8plan models" in line or "download" in line


@given(st.binary(max_size=80) | TEXTS.map(lambda x: x.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_config_or_one_line(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(content)
        line = no_error_but(lambda: ModelShape.from_hf(folder))
    assert line.startswith(f"{folder}/config.json: ")
    assert "\n" not in line
