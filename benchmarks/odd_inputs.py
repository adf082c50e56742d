"""The odd inputs of issue 38, given to `fp8plan` as a user would, with the answer of each.

    python benchmarks/odd_inputs.py --checkout DIR --label before     run the package of another checkout
    python benchmarks/odd_inputs.py --label after                     run this one

Each run replaces the rows of its label in results/odd_inputs.jsonl. docs/evidence/odd_inputs.md shows both labels.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import before_after
from before_after import FOLDER, ROOT, Example, Files, Show, lines

RESULTS = FOLDER / "odd_inputs.jsonl"
CONFIGS = ROOT / "fp8plan" / "model" / "configs"
SMALL = ("--prompts", "4", "--samples", "4", "--prompt-lengths", "fixed:64", "--response-lengths", "fixed:128")


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A bundled config with some fields changed; a field that is None goes."""
    fields = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {key: value for key, value in fields.items() if value is not None and not key.startswith("_")}


def folder(fields: dict[str, Any] | str, **others: Any) -> Files:
    """A model's folder: config.json, and other JSON files by their names without the ending."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return {"config.json": text} | {f"{name}.json": json.dumps(value) for name, value in others.items()}


def planned(*more: str, model: str = "MODEL", gpu: str = "h200", small: bool = True) -> tuple[str, ...]:
    """A command that prints a plan as JSON."""
    return ("plan", model, "--gpu", gpu, *(SMALL if small else ()), *more, "--json")


def default(model_type: str) -> dict[str, Any]:
    """The config of transformers' class for a model type, unchanged."""
    from transformers import AutoConfig

    fields: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    return fields


# Parts of an answer


def precisions(done: subprocess.CompletedProcess[str]) -> str:
    """The chosen precision, and those that can run."""
    plan = json.loads(done.stdout)
    able = [choice["precision"] for choice in plan["choices"] if choice["available"]]
    return f"plans {', '.join(able)}; chooses {plan['choices'][plan['chosen']]['precision']}"


def limits(done: subprocess.CompletedProcess[str]) -> str:
    """The engine's limits that a plan counts on."""
    chosen = json.loads(done.stdout)["limits"]
    names = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    return ", ".join(f"{name} {chosen[name]}" for name in names)


def pools(done: subprocess.CompletedProcess[str]) -> str:
    """Preemptions and rollout seconds of every precision that can run."""
    able = [choice for choice in json.loads(done.stdout)["choices"] if choice["available"]]
    rows = [
        f"{x['precision']} {x['makespan_s']:,.0f} s ({x['makespan_low_s']:,.0f}-{x['makespan_high_s']:,.0f}), "
        f"{x['preemptions']:,} preemptions"
        for x in able
    ]
    return "; ".join(rows)


def first_lines(number: int) -> Show:
    return lambda done: " ".join(" ".join(done.stdout.splitlines()[:number]).split())


QWEN, LLAMA, DEEPSEEK = "Qwen--Qwen3-8B", "meta-llama--Llama-3.1-8B", "deepseek-ai--DeepSeek-V2-Lite"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MODEL_OPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
W4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
GLM = config("zai-org--GLM-4.5-Air", first_k_dense_replace=None)
OLD_LLAMA = config(LLAMA, max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0})
VISION = {
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 32},
    "tie_word_embeddings": False,
    **{key: value for key, value in config("Qwen--Qwen2.5-7B").items() if key not in ("model_type", "architectures")},
}
NEW_VISION = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, "tie_word_embeddings": False}
NEW_VISION["text_config"] = config("Qwen--Qwen2.5-7B", model_type="qwen2_5_vl_text")

# Default configs of transformers' classes that commit fc49034 refused.
DEFAULTS = (
    *("bamba", "deepseek_v2", "deepseek_v4", "dots1", "flex_olmo", "gemma4", "glm4_moe", "jamba", "longcat_flash"),
    *("minimax", "mistral4", "qwen2_5_vl"),
)
ROLLOUT = {
    "model": "Qwen/Qwen3-1.7B", "gpu": "h200_sxm", "engine_version": "0.26.0", "precision": "bf16", "metrics": {},
    "prompt_lengths": [512] * 64, "response_lengths": [1024] * 64, "prefix_caching": False,
}  # fmt: skip
RUN = "\n".join(json.dumps(ROLLOUT | {"step": n, "seconds": s}) for n, s in ((1, 27.0), (2, 2.4), (3, 2.5)))

VERDICT = (
    "import dataclasses; from fp8plan.runtime.guard.guard import Verdict\n"
    "print('its field is named', next(x.name for x in dataclasses.fields(Verdict) if x.name in ('within', 'as_fast')))"
)
NO_FCNTL = (
    "import sys; sys.modules['fcntl'] = None\n"
    "import fp8plan; w = fp8plan.Workload(4, 4, fp8plan.Fixed(64), fp8plan.Fixed(128))\n"
    "p = fp8plan.plan('Qwen/Qwen3-8B', 'h200', w); print('plans', p.choices[p.chosen].precision)"
)
SHORT = ("--prompts", "128", "--samples", "8", "--prompt-lengths", "fixed:256", "--response-lengths", "fixed:200")
STARVED = ("--prompts", "128", "--samples", "16", "--response-lengths", "fixed:4096")


def examples() -> Iterator[Example]:
    """The inputs that issue 38 names, point by point."""
    stored = {
        "Qwen3-8B with compression_config (compressed-tensors, 4 bits)": folder(config(QWEN, compression_config=W4)),
        "Qwen3-8B with quantization_config (AWQ)": folder(
            config(QWEN, quantization_config={"quant_method": "awq", "bits": 4})
        ),
        "Qwen3-8B with hf_quant_config.json (ModelOpt FP8)": folder(config(QWEN), hf_quant_config=MODEL_OPT),
        "Qwen3-8B with hf_quant_config.json (ModelOpt NVFP4)": folder(
            config(QWEN), hf_quant_config={"quantization": {"quant_algo": "NVFP4"}}
        ),
        "Gemma 3 with text_config.quantization_config (GPTQ)": folder(
            {
                "model_type": "gemma3",
                "text_config": config(
                    "google--gemma-3-12b-it", quantization_config={"quant_method": "gptq", "bits": 4}
                ),
            }
        ),
        "Qwen3-8B-FP8: blocks of 128x128": folder(
            config(QWEN, quantization_config=FP8 | {"weight_block_size": [128, 128]})
        ),
        "Qwen3-8B, FP8 per tensor, static activations": folder(
            config(QWEN, quantization_config=FP8 | {"activation_scheme": "static"})
        ),
    }
    yield from (Example(1, title, planned(), files, precisions) for title, files in stored.items())
    yield Example(
        1,
        "Llama of 4,096 tokens, RoPE linear x4, --max-model-len 16384",
        planned("--max-model-len", "16384"),
        folder(OLD_LLAMA),
        precisions,
    )
    yield Example(
        1,
        "Qwen3-8B, RoPE linear x2, --max-model-len 61024",
        planned("--max-model-len", "61024"),
        folder(config(QWEN, rope_scaling={"rope_type": "linear", "factor": 2.0})),
        precisions,
    )
    facts: dict[str, Files] = {
        "moe_layer_freq shorter than the layers": folder(config(DEEPSEEK, moe_layer_freq=[0, 1])),
        "moe_layer_freq longer than the layers": folder(config(DEEPSEEK, moe_layer_freq=[1] * 99)),
        'moe_layer_freq of strings ("0")': folder(config(DEEPSEEK, moe_layer_freq=["0"] + ["1"] * 26)),
        "mlp_only_layers out of range": folder(config("Qwen--Qwen3-30B-A3B", mlp_only_layers=[99, -1])),
        "mlp_layer_types of another length": folder(config("zai-org--GLM-4.5-Air", mlp_layer_types=["sparse"] * 99)),
        "head_dim 1": folder(config(QWEN, head_dim=1)),
        "head_dim 7": folder(config(QWEN, head_dim=7)),
        "NaN in a size": folder(config(QWEN, head_dim=float("nan"))),
        "text_config.model_type is a list": folder(
            {"model_type": "gemma3", "text_config": config("google--gemma-3-12b-it", model_type=["gemma3_text"])}
        ),
        "config.json nested 100,000 deep": folder('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    }
    yield from (Example(1, title, planned(), files, precisions) for title, files in facts.items())
    lfm2 = default("lfm2") | {"num_hidden_layers": 16, "full_attn_idxs": [2, 40], "layer_types": None}
    yield Example(1, "full_attn_idxs out of range", planned(), folder(lfm2), precisions)
    yield Example(
        1,
        "Qwen3-8B, model_max_length 131072 in tokenizer_config.json, --max-model-len 131072",
        planned("--max-model-len", "131072"),
        folder(config(QWEN), tokenizer_config={"model_max_length": 131072}),
        precisions,
    )
    yield Example(1, "a model name of 5,000 characters", planned(model="x" * 5000))
    yield Example(1, "the model ~nouser/x", planned(model="~nouser/x"))
    yield Example(
        2,
        "--max-num-batched-tokens 512",
        planned("--max-num-batched-tokens", "512", model="Qwen/Qwen3-8B"),
        show=limits,
    )
    for share in ("1", "0.99"):
        yield Example(
            2,
            f"--gpu-memory-utilization {share}",
            planned("--gpu-memory-utilization", share, model="Qwen/Qwen3-8B"),
            show=limits,
        )
    yield Example(
        3,
        "Qwen3-8B on an A100 whose KV cache is short",
        planned(*STARVED, model="Qwen/Qwen3-8B", gpu="a100", small=False),
        show=pools,
    )
    doubtful = ("plan", "Qwen/Qwen2.5-7B", "--gpu", "l40s")
    yield Example(4, "Qwen2.5-7B on an L40S: the headline", doubtful, show=lines("- Choose"))
    yield Example(4, "Qwen2.5-7B on an L40S: the table's row", doubtful, show=lines("^> fp8_block .*x"))
    yield Example(4, "the verdict on a rollout faster than predicted", ("-c", VERDICT), show=lambda done: done.stdout)
    for name in ("4090", "a100-80gb", "A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "my-card"):
        yield Example(5, f"--gpu '{name}'", planned(model="Qwen/Qwen3-1.7B", gpu=name), show=precisions)
    sheet = "datasheet:memory_gib=24,bandwidth_gb_s=1008,bf16_tflops=165,fp8_tflops=330,sms=128,compute_capability=8.9"
    yield Example(5, f"--gpu {sheet}", planned(model="Qwen/Qwen3-1.7B", gpu=sheet), show=precisions)
    short = ("plan", "Qwen/Qwen2.5-1.5B", "--gpu", "h200", *SHORT)
    yield Example(
        6, "--emit trl, short answers: stderr", (*short, "--emit", "trl"), show=lines("with|Stay|Choose", "stderr")
    )
    yield Example(6, "--emit trl: stdout", (*short, "--emit", "trl"), show=first_lines(4))
    yield Example(
        6,
        "--emit verl: the batch size",
        (*short, "--emit", "verl"),
        show=lines("train_batch_size"),
    )
    yield Example(7, "qwen2_5_vl, fields of the text model on top", planned(), folder(VISION), precisions)
    yield Example(7, "qwen2_5_vl, nested text model", planned(), folder(NEW_VISION), precisions)
    yield Example(7, "GLM-4.5-Air without first_k_dense_replace", planned(gpu="b200"), folder(GLM), precisions)
    yield Example(
        7,
        "an unknown multimodal type around Qwen3",
        planned(),
        folder({"model_type": "new_vl", "vision_config": {"depth": 2}, "text_config": config(QWEN)}),
        precisions,
    )
    for name in DEFAULTS:
        options = {"gemma4": ("--no-prefix-caching",), "longcat_flash": ("--tensor-parallel-size", "8")}.get(name, ())
        title = " ".join((f"the default config of {name}", *options))
        yield Example(7, title, planned(*options, gpu="b200"), folder(default(name)), precisions)
    yield Example(
        8,
        "validate: a run whose first rollout took 27 s, the others 2.5 s",
        ("validate", "MODEL/run.jsonl", "--json"),
        {"run.jsonl": RUN},
        lambda done: f"counts {len(json.loads(done.stdout)['records'])} rollouts",
    )
    yield Example(9, "fp8plan.plan without fcntl (Windows)", ("-c", NO_FCNTL), show=lambda done: done.stdout.strip())
    yield Example(
        9,
        "a LoRA folder",
        planned(),
        {"adapter_config.json": json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA"})},
    )
    yield Example(9, "a .gguf file", planned(model="MODEL/model.gguf"), {"model.gguf": "GGUF"})
    yield Example(
        9, "a byte-order mark in config.json", planned(), folder("\ufeff" + json.dumps(config(QWEN))), precisions
    )
    for name in ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B/"):
        yield Example(9, f"the model {name}", planned(model=name), show=precisions)
    slower = ("plan", "Qwen/Qwen2.5-1.5B", "--gpu", "h200", *SMALL[:4], "--response-lengths", "fixed:1024")
    yield Example(9, "sentences on slower precisions", slower, show=lines("quantising|would be|slower"))


def table() -> str:
    """The committed answers, before and after, as Markdown."""
    return before_after.table(RESULTS)


if __name__ == "__main__":
    before_after.main(__doc__, examples(), RESULTS)
