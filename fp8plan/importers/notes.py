"""The notes of an import: what a log lacks, what was left out, and what to type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from fp8plan.importers.logged import Source, Tally
from fp8plan.model.turn_table import NO_WAITS
from fp8plan.model.workload_turns import WAITS

NO_TOOLS: Final = (
    "responses call tools, and the log lacks their definitions, which are in every prompt; prompts are counted without "
    "them; give --tools FILE"
)
UNUSED_TOOLS: Final = "--tools is not used: the log has no conversations, and the tools are in its prompts"
BARE_TEXT: Final = "a response is counted by its bare text: {}"
OVERWRITTEN: Final = "left out, as an evaluation wrote over them: steps {}"
LAST_LEFT_OUT: Final = "step {}, the last one, is left out: {}"
TORN_ROLLOUT: Final = "{}; step {} lacks at least that response, so its seconds are left out"
TORN_FIGURE: Final = "the last figure in line {} of {} is left out: the line breaks off"


def of_gap(step: int, counted: float, logged: float) -> str:
    """A note on the mean tokens of a response: as counted, and as the trainer logged them."""
    return (
        f"step {step}: a response has {counted:,.1f} tokens as counted, {logged:,.1f} in the log "
        f"({counted / logged - 1:+.1%}). Logged text lacks special tokens. A large gap means another tokenizer, or "
        "figures that average over steps"
    )


def of_turns(tally: Tally) -> Iterator[str]:
    """Notes on turns and tools in all responses."""
    if tally.several:
        share = tally.tools / (tally.generated + tally.tools)
        yield (
            f"{tally.several:,} of {tally.responses:,} responses have several turns. Tools and users added {share:.1%} "
            "of the tokens of all responses. The field turns has them, and response_lengths leaves them out. The "
            "seconds of a rollout include waits for tools"
        )
    if tally.unknown_waits:
        yield f"{NO_WAITS}: type plan --workload FILE --tool-s {WAITS}"
    if tally.unclear:
        yield (
            f"{tally.unclear:,} of {tally.responses:,} responses ({tally.unclear / tally.responses:.1%}) may hold tool "
            "output, and all their tokens count as generated: they have a marker of a tool or of a second turn, or "
            "lack their mask"
        )


def absent(missing: Sequence[str], trainer: str, source: Source, log: Any, timed: int, records: int) -> str:
    """A note on the fields that `validate` needs and the records lack, and how to give them.

    timed: number of records with seconds
    """
    options = ", ".join(f"--{name.replace('_', '-')}" for name in missing if name != "seconds")
    ways = [f"give {options}"] if options else []
    if "seconds" in missing:
        if source.seconds is None:
            ways.append(f"{trainer} logs no seconds of generation: write them into the lines")
        elif log is None:
            ways.append(f"give --log, where {trainer} logs {source.seconds}")
        else:
            ways.append(f"{log} has {source.seconds} of {timed} of {records} rollouts")
    return f"not known: {', '.join(missing)}; `plan --workload` needs none of them, `validate` all: {'; '.join(ways)}"
