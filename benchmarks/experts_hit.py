"""Count the experts that the last tokens of 32 sequences go to, in a model with random weights.

    python -m benchmarks.experts_hit     prints a table of profiles/README.md; a quarter of an hour of one core

The model is Qwen3-30B-A3B with experts of 16 instead of 768 inner units, so that it fits a CPU. Its weights are
uniform within 0.001 of zero, as vLLM's `load_format="dummy"` makes them. Output projections of experts are larger by
the root of 768 / 16, so that experts add as much as they would. Then `route_evenly` changes them as in a measured
engine, with or without the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.configs import bundled_configs
from fp8plan.model.cost.moe import distinct_experts
from fp8plan.runtime.measure.rollouts.worker import EMBEDDING, route_evenly

MODEL, INNER = "Qwen/Qwen3-30B-A3B", 16
SEQUENCES, PROMPT, LENGTH = 32, 64, 128  # tokens
DUMMY = 1e-3  # largest magnitude of a dummy weight


def with_dummy_weights(whole: dict[str, Any]) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(**whole | {"moe_intermediate_size": INNER})
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model = model.to_empty(device="cpu").float()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for name, value in model.named_parameters():
        value.data.uniform_(-DUMMY, DUMMY)
        if "down_proj" in name:
            value.data.mul_((whole["moe_intermediate_size"] / INNER) ** 0.5)
    return model


def experts_hit(model: Qwen3MoeForCausalLM, samples: int) -> list[int]:
    """Distinct experts of each layer for the last tokens. samples: the sequences of one prompt"""
    prompts = torch.randint(0, model.config.vocab_size, (SEQUENCES // samples, PROMPT))
    answers = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH - PROMPT))
    tokens = torch.cat([prompts.repeat_interleave(samples, 0), answers], 1)
    with torch.no_grad():
        scores = model(tokens, output_router_logits=True, logits_to_keep=1).router_logits
    last = (x.view(SEQUENCES, LENGTH, -1)[:, -1] for x in scores)
    return [len(x.topk(model.config.num_experts_per_tok).indices.unique()) for x in last]


def rows() -> Iterator[tuple[str, ...]]:
    whole = bundled_configs()[MODEL]
    for embeddings, samples in product((False, True), (1, 8)):
        torch.manual_seed(0)
        model = with_dummy_weights(whole)
        route_evenly((name, x) for name, x in model.named_parameters() if embeddings or not EMBEDDING.search(name))
        hit = experts_hit(model, samples)
        changed = "routers, norms, embeddings" if embeddings else "routers and norms"
        yield changed, str(samples), f"{sum(hit) / len(hit):.0f}", str(hit[0]), str(hit[-1])


def main() -> None:
    print(
        markdown(("changed weights", "samples per prompt", "experts hit, mean", "first layer", "last layer"), [*rows()])
    )
    ((experts, _),) = ModelShape.from_hf(MODEL).parts_of(Experts)
    even = float(distinct_experts(np.array(SEQUENCES), experts))
    print(f"\nEven routing of {SEQUENCES} tokens hits {even:.0f} of {experts.num_experts} experts.")


if __name__ == "__main__":
    main()
