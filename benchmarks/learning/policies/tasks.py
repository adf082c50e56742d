"""Tasks whose answers a program checks: prompts as tokens, and the reward of a response in [0, 1].

Recurrence     x(n+1) = x(n) + x(n-1) mod 10^digits, from two given terms until a term is 0. Digits are tokens. For
               models that are trained here. One digit gives answers of up to 17 tokens, three of 291 in the mean and
               601 at most (200 terms), of very different lengths, as rollouts of reasoning have
ReasoningGym   a task of the package reasoning-gym, in words, for a chat model or one that continues text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from fp8plan.errors import ConfigError

TEN: Final = 10  # tokens 0 to 9 are digits
RUN, GO, STOP = range(TEN, TEN + 3)
VOCABULARY: Final = 256
TEACH, LENGTHS, PILOT, TRAIN = range(1, 5)  # what problems are for: the second number of their seed
HELD_BACK: Final = 8  # one start in so many is the pilot's alone


class Problem(NamedTuple):
    """One prompt, and what its task needs to check a response."""

    prompt: list[int]
    key: Any


class Task(Protocol):
    """A task.

    stop:              token ids that end a response
    max_prompt_tokens, max_response_tokens: the longest there are
    """

    stop: Sequence[int]
    max_prompt_tokens: int
    max_response_tokens: int

    def problems(self, count: int, seed: Sequence[int]) -> list[Problem]:
        """Draw problems; the same seed gives the same ones. seed: a run's, what they are for, and which of those"""
        ...

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """The reward of a response, its end token included, in [0, 1]."""
        ...


@dataclass(frozen=True)
class Recurrence:
    """Terms of a Fibonacci-like sequence mod 10^digits, least significant digit first, up to and with the first 0.

    digits: of a term; terms: the most that an answer has, and so the length of the longest
    """

    digits: int = 1
    terms: int = 60
    stop: Sequence[int] = (STOP,)

    def __post_init__(self) -> None:
        if self.digits < 1 or self.terms < 1:
            raise ConfigError(f"digits is {self.digits} and terms {self.terms}; allowed: at least 1 of both")

    @property
    def max_prompt_tokens(self) -> int:
        return 2 * self.digits + 2

    @property
    def max_response_tokens(self) -> int:
        return self.terms * self.digits + 1

    def problems(self, count: int, seed: Sequence[int]) -> list[Problem]:
        """Draw starts until their answer ends within `terms`; not all sequences meet a 0.

        The pilot's starts are never taught or trained on. Of one digit there are 84 problems in all: too few for that.
        """
        chance, drawn = np.random.default_rng(list(seed)), list[Problem]()
        while len(drawn) < count:
            first, second = chance.integers(0, TEN**self.digits, 2).tolist()
            held_back = (first + TEN**self.digits * second) % HELD_BACK == 0
            if self.digits > 1 and held_back != (seed[1] == PILOT):
                continue
            if answer := self.answer(first, second):
                prompt = [RUN, *self._tokens(first), *self._tokens(second), GO]
                drawn.append(Problem(prompt, answer))
        return drawn

    def answer(self, first: int, second: int) -> list[int] | None:
        """The tokens of the right answer, with STOP; None if it has more than `terms` terms."""
        tokens = list[int]()
        for _ in range(self.terms):
            first, second = second, (first + second) % TEN**self.digits
            tokens += self._tokens(second)
            if second == 0:
                return [*tokens, STOP]
        return None

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """The share of the answer before the first wrong token: 1 for the whole of it."""
        right: list[int] = problem.key
        same = next((n for n, (a, b) in enumerate(zip(right, response, strict=False)) if a != b), None)
        return (min(len(right), len(response)) if same is None else same) / len(right)

    def _tokens(self, number: int) -> list[int]:
        return [number // TEN**place % TEN for place in range(self.digits)]


@dataclass(frozen=True)
class ReasoningGym:
    """A data set of reasoning-gym, asked in words.

    name, settings:      of reasoning_gym.create_dataset
    tokenizer:           of the model
    instruction:         the system prompt; without a chat template, the text before the question
    ends:                tokens that end an answer; none: the tokenizer's end token
    """

    name: str
    settings: tuple[tuple[str, Any], ...]
    tokenizer: Any
    instruction: str
    ends: tuple[str, ...] = ()
    max_prompt_tokens: int = 160
    max_response_tokens: int = 64

    @cached_property
    def stop(self) -> Sequence[int]:
        return tuple(self.tokenizer.convert_tokens_to_ids(list(self.ends or (self.tokenizer.eos_token,))))

    def problems(self, count: int, seed: Sequence[int]) -> list[Problem]:
        """Draw problems. Raises ConfigError for a prompt that is too long."""
        data = self._data(count, int(np.random.default_rng(list(seed)).integers(2**31)))
        drawn = [Problem(self._prompt(entry["question"]), entry) for entry in data]
        longest = max(len(problem.prompt) for problem in drawn)
        if longest > self.max_prompt_tokens:
            raise ConfigError(
                f"a prompt of {self.name} has {longest} tokens; allowed: {self.max_prompt_tokens} (max_prompt_tokens)"
            )
        return drawn

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """The package's score of the response's last word but punctuation; 0 for an answer that was cut off."""
        if not response or response[-1] not in self.stop:
            return 0.0
        said = final_word(self.tokenizer.decode(list(response), skip_special_tokens=True))
        score = self._scorer.score_answer(said, problem.key)
        return float(score) if score >= 1.0 else 0.0  # it has partial scores for any text that holds the answer

    @cached_property
    def _scorer(self) -> Any:
        return self._data(1, 0)

    def _prompt(self, question: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(f"{self.instruction}{question}")["input_ids"])
        said = [{"role": "system", "content": self.instruction}, {"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _data(self, count: int, seed: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.name, size=count, seed=seed, **dict(self.settings))


def final_word(text: str) -> str:
    """The last word of a text without the punctuation around it: the answer, if it is one word. "" if there is none."""
    words = text.split()
    return words[-1].strip("\"'`*.,:;!?()[]<>$") if words else ""
