"""A model of random weights, taught its task until about every fifth answer is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.learning.policies.table import Policy, Size
from benchmarks.learning.policies.tasks import LENGTHS, STOP, TEACH, Recurrence

IGNORED: Final = -100  # transformers' label of a token that is not learnt
SETTLED: Final = 20  # steps over whose loss a mean is taken
# exp(-1.5) = 0.22: a model that answers about every fifth problem in full has something to learn and something to lose
WRONG_PER_ANSWER: Final = 1.5
EXPERTS: Final = 8  # of which each token takes 2, half as wide as the dense MLP


def teach(
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


def losses_of(model: Any, size: Size, device: str, batches: Iterator[tuple[Any, Any]]) -> Iterator[Any]:
    """Train; yield losses, one per step: AdamW, a tenth of the steps of warm-up, then a cosine down to 0.

    batches: tokens and labels [batch, length]; a label of -100 is not learnt
    """
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm = max(1, size.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / warm, 0.5 * (1 + np.cos(np.pi * n / size.steps)))
    )
    for tokens, labels in islice(batches, size.steps):
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=tokens.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        yield loss.detach()


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
        "max_position_embeddings": size.positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": None,
    }
    if kind == "moe":
        experts = {"moe_intermediate_size": size.intermediate // 2, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**common, **experts, norm_topk_prob=True))
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**common))
