"""The synthetic language: its lines are what they claim, so that a model can learn them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import structured_text as text
from benchmarks.gpu.structured_text import LINE, Language, prompts

LANGUAGE = Language.of(256, seed=3)
LINES = LANGUAGE.documents(40, 20, np.random.default_rng(0)).reshape(40, 20, LINE)


def lines_that_begin_with(token: int) -> np.ndarray:
    found = LINES[LINES[..., 0] == token]
    assert len(found) > 10
    return found


def test_a_copy_says_its_words_twice() -> None:
    found = lines_that_begin_with(text.COPY)
    assert (found[:, 8] == text.IS).all()
    assert (found[:, 1:8] == found[:, 9:]).all()
    assert (found[:, 1:8] >= text.FIRST_WORD).all()
    assert found.max() < 256


def test_sums_are_right() -> None:
    found = lines_that_begin_with(text.ADD)
    numbers = [found[:, a:b] @ 10 ** np.arange(b - a - 1, -1, -1) for a, b in ((1, 4), (5, 8), (9, 13))]
    assert (numbers[0] + numbers[1] == numbers[2]).all()
    assert numbers[0].max() > 500


def test_chains_go_where_they_may() -> None:
    found = lines_that_begin_with(text.CHAIN)
    for before, after in zip(found[:, 1:-1].T, found[:, 2:].T, strict=True):
        assert (LANGUAGE.followers[before - text.FIRST_WORD] == after[:, None]).any(1).all()


def test_again_repeats_the_line_before() -> None:
    rows, lines = np.nonzero(LINES[..., 0] == text.AGAIN)
    assert len(rows) > 10
    assert (lines > 0).all()
    assert (LINES[rows, lines, 1:] == LINES[rows, lines - 1, 1:]).all()


def test_seeds_decide_and_prompts_are_cut_in_their_last_line() -> None:
    found = prompts(LANGUAGE, 30, 3, seed=1)
    assert found == prompts(LANGUAGE, 30, 3, seed=1)
    assert found != prompts(LANGUAGE, 30, 3, seed=2)
    assert {2 * LINE < len(tokens) <= 3 * LINE for tokens in found} == {True}
    assert len({len(tokens) for tokens in found}) > 5


def test_some_tokens_are_sure_and_others_are_not() -> None:
    """Entropy of the next word: of Zipf's law in a copy's first half, none in its second."""
    entropy = -(LANGUAGE.frequency * np.log(LANGUAGE.frequency)).sum()
    assert entropy > 3
    assert -(np.array(text.FOLLOWERS) * np.log(text.FOLLOWERS)).sum() == pytest.approx(1.03, abs=0.01)
