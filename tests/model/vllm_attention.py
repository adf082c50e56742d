"""vLLM's own choice of attention kernels for CUDA GPUs, asked on a CPU: print it as JSON.

    python tests/model/vllm_attention.py '[[major, minor], ...]' '[head size, ...]'

The GPUs are those of benchmarks/starts/cuda_platform.py.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.starts import cuda_platform


def chosen(capabilities: list[list[int]], heads: list[int]) -> list[dict[str, Any]]:
    """Return a row for each GPU, head size, dtype and sinks: the kernel that vLLM prefers, None if it has none."""
    cuda_platform.install()
    from vllm.platforms import current_platform, interface
    from vllm.v1.attention.selector import AttentionSelectorConfig

    rows = []
    for capability in capabilities:
        cuda_platform.set_card(cuda_platform.Card((capability[0], capability[1])))
        for head, dtype, sinks in itertools.product(heads, ("auto", "fp8"), (False, True)):
            config = AttentionSelectorConfig(
                head_size=head, dtype=torch.bfloat16, kv_cache_dtype=dtype, block_size=16, has_sink=sinks
            )
            valid, _ = current_platform.get_valid_backends(interface.DeviceCapability(*capability), config, 8)
            best = min(valid, key=lambda each: each.priority, default=None)
            name = None if best is None else best.backend.name
            row = {"capability": capability, "head": head, "fp8": dtype == "fp8", "sinks": sinks, "backend": name}
            rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(chosen(json.loads(sys.argv[1]), json.loads(sys.argv[2]))))
