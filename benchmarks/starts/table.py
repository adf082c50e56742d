"""The table of what starts, from benchmarks/results/starts.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.starts.cases import GPUS, KINDS, RESULTS
from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.model.hardware import find_gpu

# vLLM's classes of attention -> what a reader calls them.
KERNELS = {
    "FlashAttentionImpl": "FlashAttention",
    "FlashAttnMLAImpl": "FlashAttention",
    "FlashInferImpl": "FlashInfer",
    "FlashInferMLAImpl": "FlashInfer",
    "FlashMLAImpl": "FlashMLA",
    "TritonAttentionImpl": "Triton",
    "TritonMLAImpl": "Triton",
}


def rows() -> list[dict[str, Any]]:
    return jsonl.rows(RESULTS)


def cell(row: dict[str, Any]) -> str:
    """The kernel and the scales of a case that starts."""
    if "attention" not in row:
        return "refused"
    kernel = " and ".join(KERNELS[name] for name in row["attention"])
    return f"{kernel}, {row['scales']}" if row["scales"] else kernel


def why(row: dict[str, Any]) -> str:
    """The reason against a case that does not start, without the ways out."""
    reason = str(row.get("refused") or row["error"]).partition("; ")[0]
    return reason.rpartition(" was asked for: ")[2]


def table() -> str:
    """A row for each precision and the kinds of models that agree, and a column for GPUs that agree in all rows.

    The reasons of refusals stand below.
    """
    known = {(row["kind"], row["precision"], row["gpu"]): row for row in rows()}
    lines = list(dict.fromkeys((kind, precision) for kind, precision, _ in known))
    groups = alike({gpu: [cell(known[*line, gpu]) for line in lines] for gpu in GPUS})
    models = {kind.name: f"{kind.name} ({kind.model.partition('/')[2]})" for kind in KINDS}
    kinds: dict[tuple[str, ...], list[str]] = {}  # a precision, and whether and how each GPU runs it -> kinds
    for kind, precision in lines:
        answers = (known[kind, precision, gpu] for gpu in GPUS)
        answered = (f"{cell(row)} {why(row) if cell(row) == 'refused' else ''}" for row in answers)
        kinds.setdefault((precision, *answered), []).append(kind)
    reasons: list[str] = []
    body = []
    for (precision, *_), alike_kinds in kinds.items():
        kind = alike_kinds[0]
        cells = []
        for group in groups:
            row = known[kind, precision, group[0]]
            text = cell(row)
            if text == "refused":
                if why(row) not in reasons:
                    reasons.append(why(row))
                text = f"refused ({reasons.index(why(row)) + 1})"
            cells.append(text)
        body.append((", ".join(models[each] for each in alike_kinds), precision, *cells))
    numbered = "\n".join(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))
    heads = ("model kind", "precision", *map(heading, groups))
    return f"{markdown.table(heads, body)}\n\nReasons of refusals, for the first GPU of a column:\n\n{numbered}"


def alike(columns: dict[str, list[str]]) -> list[list[str]]:
    """Neighbouring GPUs with the same column."""
    groups: list[list[str]] = []
    for gpu, column in columns.items():
        if groups and columns[groups[-1][0]] == column:
            groups[-1].append(gpu)
        else:
            groups.append([gpu])
    return groups


def heading(gpus: Sequence[str]) -> str:
    """The products of a column, and their compute capabilities."""
    cards = [find_gpu(gpu) for gpu in gpus]
    products = ", ".join(card.product.removeprefix("NVIDIA ").removeprefix("GeForce ") for card in cards)
    return f"{products}<br>{', '.join(card.architecture for card in cards)}"
