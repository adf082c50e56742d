"""Turns and their clock as the scheduler in C reads them (c/state.h)."""

from __future__ import annotations

import ctypes

import numpy as np

from fp8plan.model.cost.clock import DEPTHS, SIZE_STEP, Clock
from fp8plan.model.turn_table import TurnTable

TABLES = ("tokens", "sampled", "decode", "first", "further", "uneven", "launches", "host")
NUMBERS = ("kinds", "decode_rows", "chunk_rows", "num_depths", "size_step", "overlaps", "leads", "on_cpu")
TURNS = {"first": np.int64, "generated": np.int64, "tool": np.int64, "dropped": np.int64, "wait_s": np.float64}


class ClockInC(ctypes.Structure):
    """A Clock. Its arrays have to live as long."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*TABLES, "depths")),
        *((name, ctypes.c_int64) for name in NUMBERS),
    )


class TurnsInC(ctypes.Structure):
    """A TurnTable with the number of turns, and a clock."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TURNS),
        ("num_turns", ctypes.c_int64),
        ("concurrent", ctypes.c_int64),
        ("clock", ClockInC),
    )

    def __init__(self, turns: TurnTable, clock: Clock) -> None:
        columns = [np.ascontiguousarray(getattr(turns, name), dtype=kind) for name, kind in TURNS.items()]
        tables = [np.ascontiguousarray(getattr(clock, name), dtype=np.float64) for name in TABLES]
        tables.append(np.array(DEPTHS, dtype=np.float64))
        sizes = *clock.decode.shape[:2], clock.first.shape[1], len(DEPTHS), SIZE_STEP
        flags = clock.overlaps, clock.leads, clock.on_cpu
        self._arrays = [*columns, *tables]  # keeps them alive
        in_c = ClockInC(*(table.ctypes.data for table in tables), *sizes, *flags)
        concurrent = turns.concurrent or len(turns.first) - 1
        super().__init__(*(column.ctypes.data for column in columns), len(turns.generated), concurrent, in_c)
