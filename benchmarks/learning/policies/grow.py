"""A small policy grown to the size of a large one that answers as it does, so that FP8's speed can be seen in a loop.

Teaching 7B parameters a task would take longer than a lease of a GPU. After Net2Net (Chen et al., 2016,
arXiv:1511.05641) a trained model becomes wide without any change of what it computes: each unit is there several times,
and what reads them reads each with its share. It becomes deep by layers below the others that add almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Generator, Tensor

STD: Final = 0.02  # of the weights of an added layer; transformers' initializer_range
FAINT: Final = 0.01  # about what all added layers together add to the embeddings, as a share of them


@dataclass(frozen=True, slots=True)
class Growth:
    """A larger model.

    copies:   of every hidden and every intermediate unit
    heads:    attention heads; kv_heads: of keys and values, a multiple of the small model's. For each of those there
              are as many heads as in the small model, or a multiple of it
    layers:   in all; those that are added are the first
    """

    copies: int
    heads: int
    kv_heads: int
    layers: int


def grow(small: Path, folder: Path, growth: Growth, seed: int = 0) -> None:
    """Write the checkpoint of a grown Qwen3, in BF16.

    small: the folder of a Qwen3 whose embeddings are not tied to lm_head

    Raises ConfigError for heads that would leave one of the small model's without a copy.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    config = AutoConfig.from_pretrained(small)
    added = growth.layers - config.num_hidden_layers
    config.update(
        {
            "hidden_size": growth.copies * config.hidden_size,
            "intermediate_size": growth.copies * config.intermediate_size,
            "num_attention_heads": growth.heads,
            "num_key_value_heads": growth.kv_heads,
            "num_hidden_layers": growth.layers,
            "layer_types": ["full_attention"] * growth.layers,
        }
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    grown = dict(widened(source.state_dict(), source.config, growth, added))
    chance, kinds = torch.Generator().manual_seed(seed), dict[str, Any]()
    share = FAINT * float(grown["model.embed_tokens.weight"].float().square().mean().sqrt()) / max(1, added)
    for name, like in model.state_dict().items():
        if name not in grown:
            kind = name.split(".", 3)[-1]
            if kind not in kinds:
                kinds[kind] = _of_added_layer(kind, like.shape, share, chance)
            grown[name] = kinds[kind].clone()  # all added layers are the same one
    model.load_state_dict(grown, assign=True)
    model.save_pretrained(folder)


def widened(weights: dict[str, Tensor], config: Any, growth: Growth, added: int) -> Iterator[tuple[str, Tensor]]:
    """The weights of the small model's own layers, `added` layers further up, in BF16."""
    hidden = _copies(config.hidden_size, growth.copies)
    middle = _copies(config.intermediate_size, growth.copies)
    queries, keys = heads(config, growth)
    queries, keys = _units(queries, config.head_dim), _units(keys, config.head_dim)
    # Name's end -> units that it writes, and that it reads; None: as they are
    kinds: dict[str, tuple[Sequence[int] | None, Sequence[int] | None]] = {
        "embed_tokens": (None, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (middle, hidden),
        "up_proj": (middle, hidden),
        "down_proj": (hidden, middle),
        "lm_head": (None, hidden),
    }
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        if weight.dim() == 1:
            found = weight if kind in ("q_norm", "k_norm") else weight[list(hidden)]
        else:
            written, read = kinds[kind]
            found = weight if written is None else weight[list(written)]
            if read is not None:
                found = found[:, list(read)]
                found = found if kind == "embed_tokens" else found * (weight.shape[1] / len(read))
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) + added)
        yield ".".join(parts), found.bfloat16()


def heads(config: Any, growth: Growth) -> tuple[list[int], list[int]]:
    """Map each head of the large model to that of the small one which it copies: of queries, and of keys and values."""
    few = config.num_key_value_heads
    group, each = config.num_attention_heads // few, growth.heads // growth.kv_heads
    if growth.kv_heads % few or growth.heads % growth.kv_heads or each % group:
        raise ConfigError(
            f"{growth.heads} heads and {growth.kv_heads} KV heads; allowed: a multiple of {few} KV heads, with a "
            f"multiple of {group} heads each"
        )
    keys = [one for one in range(few) for _ in range(growth.kv_heads // few)]
    return [group * key + number % group for key in keys for number in range(each)], keys


def _copies(units: int, copies: int) -> list[int]:
    return list(range(units)) * copies


def _units(heads: Sequence[int], head_dim: int) -> list[int]:
    return [head * head_dim + one for head in heads for one in range(head_dim)]


def _of_added_layer(name: str, shape: Sequence[int], share: float, chance: Generator) -> Tensor:
    """A weight of an added layer. share: about what o_proj and down_proj add to each unit (RMS)"""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    std = share / shape[1] ** 0.5 if name.split(".")[-2] in ("o_proj", "down_proj") else STD
    return (torch.randn(shape, generator=chance) * std).bfloat16()
