"""A config.json turned into the layers of a `ModelShape`, by the row of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.families import FAMILIES, REFUSED, SAME_AS, WRAPPERS
from fp8plan.model.architecture.family import Family, Unknown, layers, says
from fp8plan.model.configs.context import context_of
from fp8plan.model.configs.fields import Fields, check_numbers, shown, worded
from fp8plan.model.configs.places import ADVICE

# config.json keys whose presence (with a true value) means a part that changes weights, KV cache or cost, and that only
# the families have whose row says so (`Family.own`).
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

# Known models without a decoder.
ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")

# What a checkpoint holds beside the text model that vLLM runs.
IMAGES = "The text model alone is modelled: what vLLM spends on images, video and sound is not."


def read_model(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of the ModelShape that a config describes, without its name. Raises ConfigError naming `source` and
    the field, or the part that is not known.
    """
    model_type = _model_type(config, source)
    config = {**config, "model_type": model_type}
    whole, config = config, _text_model(config, source)
    family = FAMILIES.get(Fields(config, source).word("model_type") or model_type)
    if family is None:
        raise _refused(source, _names(whole, config))
    field = Fields({**family.defaults, **config}, source)
    if missing := [*_foreign(config, family), *_missing(field, family)]:
        raise _refused(source, missing)
    if whole.get("quantization_config"):
        raise ConfigError(
            f"{source}: this checkpoint is already quantised (quantization_config). fp8plan compares precisions from "
            "the BF16 weights: name the BF16 model instead, e.g. Qwen/Qwen3-8B for Qwen/Qwen3-8B-FP8, or give a folder "
            "whose config.json lacks quantization_config, as that of a BF16 copy does"
        )
    hidden = field.integer("hidden_size")
    try:
        check_numbers(config, source)
        found = layers(field, family)
    except Unknown as error:
        raise _refused(source, [str(error)]) from None
    tied = field.value("tie_word_embeddings")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": field.integer("vocab_size"),
        "tie_word_embeddings": family.tied if tied is None else field.flag("tie_word_embeddings"),
        "context": context_of(field),
        "layers": found,
        "norm_vectors": family.norm_vectors,
        "lm_head_bias": says(field, family.lm_head_bias),
        "logit_softcap": field.number("final_logit_softcapping"),
        "note": IMAGES if whole is not config else "",
    }


def _model_type(config: Mapping[str, Any], source: str) -> str:
    """The name of the architecture. Raises ConfigError if there is none, or one that generates no text."""
    model_type = Fields(config, source).word("model_type")
    if model_type is None and "_diffusers_version" in config:
        raise ConfigError(f"{source}: a part of a diffusers pipeline; fp8plan plans language models: {ADVICE}")
    if model_type is None:
        raise ConfigError(f"{source}: field 'model_type' is missing, which says the architecture; {ADVICE}")
    if model_type in ENCODERS:
        raise ConfigError(f"{source}: {model_type} is an encoder, and writes no text; {ADVICE} of a model that does")
    return SAME_AS.get(model_type, model_type)


def _text_model(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of the text model: the nested one of a multimodal model that is known, else the whole."""
    inside = Fields(config, source).inside("text_config") if config.get("model_type") in WRAPPERS else None
    if inside is None:
        return config
    text = inside.config
    # Where the wrapper says whether embeddings are tied, it is right: Qwen3-VL's text config has no such field.
    tied = config.get("tie_word_embeddings")
    return text if tied is None else {**text, "tie_word_embeddings": tied}


def _foreign(config: Mapping[str, Any], family: Family) -> list[str]:
    """Names of the parts that a config asks for and its family does not have."""
    own = (*family.own, family.mlp_bias)
    return list(dict.fromkeys(text for key, text in FOREIGN.items() if config.get(key) and key not in own))


def _missing(field: Fields, family: Family) -> Iterator[str]:
    """Names of the parts that a family may have and that are not known."""
    return (text for key, text in family.missing.items() if field.value(key))


def _names(whole: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What is not known of a model of an unknown family, by the features that its config names."""
    if reason := REFUSED.get(str(config.get("model_type"))):
        return [reason]
    kinds = config.get("layer_types")
    words = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    others = sorted(words - {"full_attention"})[:8]
    features = [text for key, text in FOREIGN.items() if whole.get(key)] + [f"{worded(kind)} layers" for kind in others]
    named = f"model_type {shown(whole.get('model_type'))}"
    return [f"{named}, whose config names {' and '.join(dict.fromkeys(features))}," if features else named]


def _refused(source: str, missing: list[str]) -> ConfigError:
    return ConfigError(
        f"{source}: {' and '.join(missing)} is not modelled; model types that are: {', '.join(FAMILIES)}. "
        "RolloutEngine.from_setup runs this model without a plan"
    )
