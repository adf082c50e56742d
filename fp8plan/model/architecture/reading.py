"""The reading of a config.json into the fields of a `ModelShape`, by the row of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.families import FAMILIES, REFUSED, SAME_AS, WRAPPERS
from fp8plan.model.architecture.family import Family, Unknown, layers, says
from fp8plan.model.architecture.held import held_layers
from fp8plan.model.configs import ADVICE
from fp8plan.model.configs.fields import NESTED, Fields, check_numbers, context_of, shown, worded
from fp8plan.model.precision import stored_format

# Fields of a config that mean a part, if their value is true. A family has the part only if its row lists the field
# (`Family.own`).
FOREIGN = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "index_topk": "sparse attention (token indexer)",
    "vision_config": "a vision tower (multimodal model)",
    "audio_config": "an audio tower (multimodal model)",
    "text_config": "a nested text model (multimodal model)",
    "is_encoder_decoder": "an encoder (encoder-decoder model)",
    "ssm_cfg": "state-space layers (Mamba)",
    "mamba_d_state": "state-space layers (Mamba)",
    "ssm_state_size": "state-space layers (Mamba)",
    "linear_num_key_heads": "linear attention layers (hybrid model)",
    "linear_attn_config": "linear attention layers (hybrid model)",
    "hybrid_override_pattern": "hybrid layers",
    "hybrid_layer_pattern": "hybrid layers",
    "attention_chunk_size": "chunked attention",
    "mlp_bias": "biases in the MLP (mlp_bias)",
}

TOWERS: Final = ("vision_config", "audio_config")

# Multimodal types whose older configs have the text model's fields at the top (transformers' config classes).
FLAT: Final = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")

# Multimodal types whose embeddings are tied if only the text model says so (their config classes, "BC: pre-v5").
TIED_BY_TEXT: Final = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl")

# Fields that published multimodal models leave to the config class of their text model (LLaVA: the sizes of Llama 7B).
NESTED_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
    "gemma": {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip

# Known models without a decoder.
ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")

IMAGES = "The text model alone is modelled; vLLM's work on images, video and sound is not."


def read_model(config: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """The fields of a ModelShape, except name and source.

    Raises ConfigError naming `source` and the field, or the part that is not known.
    """
    model_type = _model_type(config, source)
    config = {**config, "model_type": model_type}
    whole, config = config, _text_model(config, source)
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise _refused(source, _names(whole, config))
    field = Fields({**family.defaults, **config}, source)
    unknown = [text for key, text in family.missing.items() if field.value(key)]
    if missing := [*_foreign(config, family), *unknown]:
        raise _refused(source, missing)
    notes = [IMAGES] if whole is not config else []
    if (origin := Fields(whole, source).word("_note")) is not None:
        notes.append(origin)
    stored = stored_format(whole, name, source)
    hidden = field.integer("hidden_size")
    try:
        check_numbers(config, source)
        read = layers(field, family)
    except Unknown as error:
        raise _refused(source, [str(error)]) from None
    except ConfigError as error:
        raise _with_published(error, field, family) from None
    tied = field.value("tie_word_embeddings")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": field.integer("vocab_size"),
        "tie_word_embeddings": family.tied if tied is None else field.flag("tie_word_embeddings"),
        "context": context_of(field),
        "layers": read if stored is None else held_layers(read, stored, hidden, source),
        "stored": stored,
        "norm_vectors": family.norm_vectors,
        "lm_head_bias": says(field, family.lm_head_bias),
        "note": " ".join(notes),
    }


def _model_type(config: Mapping[str, Any], source: str) -> str:
    """The name of the architecture. Raises ConfigError if there is none, or it generates no text."""
    model_type = Fields(config, source).word("model_type", such_as="qwen3")
    if model_type is None and "_diffusers_version" in config:
        raise ConfigError(f"{source}: a part of a diffusers pipeline; fp8plan plans language models: {ADVICE}")
    if model_type is None:
        raise ConfigError(f"{source}: field 'model_type' is missing, which says the architecture; {ADVICE}")
    if model_type in ENCODERS:
        raise ConfigError(f"{source}: {model_type} is an encoder, and writes no text; {ADVICE} of a model that does")
    return SAME_AS.get(model_type, model_type)


def _text_model(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of the text model: a part of a known multimodal model's config, else all of it."""
    wrapper = config["model_type"]
    if wrapper not in WRAPPERS:
        return config
    levels = _levels(config, source)
    text = levels[-1].config
    if len(levels) == 1 and wrapper not in FLAT:
        purpose = f"fp8plan plans the text model of a {wrapper}, whose fields stand there"
        raise ConfigError(f"{source}: field 'text_config' is missing; {purpose}")
    if len(levels) == 1:
        text, model_type = {key: value for key, value in config.items() if key not in TOWERS}, WRAPPERS[wrapper]
    else:
        model_type = levels[-1].word("model_type", such_as=WRAPPERS[wrapper]) or WRAPPERS[wrapper]
    model_type = SAME_AS.get(model_type, model_type)
    defaults = NESTED_DEFAULTS.get(model_type, {}) if len(levels) > 1 else {}
    return {**defaults, **text, "model_type": model_type} | _tied(levels, wrapper)


def _levels(config: Mapping[str, Any], source: str) -> list[Fields]:
    """The config and those nested in it, down to the text model's."""
    levels = [Fields(config, source)]
    while nested := next((x for x in map(levels[-1].inside, NESTED) if x is not None), None):
        levels.append(nested)
    return levels


def _tied(levels: list[Fields], wrapper: str) -> dict[str, Any]:
    """The field that ties the embeddings, from the outermost level that has it; {} if none has."""
    name = "tie_word_embeddings"
    flags = [level.flag(name) for level in levels if level.value(name) is not None]
    if not flags:
        return {}
    return {name: any(flags) if wrapper in TIED_BY_TEXT else flags[0]}


def _foreign(config: Mapping[str, Any], family: Family) -> list[str]:
    """Names of parts in the config that its family does not have."""
    fields = (*family.own, family.mlp_bias)
    return list(dict.fromkeys(text for key, text in FOREIGN.items() if config.get(key) and key not in fields))


def _names(whole: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The unknown parts of a model whose family is unknown, by the features that its config names."""
    if reason := REFUSED.get(str(config.get("model_type"))):
        return [reason]
    kinds = config.get("layer_types")
    words = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    special = sorted(words - {"full_attention"})[:8]
    features = [text for key, text in FOREIGN.items() if config.get(key)]
    features += [f"{worded(kind)} layers" for kind in special]
    named = f"model_type {shown(config.get('model_type'))}"
    if whole is not config:
        named += f" (the text model of this {whole.get('model_type')})"
    return [f"{named}, whose config names {' and '.join(dict.fromkeys(features))}," if features else named]


def _refused(source: str, missing: list[str]) -> ConfigError:
    return ConfigError(
        f"{source}: {' and '.join(missing)} is not modelled; model types that are: {', '.join(FAMILIES)}. "
        "RolloutEngine.from_setup runs this model without a plan"
    )


def _with_published(error: ConfigError, field: Fields, family: Family) -> ConfigError:
    """The error, with the fields that this config lacks and every published config of its type has."""
    absent = [f"{key} {value}" for key, value in family.published.items() if field.value(key) is None]
    if not absent:
        return error
    return ConfigError(f"{error}; published {field.value('model_type')} configs have {' and '.join(absent)}: add it")
