"""The Calls of a procedure to an engine.

A procedure is a generator that does no input or output itself. It yields each Call, and is sent the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fp8plan.errors import ConfigError, LostEngineError

# The methods of runtime.apply.worker.extension.
Method = Literal[
    "fp8plan_facts",
    "fp8plan_prepare",
    "fp8plan_begin",
    "fp8plan_load",
    "fp8plan_patch",
    "fp8plan_join",
    "fp8plan_receive",
    "fp8plan_receive_patches",
    "fp8plan_finish",
    "fp8plan_commit",
    "fp8plan_abort",
    "fp8plan_zero_kv",
    "fp8plan_record_amax",
    "fp8plan_set_kv_scales",
    "fp8plan_attention_layers",
    "fp8plan_kv_scales",
    "fp8plan_digests",
    "fp8plan_attach",
    "fp8plan_status",
    "fp8plan_examine",
    "fp8plan_compare",
    "fp8plan_compare_with",
    "fp8plan_compared",
]
# Those that take a chunk of tensors (weight_sync.stream.Channel).
TAKE_TENSORS: Final[Collection[Method]] = ("fp8plan_load", "fp8plan_patch", "fp8plan_compare_with")


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of every worker, or a function that they run; answered by a list."""

    method: Method | Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reset:
    """A request to empty the prefix cache."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Requests, answered by their RequestOutputs.

    prompts:    token ids of each
    sampling:   fields of vLLM's SamplingParams
    everywhere: every replica gets all prompts, and answers with a list of its own
    """

    prompts: Sequence[Sequence[int]]
    sampling: Mapping[str, Any]
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """A request to shut vLLM down and start it again."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """vLLM's sleep."""

    level: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """vLLM's wake_up."""

    tags: list[str]


@dataclass(frozen=True, slots=True)
class Files:
    """Work on files, without the engine: under asyncio in a thread. Answered by what the function returns."""

    act: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


Call = Rpc | Reset | Generate | Restart | Sleep | WakeUp | Files
Procedure = Generator[Call, Any, Any]


def rpc(method: Method | Callable[..., Any], *arguments: Any) -> Generator[Call, Any, list[Any]]:
    """Call a method of every worker, and return their answers.

    Raises ConfigError with the first error among them, or LostEngineError if the engine is lost. "who" in an answer
    names its worker; otherwise its rank does.
    """
    answers = yield Rpc(method, arguments)
    kind = LostEngineError if any(answer.get("lost") for answer in answers) else ConfigError
    for rank, answer in enumerate(answers):
        if "error" in answer:
            where = f"{answer.get('who', f'rank {rank}')}: " if len(answers) > 1 or "who" in answer else ""
            raise kind(f"{where}{answer['error']}")
    return [answer["ok"] for answer in answers]
