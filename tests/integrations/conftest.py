"""Every test begins without monitors, and leaves no hook in torch's optimisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import frameworks
import pytest

from fp8plan.integrations import hooks as micro_batches


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FP8PLAN_MONITOR", raising=False)
    frameworks.install(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=frameworks.LossOutputs)
    registry = dict.fromkeys(("regular", "dual_clip"), frameworks.ppo_policy_loss)
    monkeypatch.setattr(frameworks.PolicyLossRegistry, "_functions", registry)
    place = "skyrl.backends.skyrl_train.utils.ppo_utils"
    frameworks.install(monkeypatch, place, PolicyLossRegistry=frameworks.PolicyLossRegistry)
    yield
    micro_batches.stop()


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[str]]:
    """The list that a module's warnings go to from now on."""

    def listen(module: ModuleType) -> list[str]:
        said: list[str] = []
        hearing = SimpleNamespace(warning=lambda text, *args: said.append(text % args), info=lambda *_: None)
        monkeypatch.setattr(module, "logger", hearing)
        return said

    return listen
