"""Settings of a hook: one JSON file, named by FP8PLAN_MONITOR or in the trainer's own configuration.

    {"tis": 2.0, "plan": "plan.json", "run_file": "run.jsonl"}

Every key may be left out, and without a file all of them are: token TIS that begins at C = 2. HookSettings lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.controller.laws import AdaptiveThresholds, Controller
from fp8plan.runtime.correction.settings import CorrectionSettings, Level, Mode, Thresholds
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.monitor.controller import constant
from fp8plan.schemas import checked

VARIABLE: Final = "FP8PLAN_MONITOR"


class HookSettings(msgspec.Struct, frozen=True):
    """Settings of the Monitor in a trainer's process.

    level, mode: as in CorrectionSettings; a level is needed
    tis:         C that TIS begins with
    band:        (low, high) that MIS or IcePop begins with; null: 0.5 to 2
    veto:        as in CorrectionSettings
    thresholds:  "constant", or "adaptive" (AdaptiveThresholds)
    target_kl:   of adaptive ones, in nats per token; null: as the plan expects, or else its default
    limit_kl:    of either, likewise
    plan:        a plan's file, whose choice gives the thresholds to begin with and the KL to expect
    run_file:    file for `fp8plan monitor`; null: none is written
    sampling:    how rollouts are sampled, as {"top_p": 0.9} (fp8plan.Sampling); null: as the trainer's own settings
                 say, where the hook sees them
    share:       whether the ranks add up what they see (see micro_batches); null: as the hook says

    Paths are relative to the settings' file. As read, `plan` holds the file's text and `run_file` is absolute.
    """

    level: Level = "token"
    mode: Mode = "tis"
    tis: float = 2.0
    band: tuple[float, float] | None = None
    veto: float | None = None
    thresholds: Literal["constant", "adaptive"] = "constant"
    target_kl: float | None = None
    limit_kl: float | None = None
    plan: str | None = None
    run_file: str | None = None
    sampling: Sampling | None = None
    share: bool | None = None

    def correction(self) -> CorrectionSettings:
        """How gradients are corrected, with the thresholds to begin with. Raises ConfigError for what cannot be."""
        if self.band is not None and self.mode == "tis":
            raise ConfigError('band with mode \'tis\', which has none; allowed: "mode": "mis", or tis alone')
        start = Thresholds(self.tis) if self.mode == "tis" else Thresholds(None, self.band or (0.5, 2.0))
        return CorrectionSettings(self.level, self.mode, start, veto=self.veto)

    def controller(self) -> Controller:
        """The law of the thresholds. Raises ConfigError for what cannot be."""
        return controller_for(self.correction(), self.thresholds, self.target_kl, self.limit_kl, self.read_plan())

    def read_plan(self) -> Plan | None:
        """The plan, or None without one. Raises ConfigError for what is no plan."""
        return None if self.plan is None else Plan.from_json(self.plan)


def controller_for(
    correction: CorrectionSettings,
    law: str,
    target_kl: float | None,
    limit_kl: float | None,
    plan: Plan | None = None,
) -> Controller:
    """The law of a correction's thresholds; the arguments are those of HookSettings. A plan's thresholds go before its.

    Raises ConfigError for a target of constant thresholds, and for what cannot be.
    """
    kl: dict[str, Any] = {name: x for name, x in (("target_kl", target_kl), ("limit_kl", limit_kl)) if x is not None}
    if law == "constant":
        if "target_kl" in kl:
            raise ConfigError('target_kl with constant thresholds, which have none; allowed: thresholds "adaptive"')
        return constant(correction, plan, **kl)
    start = correction.thresholds
    return AdaptiveThresholds(start.tis, start.band, correction.level or "token", **kl)


def settings_at(path: str | os.PathLike[str] | None = None) -> HookSettings:
    """The settings of a file; None: the file that FP8PLAN_MONITOR names, or the defaults if it names none.

    Each file is read once in a process. Raises ConfigError, which begins with the file, for what cannot be.
    """
    named = path or os.environ.get(VARIABLE)
    return HookSettings() if not named else _read(str(named))


@cache
def _read(path: str) -> HookSettings:
    place = Path(path).expanduser()
    where = f"the hook's settings in {place}"
    data = parse(_text(place, f"give {VARIABLE} the path of a JSON file"), where)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} are a {type(data).__name__}; allowed: a JSON object")
    refuse_names(f"the file of the hook's settings, {place},", data, HookSettings.__struct_fields__)
    if isinstance(data.get("sampling"), Mapping):
        refuse_names(f"sampling in {where}", data["sampling"], [field.name for field in fields(Sampling)])
    found = checked(data, HookSettings, where)
    changes: dict[str, Any] = {}
    if found.plan is not None:
        file = place.parent / Path(found.plan).expanduser()
        changes["plan"] = _text(file, "make it with: fp8plan plan MODEL --gpu GPU --json plan.json")
    if found.run_file is not None:
        changes["run_file"] = str((place.parent / Path(found.run_file).expanduser()).absolute())
    found = msgspec.structs.replace(found, **changes)
    try:
        found.controller().initial(found.read_plan())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return found


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {why}; {hint}") from None
