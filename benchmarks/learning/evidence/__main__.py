"""Print all tables that are made of runs."""

from __future__ import annotations

from benchmarks.learning.evidence.tables import tables

print("\n\n".join(tables().values()))
