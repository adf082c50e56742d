"""The typed reader of a config.json: every value of it that is used passes a check here."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fp8plan.errors import ConfigError

# What the field of the key is called in other families. The first that a config has counts.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),  # LongCat has both, and the latter is twice the former
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
}
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
# Where a multimodal config keeps that of its text model. Of Qwen's Omni that is the thinker's; llm_config is InternVL's
# word (vLLM's _CONFIG_ATTRS_MAPPING), language_config DeepSeek-VL2's.
NESTED: Final = ("thinker_config", "text_config", "llm_config", "language_config")
MOST: Final = 10**12  # a size beyond it is a slip, and would not fit a float


class Fields:
    """Typed access to a config, with errors that name the file and the field.

    Every reader takes None for a field that is absent or null, and raises ConfigError for a value of another kind.
    """

    def __init__(self, config: Mapping[str, Any], source: str, path: str = "") -> None:
        self.config, self.source, self._path = config, source, path

    def value(self, name: str) -> Any:
        """The unchecked value of a field, whatever its family calls it; None if it is absent or null."""
        return self.config.get(self._spelt(name))

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        field = f"{self._path}{self._spelt(name)}"
        return ConfigError(f"{self.source}: field {field!r} is {shown(value)}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number. Without a default, the field must be there."""
        value = self.value(name)
        layers = self.value("num_hidden_layers")
        if _numbers(value) and 0 < len(value) == layers and len(set(value)) == 1:
            value = value[0]  # the same for every layer (Hunyuan)
        if value is None:
            value = default
        if value is None:
            field = f"{self._path}{name}"
            raise ConfigError(f"{self.source}: field {field!r} is missing; fp8plan needs it as a whole number")
        if not _whole(value) or value < least:
            raise self.error(name, value, f"a whole number of at least {least}")
        if value > most:
            raise self.error(name, value, f"at most {most:,}")
        return int(value)

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number of at least 0."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise self.error(name, value, f"a number from 0 to {MOST:,}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; 0 and 1 stand for them."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self.error(name, value, "true or false")
        return bool(value)

    def word(self, name: str, choices: Sequence[str] = (), such_as: str = "") -> str | None:
        """A word, one of `choices` if there are any. such_as: a word that the error gives as an example"""
        value = self.value(name)
        if value is not None and (not isinstance(value, str) or (choices and value not in choices)):
            example = f"a word, such as {such_as!r}" if such_as else "a word"
            raise self.error(name, value, " or ".join(choices) or example)
        return value

    def words(self, name: str, length: int, choices: Sequence[str] = ()) -> list[str] | None:
        """A list of `length` words, one for each layer, each one of `choices` if there are any."""
        value = self._per_layer(name, length, "words")
        for x in value or ():
            if not isinstance(x, str) or (choices and x not in choices):
                raise self.error(name, x, f"in the list: {' or '.join(choices) or 'words'}")
        return value

    def marks(self, name: str, length: int) -> list[bool] | None:
        """A list of `length` marks, one for each layer: 0 or 1, false or true."""
        value = self._per_layer(name, length, "marks")
        for x in value or ():
            if not isinstance(x, int) or x not in (0, 1):
                raise self.error(name, x, "in the list: 0 and 1")
        return None if value is None else [x == 1 for x in value]

    def indices(self, name: str, layers: int, first: int = 0) -> frozenset[int] | None:
        """The numbers of some of a model's layers, counted from `first`."""
        value = self.value(name)
        last = first + layers - 1
        if value is not None and not _numbers(value):
            raise self.error(name, value, f"a list of layer numbers from {first} to {last}")
        for x in value or ():
            if not first <= x <= last:
                raise self.error(name, x, f"in the list: layer numbers from {first} to {last}")
        return None if value is None else frozenset(value)

    def letters(self, name: str, length: int, choices: str) -> str | None:
        """A word of `length` letters, one for each layer."""
        value = self.value(name)
        if value is not None and not (isinstance(value, str) and len(value) == length and set(value) <= set(choices)):
            raise self.error(name, value, f"{length} of the letters {' '.join(choices)}, one for each layer")
        return value

    def by_layer(self, name: str, layers: int) -> dict[int, Fields] | None:
        """The fields of each layer that a mapping names by its number, counted from 0."""
        whole = self.inside(name)
        if whole is None:
            return None
        for key in whole.config:
            if not re.fullmatch("[0-9]{1,9}", str(key)) or int(key) >= layers:
                raise self.error(name, key, f"as its keys: layer numbers from 0 to {layers - 1}")
        return {int(key): whole.inside(key) or Fields({}, self.source) for key in whole.config}

    def inside(self, name: str) -> Fields | None:
        """The fields of a mapping inside of the config."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "a mapping of fields")
        return Fields(value, self.source, f"{self._path}{self._spelt(name)}.")

    def _per_layer(self, name: str, length: int, kind: str) -> list[Any] | None:
        value: list[Any] | None = self.value(name)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            long = f", which has {len(value)}" if isinstance(value, list) else ""
            raise self.error(name, value, f"a list of {length} {kind}, one for each layer{long}")
        return value

    def _spelt(self, name: str) -> str:
        """The name of a field in this config."""
        return next((other for other in SYNONYMS.get(name, ()) if self.config.get(other) is not None), name)


def check_numbers(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError naming the field if a number of the config is NaN, which Python reads and JSON does not have.

    Infinity is refused only where it is read: Mamba's published configs have it as a limit (time_step_limit).
    """
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += ((str(name), x) for name, x in value.items())
        elif isinstance(value, list):
            waiting += ((field, x) for x in value)
        elif isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{source}: field {field!r} is NaN; allowed: a number")


def shown(value: object) -> str:
    """A value in a few words, however long it is or deep."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def worded(word: str) -> str:
    """A word of a config inside of a sentence: as it is, or quoted and short if it is no name."""
    return word if word.isidentifier() and len(word) < 60 else shown(word)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: object) -> bool:
    """Tell whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(map(_whole, value))
