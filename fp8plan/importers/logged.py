"""One rollout in a trainer's log: the text of its prompts and responses, or how many tokens they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Text = str | list[dict[str, Any]]  # plain, or the messages of a conversation


@dataclass(frozen=True, slots=True)
class Texts:
    """One rollout as text, one prompt and one response per request, in the order of the log.

    special_tokens: whether the trainer's tokenizer adds its special tokens (BOS) to plain prompts
    """

    step: int
    prompts: Sequence[Text]
    responses: Sequence[Text]
    special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """One rollout in tokens, one entry per request, prompt by prompt.

    prompt_ids: 0, 0, .., 1, 1, ..: equal where the prompt is the same
    """

    step: int
    prompt_lengths: list[int]
    response_lengths: list[int]
    prompt_ids: list[int]

    @property
    def mean_response(self) -> float:
        """Tokens of a response, on average."""
        return sum(self.response_lengths) / len(self.response_lengths)


@dataclass(frozen=True, slots=True)
class Source:
    """One trainer's log.

    rollouts: reads those of a folder, by step
    seconds, mean_response: names of its figures: seconds of generation, mean tokens of a response; None: not logged
    overwritten: a figure of the steps whose logged rollout is not the training's; None: there are none
    """

    rollouts: Callable[[Path], Sequence[Texts | Counted]]
    seconds: str | None = None
    mean_response: str | None = None
    overwritten: str | None = None


def counted(step: int, requests: Iterable[tuple[Any, int, int]]) -> Counted:
    """Sort requests, (prompt, its tokens, the response's tokens) each, by prompt, in order of first appearance.

    A response has a token at least, its end: of an empty text one is counted.
    """
    ids: dict[Any, int] = {}
    rows = [(ids.setdefault(prompt, len(ids)), *lengths) for prompt, *lengths in requests]
    rows.sort(key=lambda row: row[0])
    number, prompts, responses = zip(*rows, strict=True)
    return Counted(step, [max(1, x) for x in prompts], [max(1, x) for x in responses], list(number))
