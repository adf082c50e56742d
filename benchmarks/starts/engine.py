"""vLLM's start of engines on CUDA GPUs up to the first use of the device, asked on a CPU.

    python -m benchmarks.starts.engine CASES RESULTS

CASES and RESULTS are files with a JSON object a line. A case has `card` (the fields of cuda_platform.Card), `kv_bytes`
(the size of the KV cache), and `engine_args` and `env` as a plan emits them. A result has either `error` (type and
message) and `step`, the one that failed, or what an engine would run with:

attention:  classes of the attention layers' implementations, as fp8plan.runtime.apply.worker.facts has them
block_size: tokens in a block
num_blocks: blocks in the pool
cudagraph_mode: the mode that vLLM settles on
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_KIMI_K3_GEMM_AR": "0",  # its kernel needs a package of CUDA's, from 0.32 on
    "VLLM_ENABLE_GEMM_RS": "0",
}


def start_one_rank() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    meeting = tempfile.mkdtemp(prefix="fp8plan-start-")
    init_distributed_environment(1, 0, f"file://{meeting}/rank", 0, "gloo")
    initialize_model_parallel(1, 1)


class Start:
    """The start of one engine, a step at a time."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.step = "configuration"

    def run(self) -> dict[str, Any]:
        """Return a result of RESULTS."""
        from vllm.config import set_current_vllm_config

        try:
            config = self.configured()
            with set_current_vllm_config(config):
                self.step = "layers"
                layers = self.built(config)
                self.step = "blocks"
                blocks = self.blocks(config, layers)
                self.step = "CUDA graphs"
                mode = self.graphs(config, blocks)
            from fp8plan.runtime.apply.worker.facts import attention_classes
        except Exception as error:
            return {"step": self.step, "error": f"{type(error).__name__}: {error}"}
        return {
            "attention": attention_classes([layer for layer in layers.values() if hasattr(layer, "impl")]),
            "block_size": config.cache_config.block_size,
            "num_blocks": blocks.num_blocks,
            "cudagraph_mode": mode,
        }

    def configured(self) -> Any:
        from vllm import EngineArgs

        arguments = self.case["engine_args"] | {"load_format": "dummy", "skip_tokenizer_init": True}
        return EngineArgs(**arguments).create_engine_config()

    def built(self, config: Any) -> dict[str, Any]:
        """Build the model on no device, and return its layers that keep a cache."""
        import torch
        from vllm.config.vllm import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform

        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"), mock.patch("torch.cuda.Stream"), mock.patch("torch.cuda.Event"):
                self.model = initialize_model(config)
        finally:
            torch.set_default_dtype(before)
        current_platform.update_block_size_for_backend(config)
        return get_layers_from_vllm_config(config, AttentionLayerBase)

    def blocks(self, config: Any, layers: dict[str, Any]) -> Any:
        """The KV cache of the case's size, as vLLM's engine core plans it."""
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        kept = {name: spec for name, spec in specs.items() if spec is not None}
        if hasattr(config.cache_config, "kv_cache_layout"):  # from 0.30 on
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
            from vllm.v1.worker.worker_base import WorkerBase

            names = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
            resolve_kv_cache_layout(config, [names], kept.values())
        (blocks,) = get_kv_cache_configs(config, [kept], [self.case["kv_bytes"]])
        return blocks

    def graphs(self, config: Any, blocks: Any) -> str:
        """The part of vLLM's worker that compares kernels, blocks and CUDA graphs."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from vllm.v1.worker.utils import prepare_kernel_block_sizes

        runner = GPUModelRunner.__new__(GPUModelRunner)
        known = {
            "vllm_config": config,
            "compilation_config": config.compilation_config,
            "parallel_config": config.parallel_config,
            "speculative_config": None,
            "kv_cache_config": blocks,
            "attn_groups": [],
            "kv_sharing_fast_prefill_eligible_layers": set(),
            "uniform_decode_query_len": 1,
            "max_num_reqs": config.scheduler_config.max_num_seqs,
            "cudagraph_dispatcher": mock.MagicMock(),
            "model": self.model,
        }
        for name, value in known.items():
            setattr(runner, name, value)
        runner.initialize_attn_backend(blocks)
        prepare_kernel_block_sizes(blocks, runner.attn_groups)
        return str(config.compilation_config.cudagraph_mode.name)


def main(cases: str, results: str) -> None:
    """Start every case, and write its result."""
    gc.disable()  # it would look through all of torch and vLLM after each model
    os.environ.update(QUIET)
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="fp8plan-start-")
    import torch

    from benchmarks.starts import cuda_platform

    cuda_platform.install()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.workspace import init_workspace_manager

    registry._run_in_subprocess = lambda task: task()  # which would import vLLM for every family
    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        start_one_rank()
    init_workspace_manager(torch.device("meta"))
    before = dict(os.environ)
    with Path(results).open("w") as lines, cuda_platform.NoDevice():
        for line in Path(cases).read_text().splitlines():
            case = json.loads(line)
            began = time.perf_counter()
            other = cuda_platform.Card(**case["card"] | {"capability": tuple(case["card"]["capability"])})
            if other != cuda_platform.card:
                cuda_platform.set_card(other)
            os.environ.update(case["env"])
            result = Start(case).run()
            for name in case["env"].keys() - before.keys():
                os.environ.pop(name)
            print(json.dumps(result | {"seconds": time.perf_counter() - began}), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
