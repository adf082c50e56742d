"""The policies that are trained, and how each is made: checkpoints of random weights, taught a task halfway.

    python -m benchmarks.learning.policies NAME FOLDER [--device cuda] [--seed N]

All widths are multiples of 128, so blockwise FP8 takes every linear but the router and lm_head. SmolLM2 is the
exception: its hidden size is 576, and of its linears only down_proj (1536 inputs) is made of whole blocks.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.structured_model import Size, losses_of
from benchmarks.learning import smollm2
from benchmarks.learning.grow import Growth, grow
from benchmarks.learning.tasks import LENGTHS, STOP, TEACH, VOCABULARY, ReasoningGym, Recurrence, Task
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape

IGNORED: Final = -100  # transformers' label of a token that is not learnt
SETTLED: Final = 20  # steps over whose loss a mean is taken
# exp(-1.5) = 0.22: a model that answers about every fifth problem in full has something to learn and something to lose
WRONG_PER_ANSWER: Final = 1.5


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and its task.

    kind: "qk_norm" (Qwen3), "plain" (Llama: no QK-norm), "moe" (Qwen3-MoE), or "smollm2"
    size: of what is trained here; None: it comes trained
    task: of a tokenizer, which only SmolLM2's takes
    cpu:  small enough for two cores
    from_: name of the policy that it is grown from
    growth: what it is grown to; the layers that are added are not trained, nor are the embeddings below them
    """

    kind: str
    size: Size | None
    task: Callable[[Any], Task]
    cpu: bool
    from_: str = ""
    growth: Growth | None = None

    @property
    def frozen_layers(self) -> int:
        """The lowest layers, which are not trained."""
        return self.growth.layers - self.size.layers if self.growth and self.size else 0


TINY: Final = Size(VOCABULARY, 128, 256, 2, 2, 2, 64, batch=32, lines=4, steps=600, learning_rate=5e-3)
# 25M parameters: its checkpoint, 50 MB, can leave a lent GPU, so that all arms of several leases begin with one policy.
LARGE: Final = Size(VOCABULARY, 512, 1536, 8, 4, 2, 128, batch=32, lines=132, steps=3000, learning_rate=1e-3)
EXPERTS: Final = 8  # of which each token takes 2, half as wide as the dense MLP


def _short(_: Any) -> Task:
    return Recurrence(digits=1, terms=16)


def _long(_: Any) -> Task:
    return Recurrence(digits=3, terms=200)


def _sums(tokenizer: Any) -> Task:
    settings = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    # Of 32 samples at temperature 1 one in eight was right; asked to think first, one in thirty.
    return ReasoningGym("chain_sum", settings, tokenizer, "Answer with the number alone.")


POLICIES: Final = {
    "tiny-qk-norm": Policy("qk_norm", TINY, _short, cpu=True),
    "tiny-plain": Policy("plain", TINY, _short, cpu=True),
    "tiny-moe": Policy("moe", TINY, _short, cpu=True),
    "qk-norm": Policy("qk_norm", LARGE, _long, cpu=False),
    "plain": Policy("plain", LARGE, _long, cpu=False),
    "moe": Policy("moe", LARGE, _long, cpu=False),
    # The widths and the depth of Qwen3-8B, for which FP8 is faster. The 25M one answers in it.
    "wide": Policy(
        "qk_norm", LARGE, _long, cpu=False, from_="qk-norm", growth=Growth(8, heads=32, kv_heads=8, layers=36)
    ),
    "smollm2": Policy("smollm2", None, _sums, cpu=True),
}


def policy_named(name: str) -> Policy:
    """The policy of this name. Raises ConfigError for one that is none of POLICIES."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]


def make(name: str, folder: Path, device: str = "cpu", seed: int = 0, say: Callable[[str], Any] = print) -> None:
    """Write the policy's checkpoint, unless it is there. The same seed gives the same weights on a CPU.

    folder: FOLDER/NAME/model; what a policy is grown from is looked for beside it, and made if it is not there
    """
    policy = policy_named(name)
    if (folder / "config.json").is_file():
        return
    if policy.growth is not None:
        small = folder.parent.parent / policy.from_ / folder.name
        make(policy.from_, small, device, seed, say)
        grow(small, folder, policy.growth, seed)
    elif policy.size is None:
        smollm2.write(folder)
    else:
        facts = _teach(policy, policy.size, folder, device, seed, say)
        say(f"{name}: {json.dumps(facts)}")


def task_of(name: str, folder: Path) -> Task:
    """The task of a policy whose checkpoint is in this folder."""
    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    return policy_named(name).task(tokenizer)


def fp8_linears(folder: Path) -> dict[str, bool]:
    """Each linear of the model -> whether blockwise FP8 takes it, on one GPU."""
    shape = ModelShape.from_hf(str(folder))
    return {linear.name: linear.quantised for linear in (*shape.linears(1), *shape.expert_linears())}


def _teach(
    policy: Policy, size: Size, folder: Path, device: str, seed: int, say: Callable[[str], Any]
) -> dict[str, Any]:
    """Train until about every fifth answer is right, and save. Returns what was done."""
    import torch

    torch.manual_seed(seed)
    task = policy.task(None)
    assert isinstance(task, Recurrence)
    model, losses = new_model(policy.kind, size).to(device), list[float]()
    enough = WRONG_PER_ANSWER / float(np.mean([len(x.key) for x in task.problems(512, (seed, LENGTHS, 0))]))
    for loss in losses_of(model, size, device, answers(task, size.batch, seed)):
        losses.append(float(loss))
        if len(losses) % 100 == 0:
            say(f"step {len(losses)}: loss {np.mean(losses[-SETTLED:]):.4f}, wanted {enough:.4f}")
        if len(losses) >= SETTLED and np.mean(losses[-SETTLED:]) < enough:
            break
    model.to(torch.bfloat16).save_pretrained(folder)
    facts = {"steps": len(losses), "last_loss": float(np.mean(losses[-SETTLED:])), "wanted_loss": enough}
    facts |= {"parameters": sum(x.numel() for x in model.parameters()), "seed": seed, "device": device}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def answers(task: Recurrence, batch: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Batches of problems with their answers, as tokens and labels [batch, length], without end."""
    import torch

    length = task.max_prompt_tokens + task.max_response_tokens
    for number in range(1 << 30):
        tokens, labels = torch.full((batch, length), STOP), torch.full((batch, length), IGNORED)
        for row, problem in enumerate(task.problems(batch, (seed, TEACH, number))):
            start, stop = len(problem.prompt), len(problem.prompt) + len(problem.key)
            tokens[row, :stop] = torch.tensor([*problem.prompt, *problem.key])
            labels[row, start:stop] = tokens[row, start:stop]
        longest = int((labels != IGNORED).nonzero()[:, 1].max()) + 1
        yield tokens[:, :longest], labels[:, :longest]


def new_model(kind: str, size: Size) -> Any:
    """A model of this kind and size with fresh float32 weights."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 1 << math.ceil(math.log2(32 * size.lines)),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": None,
    }
    if kind == "moe":
        experts = {"moe_intermediate_size": size.intermediate // 2, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**common, **experts, norm_topk_prob=True))
    if kind == "plain":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common))
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**common))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.policies")
    parser.add_argument("name", choices=POLICIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    make(given.name, given.folder, given.device, given.seed)
    print(json.dumps({"blockwise FP8 takes": fp8_linears(given.folder)}))


if __name__ == "__main__":
    main()
