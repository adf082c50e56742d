"""The shape of a decoder-only transformer, read from a Hugging Face config.json (`reading`): layers, parts and sizes.

An unknown part is an error that names it, because a wrong number is worse than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.kept import Kept, kept_layers
from fp8plan.model.architecture.parts import (
    Attention,
    Cache,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Linear,
    Mixer,
    Mlp,
    Size,
    TokenPart,
    mixers,
    parts,
)
from fp8plan.model.architecture.reading import read_model
from fp8plan.model.configs import bundled_configs, find_config
from fp8plan.model.configs.fields import Context
from fp8plan.model.precision import BF16_BYTES, PRESETS, Precision, Stored, is_planned
from fp8plan.version import DEFAULT_VERSION

VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ModelShape:
    """The parts and sizes of a model: everything that the cost model uses.

    norm_vectors: learned vectors of the last norm: 1 for an RMSNorm, 2 for a LayerNorm with bias, 0 for OLMo's
    note:         sentences on parts of the checkpoint that are left out, and on another model's config; "" without any
    stored:       format of an FP8 checkpoint; None for BF16
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    context: Context
    layers: tuple[Layer, ...]
    source: str  # where the config came from
    norm_vectors: int = 1
    lm_head_bias: bool = False
    note: str = ""
    stored: Stored | None = None

    @classmethod
    def from_hf(cls, name_or_path: str | Path) -> ModelShape:
        """The shape of a bundled model, a local folder (or config.json), or a Hugging Face hub id, tried in this order.

        A bundled model is found whatever the case, and by the last part of its id alone ("Qwen3-8B").
        Raises ConfigError when nothing is found, and when the config is broken or has a part that is not known.
        """
        return cls.from_config(*find_config(name_or_path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str, source: str) -> ModelShape:
        """The shape described by the fields of a config.json. Raises ConfigError naming `source` and the field."""
        return cls(name=name, source=source, **read_model(config, name, source))

    def keeping_bf16(self, kept: Kept) -> ModelShape:
        """The model with these linears not quantised.

        Raises ConfigError for an FP8 checkpoint, and as `kept_layers` does.
        """
        if not any(kept):
            return self
        if self.stored is not None:
            raise ConfigError(
                f"keep_bf16 is {kept}, and the checkpoint holds its weights in {self.stored.label}; allowed: (0, 0); "
                f"type --keep-bf16 for {self.stored.bf16_model}"
            )
        return replace(self, layers=kept_layers(self.layers, kept, self.hidden_size))

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of the context without RoPE scaling."""
        return self.context.positions

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def is_like(self, other: ModelShape | None) -> bool:
        """True for another checkpoint of the same architecture and size."""
        return other is not None and (self.hidden_size, self.layers) == (other.hidden_size, other.layers)

    @cached_property
    def counted(self) -> list[tuple[Mixer | TokenPart, int]]:
        """The distinct parts and their numbers: mixers first, then inputs of layers, dense MLPs and experts."""
        counts = Counter(part for layer in self.layers for part in parts(layer))
        return sorted(counts.items(), key=lambda item: [isinstance(item[0], x) for x in (Experts, Mlp, LayerInput)])

    @cached_property
    def mixers(self) -> list[tuple[Mixer, int]]:
        return [(part, number) for part, number in self.counted if not isinstance(part, TokenPart)]

    def parts_of(self, kind: type[Kind]) -> list[tuple[Kind, int]]:
        return [(part, number) for part, number in self.counted if isinstance(part, kind)]

    @cached_property
    def num_parameters(self) -> int:
        """The exact number of elements in a checkpoint; tied embeddings count once."""
        hidden = self.hidden_size
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        body = sum(number * part.parameters(hidden) for part, number in self.counted)
        return tables + body + self._own_vectors(1, self.vocab_size)

    def linears(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The matrices of one rank as vLLM fuses them, without the routed experts (see `expert_linears`).

        `lm_head` occurs once. KV heads are replicated when there are more ranks than KV heads. Mixers come first, then
        dense MLPs, then routers and shared experts.
        """
        tp = tensor_parallel_size
        linears = ((linear, n) for part, n in self.counted for linear in part.linears(self.hidden_size, tp))
        return (*_merged(linears), Linear("lm_head", self.padded_vocab_size // tp, self.hidden_size, 1, False, False))

    def expert_linears(self, slices: int = 1) -> tuple[Linear, ...]:
        """The w13 and w2 matrices of ONE routed expert on one rank; () for a dense model. slices: as in Experts"""
        hidden = self.hidden_size
        return _merged(
            (linear, n) for experts, n in self.parts_of(Experts) for linear in experts.expert_linears(hidden, slices)
        )

    def left_in_bf16(self, tensor_parallel_size: int = 1) -> tuple[Linear, ...]:
        """The matrices that FP8 weights leave in BF16 (`Linear.left_in_bf16`), those of kept layers among them."""
        return tuple(linear for linear in self.linears(tensor_parallel_size) if linear.left_in_bf16)

    def caches(self, tensor_parallel_size: int = 1) -> tuple[Cache, ...]:
        """The caches of all layers on one rank, in order. A layer without a cache has no entry."""
        tp = tensor_parallel_size
        return tuple(cache for layer in self.layers for mixer in mixers(layer) for cache in mixer.caches(tp))

    @cached_property
    def recurrent(self) -> bool:
        """True if some layers keep a state in place of keys and values (vLLM's is_hybrid or is_attention_free)."""
        return any(cache.kind == "state" for cache in self.caches())

    @cached_property
    def indexed(self) -> bool:
        """True if some layers keep latents of which an indexer picks the tokens to attend to."""
        return any(latent.sparse for latent, _ in self.parts_of(LatentAttention))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of lm_head in vLLM, over all ranks."""
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    def weight_bytes(self, precision: Precision, tensor_parallel_size: int = 1, expert_ranks: int = 1) -> int:
        """Bytes of all weights on one rank. The embedding, lm_head, norms, biases and router are BF16.

        Vectors that vLLM keeps in float32, such as A_log, count as BF16: about a hundred bytes less per layer.

        expert_ranks: as in EngineLimits; the rank is one of those with the most experts
        """
        tp, hidden = tensor_parallel_size, self.hidden_size
        total = sum(
            w.layers * precision.linear_bytes(w.n, w.k, w.quantised) for w in self.linears(tp) if w.name != "lm_head"
        )
        total += sum(
            n * experts.most_on_a_rank(expert_ranks) * experts.stored_bytes(hidden, precision, tp // expert_ranks)
            for experts, n in self.parts_of(Experts)
        )
        if precision.weights != "bf16":
            total += sum(n * self._dequantised_bytes(part, tp) for part, n in self.parts_of(LatentAttention))
        table = self.padded_vocab_size // tp * hidden * BF16_BYTES
        total += table if self.tie_word_embeddings else 2 * table
        vectors = sum(n * part.vectors(hidden, tp) for part, n in self.counted if not isinstance(part, Experts))
        vectors += sum(n * part.vectors(hidden, tp, expert_ranks) for part, n in self.parts_of(Experts))
        return total + (vectors + self._own_vectors(tp, self.padded_vocab_size)) * BF16_BYTES

    def kv_bytes_per_token(self, precision: Precision, tensor_parallel_size: int = 1) -> int:
        """Bytes that one token of a short request adds to the caches of all layers on one rank, windows included.

        In a long request full windows do not grow, and blocks may be padded.
        """
        caches = self.caches(tensor_parallel_size)
        elements = sum(cache.elements_per_token for cache in caches)
        return elements * precision.kv_element_bytes + sum(cache.index_bytes_per_token for cache in caches)

    def why_not(self, precision: Precision) -> str | None:
        """The reason why vLLM cannot run this checkpoint in `precision` on any GPU; None if it can."""
        if self.stored is not None:
            return self.stored.why_not(precision)
        if precision.name in PRESETS:
            return None
        return (
            f"{self.name} is a BF16 checkpoint, and {precision.weights} is for checkpoints that hold such weights; "
            f"allowed: {', '.join(PRESETS)}"
        )

    def allowed_tensor_parallel(self, largest: int = 64, expert_parallel: bool = False) -> tuple[int, ...]:
        """The values of tensor_parallel_size up to `largest` with which vLLM starts this model."""
        return tuple(tp for tp in range(1, largest + 1) if self._tensor_parallel_fault(tp, expert_parallel) is None)

    def check_tensor_parallel(self, tensor_parallel_size: int, expert_parallel: bool = False) -> None:
        """Raise ConfigError, naming the allowed sizes, if vLLM refuses this tensor_parallel_size for this model, or
        enable_expert_parallel for a model without experts (ModelConfig.verify_with_parallel_config)."""
        if expert_parallel and not self.parts_of(Experts):
            raise ConfigError(
                f"enable_expert_parallel is True, and {self.name} has no experts; allowed: False (leave "
                "--expert-parallel out)"
            )
        fault = self._tensor_parallel_fault(tensor_parallel_size, expert_parallel)
        if fault:
            allowed = ", ".join(map(str, self.allowed_tensor_parallel(expert_parallel=expert_parallel)))
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel_size} does not divide {self.name}: {fault}; allowed: {allowed}"
            )

    def check_max_model_len(
        self, max_model_len: int, engine_version: str = DEFAULT_VERSION, shorten: str = "shorten the requests"
    ) -> None:
        """Raise ConfigError, with the advice to `shorten`, for a length that this vLLM refuses at start-up."""
        longest, origin = self.context.longest(engine_version)
        if max_model_len > longest:
            raise ConfigError(
                f"max_model_len {max_model_len} is beyond the context of {self.name}; allowed: at most {longest} "
                f"({origin}); {shorten}, lower --max-model-len if you gave one, or give a folder whose config.json "
                "has the longer context that you trained for"
            )

    def _own_vectors(self, tp: int, vocabulary: int) -> int:
        """Elements of norms and of the bias of lm_head on one rank."""
        norms = sum(layer.vectors(self.hidden_size) for layer in self.layers) + self.norm_vectors * self.hidden_size
        return norms + (vocabulary // tp if self.lm_head_bias else 0)

    def _tensor_parallel_fault(self, tp: int, expert_parallel: bool) -> str | None:
        """The reason why the assertions of vLLM's model classes fail for `tp` ranks; None if they hold."""
        if tp < 1:
            return "a whole number of at least 1 is needed"
        sizes = [size for part, _ in self.counted if not isinstance(part, Experts) for size in part.cuts()]
        sizes += [size for experts, _ in self.parts_of(Experts) for size in experts.cuts(expert_parallel)]
        sizes.append(Size("padded vocabulary rows", self.padded_vocab_size))
        fault = next((size for size in sizes if _uneven(size, tp)), None)
        if fault is not None:
            cannot = " can be neither split nor replicated evenly"
            return f"its {fault.size} {fault.what}{cannot}" if fault.replicated else f"it has {fault.size} {fault.what}"
        few = next((experts.num_experts for experts, _ in self.parts_of(Experts) if tp > experts.num_experts), None)
        return None if few is None else f"it has {few} experts"

    def _dequantised_bytes(self, latent: LatentAttention, tp: int) -> int:
        """Bytes of the BF16 matrices that vLLM keeps beside a kv_b_proj in FP8."""
        kv_b = next(x for x in latent.linears(self.hidden_size, tp) if x.name == "kv_b_proj")
        return latent.dequantised_elements(tp) * BF16_BYTES if kv_b.quantised else 0


def bundled_models() -> tuple[str, ...]:
    """Hub ids of the models whose config ships with fp8plan, sorted, aliases included.

    Those in a quantisation that is not planned are left out: to name one is an error that names its BF16 copy.
    """
    return tuple(name for name, config in bundled_configs().items() if is_planned(config))


def _merged(linears: Iterable[tuple[Linear, int]]) -> tuple[Linear, ...]:
    """Equal matrices as one, with the number of its layers, in the order of first occurrence."""
    layers: dict[Linear, int] = {}
    for linear, number in linears:
        layers[linear] = layers.get(linear, 0) + number
    return tuple(replace(linear, layers=number) for linear, number in layers.items())


def _uneven(size: Size, tp: int) -> bool:
    """True if `tp` ranks can neither share the size equally nor, where vLLM allows it, keep equal copies."""
    return bool(size.size % tp) and not (size.replicated and tp % size.size == 0)


def sizes_of(shape: ModelShape) -> dict[str, Any]:
    """The sizes of a model and its parts by name, as `fp8plan models --json` prints them.

    A model whose layers are all alike also has the sizes of its attention and MLP on their own.
    """
    sizes: dict[str, Any] = {"name": shape.name, "model_type": shape.model_type, "num_layers": shape.num_layers}
    sizes |= {"hidden_size": shape.hidden_size} | _alike(shape)
    names = ("vocab_size", "tie_word_embeddings", "max_position_embeddings", "source", "num_parameters")
    sizes |= {name: getattr(shape, name) for name in names}
    experts = shape.parts_of(Experts)
    sizes["experts"] = asdict(experts[0][0]) | {"layers": experts[0][1]} if len(experts) == 1 else None
    return sizes | {"parts": [{"part": type(x).__name__, "number": n, **asdict(x)} for x, n in shape.counted]}


def _alike(shape: ModelShape) -> dict[str, Any]:
    """The sizes shared by all layers of a model with full attention and dense MLPs or experts; {} for others."""
    dense, attentions = shape.parts_of(Mlp), shape.parts_of(Attention)
    other_parts = len(shape.counted) - len(dense) - len(shape.parts_of(Experts)) - len(attentions)
    if other_parts or len(attentions) != 1 or len(dense) > 1 or attentions[0][0].window or attentions[0][0].chunk:
        return {}
    attention = attentions[0][0]
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": dense[0][0].inner if dense else 0,
        "qk_norm": attention.qk_norm != "none",
        "attention_bias": attention.qkv_bias,
    }
