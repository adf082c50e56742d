"""Run verl's GRPO with fp8plan's rollouts, and the same command without them beside it.

    python -m benchmarks.gpu.verl_grpo --output verl_grpo.jsonl                       # one GPU, Qwen3-1.7B's layers
    python -m benchmarks.gpu.verl_grpo --gpus 2 --tensor-parallel 2 --output verl_grpo.jsonl
    python -m benchmarks.gpu.verl_grpo --gpus 2 --mode separate_async --output verl_grpo.jsonl

All parts are the real `python -m verl.trainer.main_ppo` on the same random weights, prompts and seeds: "stock" with
rollout.name=vllm in BF16, "fp8plan" with the plugin's line and a precision, "bf16" with that line in BF16, which tells
FP8's gain from that of fewer outputs. Nothing is downloaded: the model's folder, a tokenizer of numbered words, the
prompts, the reward (verl_reward.py) and the sampler (verl_sampler.py) are made here. Rows, by "what":

    command  the words of main_ppo
    step     step and rollout seconds, reward, KL, thresholds and the other figures that verl logged for a step
    done     seconds of the whole part
    failed   the same of a part that did not come to its end; how it has ended, and the end of its log

On a machine without a registry: verl_bundle.sh. flash-attn is not needed.

`--dry-run` makes the files, composes verl's configuration and prints the words, which works without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from benchmarks.gpu import process, verl_reward
from benchmarks.gpu.run_file import name_model
from benchmarks.gpu.source import source_hash
from fp8plan.errors import ConfigError
from fp8plan.jsonl import now, write
from fp8plan.model.configs import find_config
from fp8plan.runtime.measure.machine import gpu_facts

PARTS: Final = ("stock", "bf16", "fp8plan")
PROMPT, BATCH, SAMPLES = 64, 32, 8  # tokens, prompts, responses to each
WORDS: Final = 32  # of a prompt
VOCABULARY: Final = 8192
CPUS: Final = 64  # that Ray counts: verl's stores and workers ask for one each, and wait for ever where there are fewer

# Figures of a step that are kept, by verl's names. Those of fp8plan are all kept.
KEPT: Final = (
    "timing_s/step", "timing_s/gen", "timing_s/update_weights", "timing_s/old_log_prob", "timing_s/adv",
    "timing_s/update_actor", "critic/score/mean", "response_length/mean", "rollout_corr/kl", "rollout_corr/k3_kl",
    "training/off_policy/trajectory_staleness/mean", "training/off_policy/trajectory_spans/mean",
    "rollout_corr/rollout_is_mean", "training/rollout_probs_diff_mean", "actor/entropy", "actor/grad_norm",
)  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.verl_grpo", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B", help="whose config.json gets random weights; or a folder")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="words of the model, instead of its own")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--target-kl", type=float, help="KL k3 above which thresholds tighten; the plan's")
    parser.add_argument("--mode", choices=("sync", "colocate_async", "separate_async"), default="sync")
    parser.add_argument("--gpus", type=int, default=1, help="with separate_async one of them trains, the others sample")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--response", type=int, default=512, help="tokens of a response at most")
    parser.add_argument("--micro-batch", type=int, default=16, help="responses that are trained at once")
    parser.add_argument("--memory", type=float, help="share of a GPU for an engine; 0.4, of its own GPU 0.8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=720.0, help="after which a part is ended")
    parser.add_argument("--folder", type=Path, help="for the model and the prompts; kept, and used again")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(words)
    folder = (options.folder or Path(mkdtemp(prefix="verl-grpo-"))).absolute()
    make(folder, options.model, options.vocabulary)
    for part in options.parts:
        line = command(part, folder, options)
        if options.dry_run:
            print(json.dumps({"what": "command", "part": part, "words": compose(line)}))
        else:
            run(part, line, folder, options)


def make(folder: Path, model: str, vocabulary: int) -> None:
    """Make the model's folder and the prompts, unless they are there. vocabulary: words of the model

    Raises ConfigError for a folder with another model.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**find_config(model)[0] | {"vocab_size": vocabulary})
    if (folder / "prompts.parquet").is_file():
        present = AutoConfig.from_pretrained(folder / "model")
        if sizes(present) != sizes(config):
            raise ConfigError(
                f"{folder} has a model of (layers, width, words) {sizes(present)}, and {sizes(config)} is asked for; "
                "give another --folder"
            )
        return
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tokenizer_of(config.vocab_size).save_pretrained(folder / "model")
    rows = [prompt(number) for number in range(64 * BATCH)]
    Dataset.from_list(rows).to_parquet(folder / "prompts.parquet")


def sizes(config: Any) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.hidden_size, config.vocab_size


def tokenizer_of(size: int) -> Any:
    """A tokenizer of `size` words: "w7" is token 7. verl looks for a newline and the end of a turn among Qwen's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {f"w{number}": number for number in range(size - 3)}
    names |= {"\n": size - 3, "<pad>": size - 2, "<|im_end|>": size - 1}
    words = Tokenizer(models.WordLevel(names, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    return tokenizer


def prompt(number: int) -> dict[str, Any]:
    """A row of verl's dataset."""
    text = " ".join(f"w{(7 * number + word) % 1000}" for word in range(WORDS))
    return {
        "data_source": "numbered words",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number},
    }


def command(part: str, folder: Path, options: Any) -> list[str]:
    """The words after `python -m verl.trainer.main_ppo`: one command for all parts, but for the plugin's."""
    separate = options.mode == "separate_async"
    trains = 1 if separate else options.gpus
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": options.response,
        "data.seed": 0,
        "reward.custom_reward_function.path": verl_reward.__file__,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": False,  # that needs flash-attn
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        # Without it and flash-attn verl 0.9.1 takes log-probs token by token in Python: 34 s of a step of 43 s.
        "actor_rollout_ref.model.use_fused_kernels": True,
        f"{actor}.optim.lr": 1e-5,
        f"{actor}.ppo_mini_batch_size": BATCH // 4 if separate else BATCH,
        f"{actor}.ppo_micro_batch_size_per_gpu": options.micro_batch,
        f"{actor}.use_kl_loss": False,
        f"{rollout}.n": SAMPLES,
        f"{rollout}.tensor_model_parallel_size": options.tensor_parallel,
        f"{rollout}.gpu_memory_utilization": options.memory or (0.8 if separate else 0.4),
        f"{rollout}.max_model_len": PROMPT + options.response,
        f"{rollout}.max_num_seqs": BATCH * SAMPLES,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": options.micro_batch,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.name": "vllm",
        "ray_kwargs.ray_init.num_cpus": CPUS,
        "trainer.v1.trainer_mode": options.mode,
        "trainer.n_gpus_per_node": trains,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_training_steps": options.steps,
        "trainer.default_local_dir": folder / part,
    }
    if separate:
        settings |= {
            f"{rollout}.nnodes": 1,
            f"{rollout}.n_gpus_per_node": options.gpus - 1,
            f"{rollout}.checkpoint_engine.backend": "nccl",
            "actor_rollout_ref.hybrid_engine": False,
        }
    if options.mode == "sync":  # the other modes have a sampler of their own
        settings["trainer.v1.sampler.custom_sampler.path"] = Path(__file__).with_name("verl_sampler.py")
        settings["trainer.v1.sampler.custom_sampler.name"] = "Impatient"
    if options.tensor_parallel > 1:  # its workspace wants NVLink multicast, which is off where this was written
        settings[f"+{rollout}.engine_kwargs.vllm.compilation_config"] = "{pass_config:{fuse_allreduce_rms:false}}"
    if part != "stock":
        ours = f"+{rollout}.custom.fp8plan"
        settings |= {f"{rollout}.name": "fp8plan", f"{ours}.choice": precision(part, options), f"{ours}.accept": "high"}
        settings[f"{ours}.run_file"] = folder / f"{part}.run.jsonl"
        if options.target_kl:
            settings |= {f"{ours}.thresholds": "level", f"{ours}.target_kl": options.target_kl}
    return [f"{name}={value}" for name, value in settings.items()]


def precision(part: str, options: Any) -> str:
    return options.precision if part == "fp8plan" else "bf16"


def compose(words: list[str]) -> list[str]:
    """The words, once verl's own configuration has taken them."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        hydra_compose("ppo_trainer", overrides=words)
    return words


def run(part: str, words: list[str], folder: Path, options: Any) -> None:
    """Run a part to its end, and write its rows."""
    log, figures = folder / f"{part}.log", folder / f"{part}.jsonl"
    figures.unlink(missing_ok=True)
    env = os.environ | {"VERL_FILE_LOGGER_PATH": str(figures), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    env["VERL_LOGGING_LEVEL"] = "WARNING"  # verl 0.9.1's separate_async dies of one of its lines at INFO
    about = {"part": part, "mode": options.mode, "gpus": options.gpus, "precision": precision(part, options)}
    about |= {"model": options.model, "vocabulary": options.vocabulary, "response": options.response}

    def note(what: str, **figures: Any) -> None:
        write(options.output, {"what": what} | about | figures)

    versions = {name: version(name) for name in ("verl", "vllm", "torch")}
    note("command", date=now(), **gpu_facts(), words=words, source=source_hash(), versions=versions)
    begun = time.perf_counter()
    failed = process.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], log, options.limit_s, env)
    seconds = time.perf_counter() - begun
    name_model(folder / f"{part}.run.jsonl", folder / "model", options.model)
    rows = steps_of(figures)
    for row in rows:
        note("step", **row)
    failure = {"error": failed, "log": log.read_text(errors="replace")[-6000:]} if failed else {}
    note("failed" if failed else "done", seconds=seconds, steps=len(rows), **failure)


def steps_of(figures: Path) -> list[dict[str, Any]]:
    """The figures that are kept of each step in verl's log."""
    lines = figures.read_text().splitlines() if figures.is_file() else []
    return [{"step": row["step"]} | kept(row["data"]) for row in map(json.loads, lines)]


def kept(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in data.items() if name in KEPT or name.startswith("fp8plan/")}


if __name__ == "__main__":
    main()
