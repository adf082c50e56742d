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
    """Nats of the next word, of the lines as they are: Zipf's law in a copy's first half, one of a few in a chain."""
    many = LANGUAGE.documents(400, 20, np.random.default_rng(1)).reshape(-1, LINE)
    copies, chains = (many[many[:, 0] == kind] for kind in (text.COPY, text.CHAIN))
    seen = (
        np.bincount(copies[:, 1:8].ravel() - text.FIRST_WORD, minlength=LANGUAGE.frequency.size) / copies[:, 1:8].size
    )
    np.testing.assert_allclose(seen, LANGUAGE.frequency, atol=0.01)
    assert entropy(seen) > 3
    before, after = (chains[:, part].ravel() for part in (slice(1, -1), slice(2, None)))
    ranks = (LANGUAGE.followers[before - text.FIRST_WORD] == after[:, None]).argmax(1)
    chosen = np.bincount(ranks, minlength=len(text.FOLLOWERS)) / ranks.size
    np.testing.assert_allclose(chosen, text.FOLLOWERS, atol=0.03)
    assert entropy(chosen) == pytest.approx(1.03, abs=0.05)


def entropy(shares: np.ndarray) -> float:
    """Nats."""
    return -float((shares * np.log(np.maximum(shares, 1e-12))).sum())
