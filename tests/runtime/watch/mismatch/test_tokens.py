"""Packing: the valid tokens of every form of batch, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch import measure as module
from fp8plan.runtime.watch.mismatch.measure import pack

torch = pytest.importorskip("torch")

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]])  # a hole, an empty row, a prompt before the response
TRAIN = -torch.arange(12.0).reshape(3, 4)
ROLLOUT = TRAIN - 0.25
VALID = [0.0, -1.0, -3.0, -9.0, -10.0]


@pytest.fixture(params=[1, 3, 1 << 20])
def chunk(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padded(dtype: Any) -> None:
    tokens = pack(TRAIN, ROLLOUT, MASK.to(dtype))
    assert tokens.train.tolist() == VALID
    assert tokens.log_ratio.tolist() == [0.25] * 5
    assert tokens.offsets.tolist() == [0, 3, 5]
    assert tokens.rows.tolist() == [True, False, True]
    assert (len(tokens), tokens.sequences, tokens.lengths.tolist()) == (5, 2, [3, 2])
    assert tokens.unpack(tokens.train).tolist() == [[0, -1, 0, -3], [0] * 4, [0, -9, -10, 0]]
    assert tokens.select(TRAIN).tolist() == VALID
    assert torch.equal(tokens.mask(), MASK.to(dtype))
    kept = tokens.mask(tokens.train > -5)
    assert kept.dtype == dtype
    assert kept.tolist() == torch.where(TRAIN > -5, MASK, 0).to(dtype).tolist()


@pytest.mark.usefixtures("chunk")
def test_packed() -> None:
    some = pack(TRAIN.reshape(-1), ROLLOUT.reshape(-1), MASK.reshape(-1), lengths=[4, 4, 4])
    assert some.train.tolist() == VALID
    assert some.offsets.tolist() == [0, 3, 5]
    every = pack(TRAIN.reshape(-1), ROLLOUT.reshape(-1), lengths=torch.tensor([5, 0, 7]))
    assert (every.offsets.tolist(), every.rows.tolist()) == ([0, 5, 12], [True, False, True])
    assert torch.equal(every.unpack(every.train), TRAIN.reshape(-1))
    assert every.mask().tolist() == [True] * 12


def test_no_mask_means_that_all_tokens_are_valid() -> None:
    tokens = pack(TRAIN, ROLLOUT)
    assert tokens.lengths.tolist() == [4, 4, 4]
    assert torch.equal(tokens.unpack(tokens.train), TRAIN)


def test_a_mask_that_is_returned_is_a_new_one() -> None:
    tokens = pack(TRAIN, ROLLOUT, MASK)
    tokens.mask()[:] = 5
    assert int(MASK.max()) == 1


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mask", [MASK, None])
def test_invalid_tokens_are_left_out_and_counted(bad: float, side: int, mask: Any) -> None:
    sides = [TRAIN.clone(), ROLLOUT.clone()]
    sides[side][0, 1] = bad
    sides[side][0, 2] = bad  # masked, so not counted
    given_mask = MASK.clone() if mask is None else mask
    tokens = pack(*sides, given_mask)
    assert tokens.invalid == 1
    assert tokens.train.tolist() == [0.0, -3.0, -9.0, -10.0]
    assert tokens.offsets.tolist() == [0, 2, 4]
    assert tokens.unpack(torch.ones(4)).tolist() == [[1, 0, 0, 1], [0] * 4, [0, 1, 1, 0]]
    assert tokens.mask().tolist() == [[1, 0, 0, 1], [0] * 4, [0, 1, 1, 0]]
    everything = pack(*sides)
    assert (everything.invalid, len(everything)) == (2, 10)


def test_both_sides_minus_infinity_is_invalid_too() -> None:
    both = torch.tensor([-1.0, float("-inf")])
    assert pack(both, both, lengths=[2]).invalid == 1


def test_numpy_in_numpy_out() -> None:
    train = TRAIN.numpy().astype(np.float64)[::-1][::-1]
    train.flags.writeable = False
    tokens = pack(train, ROLLOUT.numpy(), MASK.numpy().astype(bool))
    assert tokens.train.tolist() == VALID
    assert tokens.train.dtype == torch.float32
    out = tokens.unpack(tokens.train)
    assert isinstance(out, np.ndarray)
    assert out.dtype == np.float32
    mask = tokens.mask()
    assert isinstance(mask, np.ndarray)
    assert mask.dtype == bool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_float32_whatever_comes_in_and_no_gradient(dtype: Any) -> None:
    tokens = pack(TRAIN.to(dtype).requires_grad_(), ROLLOUT.to(dtype), MASK)
    assert {tokens.train.dtype, tokens.rollout.dtype, tokens.log_ratio.dtype} == {torch.float32}
    assert not tokens.log_ratio.requires_grad


def test_a_view_that_is_not_contiguous() -> None:
    tokens = pack(TRAIN.T.contiguous().T, ROLLOUT, MASK.T.contiguous().T)
    assert tokens.train.tolist() == VALID


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((TRAIN, ROLLOUT[:2]), r"rollout_logprobs has shape \(2, 4\)"),
        ((TRAIN, ROLLOUT, MASK[0]), r"mask has shape \(4,\)"),
        ((TRAIN[0], ROLLOUT[0]), "packed .tokens. with lengths"),
        ((TRAIN, ROLLOUT, None, [4, 4, 4]), "packed .tokens. with lengths"),
        ((TRAIN[0], ROLLOUT[0], None, [3]), "lengths sum up to 3"),
        ((TRAIN[0], ROLLOUT[0], None, [5, -1]), "0 or more"),
        ((TRAIN[None], ROLLOUT[None]), "allowed: padded"),
        ((np.array([[None, 1.0]]), ROLLOUT), "train_logprobs is a ndarray of object; allowed: a tensor, an array"),
        ((TRAIN, np.array([["a"]])), "rollout_logprobs is a ndarray of <U1; allowed: a tensor, an array"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pack(*arguments)


def test_rows_without_a_column_have_versions_too() -> None:
    """As on a rank whose piece of the sequences is empty."""
    empty = torch.zeros(3, 0)
    assert module.measure(pack(empty, empty, empty.bool()), empty.long())["tokens"] == 0


def test_values_to_select_have_the_form_of_the_log_probs() -> None:
    with pytest.raises(ConfigError, match="that of the log-probs"):
        pack(TRAIN, ROLLOUT, MASK).select(TRAIN[0])


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=0, max_size=5))
def test_what_is_packed_comes_back(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows, dtype=torch.bool).reshape(-1, 6)
    values = torch.randn(mask.shape)
    tokens = pack(values, torch.zeros_like(values), mask)
    assert torch.equal(tokens.unpack(tokens.train), torch.where(mask, values, 0.0))
    assert tokens.lengths.tolist() == [count for count in mask.sum(1).tolist() if count]


def test_torch_s_threads_are_as_they_were() -> None:
    before = torch.get_num_threads()
    pack(TRAIN, ROLLOUT, MASK)
    with pytest.raises(ConfigError):
        pack(TRAIN, ROLLOUT[:2])
    assert torch.get_num_threads() == before
