"""The shape of a decoder-only transformer, read from a Hugging Face config.json.

Modelled: dense and mixture-of-experts models with full attention (GQA). Everything else is an error that names
the feature, because a wrong number is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.configs import MOE_FAMILIES, Fields, bundled_configs, find_config, refuse_unmodelled
from fp8plan.model.precision import BF16_BYTES, Precision

# vllm/model_executor/layers/vocab_parallel_embedding.py (0.26): DEFAULT_VOCAB_PADDING_SIZE.
VOCAB_PADDING = 64


class Linear(NamedTuple):
    """One weight matrix as vLLM runs it on one tensor-parallel rank: y[m, n] = x[m, k] @ W[n, k]^T."""

    name: str
    n: int
    k: int
    layers: int  # in how many layers it occurs
    quantised: bool  # whether fp8_block quantises it
    all_reduce: bool  # row-parallel: followed by an all-reduce of [m, n] when tensor_parallel_size > 1


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a mixture-of-experts layer. Sizes are per expert, before tensor parallelism."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: int  # how many layers are MoE (the rest are dense)
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model: everything that the cost model needs to know of it."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # of the dense layers
    vocab_size: int
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool  # on q, k, v
    max_position_embeddings: int
    experts: Experts | None
    source: str  # where the config came from

    @classmethod
    def from_hf(cls, name_or_path: str | Path) -> ModelShape:
        """The shape of a bundled model, a local folder (or config.json), or a Hugging Face hub id, tried in this order.

        A bundled model is found whatever the case, and by the last part of its id alone ("Qwen3-8B").
        Raises ConfigError when nothing is found, and when the config is broken or its model is not modelled.
        """
        return cls.from_config(*find_config(name_or_path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str, source: str) -> ModelShape:
        """The shape described by the fields of a config.json. Raises ConfigError naming `source` and the field."""
        refuse_unmodelled(config, source)
        model_type = str(config["model_type"])
        field = Fields(config, source)
        hidden, heads = field.integer("hidden_size"), field.integer("num_attention_heads")
        layers, kv_heads = field.integer("num_hidden_layers"), field.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise field.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        if config.get("head_dim") is None and hidden % heads:
            raise field.error(
                "hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), as head_dim is absent"
            )
        return cls(
            name=name,
            model_type=model_type,
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=field.integer("head_dim", hidden // heads),
            intermediate_size=field.integer("intermediate_size"),
            vocab_size=field.integer("vocab_size"),
            tie_word_embeddings=field.flag("tie_word_embeddings"),
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            # Qwen2 always has biases on q, k, v and no field for them; Mistral and Mixtral never have (transformers).
            attention_bias=model_type == "qwen2"
            or (model_type not in ("mistral", "mixtral") and field.flag("attention_bias")),
            max_position_embeddings=field.integer("max_position_embeddings"),
            experts=_experts(field, model_type, layers),
            source=source,
        )

    @property
    def num_parameters(self) -> int:
        """The exact number of all parameters; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        body = sum(w.n * w.k * w.layers for w in self.linears() if w.name != "lm_head")
        routed = sum(w.n * w.k * w.layers for w in self.expert_linears())
        num_experts = self.experts.num_experts if self.experts else 0
        return embeddings + body + routed * num_experts + self._unquantised_vector_elements(1)

    def linears(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The matrices of one rank as vLLM 0.26 fuses them, without the routed experts (see `expert_linears`).

        `lm_head` occurs once. KV heads are replicated when there are more ranks than KV heads. The router is BF16:
        vLLM's online FP8 quantises Qwen3-MoE's unless told otherwise, and fp8plan tells it otherwise.
        """
        tp, hidden, d = tensor_parallel_size, self.hidden_size, self.head_dim
        q_rows, kv_rows = self.num_attention_heads // tp * d, max(1, self.num_key_value_heads // tp) * d
        moe_layers = self.experts.layers if self.experts else 0
        matrices = [
            Linear("qkv_proj", q_rows + 2 * kv_rows, hidden, self.num_layers, True, False),
            Linear("o_proj", hidden, q_rows, self.num_layers, True, True),
        ]
        if dense_layers := self.num_layers - moe_layers:
            inner = self.intermediate_size // tp
            matrices.append(Linear("gate_up_proj", 2 * inner, hidden, dense_layers, True, False))
            matrices.append(Linear("down_proj", hidden, inner, dense_layers, True, True))
        if self.experts:
            matrices.append(Linear("router", self.experts.num_experts, hidden, moe_layers, False, False))
            if self.experts.shared_intermediate_size:
                inner = self.experts.shared_intermediate_size // tp
                matrices.append(Linear("shared_expert_gate", 1, hidden, moe_layers, False, False))
                matrices.append(Linear("shared_gate_up_proj", 2 * inner, hidden, moe_layers, True, False))
                # Its output is added to the routed experts' before their one all-reduce, so it has none of its own.
                matrices.append(Linear("shared_down_proj", hidden, inner, moe_layers, True, False))
        return (*matrices, Linear("lm_head", self.padded_vocab_size // tp, hidden, 1, False, False))

    def expert_linears(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The w13 and w2 matrices of ONE routed expert on one rank, cut by tensor (not expert) parallelism; () if
        dense.
        """
        if not self.experts:
            return ()
        inner = self.experts.intermediate_size // tensor_parallel_size
        return (
            Linear("experts_w13", 2 * inner, self.hidden_size, self.experts.layers, True, False),
            Linear("experts_w2", self.hidden_size, inner, self.experts.layers, True, True),
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of lm_head in vLLM, over all ranks."""
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    def weight_bytes(self, precision: Precision, tensor_parallel_size: int = 1) -> int:
        """Bytes of all weights on one rank. The embedding, lm_head, norms, biases and router stay BF16."""
        tp = tensor_parallel_size
        total = sum(
            w.layers * precision.linear_bytes(w.n, w.k, w.quantised) for w in self.linears(tp) if w.name != "lm_head"
        )
        if self.experts:
            total += self.experts.num_experts * self._expert_bytes(precision, tp)
        table = self.padded_vocab_size // tp * self.hidden_size * BF16_BYTES
        total += table if self.tie_word_embeddings else 2 * table
        return total + self._unquantised_vector_elements(tp) * BF16_BYTES

    def kv_bytes_per_token(self, precision: Precision, tensor_parallel_size: int = 1) -> int:
        """Bytes of K and V of one token in all layers on one rank."""
        heads = max(1, self.num_key_value_heads // tensor_parallel_size)
        return 2 * self.num_layers * heads * self.head_dim * precision.kv_element_bytes

    def allowed_tensor_parallel(self, largest: int = 64) -> tuple[int, ...]:
        """The tensor_parallel_size values up to `largest` that vLLM 0.26 starts this model with."""
        return tuple(tp for tp in range(1, largest + 1) if self._tensor_parallel_fault(tp) is None)

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Raise ConfigError, naming the allowed sizes, if vLLM would refuse this tensor_parallel_size."""
        fault = self._tensor_parallel_fault(tensor_parallel_size)
        if fault:
            allowed = ", ".join(map(str, self.allowed_tensor_parallel()))
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel_size} does not divide {self.name}: {fault}; allowed: {allowed}"
            )

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raise ConfigError if max_model_len is beyond the model's context, as vLLM does at start-up."""
        if max_model_len > self.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {max_model_len} is beyond the context of {self.name}; allowed: at most "
                f"{self.max_position_embeddings} (max_position_embeddings); shorten the workload, or give a folder "
                "whose config.json has the longer context you trained for"
            )

    def _tensor_parallel_fault(self, tp: int) -> str | None:
        """The reason why vLLM's model classes refuse `tp` ranks, by their assertions; None if they accept it."""
        if tp < 1:
            return "a whole number of at least 1 is needed"
        if self.num_attention_heads % tp:
            return f"it has {self.num_attention_heads} attention heads"
        kv = self.num_key_value_heads
        if kv % tp and tp % kv:
            return f"its {kv} KV heads can be neither split nor replicated evenly"
        sizes = [self.padded_vocab_size]
        if self.experts:
            sizes += [self.experts.intermediate_size, self.experts.shared_intermediate_size]
        if not self.experts or self.experts.layers < self.num_layers:
            sizes.append(self.intermediate_size)
        uneven = next((size for size in sizes if size % tp), None)
        if uneven is not None:
            return f"a dimension of {uneven} cannot be cut into {tp} equal parts"
        if self.experts and tp > self.experts.num_experts:
            return f"it has {self.experts.num_experts} experts"
        return None

    def _unquantised_vector_elements(self, tp: int) -> int:
        """Elements of norms and biases on one rank."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        bias = self.linears(tp)[0].n if self.attention_bias else 0
        if self.attention_bias and self.model_type != "qwen2":
            bias += self.hidden_size  # where it is an option, it adds one to o_proj as well
        return self.num_layers * (norms + bias) + self.hidden_size

    def _expert_bytes(self, precision: Precision, tp: int) -> int:
        """Bytes of one routed expert in all its layers on one rank."""
        w13, w2 = self.expert_linears(tp)
        inner = w2.k
        if precision.weights != "bf16":
            # vLLM pads each rank's expert to whole scale blocks (quantization/online/fp8.py, maybe_roundup_sizes).
            inner = -(-inner // precision.weight_block[0]) * precision.weight_block[0]
        return w13.layers * (precision.linear_bytes(2 * inner, w13.k, True) + precision.linear_bytes(w2.n, inner, True))


def bundled_models() -> tuple[str, ...]:
    """Hub ids of the models whose config ships with fp8plan, sorted, aliases included."""
    return tuple(bundled_configs())


def _experts(field: Fields, model_type: str, layers: int) -> Experts | None:
    if model_type not in MOE_FAMILIES:
        return None
    if model_type == "mixtral":
        experts = Experts(
            field.integer("num_local_experts"),
            field.integer("num_experts_per_tok"),
            field.integer("intermediate_size"),
            layers,
        )
    else:
        step, dense = field.integer("decoder_sparse_step", 1), field.config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise field.error("mlp_only_layers", dense, "a list of layer numbers")
        experts = Experts(
            field.integer("num_experts"),
            field.integer("num_experts_per_tok"),
            field.integer("moe_intermediate_size"),
            sum(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            field.integer("shared_expert_intermediate_size", 0, least=0),
        )
    if experts.experts_per_token > experts.num_experts:
        allowed = f"at most the number of experts ({experts.num_experts})"
        raise field.error("num_experts_per_tok", experts.experts_per_token, allowed)
    return experts if experts.layers else None
