"""The verifiers of the learning experiment's tasks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.learning.policies.tasks import GO, PILOT, RUN, STOP, TEACH, TRAIN, ReasoningGym, Recurrence, final_word
from fp8plan.errors import ConfigError


def test_an_answer_is_the_sequence_up_to_its_first_zero() -> None:
    task = Recurrence(digits=1, terms=16)
    assert task.answer(8, 6) == [4, 0, STOP]
    assert task.answer(2, 1) is None  # Lucas numbers mod 10 never end in 0
    two = Recurrence(digits=2, terms=40)
    assert two.answer(98, 1) == [9, 9, 0, 0, STOP]  # 99, then 100 mod 100; least significant digit first


@pytest.mark.parametrize(("digits", "terms"), [(1, 16), (2, 40), (3, 300)])
def test_the_right_answer_has_reward_one_and_fits(digits: int, terms: int) -> None:
    task = Recurrence(digits, terms)
    problems = task.problems(64, (3, TRAIN, 0))
    for problem in problems:
        assert problem.prompt[0] == RUN
        assert problem.prompt[-1] == GO
        assert len(problem.prompt) == task.max_prompt_tokens
        assert len(problem.key) <= task.max_response_tokens
        assert task.reward(problem, problem.key) == 1.0
    assert problems == task.problems(64, (3, TRAIN, 0))
    assert problems != task.problems(64, (3, TRAIN, 1))


def test_the_pilots_problems_are_neither_taught_nor_trained_on() -> None:
    task = Recurrence(2, 40)
    seen = {tuple(x.prompt) for use in (TEACH, TRAIN) for n in range(20) for x in task.problems(64, (0, use, n))}
    pilot = {tuple(x.prompt) for x in task.problems(64, (0, PILOT, 0))}
    assert len(seen) > 500
    assert len(pilot) > 40
    assert not seen & pilot
    assert task.problems(8, (0, TEACH, 0)) != task.problems(8, (0, TRAIN, 0))


def test_the_reward_is_the_share_before_the_first_wrong_token() -> None:
    task = Recurrence()
    problem = next(x for x in task.problems(64, (0, TRAIN, 0)) if len(x.key) >= 5)
    right, length = problem.key, len(problem.key)
    wrong = [*right[:2], (right[2] + 1) % 10, *right[3:]]
    assert task.reward(problem, wrong) == 2 / length
    assert task.reward(problem, right[:-1]) == (length - 1) / length  # cut off before STOP
    assert task.reward(problem, [STOP]) == 0
    assert task.reward(problem, []) == 0


def test_answers_of_three_digits_are_long_and_of_very_different_lengths() -> None:
    lengths = [len(x.key) for x in Recurrence(3, 300).problems(200, (0, TRAIN, 0))]
    assert np.mean(lengths) > 350
    assert np.percentile(lengths, 95) > 3 * np.percentile(lengths, 25)


def test_a_task_without_terms_is_refused() -> None:
    with pytest.raises(ConfigError, match="terms 0; allowed: at least 1"):
        Recurrence(1, 0)


@pytest.mark.parametrize(
    ("text", "word"), [("4 + 3 = 7", "7"), ("The answer is **-12**.", "-12"), ("$7$", "7"), ("", ""), ("...", "")]
)
def test_the_final_word_is_taken_without_punctuation(text: str, word: str) -> None:
    assert final_word(text) == word


class Words:
    """A tokenizer: a token for each character."""

    eos_token, chat_template = "\0", "each on a line"

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [ord(token) for token in tokens]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token)

    def apply_chat_template(self, said: list[dict[str, str]], **_: object) -> str:
        return "\n".join(one["content"] for one in said)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def said(text: str, end: bool = True) -> list[int]:
    return [*map(ord, text), *([0] if end else [])]


@pytest.mark.reasoning_gym
def test_a_package_of_verifiers_checks_answers_in_words() -> None:
    task = ReasoningGym("chain_sum", (("min_digits", 1), ("max_digits", 1)), Words(), "Answer.")
    for problem in task.problems(8, (1, TRAIN, 2)):
        right = problem.key["answer"]
        assert "".join(map(chr, problem.prompt)).endswith(problem.key["question"])
        assert task.reward(problem, said(f"It is {right}.")) == 1
        assert task.reward(problem, said(f"It is {right}.", end=False)) == 0
        assert task.reward(problem, said(f"{right} or {int(right) + 1}")) == 0
        assert task.reward(problem, []) == 0
    assert task.problems(8, (1, TRAIN, 2)) == task.problems(8, (1, TRAIN, 2))
    with pytest.raises(ConfigError, match=r"a prompt of chain_sum has \d+ tokens; allowed: 10"):
        ReasoningGym("chain_sum", (), Words(), "Answer.", max_prompt_tokens=10).problems(1, (0, TRAIN, 0))
