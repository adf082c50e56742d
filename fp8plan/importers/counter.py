"""The tokenizer of a run, which counts the tokens of the prompts and responses that its log holds as text.

A count is near, not exact: plain text has no special tokens, and tokenising it again may give other tokens than were
sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError, first_line
from fp8plan.importers import notes
from fp8plan.importers.logged import Measured, Note, Request, Text, name_of, without_waits
from fp8plan.importers.turn_boundaries import Texts, split
from fp8plan.packages import package
from fp8plan.schemas import parse

BATCH: Final = 1 << 20  # characters for the tokenizer at once: it needs 50 times as many bytes
QUESTION: Final = [{"role": "user", "content": "-"}]


def load_tokenizer(name: str) -> Any:
    """Load a transformers tokenizer. Raises ConfigError if there is none of that name, or no transformers.

    name: a hub id, or a folder with the tokenizer's files
    """
    transformers = package("transformers", "counting the tokens of text", "pip install transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # from the hub, the file system, or the tokenizer's own format
        raise ConfigError(
            f"there is no tokenizer {name!r}: {first_line(error)}; give the hub id or the folder of the run's model"
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
        """Count the tokens of requests, in batches.

        Raises ConfigError for a conversation that the tokenizer has no chat template for.
        """
        for batch in _batches(requests):
            # The samples of a prompt follow each other, so it is tokenised once.
            names = [name_of(str(request.prompt).encode(errors="surrogatepass")) for request in batch]
            prompts = {name: request.prompt for name, request in zip(names, batch, strict=True)}
            lengths = dict(zip(prompts, self._prompt_tokens([*prompts.values()]), strict=True))
            texts = [self._texts(request) for request in batch]
            counts = iter(self._tokens([text for each in texts for text in (*each.generated, *each.between)]))
            for name, each, request in zip(names, texts, batch, strict=True):
                if request.masked is not None:
                    yield Measured(name, lengths[name] + request.masked.before, request.masked.turns)
                    continue
                generated, between = ([next(counts) for _ in part] for part in each[:2])
                turns = without_waits(zip(generated, [*between, 0], strict=True))
                yield Measured(name, lengths[name], turns, each.unclear)

    def _prompt_tokens(self, prompts: Sequence[Text]) -> list[int]:
        if all(isinstance(prompt, str) for prompt in prompts):
            return self._tokens(prompts, self.special_tokens)
        conversations = ([{"role": "user", "content": x}] if isinstance(x, str) else x for x in prompts)
        return self._tokens([self._rendered(messages) for messages in conversations])

    def _texts(self, request: Request) -> Texts:
        """The texts of one response, one for each of its turns. A mask in the log goes before them."""
        if request.masked is not None:
            return Texts([], [])
        if isinstance(request.response, str):
            return split(request.response)
        generated, between = list[str](), list[str]()
        for message in request.response:
            if message.get("role") == "assistant":
                if not self.tools and "tool_calls" in message:
                    self.note(notes.NO_TOOLS)
                generated.append(self._turn(message))
                between.append("")
            elif between:
                between[-1] += _bare(message)
        return Texts(generated or [""], between[:-1])

    def _turn(self, message: dict[str, Any]) -> str:
        """The chat template's text for a message of the assistant, without the prompt before it.

        The message follows a short question, as templates drop the reasoning of earlier turns. DeepSeek-R1's drops it
        from the last turn too. Then the bare text is longer, and counts.
        """
        try:
            begun, whole = self._rendered(QUESTION), self._rendered([*QUESTION, message], False)
        except ConfigError as error:
            self.note(notes.BARE_TEXT.format(error))
            return _bare(message)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(begun, whole, strict=False)))
        return max(whole[shared:].rstrip(), _bare(message), key=len)

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool = True) -> str:
        """A conversation as its template writes it. prompt: end where a turn of the assistant begins"""
        self.rendered = True
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # ValueError without a template, and whatever a template raises
            raise ConfigError(
                f"the tokenizer cannot render the log's conversations: {first_line(error)}; give the one that "
                "the run used"
            ) from None
        return text

    def _tokens(self, texts: Sequence[Any], special_tokens: bool = False) -> list[int]:
        if not texts:
            return []
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]]


def _batches(requests: Iterable[Request]) -> Iterator[list[Request]]:
    batch, size = list[Request](), 0
    for request in requests:
        batch.append(request)
        size += sum(len(text) if isinstance(text, str) else len(str(text)) for text in request[:2])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bare(value: Any) -> str:
    """The text of a message: its content, reasoning and calls of tools, without any markers."""
    if isinstance(value, dict):
        return "".join(_bare(part) for key, part in value.items() if key not in ("role", "type"))
    return "".join(map(_bare, value)) if isinstance(value, list) else str(value)
