"""The tokens of logged text, counted by the run's own tokenizer.

A count is near, not exact: special tokens are not in the text, and text that is tokenised anew need not fall into the
tokens that were sampled. `records` compares the mean with what the trainer logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Counted, Text, Texts, counted


def load_tokenizer(name: str) -> Any:
    """Load a transformers tokenizer. Raises ConfigError if there is none of that name, or no transformers.

    name: a hub id, or a folder with the tokenizer's files
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("counting the tokens of text needs transformers; type: pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of the hub, the file system, or the tokenizer's own format
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"there is no tokenizer {name!r}: {told}; give the hub id or the folder of the run's model"
        ) from None


def count(texts: Texts, tokenizer: Any) -> Counted:
    """Count the tokens of a rollout's texts. Raises ConfigError for a conversation that the tokenizer has no chat
    template for.
    """
    prompts = _prompt_tokens(texts.prompts, tokenizer, texts.special_tokens)
    responses = _plain_tokens([_said(response) for response in texts.responses], tokenizer, False)
    return counted(texts.step, zip(map(str, texts.prompts), prompts, responses, strict=True))


def _prompt_tokens(prompts: Sequence[Text], tokenizer: Any, special_tokens: bool) -> list[int]:
    if all(isinstance(prompt, str) for prompt in prompts):
        return _plain_tokens(list(prompts), tokenizer, special_tokens)
    try:
        rendered = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts
        ]
    except Exception as error:  # ValueError without a template, and whatever a template raises
        raise ConfigError(
            f"the tokenizer cannot render the log's conversations: {str(error).splitlines()[0]}; give the one that the "
            "run used"
        ) from None
    return _plain_tokens(rendered, tokenizer, False)


def _plain_tokens(texts: list[Any], tokenizer: Any, special_tokens: bool) -> list[int]:
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]]


def _said(response: Text) -> str:
    return response if isinstance(response, str) else "".join(str(message.get("content", "")) for message in response)
