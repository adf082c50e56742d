"""The tokens of logged text, counted by the run's own tokenizer.

A count is near, not exact: special tokens are not in the text, and text that is tokenised anew need not fall into the
tokens that were sampled. `records` compares the mean with what the trainer logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Measured, Request, Text

BATCH: Final = 1 << 20  # characters that the tokenizer is given at once: it needs 50 times as many bytes


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


def measured(requests: Iterable[Request], tokenizer: Any, special_tokens: bool) -> Iterator[Measured]:
    """Count the tokens of requests, some at a time.

    Raises ConfigError for a conversation that the tokenizer has no chat template for.

    special_tokens: as Source has it
    """
    for batch in _batches(requests):
        # Samples of a prompt follow each other: it is tokenised once for all of them.
        names = [prompt_name(request.prompt) for request in batch]
        prompts = {name: request.prompt for name, request in zip(names, batch, strict=True)}
        lengths = dict(zip(prompts, _prompt_tokens([*prompts.values()], tokenizer, special_tokens), strict=True))
        responses = _plain_tokens([_said(request.response) for request in batch], tokenizer, False)
        yield from (Measured(name, lengths[name], tokens) for name, tokens in zip(names, responses, strict=True))


def prompt_name(prompt: Text) -> bytes:
    """A short name, the same for the same prompt: a large rollout's prompts need not stay in memory."""
    return blake2b(str(prompt).encode(errors="surrogatepass"), digest_size=16).digest()


def _batches(requests: Iterable[Request]) -> Iterator[list[Request]]:
    batch, size = list[Request](), 0
    for request in requests:
        batch.append(request)
        size += sum(len(text) if isinstance(text, str) else len(str(text)) for text in request)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
