"""The format in which a checkpoint stores its weights: BF16, or one of the FP8 formats that the cost model knows.

vLLM (0.30) takes the quantisation from the first of these that is not null: `quantization_config` of config.json;
hf_quant_config.json beside it, which `find_config` puts there (transformers_utils/config.py, get_config); and
`compression_config`, which older files of compressed-tensors have; then from these of the text model
(model_arch_config_convertor.py, get_quantization_config). What is quantised otherwise is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from fp8plan.errors import ConfigError
from fp8plan.model.configs import QUANT_FILE, bundled_configs
from fp8plan.model.configs.fields import NESTED
from fp8plan.model.precision import Precision, Weights, presets_of

Config: TypeAlias = Mapping[str, Any]  # not checked yet

SPELLINGS: Final = ("quantization_config", QUANT_FILE, "compression_config")
BLOCK: Final = [128, 128]
E4M3: Final = ("e4m3", "float8_e4m3fn")

# The end of a quantised checkpoint's name, as people write it.
_SUFFIX: Final = re.compile(
    r"-(fp8|fp4|nvfp4|mxfp4|mxfp8|awq|gptq|int[48]|w[48]a(4|8|16)|bnb|[48]bit|gguf|quantized)\b.*", re.IGNORECASE
)
_KINDS: Final[Mapping[Weights, str]] = {
    "fp8_block": "blocks of 128 x 128",
    "fp8_tensor": "one scale for a matrix",
    "fp8_channel": "one scale for each row",
}


class Unplanned(ValueError):
    """The name of a format that is not planned."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The format of an FP8 checkpoint.

    method:  "fp8", "compressed-tensors" or "modelopt", as vLLM calls it
    weights: as in Precision
    in_bf16: its list of modules that are in BF16: names, patterns with *, or regular expressions after "re:"
    kv_fp8:  it asks for an FP8 KV cache, and vLLM takes one unless it is told another dtype
    e8m0:    its scales are powers of two
    twin:    the bundled BF16 model of its name; "" if there is none
    """

    method: str
    weights: Weights
    in_bf16: tuple[str, ...] = ()
    kv_fp8: bool = False
    e8m0: bool = False
    twin: str = ""

    @property
    def label(self) -> str:
        """The format as a sentence names it."""
        return f"FP8 ({self.method}, {_KINDS[self.weights]})"

    @property
    def precisions(self) -> tuple[Precision, Precision]:
        """The precisions in which vLLM runs it."""
        return presets_of(self.weights)

    def why_not(self, precision: Precision) -> str | None:
        """The reason why vLLM does not run it in `precision`; None if it does."""
        if precision.weights == self.weights:
            return None
        names = ", ".join(x.name for x in self.precisions)
        held = f"the checkpoint holds its weights in {self.label}"
        return f"{held}; allowed: {names}; to compare, plan {self.bf16_model} too"

    @property
    def bf16_model(self) -> str:
        """The BF16 model that it was made from, as far as that is known."""
        return self.twin or "the BF16 model that it was made from"

    @property
    def not_synced(self) -> str:
        """The reason why no trainer can have it as its rollout engine here."""
        return (
            f"the checkpoint holds its weights in {self.label}, and fp8plan syncs BF16 weights, which vLLM quantises; "
            f"name {self.bf16_model}, or serve this one (--emit vllm)"
        )


def stored_format(config: Config, source: str) -> Stored | None:
    """The format of an FP8 checkpoint; None for one in BF16. Raises ConfigError, which names the method, for weights
    that are quantised otherwise.

    source: of the config, as a path or a hub id that ends in the model's name and the file's
    """
    known = quantisation(config)
    if known is None:
        return None
    where, fields = known
    twin = bf16_twin(Path(source).parent.name)
    try:
        if not isinstance(fields, Mapping):
            raise Unplanned(f"not fields but {fields!r:.40}")
        return _read(fields, twin)
    except Unplanned as error:
        without = f"without {QUANT_FILE}" if where == QUANT_FILE else f"whose config.json lacks {where}"
        raise refused(source, f"{where}: {error}", twin, without) from None


def refused(source: str, what: str, twin: str, without: str) -> ConfigError:
    """The error for a checkpoint that is quantised in another way than those that are planned.

    without: what a folder must be to be planned
    """
    named = f" ({twin})" if twin else ", e.g. Qwen/Qwen3-8B for Qwen/Qwen3-8B-AWQ"
    return ConfigError(
        f"{source}: this checkpoint is already quantised ({what}). fp8plan plans checkpoints in BF16, and those in FP8 "
        f"of fp8, compressed-tensors and modelopt: name the BF16 model instead{named}, or give a folder {without}, as "
        "that of a BF16 copy does"
    )


def bf16_twin(name: str) -> str:
    """The bundled model whose quantised checkpoint has this name, such as Qwen3-8B-FP8; "" if there is none."""
    short = _SUFFIX.sub("", name).lower()
    if short == name.lower():
        return ""
    return next((known for known in bundled_configs() if known.rpartition("/")[2].lower() == short), "")


def quantisation(config: Config) -> tuple[str, Any] | None:
    """The field that says how weights are quantised, and its value; None where nothing is said."""
    for name in SPELLINGS:
        if (value := config.get(name)) is not None:
            return None if value == {} else (name, value)  # an empty one ends the search in vLLM too
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping) and (known := quantisation(inner)):
            return f"{name}.{known[0]}", known[1]
    return None


def _read(fields: Config, twin: str) -> Stored:
    method = str(fields.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    inner = fields.get("quantization")
    if method == "modelopt" or (not method and ("quant_algo" in fields or isinstance(inner, Mapping))):
        return _modelopt(inner if isinstance(inner, Mapping) else fields, twin)
    if method == "fp8":
        return _fp8(fields, twin)
    if method == "compressed-tensors":
        return _compressed(fields, twin)
    raise Unplanned(f"quant_method {method!r}" if method else "no quant_method")


def _fp8(fields: Config, twin: str) -> Stored:
    """vllm/model_executor/layers/quantization/fp8.py, Fp8Config. Names must be whole there (`is_layer_skipped`)."""
    scheme, block, dtype = fields.get("activation_scheme"), fields.get("weight_block_size"), fields.get("fmt") or "e4m3"
    if scheme not in ("static", "dynamic"):
        raise Unplanned(f"fp8 with activation_scheme {scheme!r}, where vLLM takes static and dynamic")
    if dtype not in E4M3:
        raise Unplanned(f"fp8 with fmt {dtype!r}")
    for name in ("store_dtype", "modules_to_convert"):
        if fields.get(name):
            raise Unplanned(f"fp8 with {name} {fields[name]!r:.40}")
    if block is not None and (block != BLOCK or scheme != "dynamic"):
        raise Unplanned(f"fp8 with weight_block_size {block!r:.40} and {scheme} activations")
    return Stored(
        "fp8",
        "fp8_tensor" if block is None else "fp8_block",
        _names(fields.get("ignored_layers") or fields.get("modules_to_not_convert")),
        e8m0=fields.get("scale_fmt") == "ue8m0",
        twin=twin,
    )


def _compressed(fields: Config, twin: str) -> Stored:
    """vllm/.../compressed_tensors.py: CompressedTensorsConfig.from_config and _is_fp8_w8a8."""
    groups = fields.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        raise Unplanned("compressed-tensors without config_groups")
    groups = [group for group in groups if not _of_attention(group.get("targets"))]
    schemes = {_scheme(group) for group in groups}
    if len(schemes) != 1:
        raise Unplanned(f"compressed-tensors with {len(schemes)} schemes for weights")
    for group in groups:
        if group.get("targets") != ["Linear"]:
            raise Unplanned(f"compressed-tensors for targets {group.get('targets')!r:.60}, where Linear is planned")
    for name in ("sparsity_config", "transform_config"):
        if fields.get(name):
            raise Unplanned(f"compressed-tensors with a {name}")
    cache = fields.get("kv_cache_scheme")
    if cache and not _is_static_fp8(cache):
        raise Unplanned("compressed-tensors with a KV cache that is not FP8 with scales of its own")
    return Stored("compressed-tensors", schemes.pop(), _names(fields.get("ignore")), kv_fp8=bool(cache), twin=twin)


def _scheme(group: Config) -> Weights:
    """The format of the weights of one group."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not _is_static_fp8(weights):
        kind = f"{weights.get('num_bits')}-bit {weights.get('type')}" if isinstance(weights, Mapping) else "no"
        raise Unplanned(f"compressed-tensors with {kind} weights")
    if not isinstance(inputs, Mapping):
        raise Unplanned("compressed-tensors with FP8 weights and 16-bit activations")
    if not _is_fp8(inputs):
        raise Unplanned("compressed-tensors with FP8 weights and activations that are not FP8")
    strategy, dynamic = weights.get("strategy"), bool(inputs.get("dynamic"))
    if strategy == "block" and weights.get("block_structure") in (BLOCK, "128x128") and dynamic:
        return "fp8_block"
    if strategy in ("tensor", "channel") and (dynamic or inputs.get("strategy") == "tensor"):
        return "fp8_tensor" if strategy == "tensor" else "fp8_channel"
    by = inputs.get("strategy")
    raise Unplanned(f"compressed-tensors with FP8 weights by {strategy!r:.40} and activations by {by!r:.40}")


def _modelopt(fields: Config, twin: str) -> Stored:
    """vllm/.../modelopt.py: ModelOptQuantConfigBase.from_config, and `resolve` for what each quant_algo is."""
    algorithm = str(fields.get("quant_algo") or "").upper()
    formats: dict[str, Weights] = {
        "FP8": "fp8_tensor",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
        "FP8_PB_WO": "fp8_block",
    }
    if algorithm not in formats:
        raise Unplanned(f"modelopt with quant_algo {fields.get('quant_algo')!r:.40}")
    in_bf16 = _names(fields.get("exclude_modules") or fields.get("ignore"))
    if not any(re.fullmatch(r"\*?lm_head\*?", name) for name in in_bf16):
        raise Unplanned("modelopt with a quantised lm_head")
    cache = fields.get("kv_cache_scheme") or fields.get("kv_cache_quant_algo")
    fp8_cache = _is_static_fp8(cache) if isinstance(cache, Mapping) else str(cache).upper() == "FP8"
    if cache and not fp8_cache:
        raise Unplanned(f"modelopt with a KV cache in {cache!r:.40}")
    return Stored("modelopt", formats[algorithm], in_bf16, kv_fp8=fp8_cache, twin=twin)


def _is_fp8(arguments: Any) -> bool:
    """Tell whether the arguments of compressed-tensors describe symmetric FP8."""
    fields = arguments if isinstance(arguments, Mapping) else {}
    return fields.get("type") == "float" and fields.get("num_bits") == 8 and fields.get("symmetric") is not False


def _is_static_fp8(arguments: Any) -> bool:
    return _is_fp8(arguments) and not arguments.get("dynamic")


def _of_attention(targets: Any) -> bool:
    """Tell whether a group is about an attention's cache, which vLLM takes from kv_cache_scheme instead."""
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")


def _names(listed: Any) -> tuple[str, ...]:
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise Unplanned(f"a list of modules that is {listed!r:.40}")
    return tuple(listed)
