"""Layer sizes that the real vLLM starts with in blockwise FP8, by the way the engine is told to quantise.

    python benchmarks/block_shapes.py OUTPUT.jsonl          # on a machine with a GPU and vLLM; about five minutes

A tensor-parallel shard is a smaller layer, so small models whose layers have a shard's size stand for shards of large
ones: `intermediate` 3696 is Qwen2.5-72B's at tensor_parallel_size 8, 192 the experts' of Qwen3-30B-A3B at 4. Each row
says what was asked, whether the engine started and generated, and else the first error. The rows are evidence for
`fp8plan.model.shards`, which foresees them.

online:     quantization="online" with fp8_per_block, as fp8plan's engine and `--emit vllm` ask for it
checkpoint: the quantization_config of a block-quantised checkpoint, as verl asks for it
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SIDE_BY_SIDE = 4
DENSE = {"hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "experts": 0}
MOE = DENSE | {"experts": 16}
SHAPES: dict[str, dict[str, int]] = {
    "dense": DENSE | {"intermediate": 1024},
    "dense, Qwen3-4B at TP 8": DENSE | {"intermediate": 1216},
    "dense, Qwen2.5-72B at TP 8": DENSE | {"intermediate": 3696},
    "dense, o_proj of 960": DENSE | {"intermediate": 1024, "heads": 15, "kv_heads": 15, "head_dim": 64},
    "dense, hidden 576": DENSE | {"intermediate": 1536, "hidden": 576},
    "dense, K and V of 64": DENSE | {"intermediate": 1024, "kv_heads": 1, "head_dim": 64},
    "moe": MOE | {"intermediate": 256},
    "moe, Qwen3-30B-A3B at TP 4": MOE | {"intermediate": 192},
    "moe, Qwen3-30B-A3B at TP 8": MOE | {"intermediate": 96},
    "moe, hidden 576": MOE | {"intermediate": 256, "hidden": 576},
}
WAYS = ("online", "checkpoint")


def config(shape: dict[str, int]) -> dict[str, Any]:
    """A config.json of Qwen3's or Qwen3-MoE's architecture with these sizes."""
    moe = shape["experts"] > 0
    return {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": 2,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | (
        {
            "num_experts": shape["experts"],
            "num_experts_per_tok": 4,
            "moe_intermediate_size": shape["intermediate"],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        }
        if moe
        else {}
    )


def quantised(way: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    if way == "online":
        from fp8plan.model.emit.vllm import ROUTER_PATTERN

        wanted = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": [ROUTER_PATTERN]}
        return {"quantization": "online", "quantization_config": wanted}
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"hf_overrides": {"quantization_config": blocks}}


def start(name: str, way: str) -> None:
    """Start one engine and generate; whatever vLLM raises ends this process."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(SHAPES[name])))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=512,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=1 << 30,
            **quantised(way),
        )
        prompts = [{"prompt_token_ids": list(range(2, 2 + length))} for length in (5, 40, 200, 300)]
        out = llm.generate(prompts, SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True), use_tqdm=False)
        steps = [next(iter(step.values())).logprob for one in out for step in one.outputs[0].logprobs]
        print("LOGPROBS", min(steps), max(steps))


def tried(case: tuple[str, str]) -> dict[str, Any]:
    """The row of one case, from a process of its own."""
    name, way = case
    done = subprocess.run([sys.executable, __file__, "--start", name, way], capture_output=True, text=True, timeout=400)
    log = done.stdout + done.stderr
    kernels = sorted(set(re.findall(r"Selected (\w+)|Using (\w+) Fp8 MoE backend", log)))
    errors = re.findall(r"(?:\w+Error|Exception): .*", log)
    row = {"case": name, "way": way, "started": done.returncode == 0, **SHAPES[name]}
    row |= {
        "kernels": ["".join(found) for found in kernels],
        "error": None if row["started"] else errors[:1] or log[-500:],
    }
    print(json.dumps(row), flush=True)
    return row


def main(output: Path) -> None:
    import torch
    import vllm

    machine = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip(),
        "engine": "vllm",
        "engine_version": vllm.__version__,
    }
    cases = [(name, way) for name in SHAPES for way in WAYS]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:  # the first alone: it compiles what the others use
        rows = [tried(cases[0]), *pool.map(tried, cases[1:])]
    output.write_text("".join(json.dumps(machine | row) + "\n" for row in rows))


if __name__ == "__main__":
    if sys.argv[1] == "--start":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        start(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
