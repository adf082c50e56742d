"""The context length: the longest max_model_len that vLLM takes of a model, by its config.json.

Source: _get_and_verify_max_len in vllm/config/model.py, and derive_max_model_len_and_key in vllm/transformers_utils/
model_arch_config_convertor.py. The `model_max_length` of a tokenizer_config.json does not count: vLLM 0.26 to 0.30 look
at it for pooling models with absolute positions alone (ModelConfig.get_and_verify_max_len).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fp8plan.model.configs.fields import Fields
from fp8plan.model.engine_versions import at_least

# Fields that bound the positions. The smallest counts, but a model_max_length alone where there is one.
LENGTHS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Types of RoPE scaling that vLLM knows (layers/rotary_embedding, get_rope; patch_legacy_rope_type). The `factor` of the
# first group lengthens the context. With YaRN it did so before 0.30.
LENGTHENING: Final = ("default", "linear", "dynamic", "ntk", "mrope", "proportional", "mllama4", "openpangu", "xdrope")
YARN: Final = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
LONGROPE: Final = ("longrope", "su")
NEEDS_FACTOR: Final = ("linear", "dynamic", "yarn")  # transformers reads no config without it (validate_rope)
TYPES: Final = (*LENGTHENING, *YARN, *LONGROPE, "llama3")


@dataclass(frozen=True, slots=True)
class Scaling:
    """A scaling of rotary positions.

    kind:     one of TYPES
    factor:   None: the config has none
    original: tokens before the scaling
    """

    kind: str
    factor: float | None
    original: int


@dataclass(frozen=True, slots=True)
class Context:
    """The context length of a model.

    positions: tokens, without scaling
    field:     the field that says so
    scalings:  of rotary positions, one or one for each kind of layer
    default:   max_model_len in tokens where nobody gives one; 0: the longest
    """

    positions: int
    field: str = "max_position_embeddings"
    scalings: tuple[Scaling, ...] = ()
    default: int = 0

    def longest(self, engine_version: str) -> tuple[int, str]:
        """The longest max_model_len in tokens that a version of vLLM takes, and what says so."""
        tokens, origin, factor, kind = self.positions, self.field, 1.0, ""
        for scaling in self.scalings:
            if scaling.kind in YARN and at_least(engine_version, (0, 30)):
                continue  # max_position_embeddings is the length after it
            if scaling.kind in (*LENGTHENING, *YARN):
                factor, kind = factor if scaling.factor is None else scaling.factor, scaling.kind
            if scaling.kind == "yarn":
                tokens, origin = scaling.original, "original_max_position_embeddings"
        if factor != 1:
            origin = f"{origin} {tokens}, times {factor:g} by its {kind} RoPE scaling"
        return int(tokens * factor), origin

    def derived(self, engine_version: str = "0.26.0") -> int:
        """The max_model_len in tokens of an engine that is given none."""
        return self.default or self.longest(engine_version)[0]


def context_of(config: Fields) -> Context:
    """Read the context length of a model. Raises ConfigError for fields that are broken or missing."""
    lengths = {name: config.integer(name) for name in LENGTHS if config.value(name) is not None}
    if config.value("model_max_length"):
        lengths = {"model_max_length": config.integer("model_max_length")}
    if not lengths:
        config.integer("max_position_embeddings")  # raises that it is missing
    field = min(lengths, key=lambda name: lengths[name])
    scalings = tuple(_scalings(config, lengths[field]))
    long = any(scaling.kind in LONGROPE for scaling in scalings)
    default = config.integer("original_max_position_embeddings", lengths[field]) if long else 0
    if "gemma3" in (config.word("model_type") or ""):
        scalings = ()  # its positions are those after the scaling
    return Context(lengths[field], field, scalings, default)


def _scalings(config: Fields, positions: int) -> Iterator[Scaling]:
    """Yield the scalings of a config, under either of their names, for all layers or for each kind of them."""
    for name in ("rope_scaling", "rope_parameters"):
        whole = config.inside(name)
        if whole is None or not whole.config:
            continue
        nested = any(isinstance(x, Mapping) for x in whole.config.values())
        for fields in [whole.inside(kind) for kind in whole.config] if nested else [whole]:
            if fields is not None:
                yield _scaling(fields, config, positions)
        return


def _scaling(fields: Fields, config: Fields, positions: int) -> Scaling:
    kind = fields.word("rope_type", TYPES) or fields.word("type", TYPES) or "default"
    factor = fields.number("factor", 1.0) if "factor" in fields.config else None
    if factor is None and kind in NEEDS_FACTOR:
        raise fields.error("factor", None, f"a number of at least 1, which a scaling of type {kind} needs")
    if factor is not None and factor < 1:
        raise fields.error("factor", factor, "a number of at least 1")
    # Where the config has the field outside of the scaling, too, that one counts (standardize_rope_params).
    original = fields.integer("original_max_position_embeddings", positions)
    return Scaling(kind, factor, config.integer("original_max_position_embeddings", original))
