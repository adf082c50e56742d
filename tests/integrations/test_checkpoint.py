"""The Monitor's state in a trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8plan.errors import ConfigError
from fp8plan.integrations.checkpoint import STATE_FILE, load_state, save_state
from fp8plan.runtime.monitor.monitor import Monitor


def test_a_state_comes_back_and_a_torn_one_is_an_error(tmp_path: Path) -> None:
    monitor = Monitor()
    assert not load_state(monitor, tmp_path)
    save_state(monitor, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    fresh = Monitor()
    assert load_state(fresh, tmp_path)
    assert fresh.state_dict() == monitor.state_dict()
    text = (tmp_path / STATE_FILE).read_text()
    (tmp_path / STATE_FILE).write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=f"{STATE_FILE}, without which thresholds begin anew, is not JSON"):
        load_state(fresh, tmp_path)
