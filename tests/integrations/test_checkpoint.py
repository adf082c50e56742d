"""The Monitor's state in a trainer's checkpoint."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.integrations.common import STATE_FILE, load_state, save_state
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.monitor.monitor import Monitor


def test_a_state_comes_back_and_a_torn_one_is_an_error(tmp_path: Path) -> None:
    monitor = Monitor()
    assert load_state(tmp_path) is None
    save_state(monitor.state_dict(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    fresh = Monitor()
    fresh.load_state_dict(load_state(tmp_path) or {})
    assert fresh.state_dict() == monitor.state_dict()
    text = (tmp_path / STATE_FILE).read_text()
    (tmp_path / STATE_FILE).write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=f"{STATE_FILE}, without which thresholds begin anew, is not JSON"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    "law", [ConstantThresholds(limit_kl=inf), LevelThresholds(limit_kl=inf), ConstantThresholds(tis=inf)]
)
def test_a_state_without_a_limit_comes_back(law: Any, tmp_path: Path) -> None:
    monitor, fresh = Monitor(controller=law), Monitor(controller=law)
    save_state(monitor.state_dict(), tmp_path)
    fresh.load_state_dict(load_state(tmp_path) or {})
    assert fresh.state_dict() == monitor.state_dict()
