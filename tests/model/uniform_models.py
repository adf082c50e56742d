"""Models whose layers are all alike, made from sizes: for one kernel's cost, and for what another size would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fp8plan.model.architecture.parts import Attention, Experts, Layer, Mlp
from fp8plan.model.architecture.shape import ModelShape
from fp8plan.model.configs.fields import Context

# The sizes of attention, by the names of a config.json -> the field of its part.
ATTENTION: Final = {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}


def uniform(
    *,
    num_layers: int = 1,
    hidden_size: int = 1,
    num_attention_heads: int = 1,
    num_key_value_heads: int = 1,
    head_dim: int = 1,
    intermediate_size: int = 1,
    vocab_size: int = 1,
    qk_norm: bool = False,
    attention_bias: bool = False,
    experts: Experts | None = None,
    sparse_layers: int | None = None,
    name: str = "a model of equal layers",
    **fields: Any,
) -> ModelShape:
    """A model of equal layers of full attention. A size that is not given is 1.

    experts: those of the last `sparse_layers` layers; None: of all
    fields:  further fields of ModelShape
    """
    attention = Attention(
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        qkv_bias=attention_bias,
        qk_norm="head" if qk_norm else "none",
    )
    sparse = (num_layers if sparse_layers is None else sparse_layers) if experts else 0
    layers = (Layer(attention, Mlp(intermediate_size)),) * (num_layers - sparse)
    if experts:
        layers += (Layer(attention, experts),) * sparse
    plain: dict[str, Any] = {
        "model_type": name,
        "tie_word_embeddings": False,
        "context": Context(fields.pop("max_position_embeddings", 1)),
        "source": name,
    }
    return ModelShape(name=name, hidden_size=hidden_size, vocab_size=vocab_size, layers=layers, **plain | fields)


def resized(
    shape: ModelShape, *, num_layers: int | None = None, experts: Experts | None = None, **sizes: int
) -> ModelShape:
    """The shape with another number of layers (more repeat the last one) and other sizes.

    experts: None: those that it has
    sizes:   num_attention_heads, num_key_value_heads, head_dim, intermediate_size
    """
    attention: dict[str, Any] = {ATTENTION[name]: size for name, size in sizes.items() if name in ATTENTION}
    inner = sizes.get("intermediate_size")
    if unknown := sorted(set(sizes) - {*ATTENTION, "intermediate_size"}):
        raise TypeError(f"{', '.join(unknown)}; allowed: {', '.join(ATTENTION)}, intermediate_size")

    def changed(layer: Layer) -> Layer:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, Attention):
            mixer = replace(mixer, **attention)
        if isinstance(mlp, Mlp) and inner is not None:
            mlp = replace(mlp, inner=inner)
        if isinstance(mlp, Experts) and experts is not None:
            mlp = experts
        return replace(layer, mixer=mixer, mlp=mlp)

    number = shape.num_layers if num_layers is None else num_layers
    return replace(shape, layers=tuple(changed(shape.layers[min(i, shape.num_layers - 1)]) for i in range(number)))
