"""Replicas without Ray or vLLM, as far as a fleet's Calls go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.fleet.sync import unpacked
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Rpc
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

MANIFEST = [["w", "bfloat16", [2]], ["v", "bfloat16", [2]]]


class FakeReplica:
    """One worker, with two tensors: a stream is written at once, and a copy goes back where one was kept."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights: dict[str, Any] = {"w": 0.0, "v": 0.0}
        self.scales: dict[str, list[float]] = {"layer": [1.0, 1.0, 1.0]}
        self.scales_before = self.scales
        self.copy: dict[str, Any] | None = None
        self.is_open = False
        self.heard: list[Any] = []
        self.rung: Any = None

    def answer(self, call: Call) -> Any:
        if isinstance(call, Generate) and call.everywhere:
            return [[]]
        if not isinstance(call, Rpc):
            return list(call.prompts) if isinstance(call, Generate) else None
        method, arguments = str(call.method), call.arguments
        self.heard.append((method, arguments))
        return [{"ok": getattr(self, method.removeprefix("fp8plan_"), lambda *_: None)(*arguments)}]

    def load(self, method: str, numbers: list[int], parts: Any) -> Any:
        tensors = unpacked(parts)
        self.heard.append((method, numbers))
        for number, tensor in zip(numbers, tensors, strict=True):
            self.weights[MANIFEST[number][0]] = float(tensor[0])
        return [{"ok": None}]

    def remember(self, rung: Any) -> None:
        self.rung = rung

    def facts(self) -> dict[str, Any]:
        return {"vllm_version": "0.30.0", "attention": ["FlashAttentionImpl"], "cudagraph_mode": None}

    def kv_scales(self) -> dict[str, dict[str, float]]:
        return {layer: dict(zip("qkv", parts, strict=True)) for layer, parts in self.scales.items()}

    def prepare(self, *_: Any) -> dict[str, Any]:
        return {
            "groups": [0, 1],
            "quantised": [],
            "wide": [],
            "reloaded": [],
            "taken": [2, 2],
            "twins": [],
        }

    def begin(self, number: int, samples: int, version: int, keep: str | None, *_: Any) -> None:
        self.copy = None if keep is None else dict(self.weights)
        self.is_open, self.scales_before = True, self.scales

    def finish(self, patches: int) -> dict[str, Any]:
        done: dict[str, Any] = {
            "in_place": 2,
            "reloaded": 0,
            "why_reloaded": {},
            "ignored": [],
            "layers": {},
            "rounded": [],
        }
        return done | {"check": {"compared": 2, "weight_error": None, "seconds": 0.0}}

    def record_amax(self, on: bool) -> dict[str, list[float]] | None:
        return None if on else {"layer": [1.0 + self.number, 2.0, 3.0 - self.number]}

    def set_kv_scales(self, scales: dict[str, list[float]]) -> None:
        self.scales = scales

    def commit(self, stamp: str) -> None:
        self.is_open = False

    def abort(self, why: str) -> bool:
        was_open, self.is_open = self.is_open, False
        if was_open:
            self.scales = self.scales_before
        if self.copy is not None and was_open:
            self.weights = self.copy
        return self.copy is not None and was_open


class FakeMembers:
    """The replicas as `Members` has them.

    faults: (number of a submitted call, replica) -> "dies", "refuses" or "raises"
    """

    def __init__(self, replicas: int, faults: Mapping[tuple[int, int], str] = {}) -> None:
        self.living = {number: FakeReplica(number) for number in range(replicas)}
        self.lost: dict[int, str] = {}
        self.terms = SimpleNamespace(workers=1, guard=None)
        self.count, self.born, self.sizes = replicas, replicas, (256, 1024)
        self.faults, self.calls = dict(faults), 0
        self.put_count = 0

    @property
    def lineup(self) -> Any:
        return sorted(self.living), self.born

    def start(self, numbers: Iterable[int], launched: Any) -> None:
        for number in numbers:
            self.living[number] = FakeReplica(number)
            self.lost.pop(number, None)
            self.born += 1

    def stop(self, numbers: Iterable[int] | None = None) -> None:
        for number in list(self.living if numbers is None else numbers):
            self.living.pop(number, None)

    def close(self) -> None:
        self.stop()

    def put(self, value: Any) -> Any:
        self.put_count += 1
        return value

    def submit(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        call, self.calls = self.calls, self.calls + 1
        found = {}
        for number, given in arguments.items():
            fault = self.faults.get((call, number))
            if number not in self.living:
                continue
            if fault == "refuses" and (method == "load" or isinstance(given[0], Rpc)):
                found[number] = [{"error": "it says no"}]
            elif fault == "dies":
                found[number] = self
            elif fault == "raises":
                found[number] = RuntimeError("the object store is full")
            else:
                found[number] = getattr(self.living[number], method)(*given)
        return found

    def collect(self, references: Mapping[int, Any]) -> dict[int, Any]:
        answers, errors = {}, []
        for number, found in references.items():
            if found is self:
                self.lose(number, "it was killed")
            elif isinstance(found, Exception):
                errors.append(found)
            else:
                answers[number] = found
        if errors:
            raise errors[0]
        return answers

    def lose(self, number: int, why: str) -> None:
        self.living.pop(number, None)
        self.lost[number] = why

    def obituary(self) -> str:
        return str(self.lost)


class FakeLaunch(SimpleNamespace):
    """A Launch, as far as a fleet asks it."""

    fp8_kv, precision, not_predicted, workers = True, "fp8_kv", (), 1

    @property
    def setup(self) -> Any:
        raise ConfigError("a test without a guard")

    def refuse_other(self, facts: Any) -> None: ...

    def checkpoint(self) -> None: ...

    def holding(self, longest: int) -> FakeLaunch:
        self.limits = SimpleNamespace(max_model_len=longest)
        return self


def made(replicas: int = 2, **settings: Any) -> tuple[RolloutFleet, FakeMembers]:
    members = FakeMembers(0)
    members.count = replicas
    launched: Any = FakeLaunch()
    fleet = RolloutFleet(launched, SyncSettings(**settings), members)  # type: ignore[arg-type]
    members.calls = 0
    return fleet, members
