"""Token ids that a model has not are named before an engine sees them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import PROMPTS, VOCABULARY, generate, started

from fp8plan.errors import ConfigError
from fp8plan.runtime.tokens import refuse_prompts, refuse_tokens

FITTING = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), min_size=1, max_size=5)
BAD = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=VOCABULARY),
    st.floats(),
    st.none(),
    st.text(max_size=3),
    st.booleans(),
    st.booleans().map(np.bool_),
)
# The forms in which vllm.LLM.generate takes prompts of token ids.
FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "lists": list,
    "dicts": lambda prompts: [{"prompt_token_ids": tokens} for tokens in prompts],
    "tuples": lambda prompts: tuple(tuple(tokens) for tokens in prompts),
    "with media beside text": lambda prompts: [*prompts, "text", {"prompt": "text", "multi_modal_data": {"image": 1}}],
}


@pytest.mark.parametrize("form", FORMS)
@given(prompts=FITTING)
def test_ids_of_the_vocabulary_pass(form: str, prompts: list[list[int]]) -> None:
    refuse_prompts(FORMS[form](prompts), VOCABULARY)
    refuse_tokens("kv_prompts", prompts, VOCABULARY, 20)


@pytest.mark.parametrize("form", FORMS)
@given(prompts=FITTING, bad=BAD, data=st.data())
def test_the_first_that_is_none_is_named(form: str, prompts: list[list[Any]], bad: Any, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(prompts) - 1))
    position = data.draw(st.integers(0, len(prompts[number])))
    spoilt = [list(tokens) for tokens in prompts]
    spoilt[number].insert(position, bad)
    said = rf"prompt {number}, token {position} is .*{re.escape(repr(bad)[:60])}; allowed: .*0 to 1,023"
    with pytest.raises(ConfigError, match=f"prompts: {said}"):
        refuse_prompts(FORMS[form](spoilt), VOCABULARY)
    with pytest.raises(ConfigError, match=f"scored: {said}"):
        refuse_tokens("scored", spoilt, VOCABULARY)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("make", [bool, np.bool_, torch.tensor, np.array], ids=["bool", "numpy", "torch", "array"])
def test_a_boolean_is_no_token_wherever_it_stands(make: Callable[[bool], Any], whole: bool) -> None:
    """Python and torch take True for 1 where a number is asked for, and numpy does in a list with numbers."""
    for prompt in ([make(whole)], [1, make(whole)], [make(whole), 1]):
        for prompts in (prompt, [prompt], [[2], prompt], {"prompt_token_ids": prompt}):
            with pytest.raises(ConfigError, match="allowed: a whole number, 0 to 1,023"):
                refuse_prompts(prompts, VOCABULARY)
        with pytest.raises(ConfigError, match="allowed: a whole number, 0 to 1,023"):
            refuse_tokens("scored", [prompt], VOCABULARY)


@pytest.mark.parametrize("tokens", [torch.tensor([True, False]), np.array([True])], ids=["torch", "numpy"])
def test_a_mask_is_no_list_of_tokens(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: a whole number, 0 to 1,023"):
        refuse_tokens("scored", [tokens], VOCABULARY)


def test_one_prompt_alone_is_number_0() -> None:
    for alone in ([1, -2], {"prompt_token_ids": [1, -2]}):
        with pytest.raises(ConfigError, match="prompts: prompt 0, token 1 is id -2; allowed: 0 to 1,023, the model's"):
            refuse_prompts(alone, VOCABULARY)


def test_a_mask_is_no_list_of_ids() -> None:
    with pytest.raises(ConfigError, match="prompt 0, token 0 is True; allowed: a whole number"):
        refuse_tokens("kv_prompts", [[True, False]], VOCABULARY)


def test_arrays_are_prompts_too() -> None:
    refuse_prompts([{"prompt_token_ids": np.arange(5)}], VOCABULARY)
    with pytest.raises(ConfigError, match="token 4 is id 2000; allowed"):
        refuse_prompts([{"prompt_token_ids": np.array([1, 2, 3, 4, 2000], dtype=np.uint32)}], VOCABULARY)


def test_an_empty_prompt_has_no_wrong_id_and_is_refused_by_its_length() -> None:
    for empty in ([], np.zeros(0, np.int64), torch.zeros(0, dtype=torch.long)):
        refuse_prompts([{"prompt_token_ids": empty}], VOCABULARY)
        with pytest.raises(ConfigError, match="scored: prompt 0 has 0 tokens; allowed: 1 or more"):
            refuse_tokens("scored", [empty], VOCABULARY)


@pytest.mark.parametrize("prompts", ["text", ["text", "more"], {"prompt": "text"}, [], iter([[5]]), None, 7, [{}]])
def test_what_has_no_ids_is_vllms_to_judge(prompts: Any) -> None:
    refuse_prompts(prompts, VOCABULARY)


def test_placeholders_of_media_may_lie_beyond_the_vocabulary() -> None:
    beyond = {"prompt_token_ids": [1, VOCABULARY + 7], "multi_modal_data": {"image": object()}}
    refuse_prompts([beyond], VOCABULARY)
    with pytest.raises(ConfigError, match="token 0 is id -1; allowed: 0 or more"):
        refuse_prompts([beyond | {"prompt_token_ids": [-1]}], VOCABULARY)


@pytest.mark.vllm
def test_an_engine_serves_on_after_ids_that_it_has_not() -> None:
    with started("dense", "a", "bf16") as engine:
        before = generate(engine)
        for bad in (-1, VOCABULARY, 2**70, 1.5, "5"):
            with pytest.raises(ConfigError, match=rf"prompt 1, token 2 is .*{bad}.*; allowed: .*0 to 1,023"):
                engine.generate([{"prompt_token_ids": list(PROMPTS[0])}, {"prompt_token_ids": [5, 6, bad]}])
        assert engine.serving
        assert generate(engine, cold=True) == before
