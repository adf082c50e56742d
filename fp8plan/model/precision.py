"""Formats of weights and KV cache: those that vLLM makes from a BF16 checkpoint, and those of FP8 checkpoints.

vLLM (0.30) takes the quantisation of a checkpoint from the first of these fields that is not null:
- `quantization_config` of config.json;
- hf_quant_config.json beside it, which `find_config` adds to the config (transformers_utils/config.py, get_config);
- `compression_config`, from older versions of compressed-tensors;
- the same fields of the text model (model_arch_config_convertor.py, get_quantization_config).
Any other format is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, Literal, TypeAlias

from fp8plan.errors import ConfigError
from fp8plan.model.configs import QUANT_FILE, bf16_twin
from fp8plan.model.configs.fields import NESTED

BF16_BYTES = 2
FP8_BYTES = 1
FP32_BYTES = 4

# E4M3 "fn": 4 exponent bits, 3 mantissa bits, no infinities (OCP OFP8 specification, table 1).
E4M3_MAX = 448.0
E4M3_MANTISSA_BITS = 3

Weights: TypeAlias = Literal["bf16", "fp8_block", "fp8_tensor", "fp8_channel"]


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats in which a rollout engine stores weights and KV cache.

    name:    preset name, as the command line spells it
    weights: "bf16", or "fp8_block": E4M3 weights with one FP32 scale per `weight_block`, activations quantised per
             1 x weight_block[1] group by the engine. Only checkpoints have "fp8_tensor" (one scale per matrix) and
             "fp8_channel" (one per row); their activations have one scale per token or one for all
    kv:      "bf16" or "fp8" (E4M3, one scale per layer and K/V)
    uses_fp8: weights or KV are FP8
    in_blocks: weights have one scale per block
    gemm_dtype: the key of the quantised linears' GEMM tables in a profile
    kv_element_bytes: bytes of one K or V element (the per-layer scales are a few bytes in all)
    """

    name: str
    weights: Weights
    kv: Literal["bf16", "fp8"]
    weight_block: tuple[int, int] = (128, 128)
    uses_fp8: bool = field(init=False, repr=False, compare=False)
    in_blocks: bool = field(init=False, repr=False, compare=False)
    gemm_dtype: str = field(init=False, repr=False, compare=False)
    kv_element_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole_scales = self.weights in ("fp8_tensor", "fp8_channel")
        object.__setattr__(self, "uses_fp8", self.weights != "bf16" or self.kv != "bf16")
        object.__setattr__(self, "in_blocks", self.weights == "fp8_block")
        object.__setattr__(self, "gemm_dtype", "fp8" if whole_scales else self.weights)
        object.__setattr__(self, "kv_element_bytes", FP8_BYTES if self.kv == "fp8" else BF16_BYTES)

    def linear_bytes(self, n: int, k: int, quantised: bool) -> int:
        """Bytes of one (n, k) weight matrix; quantised: the engine quantises this layer."""
        if self.weights == "bf16" or not quantised:
            return n * k * BF16_BYTES
        scales = n if self.weights == "fp8_channel" else 1
        if self.in_blocks:
            rows, columns = self.weight_block
            scales = ceil(n / rows) * ceil(k / columns)
        return n * k * FP8_BYTES + scales * FP32_BYTES


BF16 = Precision("bf16", "bf16", "bf16")
FP8_BLOCK = Precision("fp8_block", "fp8_block", "bf16")
FP8_KV = Precision("fp8_kv", "bf16", "fp8")
FP8_BLOCK_KV = Precision("fp8_block+fp8_kv", "fp8_block", "fp8")

PRESETS: dict[str, Precision] = {p.name: p for p in (BF16, FP8_BLOCK, FP8_KV, FP8_BLOCK_KV)}

_STORED_ONLY: Final[tuple[Weights, ...]] = ("fp8_tensor", "fp8_channel")
STORED_PRESETS: dict[str, Precision] = {  # formats that only checkpoints hold
    p.name: p
    for weights in _STORED_ONLY
    for p in (Precision(weights, weights, "bf16"), Precision(f"{weights}+fp8_kv", weights, "fp8"))
}


def find_precision(name: str) -> Precision:
    """The preset of this name, in any case. Raises ConfigError if there is none."""
    try:
        return (PRESETS | STORED_PRESETS)[name.lower()]
    except KeyError:
        stored = f"and for FP8 checkpoints {', '.join(STORED_PRESETS)}"
        raise ConfigError(f"unknown precision {name!r}; allowed: {', '.join(PRESETS)}, {stored}") from None


def presets_of(weights: Weights) -> tuple[Precision, Precision]:
    """The presets with these weights, with a KV cache in BF16 and in FP8."""
    bf16, fp8 = (p for p in (PRESETS | STORED_PRESETS).values() if p.weights == weights)
    return bf16, fp8


Config: TypeAlias = Mapping[str, Any]  # not checked yet

SPELLINGS: Final = ("quantization_config", QUANT_FILE, "compression_config")
BLOCK: Final = [128, 128]
E4M3: Final = ("e4m3", "float8_e4m3fn")
UE8M0: Final = "ue8m0"  # the scale_fmt of scales that are powers of two

_KINDS: Final[Mapping[Weights, str]] = {
    "fp8_block": "blocks of 128 x 128",
    "fp8_tensor": "one scale for a matrix",
    "fp8_channel": "one scale for each row",
}


class Unplanned(ValueError):
    """A quantisation that fp8plan does not plan; the message names it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The format of an FP8 checkpoint.

    method:  vLLM's name of the method: "fp8", "compressed-tensors" or "modelopt"
    weights: as in Precision
    in_bf16: modules in BF16: names, patterns with *, or regular expressions after "re:"
    kv_fp8:  the checkpoint asks for an FP8 KV cache, which vLLM uses unless another dtype is given
    e8m0:    scales are powers of two
    twin:    the bundled BF16 model of the same name; "" if there is none
    """

    method: str
    weights: Weights
    in_bf16: tuple[str, ...] = ()
    kv_fp8: bool = False
    e8m0: bool = False
    twin: str = ""

    @property
    def label(self) -> str:
        """The format in words."""
        return f"FP8 ({self.method}, {_KINDS[self.weights]})"

    @property
    def precisions(self) -> tuple[Precision, Precision]:
        """The precisions that vLLM can run it in."""
        return presets_of(self.weights)

    def why_not(self, precision: Precision) -> str | None:
        """The reason why vLLM cannot run it in `precision`; None if it can."""
        if precision.weights == self.weights:
            return None
        names = ", ".join(x.name for x in self.precisions)
        held = f"the checkpoint holds its weights in {self.label}"
        return f"{held}; allowed: {names}; to compare, plan {self.bf16_model} too"

    @property
    def bf16_model(self) -> str:
        """The BF16 model that it was made from, in words if the name is not known."""
        return self.twin or "the BF16 model that it was made from"

    @property
    def not_synced(self) -> str:
        """The reason why trainers cannot sync weights into it."""
        return (
            f"the checkpoint holds its weights in {self.label}, and fp8plan syncs BF16 weights, which vLLM quantises; "
            f"name {self.bf16_model}, or serve this one (--emit vllm)"
        )


def stored_format(config: Config, name: str, source: str) -> Stored | None:
    """The format of an FP8 checkpoint; None for one in BF16.

    name: the checkpoint's, as on the hub or of its folder

    Raises ConfigError naming the method for any other quantisation.
    """
    if (known := quantisation(config)) is None:
        return None
    where, fields = known
    twin = bf16_twin(name)
    try:
        if not isinstance(fields, Mapping):
            raise Unplanned(f"not fields but {fields!r:.40}")
        return _read(fields, twin)
    except Unplanned as error:
        without = f"without {QUANT_FILE}" if where == QUANT_FILE else f"whose config.json lacks {where}"
        raise refused(source, f"{where}: {error}", twin, without) from None


def is_planned(config: Config) -> bool:
    """True for a checkpoint in BF16, or in a format of FP8 that fp8plan plans."""
    try:
        stored_format(config, "", "")
    except ConfigError:
        return False
    return True


def refused(source: str, what: str, twin: str, without: str) -> ConfigError:
    """The error for an unplanned quantisation. without: words for a folder that can be planned"""
    named = f" ({twin})" if twin else ", e.g. Qwen/Qwen3-8B for Qwen/Qwen3-8B-AWQ"
    return ConfigError(
        f"{source}: this checkpoint is already quantised ({what}). fp8plan plans checkpoints in BF16, and those in FP8 "
        f"of fp8, compressed-tensors and modelopt: name the BF16 model instead{named}, or give a folder {without}, as "
        "that of a BF16 copy does"
    )


def quantisation(config: Config) -> tuple[str, Any] | None:
    """The field that describes the quantisation of weights, and its value; None if no field does."""
    for name in SPELLINGS:
        if (value := config.get(name)) is not None:
            return None if value == {} else (name, value)  # an empty field ends the search in vLLM too
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
    """vllm/model_executor/layers/quantization/fp8.py, Fp8Config. It needs whole names (`is_layer_skipped`)."""
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
        e8m0=fields.get("scale_fmt") == UE8M0,
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
    """vllm/.../modelopt.py: ModelOptQuantConfigBase.from_config, and `resolve` for the meaning of quant_algo."""
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
    """True if the arguments of compressed-tensors describe symmetric FP8."""
    fields = arguments if isinstance(arguments, Mapping) else {}
    return fields.get("type") == "float" and fields.get("num_bits") == 8 and fields.get("symmetric") is not False


def _is_static_fp8(arguments: Any) -> bool:
    return _is_fp8(arguments) and not arguments.get("dynamic")


def _of_attention(targets: Any) -> bool:
    """True for a group that describes attention's cache. vLLM reads that format from kv_cache_scheme instead."""
    return isinstance(targets, list) and len(targets) == 1 and str(targets[0]).endswith("Attention")


def _names(listed: Any) -> tuple[str, ...]:
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise Unplanned(f"a list of modules that is {listed!r:.40}")
    return tuple(listed)
