"""Checks of the token ids that a caller hands to an engine.

A token id without a row in the model's embedding gives garbage or ends the engine's process. So ids of prompts,
calibration, scoring and HTTP routes are checked here before an engine sees them. A boolean is no id, although Python,
numpy and vLLM take True for token 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from fp8plan.errors import ConfigError


def refuse_tokens(what: str, sequences: Any, vocabulary: int | None, longest: int | None = None) -> None:
    """Raise ConfigError for anything but lists of token ids that an engine takes.

    what:       name of the argument, for the error
    sequences:  token ids of each sequence
    vocabulary: number of the model's ids; None: not known, so any id of 0 or more will do
    longest:    most tokens of a sequence; None: no limit

    The error names the sequence and the token by their numbers from 0, the id and the allowed range.
    """
    try:
        counts = [(tokens, len(tokens)) for tokens in sequences if not is_text(tokens)]
        if len(counts) < len(sequences):
            raise TypeError
    except TypeError:
        raise ConfigError(f"{what}: no list of token ids each; allowed: [[token ids], ...], e.g. [[1, 2, 3]]") from None
    for number, (tokens, count) in enumerate(counts):
        _refuse_ids(f"{what}: prompt {number}", tokens, vocabulary)
        if not 1 <= count <= (longest or count):
            most = "or more" if longest is None else f"to {longest:,}, as max_model_len says"
            raise ConfigError(f"{what}: prompt {number} has {count:,} tokens; allowed: 1 {most}")


def refuse_prompts(prompts: Any, vocabulary: int | None) -> None:
    """Raise ConfigError for a token id that the engine must not see, in prompts as vllm.LLM.generate takes them.

    vLLM checks text and everything else without token ids. In a prompt with images or other media, placeholders may
    have ids beyond the vocabulary.
    """
    if isinstance(prompts, Mapping) or (isinstance(prompts, Sequence) and len(prompts) and _is_one(prompts[0])):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or is_text(prompts):
        return
    for number, prompt in enumerate(prompts):
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if isinstance(tokens, (Sequence, np.ndarray)) and not is_text(tokens):
            media = isinstance(prompt, Mapping) and prompt.get("multi_modal_data")
            _refuse_ids(f"prompts: prompt {number}", tokens, None if media else vocabulary)


def _refuse_ids(where: str, tokens: Sequence[Any] | np.ndarray, vocabulary: int | None) -> None:
    """Raise ConfigError for the first token that is no id. numpy checks all at once, as a rollout has millions."""
    if _all_fit(tokens, vocabulary):
        return
    allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1:,}, the model's vocabulary"
    for position, token in enumerate(tokens):
        if not _is_id(token):
            raise ConfigError(f"{where}, token {position} is {token!r:.60}; allowed: a whole number, {allowed}")
        if not 0 <= index(token) < (vocabulary or index(token) + 1):
            raise ConfigError(f"{where}, token {position} is id {index(token)}; allowed: {allowed}")


def _all_fit(tokens: Sequence[Any] | np.ndarray, vocabulary: int | None) -> bool:
    if not len(tokens):
        return True
    if not hasattr(tokens, "dtype") and not whole_numbers(tokens):
        return False
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal lengths, or a tensor on a GPU
        return False
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return False
    return int(ids.min()) >= 0 and (vocabulary is None or int(ids.max()) < vocabulary)


def whole_numbers(values: Iterable[Any]) -> bool:
    """Return True if all values are Python's or numpy's integers. numpy and torch would make numbers of booleans."""
    return all(kind is not bool and issubclass(kind, (int, np.integer)) for kind in set(map(type, values)))


def _is_id(token: Any) -> bool:
    try:
        index(token)
    except TypeError:
        return False
    return not _is_boolean(token)


def _is_one(prompt: Any) -> bool:
    """Return True for a single token in the place of a prompt: its list is one prompt."""
    return _is_id(prompt) or _is_boolean(prompt)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def is_text(value: Any) -> bool:
    """Return True for text and mappings, over which Python can iterate although they are no lists of ids."""
    return isinstance(value, (str, bytes, Mapping))
