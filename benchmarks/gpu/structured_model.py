"""Train a small Qwen3 on text with structure, to measure the mismatch of rollout precisions on it.

    python -m benchmarks.gpu.structured_model --size large --output FOLDER
    fp8plan probe FOLDER --prompts FOLDER/prompts.jsonl

small: 2 layers for a CPU, 20 s on one core. large: 16 layers, 126M parameters, for a GPU, about three minutes.
Writes a BF16 checkpoint, prompts.jsonl and training.json (settings and losses).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.structured_text import LINE, STOP, Language, prompts

PROMPT_SEED: Final = 1_000_003  # of documents that are not trained on


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model and of its training. Every width is a multiple of 128, as blockwise FP8 likes it.

    batch: number of documents; lines: number of lines, of LINE tokens each, in a document
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    lines: int
    steps: int
    learning_rate: float


SIZES: Final = {
    "small": Size(256, 256, 512, 2, 4, 2, 64, batch=16, lines=6, steps=100, learning_rate=4e-3),
    "large": Size(16_384, 768, 2048, 16, 6, 2, 128, batch=64, lines=32, steps=1500, learning_rate=1e-3),
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.structured_model", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default=None, help="cuda or cpu; default: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=256, help="in prompts.jsonl")
    given = parser.parse_args(words)
    facts = train(SIZES[given.size], given.output, given.device, given.seed, progress=print)
    write_prompts(SIZES[given.size], given.output / "prompts.jsonl", given.prompts, given.seed)
    print(json.dumps(facts))


def train(
    size: Size, folder: Path, device: str | None = None, seed: int = 0, progress: Callable[[str], Any] = lambda _: None
) -> dict[str, Any]:
    """Train and save; what training.json says. The same size, seed and machine give the same weights on a CPU."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = new_model(size).to(device)
    begun, losses = time.perf_counter(), []
    for step, loss in enumerate(losses_of(model, size, device, documents(size, seed))):
        losses.append(loss)
        if step % 100 == 0 or step == size.steps - 1:
            progress(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - begun:.0f} s")
    model.to(torch.bfloat16).save_pretrained(folder)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "seconds": time.perf_counter() - begun}
    facts |= {"first_loss": float(losses[0]), "last_loss": float(torch.stack(losses[-20:]).mean())}
    facts |= {"seed": seed, "device": device, "size": asdict(size)}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def new_model(size: Size) -> Any:
    """A Qwen3ForCausalLM of this size with fresh float32 weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim, max_position_embeddings=max(1024, 2 * size.lines * LINE), tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=STOP, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def write_prompts(size: Size, path: Path, count: int, seed: int = 0) -> None:
    """Lines {"prompt_token_ids": [...]}, a quarter of a document each."""
    found = prompts(Language.of(size.vocabulary, seed), count, max(2, size.lines // 4), PROMPT_SEED)
    path.write_text("".join(json.dumps({"prompt_token_ids": tokens}) + "\n" for tokens in found), encoding="utf-8")


def documents(size: Size, seed: int) -> Iterator[tuple[Any, Any]]:
    """Batches of documents, as tokens and labels [batch, length], without end."""
    import torch

    language, chance = Language.of(size.vocabulary, seed), np.random.default_rng(seed)
    while True:
        tokens = torch.from_numpy(language.documents(size.batch, size.lines, chance))
        yield tokens, tokens


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


if __name__ == "__main__":
    main()
