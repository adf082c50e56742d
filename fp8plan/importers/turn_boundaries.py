"""The turns of a logged response: the texts that the model generated, and those that a tool or a user put between.

A chat template opens a turn of another role with a marker, and hands over to the assistant with a second one. Only both
together make a turn: text that mentions one marker is not told from tool output, and counts as generated. verl decodes
without special tokens. Then Qwen's turn is "user", "<tool_response>", the output, "</tool_response>" and "assistant".
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np

from fp8plan.importers.logged import Masked, without_waits

OTHERS: Final = "(?:user|tool|ipython|system|function|observation|environment)"
# A turn that no engine generated, from its first marker to the one that hands over to the assistant.
TURNS: Final = (
    rf"<\|im_start\|>{OTHERS}\b.*?<\|im_start\|>assistant\n?",  # Qwen
    rf"\n?{OTHERS}\n<tool_response>\n.*?</tool_response>\s*assistant\n",  # Qwen without special tokens
    # Llama, with special tokens and without
    rf"<\|start_header_id\|>{OTHERS}<\|end_header_id\|>.*?<\|start_header_id\|>assistant<\|end_header_id\|>\n*",
    r"ipython\n\n.*?assistant\n\n",
    r"<start_of_turn>user\n.*?<start_of_turn>model\n",  # Gemma
    r"<\|(?:observation|user)\|>.*?<\|assistant\|>\n?",  # GLM
    r"<｜tool▁outputs▁begin｜>.*?<｜tool▁outputs▁end｜>",  # DeepSeek
    r"\[TOOL_RESULTS\].*?\[/TOOL_RESULTS\]",  # Mistral
)
TURN: Final = re.compile("|".join(TURNS), re.DOTALL)
# A marker outside of such a turn. Lines of "user" and "assistant" are all that Qwen leaves of a user's turn.
MARKER: Final = re.compile(
    rf"<\|im_start\|>{OTHERS}\b|<\|start_header_id\|>{OTHERS}<|</?tool_response>|</?information>|<start_of_turn>user"
    r"|<\|observation\|>|<｜tool▁outputs▁begin｜>|\[TOOL_RESULTS\]|user\n.*?\nassistant\n",
    re.DOTALL,
)
# Each turn and marker has one of these, which are quick to look for.
HINTS: Final = ("<|", "assistant\n", "tool_response>", "information>", "<start_of_turn>", "<｜tool", "[TOOL_RESULTS]")


class Texts(NamedTuple):
    """The texts of one response.

    generated: one for each turn of the model
    between:   one after each of them but the last, of tools and users
    unclear:   a marker stands in the generated text, which may hold tool output, too
    """

    generated: list[str]
    between: list[str]
    unclear: bool = False


def split(text: str) -> Texts:
    """Split the plain text of a response at its whole turns of others. A single turn comes back as it is.

    A response that ends with a turn of others has no turn of the model after it: it was cut there.
    """
    if not any(hint in text for hint in HINTS):
        return Texts([text], [])
    generated, between, end = list[str](), list[str](), 0
    for turn in TURN.finditer(text):
        generated.append(text[end : turn.start()])
        between.append(turn[0])
        end = turn.end()
    if text[end:] or not between:
        generated.append(text[end:])
    unclear = any(MARKER.search(part) for part in generated)
    return Texts(generated, between[: len(generated) - 1], unclear)


def masked(mask: Any) -> Masked | None:
    """The turns of a response by its mask, 1 for each generated token. None: it is not such a mask, or has no 1.

    Zeros at the end pad the batch, or are of a tool that no turn follows. Both are left out.
    """
    try:
        bits = np.asarray(mask)
    except ValueError:  # lists of unequal length
        return None
    if bits.ndim != 1 or bits.dtype.kind not in "biuf" or not np.isin(bits, (0, 1)).all():
        return None
    edges = np.flatnonzero(np.diff(bits.astype(bool), prepend=False, append=False))
    if not len(edges):
        return None
    starts, ends = edges[::2], edges[1::2]
    tools = np.append(starts[1:], ends[-1]) - ends
    turns = zip((ends - starts).tolist(), tools.tolist(), strict=True)
    return Masked(int(starts[0]), without_waits(turns))
