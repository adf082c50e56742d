"""A CPU as verl's platform: verl has none, so its transport asks CUDA to wait. VERL_USE_EXTERNAL_MODULES names it, by
which verl imports it in each of its processes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


class Cpu(PlatformCUDA):
    """verl's platform for CUDA, less what needs a GPU. Weights go through shared memory."""

    @property
    def device_module(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)

    def is_ipc_supported(self) -> bool:
        return False


platform_manager._current_platform = Cpu()
