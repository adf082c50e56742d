"""The tokens of logged text, counted by the run's own tokenizer.

A count is near, not exact. Special tokens are not in plain text, and text that is tokenised anew need not fall into the
tokens that were sampled. `records` compares the mean with what the trainer logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Measured, Note, Request, Text, name_of
from fp8plan.jsonl import parse

BATCH: Final = 1 << 20  # characters that the tokenizer is given at once: it needs 50 times as many bytes
NO_TOOLS: Final = (
    "responses call tools, whose definitions are in every prompt and not in the log: prompts are counted without them; "
    "give --tools FILE"
)
TOOL_OUTPUT: Final = (
    "tool output stands between the turns of a response. It is not counted, as no engine generated it; yet it was in "
    "the KV cache, and the seconds hold the tools' own"
)
QUESTION: Final = [{"role": "user", "content": "-"}]
UNUSED_TOOLS: Final = "--tools was not used: the log holds no conversations, and prompts have their tools in them"


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


def load_tools(path: Path) -> list[dict[str, Any]]:
    """Read definitions of tools, as a chat template takes them. Raises ConfigError for a file that has none."""
    try:
        tools = parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a JSON file with a list of tools") from None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{path} holds no list of tools; allowed: a JSON list of their definitions, as "
            "transformers.utils.get_json_schema(function) gives each"
        )
    return tools


@dataclass(slots=True)
class Counter:
    """The tokenizer of a run, which counts the tokens of its requests.

    special_tokens: as Source has it
    tools:          definitions that every conversation's prompt has
    note:           called with remarks
    rendered:       a conversation was counted
    """

    tokenizer: Any
    special_tokens: bool
    tools: Sequence[dict[str, Any]] | None
    note: Note
    rendered: bool = False

    def measured(self, requests: Iterable[Request]) -> Iterator[Measured]:
        """Count the tokens of requests, some at a time.

        Raises ConfigError for a conversation that the tokenizer has no chat template for.
        """
        for batch in _batches(requests):
            # Samples of a prompt follow each other: it is tokenised once for all of them.
            names = [name_of(str(request.prompt).encode(errors="surrogatepass")) for request in batch]
            prompts = {name: request.prompt for name, request in zip(names, batch, strict=True)}
            lengths = dict(zip(prompts, self._prompt_tokens([*prompts.values()]), strict=True))
            turns = [self._turns(request) for request in batch]
            counts = iter(self._tokens([text for texts in turns for text in texts]))
            for name, texts in zip(names, turns, strict=True):
                yield Measured(name, lengths[name], sum(next(counts) for _ in texts))

    def _prompt_tokens(self, prompts: Sequence[Text]) -> list[int]:
        if all(isinstance(prompt, str) for prompt in prompts):
            return self._tokens(prompts, self.special_tokens)
        return self._tokens([self._rendered(_messages(prompt)) for prompt in prompts])

    def _turns(self, request: Request) -> list[str]:
        """Return the texts that the model generated for one response, one for each of its turns."""
        if isinstance(request.response, str):
            return [request.response]
        turns = [message for message in request.response if message.get("role") == "assistant"]
        if len(turns) < len(request.response):
            self.note(TOOL_OUTPUT)
        if not self.tools and any("tool_calls" in message for message in turns):
            self.note(NO_TOOLS)
        return [self._turn(message) for message in turns]

    def _turn(self, message: dict[str, Any]) -> str:
        """Return what the chat template writes for a message of the assistant, behind the prompt that asks for it.

        The message stands behind a short question, as templates leave the reasoning out of earlier turns. One that
        leaves it out of the last turn, too, as DeepSeek-R1's does, writes less than the bare text, which then counts.
        """
        try:
            begun, whole = self._rendered(QUESTION), self._rendered([*QUESTION, message], False)
        except ConfigError as error:
            self.note(f"a response is counted by its bare text: {error}")
            return _bare(message)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(begun, whole, strict=False)))
        return max(whole[shared:].rstrip(), _bare(message), key=len)

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool = True) -> str:
        """Return a conversation as its template writes it. prompt: a turn of the assistant follows"""
        self.rendered = True
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # ValueError without a template, and whatever a template raises
            raise ConfigError(
                f"the tokenizer cannot render the log's conversations: {str(error).splitlines()[0]}; give the one that "
                "the run used"
            ) from None
        return text

    def _tokens(self, texts: Sequence[Any], special_tokens: bool = False) -> list[int]:
        return (
            [len(ids) for ids in self.tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]] if texts else []
        )


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


def _messages(prompt: Text) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _bare(value: Any) -> str:
    """Return the text of a message: its content, reasoning and calls of tools, without any markers."""
    if isinstance(value, dict):
        return "".join(_bare(x) for key, x in value.items() if key not in ("role", "type"))
    return "".join(map(_bare, value)) if isinstance(value, list) else str(value)
