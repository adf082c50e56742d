"""The tables of what is known: the bundled models, and the profiles."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from fp8plan.model.profile.profile import KEPT
from fp8plan.views.text import Column, Fitted, Paragraph, short

if TYPE_CHECKING:
    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.profile.library import ProfileEntry


def models_report(shapes: Sequence[ModelShape]) -> RenderableType:
    """One row per shape; the other hub ids of the same shape stand under the first."""
    from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention
    from fp8plan.model.precision import BF16

    alike: dict[Any, list[ModelShape]] = {}
    for shape in shapes:
        attention = [part for part, _ in shape.parts_of(Attention)]
        heads = [*(x.heads for x in attention), *(part.heads for part, _ in shape.parts_of(LatentAttention))]
        experts = [part.num_experts for part, _ in shape.parts_of(Experts)]
        sizes = [[shape.num_layers], heads, [x.kv_heads for x in attention], experts, [shape.kv_bytes_per_token(BF16)]]
        alike.setdefault((shape.num_parameters, *map(_distinct, sizes)), []).append(shape)
    columns = [
        Column("model", [_ids([shape.name for shape in group]) for group in alike.values()], left=True),
        Column("para-\nmeters", [short(key[0]) for key in alike]),
        *(
            Column(name, [key[at] for key in alike])
            for at, name in enumerate(("layers", "heads", "KV\nheads", "experts", "KV bytes\n/ token"), 1)
        ),
    ]
    return Group("bundled models (KV in bf16); a local folder or another hub id works too", "", Fitted(columns))


def _distinct(sizes: Sequence[int]) -> str:
    """The distinct values of a size that may differ between layers, such as 8, 2."""
    return ", ".join(f"{size:,}" for size in sorted(set(sizes), reverse=True)) or "-"


def _ids(names: Sequence[str]) -> str:
    """The shortest id, and below it the others, without their owner, or as endings of the first."""
    first = min(names, key=len)
    others = [name for name in names if name != first]
    endings = [name.removeprefix(first) if name.startswith(f"{first}-") else name.rpartition("/")[2] for name in others]
    lines = textwrap.TextWrapper(34, initial_indent="  ", subsequent_indent="  ")
    lines.break_on_hyphens = lines.break_long_words = False
    return "\n".join([first, *lines.wrap(", ".join(endings))])


def profiles_report(entries: Sequence[ProfileEntry]) -> RenderableType:
    """One row per profile, then each source and each test once."""
    gpus = ["any GPU" if entry.gpu == "*" else entry.gpu for entry in entries]
    sources: dict[str, list[str]] = {}
    tests: dict[str, list[str]] = {}
    for gpu, entry in zip(gpus, entries, strict=True):
        source, _, test = entry.source.partition("; ")
        sources.setdefault(source, []).append(gpu)
        if test:
            tests.setdefault(test, []).append(gpu)
    engines = [f"{entry.engine} {entry.engine_version}".replace("*", "any") for entry in entries]
    columns = [
        Column("gpu", gpus, left=True),
        Column("engine", engines, left=True),
        Column("kind", [entry.kind for entry in entries], left=True),
        Column("imported rows", [_kept(entry) for entry in entries]),
    ]
    lines = [f"{', '.join(of)}: {text}" for group in (sources, tests) for text, of in group.items()]
    lines += _of_their_rows(entries)
    return Group(Fitted(columns), "", *(Paragraph(line, indent=2) for line in lines))


def _kept(entry: ProfileEntry) -> str:
    """The cell for the rows that an import kept of its tables."""
    if entry.table_rows is None:
        return "not recorded" if entry.kind == "imported" else ""
    counts = entry.table_rows.values()
    return f"{sum(x.get(KEPT, 0) for x in counts):,} of {sum(sum(x.values()) for x in counts):,}"


def _of_their_rows(entries: Sequence[ProfileEntry]) -> list[str]:
    """Sentences on the rows that imports left out, and on kernels whose times are flat."""
    reasons, lines = Counter[str](), []
    for counts in (counts for entry in entries for counts in (entry.table_rows or {}).values()):
        reasons.update(counts)
    del reasons[KEPT]
    if reasons:
        named = ", ".join(f"{reason} ({number:,})" for reason, number in reasons.most_common())
        lines.append(f"left out by the imports (--json: by GPU and kernel): {named}")
    flat = [f"{entry.gpu} {kernel} ({times})" for entry in entries for kernel, times in entry.flat.items()]
    return [*lines, *([f"timed with launch gaps, so flat: {', '.join(flat)}"] if flat else [])]
