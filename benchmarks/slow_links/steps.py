"""Train a real model by GRPO, and write what each step's weight sync takes in several encodings.

    python -m benchmarks.slow_links.steps FOLDER OUT.jsonl [--steps 50] [--learning-rate 3e-6]

FOLDER is a model with its tokenizer, such as SmolLM2 135M. The task is addition. transformers samples on the CPU. AdamW
keeps FP32 weights, which are sent in BF16. All linears of layers count as FP8. Exact zeros, which some 4-bit files
hold, change their codes in every step, so such a model shows too many changes.

Lines, by "what":
    model     the set-up, and bytes of all weights in BF16 and FP8
    step      reward; bytes and changed values of a delta, of FP8 matrices and of BF16 tensors apart; bits of entropy;
              bytes of verl's encoding (int32 places and BF16 values of what differs: docs/advance/delta_weight_sync.md
              of verl 0.9); seconds to encode and to apply
    top_k     by "budget": bytes, residual, and KL(exact sync || sparse sync) per token in nats on held-out text; for a
              share of values also without error feedback: then a change that is left out is forgotten
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping
from math import log2
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers

from fp8plan.jsonl import append, line
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.quantize.block_fp8 import dequantize
from fp8plan.runtime.weight_sync.delta.base import Base, in_format
from fp8plan.runtime.weight_sync.delta.patch import apply, unpacked
from fp8plan.runtime.weight_sync.delta.tiles import bits
from fp8plan.runtime.weight_sync.manifest import SCALE_SUFFIX, entry_of

Tensors = dict[str, torch.Tensor]
PROMPTS, SAMPLES, LENGTH = 2, 8, 6
SHARE: Final = 1e-4  # of values that top-k sends; at 3e-6 a delta has about 6e-4 of the codes
BUDGETS: Final = {"share": TopK(share=SHARE), "residual": TopK(residual=2e-5)}
HELD_OUT: Final = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees. A week has seven days, and a "
    "year has twelve months. Paris is the capital of France, and Rome is the capital of Italy. 12 + 7 = 19. 5 + 6 = 11."
)


def weights_of(policy: torch.nn.Module) -> Tensors:
    """The BF16 tensors that a trainer sends; a tied lm_head is not among them."""
    return {name: x.detach().bfloat16() for name, x in policy.named_parameters()}


def fp8_names(tensors: Tensors) -> frozenset[str]:
    """Names of the matrices that vLLM's block FP8 quantises: linears of layers."""
    return frozenset(name for name, x in tensors.items() if x.dim() == 2 and ".layers." in name)


def worth(text: str, total: int) -> float:
    """The reward of a response: 1 for the sum, less the farther the first number is from it, 0 for no number."""
    number = next((word for word in text.replace("\n", " ").split() if word.isdigit()), None)
    return 0.0 if number is None else 1 / (1 + abs(int(number) - total))


class Trainer(NamedTuple):
    """A model that is trained, and what its steps need."""

    policy: Any
    optimiser: torch.optim.Optimizer
    tokenizer: Any
    chance: torch.Generator


def trainer_of(folder: str, rate: float) -> Trainer:
    """The model in a folder, in FP32 under AdamW, with all seeds set."""
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimiser = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return Trainer(policy, optimiser, tokenizer, torch.Generator().manual_seed(0))


def learn(policy: Any, optimiser: Any, tokenizer: Any, chance: torch.Generator) -> float:
    """One step of GRPO. Returns the mean reward."""
    pairs = torch.randint(10, 60, (PROMPTS, 2), generator=chance)
    prompts = [f"{a} + {b} =" for a, b in pairs.tolist()]
    ids = tokenizer(prompts, return_tensors="pt").input_ids.repeat_interleave(SAMPLES, 0)  # of one length
    with torch.no_grad():
        sampled = policy.generate(ids, do_sample=True, top_k=0, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
    responses = sampled[:, ids.shape[1] :]
    totals = pairs.sum(1).repeat_interleave(SAMPLES).tolist()
    rewards = torch.tensor([worth(tokenizer.decode(row), total) for row, total in zip(responses, totals, strict=True)])
    groups = rewards.view(PROMPTS, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    logits = policy(sampled, logits_to_keep=LENGTH + 1).logits[:, :-1].float()
    chances = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    (-(advantages.view(-1, 1) * chances).mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return float(rewards.mean())


def entropy_bits(held: torch.Tensor, new: torch.Tensor) -> float:
    """Bits that the places of a tensor's changes and their differences take at least, by their frequencies.

    Places are taken as independent. A difference is one of the bit patterns as integers.
    """
    old, now = bits(held).flatten().int(), bits(new.contiguous()).flatten().int()
    differences = (now - old)[now != old]
    changed, size = differences.numel(), old.numel()
    if not changed:
        return 0.0
    share = changed / size
    places = -log2(share) * changed - (log2(1 - share) * (size - changed) if changed < size else 0)
    counts = Counter(differences.tolist()).values()
    return places - sum(count * log2(count / changed) for count in counts)


class Encoding:
    """A base with the copy that an engine would hold, patched after each step."""

    def __init__(self, tensors: Tensors, top_k: TopK | None = None) -> None:
        self.base = Base((), "cpu", fp8_names(tensors), top_k)
        self.held = {name: x.clone() for name, x in self.base.recorded(tensors.items())}
        self.base.manifest = tuple(entry_of(*pair) for pair in self.held.items())
        self.base.commit("start")

    def step(self, tensors: Tensors) -> dict[str, Any]:
        """Encode and apply a step. Returns bytes, changed values and seconds."""
        began = time.perf_counter()
        patches = dict(self.base.patches(tensors.items(), {}))
        encoded = time.perf_counter()
        row: dict[str, Any] = {"fp8_bytes": 0, "bf16_bytes": 0, "fp8_changed": 0, "bf16_changed": 0}
        entries = [entry_of(name, self.held[name]) for name in patches]
        changes = unpacked(list(patches.values()), entries, torch.device("cpu"))
        for (name, patch), made in zip(patches.items(), changes, strict=True):
            kind = "fp8" if name.removesuffix(SCALE_SUFFIX) in self.base.fp8 else "bf16"
            row[f"{kind}_bytes"] += patch.numel()
            if not name.endswith(SCALE_SUFFIX):
                row[f"{kind}_changed"] += made.words.numel()
        apply([self.held[name] for name in patches], changes)
        row |= {"encode_s": encoded - began, "apply_s": time.perf_counter() - encoded}
        self.base.commit("next")
        return row | {"residual": self.base.residual.relative}


def engine_weights(held: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights that an engine computes with, FP32."""
    return {
        name: dequantize(x, held[name + SCALE_SUFFIX], torch.float32) if name + SCALE_SUFFIX in held else x.float()
        for name, x in held.items()
        if not name.endswith(SCALE_SUFFIX)
    }


@torch.no_grad()
def log_probs(policy: Any, weights: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of all tokens [positions, vocabulary] under other weights."""
    logits = torch.func.functional_call(policy, weights, (ids,), {"use_cache": False}).logits
    return torch.log_softmax(logits[0].float(), -1)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


class Forgetful:
    """Top-k without error feedback: the largest changes of each step move a copy, and the others are forgotten."""

    def __init__(self, tensors: Tensors, share: float) -> None:
        self.own, self._share, self._fp8 = dict(tensors), share, fp8_names(tensors)
        self._last = tensors

    def step(self, tensors: Tensors) -> None:
        for name, new in tensors.items():
            if torch.equal(new, self._last[name]):
                continue
            moved = new.float() - self._last[name].float()
            if new.dim() > 1:
                count = max(1, int(self._share * new.numel()))
                kept = moved.abs().flatten().topk(count).indices
                moved = torch.zeros_like(moved).view(-1).index_copy(0, kept, moved.flatten()[kept]).view_as(moved)
            self.own[name] = (self.own[name].float() + moved).bfloat16()
        self._last = tensors

    def weights(self) -> Tensors:
        parts = {name: x for parts in in_format(self.own, self._fp8).values() for name, x in parts.items()}
        return engine_weights(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links.steps")
    parser.add_argument("folder")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements of the KL")
    options = parser.parse_args()
    trainer = trainer_of(options.folder, options.learning_rate)
    policy, ids = trainer.policy, trainer.tokenizer(HELD_OUT, return_tensors="pt").input_ids
    last = weights_of(policy)
    exact, sparse = Encoding(last), {name: Encoding(last, top_k) for name, top_k in BUDGETS.items()}
    forgetful = Forgetful(last, SHARE)
    setting = {"model": Path(options.folder).name, "learning_rate": options.learning_rate}
    names = exact.base.fp8
    counted = {
        "fp8_values": sum(last[name].numel() for name in names),
        "bf16_values": sum(x.numel() for name, x in last.items() if name not in names),
        "fp8_dense_bytes": sum(x.nbytes for name, x in exact.held.items() if name.removesuffix(SCALE_SUFFIX) in names),
    }
    append(options.output, line({"what": "model"} | setting | counted | machine_facts()))
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        reward = learn(*trainer)
        tensors = weights_of(policy)
        before = {name: exact.held[name].clone() for name in names}
        row = exact.step(tensors)
        row["fp8_entropy_bits"] = sum(entropy_bits(before[name], exact.held[name]) for name in names)
        differ = {name: int((bits(tensors[name]) != bits(last[name])).sum()) for name in tensors}
        row["verl_bytes"] = 6 * sum(differ.values())
        row["verl_fp8_bytes"] = 6 * sum(differ[name] for name in names)
        append(options.output, line({"what": "step", "step": step, "reward": reward} | setting | row))
        measured = step % options.every == 0
        reference = log_probs(policy, engine_weights(exact.held), ids) if measured else None
        forgetful.step(tensors)
        for name, encoding in sparse.items():
            budget = {"budget": name, "limit": getattr(BUDGETS[name], name)}
            row = {"what": "top_k", "step": step} | budget | setting | encoding.step(tensors)
            if reference is not None:
                row["kl"] = kl(reference, log_probs(policy, engine_weights(encoding.held), ids))
                if name == "share":
                    row["kl_without_feedback"] = kl(reference, log_probs(policy, forgetful.weights(), ids))
            append(options.output, line(row))
        last = tensors
        print(f"step {step}: reward {reward:.2f}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
