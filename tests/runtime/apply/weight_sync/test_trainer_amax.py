"""recording_amax in transformers' own table of attention functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.runtime.apply.weight_sync.amax import recording_amax

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    """One layer that looks its attention up, as every model of transformers does."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table
        self.attention = torch.nn.Module()
        self.attention.layer_idx = 0

    def forward(self, *parts: Any) -> Any:
        return self.table["sdpa"](self.attention, *parts)


def answers(*_: Any, **__: Any) -> str:
    return "attended"


@pytest.mark.parametrize("stands_in_the_table", [True, False], ids=["set", "registered"])
def test_it_records_and_leaves_the_table_as_it_was(monkeypatch: pytest.MonkeyPatch, stands_in_the_table: bool) -> None:
    table = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(table, "_local_mapping", {"sdpa": answers} if stands_in_the_table else {})
    monkeypatch.setitem(table._global_mapping, "sdpa", None if stands_in_the_table else answers)
    before = dict(table._local_mapping)
    model = Model(table)
    with recording_amax(model) as amax:
        assert model(*(torch.tensor([size, -2 * size]) for size in (1.0, 2.0, 3.0))) == "attended"
    assert amax() == {"attention.attn": [2.0, 4.0, 6.0]}
    assert table._local_mapping == before
