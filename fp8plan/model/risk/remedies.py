"""Remedies: settings that lower the mismatch between the rollout policy and the trainer's.

A correction weighs the mismatch that is left (fp8plan.runtime.watch.correction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.kept import OUTPUTS, Kept, kept_words
from fp8plan.options import REMEDIES, Option, group_of

# How a trainer computes its linears. BLOCK has 128x128 weights and 1x128 activations, as FP8_BLOCK of the rollout;
# POW2 rounds their scales to powers of two (E8M0); TENSOR has one scale for each matrix.
BF16, BLOCK, POW2, TENSOR = "bf16", "fp8_block", "fp8_block_pow2", "fp8_tensor"
TRAINER_PRECISIONS: Final = (BF16, BLOCK, POW2, TENSOR)


def typed_kept(typed: str) -> Kept:
    """The value of keep_bf16 for "FIRST,LAST" or "FIRST,LAST,o_proj". Raises ConfigError as `checked_kept` does."""
    words = typed.replace(" ", "").split(",")
    return checked_kept([int(word) if word.isdecimal() else word for word in words])


def checked_kept(kept: Sequence[Any]) -> Kept:
    """The value of keep_bf16 as a tuple. Raises ConfigError unless it is two counts, or these and OUTPUTS."""
    if isinstance(kept, Sequence) and len(kept) in (2, 3):
        counts, names = kept[:2], kept[2:]
        if all(type(n) is int and n >= 0 for n in counts) and all(name == OUTPUTS for name in names):
            return tuple(kept)
    allowed = 'two counts of layers, first and last, and perhaps o_proj: (1, 1) or (1, 1, "o_proj")'
    raise ConfigError(f"keep_bf16 is {kept!r}; allowed: {allowed}, typed 1,1 or 1,1,o_proj")


@dataclass(frozen=True, slots=True)
class Remedies:
    """The remedies of a run.

    router_replay:     the trainer uses the experts that the engine picked for each token (R3, arXiv 2510.11370)
    trainer_precision: one of TRAINER_PRECISIONS: how the trainer rounds weights and activations
    keep_bf16:         linears of the rollout that stay in BF16: (1, 1): those of the first and last layer; (1, 1,
                       "o_proj"): the attention outputs of the others, too

    Raises ConfigError for an unknown precision, and for counts below 0 or other names.
    """

    router_replay: Annotated[
        bool, Option(REMEDIES, "the trainer uses the experts that the engine picked", name="--router-replay")
    ] = False
    trainer_precision: Annotated[
        str, Option(REMEDIES, f"of its linears: {', '.join(TRAINER_PRECISIONS)}", metavar="NAME")
    ] = BF16
    keep_bf16: Annotated[
        Kept,
        Option(
            REMEDIES,
            "so many first and last layers stay in BF16 beside FP8 weights; 1,1,o_proj: attention outputs, too",
            "0,0",
            metavar="FIRST,LAST",
            kind=str,
            read=typed_kept,
        ),
    ] = (0, 0)

    def __post_init__(self) -> None:
        if self.trainer_precision not in TRAINER_PRECISIONS:
            allowed = ", ".join(TRAINER_PRECISIONS)
            raise ConfigError(f"trainer_precision is {self.trainer_precision!r}; allowed: {allowed}")
        object.__setattr__(self, "keep_bf16", checked_kept(self.keep_bf16))

    @property
    def options(self) -> str:
        """The remedies as they are typed for `fp8plan plan`; "" for none."""
        words = ["--router-replay"] if self.router_replay else []
        if self.trainer_precision != BF16:
            words.append(f"--trainer-precision {self.trainer_precision}")
        if any(self.keep_bf16):
            words.append(f"--keep-bf16 {','.join(map(str, self.keep_bf16))}")
        return " ".join(words)

    def beyond(self, others: Remedies) -> Remedies:
        """These remedies without those that the others have, too."""
        return Remedies(
            self.router_replay and not others.router_replay,
            BF16 if self.trainer_precision == others.trainer_precision else self.trainer_precision,
            (0, 0) if self.keep_bf16 == others.keep_bf16 else self.keep_bf16,
        )

    def words(self, fp8_weights: bool) -> str:
        """The remedies in a sentence; "" for none. fp8_weights: of the rollout; only then layers stay in BF16"""
        words = ["router replay"] if self.router_replay else []
        if self.trainer_precision != BF16:
            words.append(f"a trainer in {self.trainer_precision}")
        if fp8_weights and any(self.keep_bf16):
            words.append(f"{kept_words(self.keep_bf16)} in BF16")
        return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


NO_REMEDIES: Final = Remedies()
REMEDY_OPTIONS: Final = group_of(Remedies)
