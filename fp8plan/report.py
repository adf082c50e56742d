"""Results for people: tables by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fp8plan.model.explain import seconds

if TYPE_CHECKING:
    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.plan import Choice, Plan
    from fp8plan.model.profile import ProfileEntry
    from fp8plan.model.validate import Validation

RISK_STYLE = {"low": "green", "moderate": "yellow", "high": "red"}


def plan_report(plan: Plan) -> RenderableType:
    """The table of choices, and the reasons for the chosen one."""
    work, limits = plan.workload, plan.limits
    title = (
        f"{plan.model} on {plan.gpu}: {work['prompts']} prompts x {work['samples']} samples, "
        f"{work['response_tokens']:,} response tokens (mean {work['mean_response_tokens']:,.0f}, "
        f"longest {work['max_response_tokens']:,})"
    )
    caption = (
        f"profile: {plan.profile['kind']}, vLLM {plan.profile['engine_version']}; gpu_memory_utilization "
        f"{limits.gpu_memory_utilization:g}, max_num_seqs {limits.max_num_seqs}, max_num_batched_tokens "
        f"{limits.max_num_batched_tokens}; seed {plan.seed}"
    )
    several = len({(c.tensor_parallel, c.data_parallel) for c in plan.choices}) > 1
    stepped = any(c.rl_step_s is not None for c in plan.choices)
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("precision")
    if several:
        table.add_column("TP x DP", justify="right")
    for name in ("rollout s (90%)", "speed-up", *(("step s", "step speed-up") if stepped else ())):
        table.add_column(name, justify="right")
    for name in ("tokens/s", "KV tokens", "preempt.", "tail", "KL k3 (90%)", "clip", "seq. reject"):
        table.add_column(name, justify="right")
    table.add_column("risk")
    for index, choice in enumerate(plan.choices):
        table.add_row(*_choice_cells(choice, index == plan.chosen, several, stepped))
    absent = [Text(f"{_name(c)} is not available: {c.reason}") for c in plan.choices if not c.available]
    reasons = [Padding(Text("- " + reason), (0, 0, 0, 1)) for reason in plan.reasons]
    return Group(table, *absent, *reasons)


def _choice_cells(choice: Choice, chosen: bool, several: bool, stepped: bool) -> list[Text]:
    style = "bold" if chosen else ("" if choice.available else "dim")
    cells = [Text(("> " if chosen else "  ") + choice.precision, style)]
    if several:
        cells.append(Text(f"{choice.tensor_parallel} x {choice.data_parallel}", style))
    if not choice.available:
        return [*cells, Text("not available", style)]
    low, high = seconds(choice.makespan_low_s), seconds(choice.makespan_high_s)
    cells.append(Text(f"{seconds(choice.makespan_s)} ({low}-{high})", style))
    cells.append(Text(_ratio(choice.speedup), style))
    if stepped:
        cells += [Text(seconds(choice.rl_step_s), style), Text(_ratio(choice.step_speedup), style)]
    cells += [
        Text(text, style)
        for text in (
            f"{choice.output_tokens_per_s:,.0f}",
            f"{choice.kv_cache_tokens:,}",
            f"{choice.preemptions:,}",
            f"{choice.tail_fraction:.0%}",
            f"{choice.kl_k3:.1e} ({choice.kl_k3_low:.0e}-{choice.kl_k3_high:.0e})",
            f"{choice.clip_fraction:.1e}",
            f"{choice.seq_reject_fraction:.0%}",
        )
    ]
    return [*cells, Text(choice.risk or "", RISK_STYLE.get(choice.risk or "", ""))]


def _name(choice: Choice) -> str:
    return f"{choice.precision} (TP {choice.tensor_parallel})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def validation_report(result: Validation) -> RenderableType:
    """One row per record, one per speed-up, and the totals."""
    rows = Table(title="records", title_justify="left")
    for name in ("line", "model", "precision"):
        rows.add_column(name)
    for name in (
        "measured s",
        "predicted s (90%)",
        "error",
        "preempt. measured",
        "predicted",
        "KV tokens measured",
        "predicted",
    ):
        rows.add_column(name, justify="right")
    for row in result.records:
        rows.add_row(
            str(row["line"]),
            row["model"],
            row["precision"],
            f"{row['seconds']:.2f}",
            f"{row['predicted_s']:.2f} ({row['predicted_low_s']:.2f}-{row['predicted_high_s']:.2f})",
            f"{row['error']:+.1%}",
            _count(row.get("preemptions")),
            _count(row["predicted_preemptions"]),
            _count(row.get("measured_kv_cache_tokens")),
            _count(row["predicted_kv_cache_tokens"]),
        )
    gains = Table(title="speed-up over bf16", title_justify="left")
    for name in ("group", "precision"):
        gains.add_column(name)
    for name in ("measured", "predicted", "error, points"):
        gains.add_column(name, justify="right")
    for group in result.groups:
        for entry in group["speedups"]:
            measured, predicted = _ratio(entry["measured_speedup"]), _ratio(entry["predicted_speedup"])
            gains.add_row(group["group"], entry["precision"], measured, predicted, f"{entry['error_points']:+.1f}")
    total = f"makespan: MAPE {result.makespan_mape:.1%}, worst {result.makespan_worst:.1%}; "
    if result.speedup_mae_points is not None:
        total += f"speed-up: mean {result.speedup_mae_points:.1f}, worst {result.speedup_worst_points:.1f} points; "
    total += f"90% interval: holds {result.coverage:.0%}, median half-width {result.interval_median_halfwidth:.1%}"
    return Group(rows, gains, Text(total))


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def models_report(shapes: Sequence[ModelShape]) -> RenderableType:
    table = Table(title="bundled models; a local folder or another hub id works too", title_justify="left")
    table.add_column("model")
    for name in ("parameters", "layers", "heads", "KV heads", "experts", "KV bytes/token (bf16)"):
        table.add_column(name, justify="right")
    from fp8plan.model.precision import BF16

    for shape in shapes:
        table.add_row(
            shape.name,
            f"{shape.num_parameters:,}",
            str(shape.num_layers),
            str(shape.num_attention_heads),
            str(shape.num_key_value_heads),
            str(shape.experts.num_experts) if shape.experts else "-",
            f"{shape.kv_bytes_per_token(BF16):,}",
        )
    return table


def profiles_report(entries: Sequence[ProfileEntry]) -> RenderableType:
    table = Table(title="profiles", title_justify="left")
    for name in ("gpu", "engine", "kind", "source", "file"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(entry.gpu, f"{entry.engine} {entry.engine_version}", entry.kind, entry.source, entry.path.name)
    return table
