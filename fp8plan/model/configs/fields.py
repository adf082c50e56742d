"""The typed reader of a config.json, and the context length: the longest max_model_len that vLLM allows for a model.

Every value of a config passes a check here before use. Sources of the context length: _get_and_verify_max_len in
vllm/config/model.py, and derive_max_model_len_and_key in vllm/transformers_utils/model_arch_config_convertor.py. The
`model_max_length` of a tokenizer_config.json does not count. vLLM reads it only for pooling models with
absolute positions (ModelConfig.get_and_verify_max_len).
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.version import DEFAULT_VERSION, has

# Names of a field in several families. The first that a config has counts.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),  # LongCat has both, and the latter is twice the former
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
}
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
# Fields of a multimodal config that hold the text model's config: in Qwen's Omni, in most, in InternVL (vLLM's
# _CONFIG_ATTRS_MAPPING), and in DeepSeek-VL2.
NESTED: Final = ("thinker_config", "text_config", "llm_config", "language_config")
MOST: Final = 10**12  # a larger size is a typo, and would not fit a float


class Fields:
    """Typed access to a config, with errors that name the file and the field.

    Every reader treats null as absent, and raises ConfigError for a value of another kind.
    """

    def __init__(self, config: Mapping[str, Any], source: str, path: str = "") -> None:
        self.config, self.source, self._path = config, source, path

    def value(self, name: str) -> Any:
        """The value of a field under any of its names, unchecked; None if it is absent or null."""
        return self.config.get(self._spelt(name))

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        field = f"{self._path}{self._spelt(name)}"
        return ConfigError(f"{self.source}: field {field!r} is {shown(value)}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number. Without a default, the field must be there."""
        value = self.value(name)
        layers = self.value("num_hidden_layers")
        if _numbers(value) and 0 < len(value) == layers and len(set(value)) == 1:
            value = value[0]  # the same for every layer (Hunyuan)
        if value is None:
            value = default
        if value is None:
            field = f"{self._path}{name}"
            raise ConfigError(f"{self.source}: field {field!r} is missing; fp8plan needs it as a whole number")
        if not _whole(value) or value < least:
            raise self.error(name, value, f"a whole number of at least {least}")
        if value > most:
            raise self.error(name, value, f"at most {most:,}")
        return int(value)

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number of at least 0."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise self.error(name, value, f"a number from 0 to {MOST:,}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, or 1 or 0."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self.error(name, value, "true or false")
        return bool(value)

    def word(self, name: str, choices: Sequence[str] = (), such_as: str = "") -> str | None:
        """A word, one of `choices` if there are any. such_as: an example for the error"""
        value = self.value(name)
        if value is not None and (not isinstance(value, str) or (choices and value not in choices)):
            example = f"a word, such as {such_as!r}" if such_as else "a word"
            raise self.error(name, value, " or ".join(choices) or example)
        return value

    def words(self, name: str, length: int, choices: Sequence[str] = ()) -> list[str] | None:
        """A list of `length` words, one for each layer, each one of `choices` if there are any."""
        value = self._per_layer(name, length, "words")
        for x in value or ():
            if not isinstance(x, str) or (choices and x not in choices):
                raise self.error(name, x, f"in the list: {' or '.join(choices) or 'words'}")
        return value

    def marks(self, name: str, length: int) -> list[bool] | None:
        """A list of `length` marks, one for each layer: 0 or 1, false or true."""
        value = self._per_layer(name, length, "marks")
        for x in value or ():
            if not isinstance(x, int) or x not in (0, 1):
                raise self.error(name, x, "in the list: 0 and 1")
        return None if value is None else [x == 1 for x in value]

    def indices(self, name: str, layers: int, first: int = 0) -> frozenset[int] | None:
        """A list of layer numbers, counted from `first`."""
        value = self.value(name)
        last = first + layers - 1
        if value is not None and not _numbers(value):
            raise self.error(name, value, f"a list of layer numbers from {first} to {last}")
        for x in value or ():
            if not first <= x <= last:
                raise self.error(name, x, f"in the list: layer numbers from {first} to {last}")
        return None if value is None else frozenset(value)

    def letters(self, name: str, length: int, choices: str) -> str | None:
        """A word of `length` letters, one for each layer."""
        value = self.value(name)
        if value is not None and not (isinstance(value, str) and len(value) == length and set(value) <= set(choices)):
            raise self.error(name, value, f"{length} of the letters {' '.join(choices)}, one for each layer")
        return value

    def by_layer(self, name: str, layers: int) -> dict[int, Fields] | None:
        """The fields of single layers, in a mapping by their number from 0."""
        whole = self.inside(name)
        if whole is None:
            return None
        for key in whole.config:
            if not re.fullmatch("[0-9]{1,9}", str(key)) or int(key) >= layers:
                raise self.error(name, key, f"as its keys: layer numbers from 0 to {layers - 1}")
        return {int(key): whole.inside(key) or Fields({}, self.source) for key in whole.config}

    def inside(self, name: str) -> Fields | None:
        """The fields of a mapping inside of the config."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "a mapping of fields")
        return Fields(value, self.source, f"{self._path}{self._spelt(name)}.")

    def _per_layer(self, name: str, length: int, kind: str) -> list[Any] | None:
        value: list[Any] | None = self.value(name)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            long = f", which has {len(value)}" if isinstance(value, list) else ""
            raise self.error(name, value, f"a list of {length} {kind}, one for each layer{long}")
        return value

    def _spelt(self, name: str) -> str:
        return next((other for other in SYNONYMS.get(name, ()) if self.config.get(other) is not None), name)


def check_numbers(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError naming the field if a number of the config is NaN, which Python reads although JSON has none.

    Infinity is refused only in fields that are read: Mamba's published configs have it as a limit (time_step_limit).
    """
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += ((str(name), x) for name, x in value.items())
        elif isinstance(value, list):
            waiting += ((field, x) for x in value)
        elif isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{source}: field {field!r} is NaN; allowed: a number")


def shown(value: object) -> str:
    """A value in a few words, even if it is long or deep."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "a number of thousands of digits"


def worded(word: str) -> str:
    """A config's word as it stands in a sentence: an identifier unchanged, other text shortened and quoted."""
    return word if word.isidentifier() and len(word) < 60 else shown(word)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: object) -> bool:
    """True for a list of whole numbers."""
    return isinstance(value, list) and all(map(_whole, value))


# Fields that bound the positions. The smallest counts, unless there is a model_max_length.
LENGTHS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Types of RoPE scaling that vLLM knows (layers/rotary_embedding, get_rope; patch_legacy_rope_type). The `factor` of the
# first group lengthens the context. YaRN's did so before 0.30.
LENGTHENING: Final = ("default", "linear", "dynamic", "ntk", "mrope", "proportional", "mllama4", "openpangu", "xdrope")
YARN: Final = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
LONGROPE: Final = ("longrope", "su")
NEEDS_FACTOR: Final = ("linear", "dynamic", "yarn")  # required by transformers (validate_rope)
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
    field:     the config's field for them
    scalings:  one for all rotary positions, or one for each kind of layer
    default:   max_model_len in tokens of an engine without a limit; 0: the longest
    """

    positions: int
    field: str = "max_position_embeddings"
    scalings: tuple[Scaling, ...] = ()
    default: int = 0

    def longest(self, engine_version: str) -> tuple[int, str]:
        """The longest max_model_len in tokens that a version of vLLM allows, and the fields that it comes from."""
        tokens, origin, factor, kind = self.positions, self.field, 1.0, ""
        for scaling in self.scalings:
            if scaling.kind in YARN and has(engine_version, "yarn scales max_position_embeddings"):
                continue  # max_position_embeddings includes the scaling
            if scaling.kind in (*LENGTHENING, *YARN):
                factor, kind = factor if scaling.factor is None else scaling.factor, scaling.kind
            if scaling.kind == "yarn":
                tokens, origin = scaling.original, "original_max_position_embeddings"
        if factor != 1:
            origin = f"{origin} {tokens}, times {factor:g} by its {kind} RoPE scaling"
        return int(tokens * factor), origin

    def derived(self, engine_version: str = DEFAULT_VERSION) -> int:
        """The max_model_len in tokens of an engine without a limit."""
        return self.default or self.longest(engine_version)[0]


def context_of(config: Fields) -> Context:
    """The context length of a model. Raises ConfigError for broken or missing fields."""
    lengths = {name: config.integer(name) for name in LENGTHS if config.value(name) is not None}
    if config.value("model_max_length"):
        lengths = {"model_max_length": config.integer("model_max_length")}
    if not lengths:
        config.integer("max_position_embeddings")  # raises ConfigError
    field = min(lengths, key=lambda name: lengths[name])
    scalings = tuple(_scalings(config, lengths[field]))
    long = any(scaling.kind in LONGROPE for scaling in scalings)
    default = config.integer("original_max_position_embeddings", lengths[field]) if long else 0
    if "gemma3" in (config.word("model_type") or ""):
        scalings = ()  # its positions include the scaling
    return Context(lengths[field], field, scalings, default)


def _scalings(config: Fields, positions: int) -> Iterator[Scaling]:
    """Yield the scalings of a config, under either of their names, for all layers or for each kind of layer."""
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
    # A field beside the scaling takes precedence over one inside it (standardize_rope_params).
    original = fields.integer("original_max_position_embeddings", positions)
    return Scaling(kind, factor, config.integer("original_max_position_embeddings", original))
