"""vLLM's own choice of attention kernels for CUDA GPUs, asked on a CPU: print it as JSON.

    python tests/model/vllm_attention.py '[[major, minor], ...]' '[head size, ...]'

The compiled parts that a CPU lacks are stubs: FlashAttention says which of its versions a GPU runs, as
vllm/vllm_flash_attn/flash_attn_interface.py does, and FlashInfer is installed and can load its kernels.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

FLASH_ATTENTION = "vllm.vllm_flash_attn"


class Stub(types.ModuleType):
    """A module of which every name exists."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder:
    """An importer that finds a Stub for each module of the packages in PACKAGES."""

    PACKAGES = ("flashinfer", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", FLASH_ATTENTION)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == package or name.startswith(f"{package}.") for package in self.PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: Stub) -> None:
        pass


def chosen(capabilities: list[list[int]], heads: list[int]) -> list[dict[str, Any]]:
    """Return a row for each GPU, head size, dtype and sinks: the kernel that vLLM prefers, None if it has none."""
    sys.meta_path.insert(0, Finder())
    from vllm.platforms import cuda, interface
    from vllm.v1.attention.selector import AttentionSelectorConfig

    cuda.CudaPlatformBase.is_fully_connected = None
    flash = importlib.import_module(f"{FLASH_ATTENTION}.flash_attn_interface")
    current = [(9, 0)]

    class Platform(cuda.CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*current[-1])

    import vllm.platforms

    vllm.platforms._current_platform = Platform()
    flash.is_fa_version_supported = lambda version, *_: {2: True, 3: current[-1][0] == 9, 4: current[-1][0] in (9, 10)}[
        version
    ]
    flash.fa_version_unsupported_reason = lambda *_: "stub"
    names = [f"vllm.v1.attention.backends.{name}" for name in ("flash_attn", "flashinfer", "fa_utils")]
    modules = [*map(importlib.import_module, names), importlib.import_module("vllm.utils.flashinfer")]
    for module in modules:
        for name, value in {
            "current_platform": vllm.platforms._current_platform,
            "has_nvidia_artifactory": lambda: True,
            "is_flash_attn_varlen_func_available": lambda: True,
            "is_fa_version_supported": flash.is_fa_version_supported,
            "force_use_trtllm_attention": lambda: None,
        }.items():
            if hasattr(module, name):
                setattr(module, name, value)
    rows = []
    for capability, head, dtype, sinks in itertools.product(capabilities, heads, ("auto", "fp8"), (False, True)):
        current.append((capability[0], capability[1]))
        for module in modules:
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()
        config = AttentionSelectorConfig(
            head_size=head, dtype=torch.bfloat16, kv_cache_dtype=dtype, block_size=16, has_sink=sinks
        )
        valid, _ = Platform.get_valid_backends(interface.DeviceCapability(*capability), config, 8)
        best = min(valid, key=lambda each: each.priority, default=None)
        name = None if best is None else best.backend.name
        rows.append({"capability": capability, "head": head, "fp8": dtype == "fp8", "sinks": sinks, "backend": name})
    return rows


if __name__ == "__main__":
    print(json.dumps(chosen(json.loads(sys.argv[1]), json.loads(sys.argv[2]))))
