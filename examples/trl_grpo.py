"""TRL's GRPOTrainer with an engine that fp8plan plans, on a CPU: `plan="auto"` and a run file are all that is added.

    python examples/trl_grpo.py [run.jsonl]       two minutes; then: fp8plan monitor run.jsonl

The task is made up: an answer is worth the share of its words that are even numbers. The model starts random.
"""

import logging
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from apply_to_vllm import held_back, random_model
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

import fp8plan

with held_back():  # what vLLM writes; an exception names the file
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer

WORDS, STEPS = 1024, 12


class OneLine(TrainerCallback):
    """Prints a line for each step, in the place of all that the trainer logs."""

    def on_log(self, args: object, state: Any, control: object, logs: Mapping[str, float], **_: object) -> None:
        if "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.3f}, KL {logs['fp8plan/k3_kl']:.1e}", flush=True)


def share_of_even(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def main(run_file: str) -> None:
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=256, per_device_train_batch_size=64, num_generations=8, max_completion_length=16,
        learning_rate=1e-2, max_steps=STEPS, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    prompts = [" ".join(str((7 * row + word) % 1000) for word in range(8)) for row in range(64)]
    sinks = [fp8plan.JsonLines(run_file)]
    logging.getLogger("vllm").setLevel(logging.ERROR)
    trainer = GRPOTrainer(
        model_with_words(), share_of_even, args, Dataset.from_dict({"prompt": prompts}), plan="auto",
        choice="fp8_kv", sinks=sinks,  # without a choice: the precision that the plan chooses
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(OneLine)
    trainer.train()
    trainer.monitor.close()
    trainer.rollout_engine.shutdown()


def model_with_words() -> str:
    """A random model in a folder, and a tokenizer whose words are the numbers of its tokens."""
    folder = random_model()
    words = {str(number): number for number in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<eos>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*(sys.argv[1:] or ["run.jsonl"]))
