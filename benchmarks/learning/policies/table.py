"""The policies that are trained, as a table.

All inputs are multiples of 128, so blockwise FP8 takes every linear but the router and lm_head. SmolLM2 is the
exception: its hidden size is 576, and of its linears only down_proj (1536 inputs) is made of whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.learning.policies.tasks import VOCABULARY, ReasoningGym, Recurrence, Task
from fp8plan.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model and of its training. Every width is a multiple of 128, as blockwise FP8 likes it.

    batch: problems of a step; positions: the longest sequence that the model takes
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    positions: int
    steps: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and its task.

    kind: "qk_norm" (Qwen3), "moe" (Qwen3-MoE), or a name in gguf_models.SOURCES
    size: of what is trained here; None: it comes trained
    task: of a tokenizer, which only those that come trained have
    """

    kind: str
    size: Size | None
    task: Callable[[Any], Task]


TINY: Final = Size(VOCABULARY, 128, 256, 2, 2, 2, 64, batch=32, positions=128, steps=600, learning_rate=5e-3)
# 25M parameters: its checkpoint, 50 MB, can leave a lent GPU, so that all arms of several leases begin with one policy.
LARGE: Final = Size(VOCABULARY, 512, 1536, 8, 4, 2, 128, batch=32, positions=8192, steps=3000, learning_rate=1e-3)


def _short(_: Any) -> Task:
    return Recurrence(digits=1, terms=16)


def _long(_: Any) -> Task:
    return Recurrence(digits=3, terms=200)


def _sums(instruction: str, ends: tuple[str, ...] = ()) -> Callable[[Any], Task]:
    """Sums of two digits."""
    settings = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    return lambda tokenizer: ReasoningGym("chain_sum", settings, tokenizer, instruction, ends)


# Of 32 samples at temperature 1 one in eight was right; asked to think first, one in thirty.
ASKED: Final = _sums("Answer with the number alone.")
# A model that was only pretrained continues text. After two solved lines it is right two times in five.
QUESTION: Final = "State the final answer to the following arithmetic problem:"
CONTINUED: Final = _sums(f"{QUESTION} 4 + 3 = 7\n{QUESTION} 5 - 9 = -4\n", ends=("\n", "\n\n", "<eos>"))

POLICIES: Final = {
    "tiny-qk-norm": Policy("qk_norm", TINY, _short),
    "tiny-moe": Policy("moe", TINY, _short),
    "qk-norm": Policy("qk_norm", LARGE, _long),
    "moe": Policy("moe", LARGE, _long),
    "smollm2": Policy("smollm2", None, ASKED),
    "gemma": Policy("gemma", None, CONTINUED),
}


def policy_named(name: str) -> Policy:
    """The policy of this name. Raises ConfigError for one that is none of POLICIES."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]
