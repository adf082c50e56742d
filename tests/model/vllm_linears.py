"""The linears that vLLM itself builds from families' configs, on the meta device.

It runs in a process of its own because vLLM fills the process with its groups.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.network_utils import get_open_port


def config_of(folder: Path) -> Any:
    ignored, online = folder / "ignored.json", {}
    if ignored.is_file():
        linears = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": json.loads(ignored.read_text())}
        online = {"quantization": "online", "quantization_config": linears}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **online,
        enforce_eager=True, max_model_len=128, enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip


def matrices(model: torch.nn.Module) -> list[list[int]]:
    found: Counter[tuple[int, int, bool]] = Counter()
    for name, module in model.named_modules():
        quantised = "Fp8PerBlock" in type(getattr(module, "quant_method", None)).__name__
        quantised |= getattr(module, "weight", None) is not None and module.weight.dtype == torch.float8_e4m3fn
        if (
            isinstance(module, LinearBase | torch.nn.Linear)
            and "lm_head" not in name
            and "conv" not in name.rpartition(".")[2]
        ):
            found[*module.weight.shape, quantised] += 1
        elif type(module).__name__.endswith("RoutedExperts"):
            for weight in (module.w13_weight, module.w2_weight):
                found[*weight.shape[1:], quantised] += 1
    return [[*key, number] for key, number in found.items()]


def main(result: str, *folders: str) -> None:
    """Write one line of JSON for each folder to the file `result`.

    It is a list of [rows, columns, quantised, how many], of all linears but convolutions and lm_head, and of each
    layer's one expert. A folder has a config.json, and the patterns of linears that are not quantised as a list in
    ignored.json. Without that file vLLM builds the checkpoint as it is stored.
    """
    # Kernels of FP8 checkpoints are chosen while linears are made, and a CPU has not all of them.
    for module in (fp8, modelopt, compressed_tensors_w8a8_fp8):
        module.init_fp8_linear_kernel = MagicMock()
    # The first folder's model has experts: vLLM makes their process group only for such a model.
    with open(result, "w") as lines:
        for number, folder in enumerate(folders):
            config = config_of(Path(folder))
            with set_current_vllm_config(config):
                if number == 0:
                    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                    initialize_model_parallel(1, 1)
                with torch.device("meta"):
                    print(json.dumps(matrices(initialize_model(config))), file=lines)
