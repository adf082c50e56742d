"""The request of `plan` or `tune` as it is typed: the question, and where the answer goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fp8plan.cli import console
from fp8plan.cli.console import STDOUT, print_notes, progress, show
from fp8plan.errors import ConfigError
from fp8plan.model.distributions import DEFAULT_PROMPTS, PROMPT, SECONDS, parse_both_lengths, parse_distribution
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.risk.expected import LEVELS, RiskBudget
from fp8plan.model.schedule.scheduler import NOT_COMPILED, compiled
from fp8plan.model.setup import KV_SCALES
from fp8plan.model.shards import check_target, strictest
from fp8plan.model.targets import TARGETS
from fp8plan.model.validate.records import Record, host_of, read_run, recorded_workload
from fp8plan.model.workload import PROMPTS, RESPONSES, SAMPLES, SEED, WORKLOAD_OPTIONS, Workload
from fp8plan.model.workload_turns import TURN_OPTIONS, Turns, parse_turns
from fp8plan.options import OUTPUT, Option, Words
from fp8plan.version import check_starts, planned_version

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction

Asked = TypeVar("Asked", bound=PlanRequest)
BESIDE_A_RECORD = ("tool_s", "concurrent", "reasoning_share")  # options of turns that go with --workload


@dataclass(frozen=True)
class PlanOutputs:
    """The destinations of a plan's results, and the KV scales of its settings.

    Raises ConfigError for outputs that cannot all be written, and for unknown scales.
    """

    as_json: Annotated[
        str | None, Option(OUTPUT, "the plan, to a file or, alone, to stdout", name="--json", metavar="[FILE.json]")
    ] = None
    emit: Annotated[
        list[str] | None,
        Option(
            OUTPUT,
            f"settings for {', '.join(TARGETS)}, to a file or stdout; repeat",
            metavar="TARGET[=FILE]",
        ),
    ] = None
    every: Annotated[bool, Option(OUTPUT, "every row of the table, not ten", name="--all")] = False
    plot: Annotated[Path | None, Option(OUTPUT, "a picture: FILE.png or FILE.html", metavar="FILE")] = None
    kv_scales: str | None = None

    def __post_init__(self) -> None:
        outputs = [(f"--emit {target}", file) for target, file in self.emissions]
        if self.as_json is not None:
            outputs.insert(0, ("--json", self.as_json))
        if self.plot is not None:
            from fp8plan.views.page import check_suffix

            check_suffix(self.plot)
            outputs.append(("--plot", str(self.plot)))
        console.check(outputs)
        if self.kv_scales not in (None, *KV_SCALES):
            raise ConfigError(f"--kv-scales is {self.kv_scales!r}; allowed: {', '.join(KV_SCALES)}")

    @cached_property
    def emissions(self) -> list[tuple[str, str]]:
        """The target, and the file or STDOUT, of each `--emit TARGET[=FILE]`."""
        parts = [word.partition("=") for word in self.emit or []]
        for target, *_ in parts:
            check_target(target)
        return [(target, file if equals else STDOUT) for target, equals, file in parts]

    @property
    def vllms_scales(self) -> bool:
        """True if the K and V scales of FP8 KV stay at 1.0 because nobody measures them for some target."""
        return self.kv_scales is None and any(not TARGETS[target].measures for target, _ in self.emissions)

    @property
    def scales(self) -> str:
        """The K and V scales of FP8 KV in the settings, one of KV_SCALES."""
        return self.kv_scales or ("unit" if self.vllms_scales else "calibrated")

    def deliver(
        self,
        prediction: Prediction,
        notes: list[str],
        report: Callable[..., RenderableType],
        draw: Callable[[Prediction, Path, str], None],
        **beside: Any,
    ) -> None:
        """Write the files, all or none, and print the rest.

        report: of a plan; `every` is true for every row of its table
        draw:   writes the picture to a file; the text is the KV scales of its settings
        beside: more fields for the plan's JSON
        """
        if self.vllms_scales and any(choice.unit_kv_scales for choice in prediction.plan.choices):
            notes = [*notes, "K and V scales are 1.0, as vLLM leaves them; if you calibrate: --kv-scales calibrated"]
        plan = replace(prediction.plan, warnings=(*prediction.plan.warnings, *notes))
        prediction = replace(prediction, plan=plan)
        plan_file = None if self.as_json in (None, STDOUT) else os.path.abspath(self.as_json)
        texts = {
            file: plan.emit(target, kv_scales=self.scales, plan_file=plan_file, python=as_python(file))
            for target, file in self.emissions
        }
        if self.as_json is not None:
            texts[self.as_json] = plan.to_json(**beside)
        printed = texts.pop(STDOUT, None)
        writers = {file: console.text(content) for file, content in texts.items()}
        if self.plot is not None:
            writers[str(self.plot)] = lambda path: draw(prediction, path, self.kv_scales or "unit")  # as `emit` does
        console.write(writers)
        print_notes(plan.warnings)  # after all steps that may fail, so that an error stands alone
        console.print_written(writers)
        if self.as_json == STDOUT:
            print_choice(plan)  # without the report, which names it
        else:
            show(report(plan, every=self.every), on_stderr=printed is not None)
        if printed is not None:
            print(printed)


def request_of(kind: type[Asked], words: Words, doing: str) -> tuple[Asked, PlanOutputs, list[str]]:
    """The request that is typed, the outputs that are asked for, and notes.

    doing: the word beside the bar of progress

    Raises ConfigError for words that cannot be read, and for options that contradict each other.
    """
    own, limits = words[kind], words[EngineLimits]
    card = find_gpu(own["gpu"])
    outputs = PlanOutputs(**words[PlanOutputs], kv_scales=own.get("kv_scales_calibrated"))
    if outputs.emissions:
        check_starts(planned_version(own.get("engine_version"), card.is_cpu))
    accept = words[RiskBudget].get("accept")
    if accept not in (None, *LEVELS):
        raise ConfigError(f"--accept is {accept!r}; allowed: {', '.join(LEVELS)}")
    sizes = {"tensor_parallel_size", "data_parallel_size"} & limits.keys()
    if "gpus" in own and (sizes or limits.get("enable_expert_parallel")):
        raise ConfigError(
            "both --gpus and a layout are given; give --gpus, which tries every layout, or --tensor-parallel-size, "
            "--data-parallel-size and --expert-parallel"
        )
    targets = [target for target, _ in outputs.emissions]
    made: dict[str, Any] = {
        "kv_scales_calibrated": outputs.scales == "calibrated",
        "target": strictest([own.get("target", "vllm"), *targets]),
        "workers": _cores(),
        "progress": progress(doing),
    }
    made["workload"], notes = _workload(own.get("workload"), words[Workload], words[Turns])
    records: Sequence[Record] = ()
    if "observed" in own:
        measured = read_run(own["observed"])
        records, notes = measured.records, [*notes, *measured.notes]
    made["observed"] = records
    if "host_loop_s" not in own and card.is_here and host_of(records, card.name) is None:
        from fp8plan.runtime import this_host

        loop_s = this_host.host_loop_s()
        if loop_s is not None:
            made["host_loop_s"], notes = loop_s, [*notes, this_host.said(loop_s)]
    if compiled() is None:
        print_notes([NOT_COMPILED])  # at once, as the simulation may take minutes
    return kind.of(words, **made), outputs, notes


def _workload(
    recorded: Path | None, typed: Mapping[str, Any], of_turns: Mapping[str, Any]
) -> tuple[Workload, list[str]]:
    """The workload that is typed, and notes. typed, of_turns: the options of Workload and of Turns that were set

    Raises ConfigError for options that contradict each other, and as the workload's own readers do.
    """
    if recorded is not None:
        besides = {name: value for name, value in of_turns.items() if name not in BESIDE_A_RECORD}
        if typed or besides:
            options = {**WORKLOAD_OPTIONS.options, **TURN_OPTIONS.options}
            names = ", ".join(options[name].name or f"--{name.replace('_', '-')}" for name in [*typed, *besides])
            raise ConfigError(f"both --workload and {names} are given; --workload {recorded} says all of them")
        words = dict(of_turns)
        if "tool_s" in words:
            words["tool_s"] = parse_distribution(words["tool_s"], "tool_s", SECONDS)
        return recorded_workload(recorded, **words)
    counts = typed.get("prompts", PROMPTS), typed.get("samples_per_prompt", SAMPLES)
    seed = typed.get("seed", SEED)
    if of_turns:
        prompts = parse_distribution(typed.get("prompt_lengths", DEFAULT_PROMPTS), PROMPT)
        return Workload(*counts, prompts, typed.get("response_lengths"), seed, parse_turns(of_turns)), []
    prompts, responses, notes = parse_both_lengths(
        typed.get("prompt_lengths"), typed.get("response_lengths", RESPONSES)
    )
    return Workload(*counts, prompts, responses, seed), notes


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_python(file: str) -> bool:
    """True if settings for TRL go there as Python: to stdout, and to any file whose name does not end in .json."""
    return not file.endswith(".json")


def print_choice(plan: Plan, name: int | str | None = None) -> None:
    """Print the choice and its reason on stderr. If `name` is another choice, say so first."""
    notes, index = list(plan.reasons[:1]), plan.index(name)
    if index != plan.chosen:
        other = plan.choices[index]
        where = f" on {other.data_parallel} x {other.replica_label}" if plan.several_layouts else ""
        notes.insert(0, f"these settings are of {other.precision}{where}, which is not the plan's choice")
    print_notes(notes)
