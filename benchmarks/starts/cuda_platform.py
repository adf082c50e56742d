"""vLLM's CUDA platform with a card that is not there: `install` it before vLLM is imported, then `set_card`.

The compiled parts that a CPU lacks are stubs. FlashAttention says which of its versions a GPU runs, as
vllm/vllm_flash_attn/flash_attn_interface.py does. FlashInfer is installed, and can load its kernels. CUTLASS says which
GPUs it runs on, as csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu does for CUDA 13.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

FLASH_ATTENTION = "vllm.vllm_flash_attn"
FLASH_VERSIONS = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10)}  # -> major compute capabilities
CUTLASS = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: 90 <= capability < 110,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "mxfp4_experts_quant_supported": lambda capability: 100 <= capability < 110,
}
COMPILED = ("_c", "_moe", "vllm_")  # how torch's names of vLLM's compiled operations begin


@dataclass(frozen=True)
class Card:
    """A GPU as vLLM asks for it. product: as nvidia-smi names it"""

    capability: tuple[int, int]
    memory_bytes: int = 80 << 30
    product: str = "NVIDIA GPU"
    sms: int = 132


card = Card((9, 0))


class NoDevice(TorchFunctionMode):
    """Tensors for the GPU are made without memory, on torch's meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = kwargs | {"device": _off_the_gpu(kwargs["device"])}
        if function is torch.Tensor.to:
            args = tuple(map(_off_the_gpu, args))
        return function(*args, **kwargs)


def _off_the_gpu(value: Any) -> Any:
    named = isinstance(value, torch.device | str) and str(value).partition(":")[0] == "cuda"
    return torch.device("meta") if named else value


class Stub(types.ModuleType):
    """A module of which every name exists."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder:
    """An importer that finds a Stub for each module of the packages in PACKAGES."""

    PACKAGES = (
        *("flashinfer", "torchvision", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", FLASH_ATTENTION),
        *("vllm._flashmla_C", "vllm._flashmla_extension_C", "vllm.third_party.flashmla", "vllm.third_party.deep_gemm"),
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == package or name.startswith(f"{package}.") for package in self.PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: Stub) -> None:
        pass


def install() -> None:
    """Make the CUDA platform vLLM's own. Its models, and kernels of Triton, are then those of a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Triton then stays in use without a driver (triton_utils/importing.py)
    torch.version.cuda = "13.0"
    import transformers.models.auto.image_processing_auto  # looks for torchvision's version

    assert transformers
    sys.meta_path.insert(0, Finder())
    import vllm.platforms
    from vllm.platforms import cuda, interface

    vllm.platforms.vllm_version_matches_substr = lambda word: False  # this build is no longer the one for CPUs

    class Platform(cuda.CudaPlatformBase):
        get_device_capability = _answer(lambda: interface.DeviceCapability(*card.capability))
        get_device_name = _answer(lambda: card.product)
        get_device_total_memory = _answer(lambda: card.memory_bytes)
        get_device_uuid = _answer(lambda: "GPU-0")
        num_compute_units = _answer(lambda: card.sms)
        is_fully_connected = _answer(lambda: True)
        is_integrated_gpu = _answer(lambda: False)
        device_count = _answer(lambda: 8)
        current_device = _answer(lambda: torch.device("cuda", 0))

    vllm.platforms._current_platform = Platform()
    import vllm._custom_ops  # describes the operations that this build has, before all others seem to exist

    assert vllm._custom_ops
    _compile()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    torch.compile = lambda function=None, **kwargs: function if function else torch.compile  # nothing will run
    flash = importlib.import_module(f"{FLASH_ATTENTION}.flash_attn_interface")
    flash.is_fa_version_supported = lambda version, *_: card.capability[0] in FLASH_VERSIONS[version]
    flash.fa_version_unsupported_reason = lambda *_: "stub"
    flashinfer = importlib.import_module("vllm.utils.flashinfer")
    flashinfer.has_nvidia_artifactory = lambda: True
    flashinfer.force_use_trtllm_attention = lambda: None


def _answer(ask: Callable[[], Any]) -> Any:
    """A method of a platform that answers so, whichever device is meant."""
    return classmethod(lambda cls, *args, **kwargs: ask())


def _compile() -> None:
    """Let every operation of vLLM's compiled parts exist."""
    namespace = type(torch.ops._C)
    existing = namespace.__getattr__

    def operation(self: Any, name: str) -> Any:
        try:
            return existing(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.lower().startswith(COMPILED):
                raise
            return CUTLASS.get(name) or MagicMock(name=name)

    namespace.__getattr__ = operation


def set_card(other: Card) -> None:
    """Put another card in. What vLLM remembers of the one before is forgotten."""
    global card
    card = other
    for value in _values():
        if hasattr(type(value), "cache_clear"):
            value.cache_clear()
    if deep_gemm := sys.modules.get("vllm.utils.deep_gemm"):
        deep_gemm.DeepGemmQuantScaleFMT._oracle_cache = None
    for module in map(sys.modules.get, (f"vllm.model_executor.{name}" for name in OF_BLOCKS)):
        if module is not None:
            number = 10 * other.capability[0] + other.capability[1]
            module.CUTLASS_BLOCK_FP8_SUPPORTED = CUTLASS["cutlass_scaled_mm_supports_block_fp8"](number)


OF_BLOCKS = ("kernels.linear.scaled_mm.cutlass", "layers.quantization.utils.w8a8_utils")  # set while they are imported


def _values() -> Iterator[Any]:
    """The values of vLLM's modules, and of their classes."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or isinstance(module, Stub):
            continue
        for value in list(vars(module).values()):
            yield value
            if isinstance(value, type) and value.__module__.startswith("vllm"):
                yield from (getattr(method, "__func__", method) for method in list(vars(value).values()))
