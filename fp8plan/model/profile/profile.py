"""A profile: the coefficients that turn shapes into seconds on one GPU with one engine version.

No fallback is silent: a kernel that was never measured is an error that names the command to measure it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, repeat
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.sibling import layers_of_sibling, power_sd, rates_of_sibling, watts_of_sibling
from fp8plan.schemas import VERSIONS, check_version, checked, parse

T = TypeVar("T")

ENGINE = "vllm"
CALIBRATE_COMMAND = "fp8plan calibrate --gpu auto"
UNCALIBRATED = "uncalibrated"  # the word for a profile whose GPU was not measured
ASSUMED = "not measured on this GPU: "  # start of the note on a coefficient that the datasheet profile lent
FITTED = "fitted to "  # start of the note on a coefficient that was fitted to imported tables or on another GPU
KEPT = "kept"  # the imported rows in `table_rows` that were not left out
GPU_PACE, HOST_PACE = "gpu.pace", "host.pace"  # factors, 1.0, on all seconds of the GPU and on all of the host
PACES = (GPU_PACE, HOST_PACE)
HOST_LOOP = "host.loop_seconds"  # of the host that the profile holds for, as in RolloutRecord.host_loop_s
PRECISION, LAYOUT = "precision.", "layout."

# sd of log step time between engine versions, of what all precisions share and of each precision's own. It is taken
# from a report, without records here: on H100s FP8 rollouts took 3 to 5% less with vLLM 0.33 than with 0.26.
VERSION_SD = 0.03

# sds of log step time that a profile gets when it is used for a sibling, a GPU of the same architecture: of what all
# precisions share, and of each one's own. The H200's is off by 4.5% (root of the mean square) on 43 rollouts of H100s
# with timed hosts, and by as much on unseen ones of its own GPU. One pair of GPUs tells little, so neither is 0.
SIBLING_SD, SIBLING_OWN_SD = 0.03, 0.015

# Hosts whose loop nobody timed: its seconds, and the sd of the log of their pace around it, from the hosts that were
# seen (`python -m benchmarks.host_loop`). tests/benchmarks/test_host_loop.py holds both to the committed records.
SEEN_LOOP_S, OTHER_HOST_SD = 4.36e-4, 0.25

LOOPS_S = 1e-5, 1e-2  # least and most that a host's loop can take

# sd of the log of a host's pace beyond what the seconds of its loop say (`python -m benchmarks.host_loop`).
KNOWN_HOST_SD = 0.15

# The part of the variance of a calibrated profile's error that all precisions of one model share. `python -m
# benchmarks.error_parts` estimates it.
SHARED_VARIANCE = 0.35

# sd of log step time for each doubling of tensor_parallel_size away from the measured sizes, taken as independent. It
# is the error of makespans by the H200's import (0.082) beyond that by its calibration (0.046), hosts included.
UNMEASURED_DOUBLING_SD = 0.0673


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of the cost functions, their uncertainty, and the range of shapes that they hold for.

    gpu:             GPU name, as `Gpu.name`
    engine, engine_version: the measured engine, e.g. "vllm", "0.33.0"
    kind:            "datasheet" (generic efficiencies), "calibrated" (measured here) or "imported" (others' tables)
    source:          the origin of the numbers
    kernel_backends: kernel ("gemm.fp8_block", "attention.bf16", ...) -> implementation
    coefficients:    name -> value; positive; SI units; an "..._efficiency" is a fraction of a datasheet peak, at most 1
    log_covariance:  covariance of the logs of the coefficients, as a symmetric sparse table: name -> name -> value
    residuals:       kernel -> relative RMS error left by the fit, on held-out points if there are any
    model_error:     sd of log step time that the coefficients cannot explain, independent between precisions. The part
                     that all precisions share is the covariance of PACES
    hull:            kernel -> quantity -> (lowest, highest) measured; None when nothing was measured
    date:            day of the measurement, ISO 8601
    notes:           coefficient -> source of its value
    tensor_parallel: the sizes whose rollouts are behind model_error
    table_rows:      kernel -> KEPT, or the reason why it was left out -> rows of imported tables; None: not recorded
    flat:            kernel whose imported times do not grow with its traffic -> its times, in words
    layers:          kernel -> shape ("NxK" of a GEMM, "EXPERTSxTOP_KxHIDDENxINNER") -> [rows, log(measured seconds /
                     seconds by the coefficients)]: layers that were timed themselves
    """

    gpu: str
    engine: str
    engine_version: str
    kind: Literal["datasheet", "calibrated", "imported"]
    source: str
    kernel_backends: dict[str, str]
    coefficients: dict[str, float]
    log_covariance: dict[str, dict[str, float]]
    residuals: dict[str, float]
    model_error: Annotated[float, Meta(ge=0)]
    hull: dict[str, dict[str, tuple[float, float]]] | None
    date: str
    notes: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    tensor_parallel: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)] = field(
        default_factory=lambda: [1]
    )
    table_rows: dict[str, dict[str, int]] | None = None
    flat: dict[str, str] = field(default_factory=dict)

    def with_errors(self, shared: float, own: float) -> Profile:
        """A copy of the profile whose error has these standard deviations. The doubt about its host stays.

        shared: the part of the GPU, and of the host, that all precisions share
        own:    the part of each precision, `model_error`
        """
        doubt = max(self.log_covariance.get(HOST_PACE, {}).get(HOST_PACE, 0.0) - self.shared_error**2, 0.0)
        paces = {GPU_PACE: {GPU_PACE: shared**2}, HOST_PACE: {HOST_PACE: shared**2 + doubt}}
        return replace(
            self,
            coefficients=dict.fromkeys(PACES, 1.0) | self.coefficients,
            log_covariance=self.log_covariance | paces,
            model_error=own,
        )

    def layout_error(self, tensor_parallel_size: int, expert_parallel: bool = False) -> float:
        """The standard deviation of log step time that an unmeasured layout adds; 0 for a layout that was measured.

        expert_parallel: counts as a doubling of its own, as no fit has seen it
        """
        if layout_pace(tensor_parallel_size, expert_parallel) in self.coefficients:
            return 0.0
        doublings = min(abs(math.log2(tensor_parallel_size / size)) for size in self.tensor_parallel)
        return UNMEASURED_DOUBLING_SD * math.sqrt(doublings + expert_parallel)

    def assumes(self, kernel: str) -> bool:
        """True if the datasheet stands in for a kernel that was not measured."""
        return any(note.startswith(ASSUMED) for name, note in self.notes.items() if name.startswith(f"{kernel}."))

    @property
    def label(self) -> str:
        """The name of the profile in tables and messages."""
        note = f" ({UNCALIBRATED})" if self.is_uncalibrated else ""
        return f"{self.gpu}/{self.engine}-{self.engine_version} {self.kind}{note}"

    @property
    def is_uncalibrated(self) -> bool:
        """True if no step of an engine was measured on this GPU."""
        return self.kind in ("datasheet", "imported")

    @property
    def remarks(self) -> list[str]:
        """The warnings for every use of the profile."""
        if self.gpu == "cpu" and self.kind == "calibrated":
            return [f"CPUs differ by several times, and the interval knows one: {self.source}"]
        if self.kind != "imported":
            return []
        return [f"the profile of {self.gpu} is imported, not measured here; `fp8plan profiles` says how far off it is"]

    def coefficient(self, name: str) -> float:
        """The coefficient called `name`. Raises ProfileError, naming the missing measurement, if there is none."""
        try:
            return self.coefficients[name]
        except KeyError:
            kernel = name.rsplit(".", 1)[0]
            raise ProfileError(
                f"profile {self.label} has no {name!r}: kernel {kernel!r} was not measured; {self._way_out}"
            ) from None

    def named(self, name: str) -> tuple[str, float]:
        """The pair (name, value) of a coefficient, as the cost functions take it. Raises as `coefficient` does."""
        return name, self.coefficient(name)

    def layer_factor(self, kernel: str, shape: Sequence[int], rows: NDArray[Any]) -> NDArray[Any]:
        """The measured time of a layer over its time by the coefficients, for each number of `rows`: shape of `rows`.

        It is 1 if no layer of this shape was timed. Between timed numbers of rows it is interpolated in both logs.
        """
        timed = self.layers.get(kernel, {}).get(layer_name(shape))
        if timed is None:
            return np.ones(np.shape(rows))
        return np.asarray(np.exp(np.interp(np.log(np.maximum(rows, 1)), np.log(timed[0]), timed[1])))

    def backend(self, kernel: str) -> str:
        """The implementation of `kernel`. Raises ProfileError if the profile does not know it."""
        try:
            return self.kernel_backends[kernel]
        except KeyError:
            raise ProfileError(
                f"profile {self.label} has no kernel {kernel!r}: it was not measured; {self._way_out}"
            ) from None

    @property
    def _way_out(self) -> str:
        """Advice for a missing kernel. Calibration on a CPU covers every kernel of dense models, and no other."""
        return "on a CPU only dense models are" if self.gpu == "cpu" else f"run `{CALIBRATE_COMMAND}`"

    def covariance(self, names: Sequence[str]) -> NDArray[Any]:
        """Covariance of the logs of the coefficients `names`, shape (names, names); zero if unknown."""
        return _covariance_matrix(self.log_covariance, names)

    def of_another_version(self) -> Profile:
        """A copy of the profile with the error of using it for another engine version."""
        return self.with_errors(math.hypot(self.shared_error, VERSION_SD), math.hypot(self.model_error, VERSION_SD))

    def of_sibling(self, gpu: str) -> Profile:
        """The profile as an import for another GPU of the same architecture, with the error of that use.

        fp8plan.model.profile.sibling says which coefficients change.

        Another power limit adds an error to that of siblings with one limit: its half to each precision's own.
        """
        origin = f"measurements of {self.gpu} with {self.engine} {self.engine_version}"
        cards = find_gpu(self.gpu), find_gpu(gpu)
        power = power_sd(*cards)
        shared = math.hypot(self.shared_error, SIBLING_SD, power)
        own = math.hypot(self.model_error, SIBLING_OWN_SD, power / 2)
        sibling = replace(
            self,
            gpu=gpu,
            kind="imported",
            source=f"{origin}: {self.source}",
            coefficients=rates_of_sibling(watts_of_sibling(self.coefficients, *cards), *cards),
            layers=layers_of_sibling(self.layers, *cards),
        )
        return sibling.with_notes(f"{FITTED}{origin}").with_errors(shared, own)

    def on_host(self, loop_s: float | None) -> Profile:
        """The profile with the speed and the error of an engine's host, which was timed.

        loop_s: seconds as in RolloutRecord.host_loop_s. The host runs Python, so all its seconds scale alike. None: the
                profile stays as it is

        A profile whose own host was not timed stays as it is, too.

        Raises ConfigError for seconds that no host needs.
        """
        if loop_s is None:
            return self
        if not (is_number(loop_s) and LOOPS_S[0] < loop_s < LOOPS_S[1]):
            allowed = "seconds, such as 0.0003, which `fp8plan doctor --host` measures"
            raise ConfigError(f"host_loop_s is {loop_s!r}; allowed: {allowed}")
        return self.on_unknown_host(loop_s, KNOWN_HOST_SD)

    def on_unknown_host(self, loop_s: float = SEEN_LOOP_S, sd: float = OTHER_HOST_SD) -> Profile:
        """The profile for a host that nobody timed.

        loop_s: seconds to expect of its loop; sd: standard deviation of the log of its pace around them
        """
        if HOST_LOOP not in self.coefficients:
            return self
        # From here on HOST_LOOP is a fact about this host. An error of it would let observed rollouts move it.
        covariance = self.log_covariance
        if HOST_LOOP in covariance:
            covariance = between(covariance, covariance.keys() - {HOST_LOOP})
        if covariance.get(HOST_PACE, {}).keys() == {HOST_PACE}:  # else rollouts have corrected it
            covariance = covariance | {HOST_PACE: {HOST_PACE: self.shared_error**2 + sd**2}}
        pace = self.coefficient(HOST_PACE) * loop_s / self.coefficient(HOST_LOOP)
        coefficients = self.coefficients | {HOST_PACE: pace, HOST_LOOP: loop_s}
        return replace(self, coefficients=coefficients, log_covariance=covariance)

    def with_coefficients_of(self, other: Profile, notes: Mapping[str, str]) -> Profile:
        """A copy of the profile with coefficients that it lacks, and their covariance, from another profile.

        notes: name of each of these coefficients -> the note on it
        """
        return replace(
            self,
            coefficients=self.coefficients | {name: other.coefficients[name] for name in notes},
            log_covariance=self.log_covariance | between(other.log_covariance, notes.keys()),
            notes=self.notes | dict(notes),
        )

    def with_notes(self, note: str) -> Profile:
        return replace(self, notes=dict.fromkeys(self.coefficients.keys() - {*PACES}, note) | self.notes)

    @property
    def shared_error(self) -> float:
        """The standard deviation of the log of the GPU's pace: the error that all precisions share."""
        return math.sqrt(self.log_covariance.get(GPU_PACE, {}).get(GPU_PACE, 0.0))

    def to_json(self) -> str:
        """The profile as JSON, which `from_json` reads again."""
        return json.dumps({"schema_version": VERSIONS["profile"]} | asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, path: str = "profile.json") -> Profile:
        """Parse `to_json`'s text. Raises ProfileError naming `path` and the field that cannot be used."""
        profile = parsed(text, path, cls)
        # Here alone: a check of the tables takes as long as a simulation, and fits derive thousands of profiles.
        covariance = _covariance_problem(profile.coefficients, profile.log_covariance)
        if problem := _problem(profile) or covariance or _layers_problem(profile.layers):
            raise ProfileError(f"{path}: {problem}")
        return profile


def precision_pace(name: str) -> str:
    """The coefficient of the seconds of all rollouts in one precision, which only observed rollouts give."""
    return f"{PRECISION}{name}.pace"


def layout_pace(tensor_parallel_size: int, expert_parallel: bool = False) -> str:
    """The coefficient of the seconds of all rollouts on one layout, which only observed rollouts give."""
    return f"{LAYOUT}{tensor_parallel_size}{'_ep' if expert_parallel else ''}.pace"


def cut_of(pace: str) -> tuple[int, bool]:
    """The layout of a `layout_pace`."""
    size, _, whole_experts = pace.removeprefix(LAYOUT).removesuffix(".pace").partition("_")
    return int(size), bool(whole_experts)


def error_parts(error: float) -> tuple[float, float]:
    """The standard deviations of the shared part of a calibrated profile's `error`, and of a precision's own."""
    return error * math.sqrt(SHARED_VARIANCE), error * math.sqrt(1 - SHARED_VARIANCE)


def layer_name(shape: Sequence[int]) -> str:
    return "x".join(str(int(size)) for size in shape)


def parsed(text: str, path: str, kind: type[T]) -> T:
    """Parse a file of coefficients. Raises ProfileError naming `path` and the field that cannot be used."""
    data = parse(text, path, ProfileError)
    check_version(data, "profile", path, ProfileError)
    return checked(data, kind, path, ProfileError)


def _problem(profile: Profile) -> str | None:
    """The problem that makes a profile's coefficients or hull unusable, naming the field; None if there is none."""
    if not is_number(profile.model_error):  # JSON's 1e999 is infinite
        return f"model_error is {profile.model_error!r}; allowed: a finite number"
    for name, value in profile.coefficients.items():
        if not is_number(value) or value <= 0:
            return f"coefficients[{name!r}] is {value!r}; allowed: a finite number above 0"
        if name.endswith("_efficiency") and value > 1:
            return f"coefficients[{name!r}] is {value!r}; allowed: at most 1, it is a fraction of the datasheet's peak"
    for kernel, ranges in (profile.hull or {}).items():
        for quantity, (low, high) in ranges.items():
            if not low <= high:
                return f"hull[{kernel!r}][{quantity!r}] is {[low, high]}; allowed: [lowest, highest]"
    return None


def _layers_problem(layers: Mapping[str, Mapping[str, list[list[float]]]]) -> str | None:
    for kernel, shapes in layers.items():
        for shape, timed in shapes.items():
            good = len(timed) == 2 and 0 < len(timed[0]) == len(timed[1]) and timed[0][0] >= 1
            if not good or not all(map(is_number, timed[1])) or any(b <= a for a, b in pairwise(timed[0])):
                return f"layers[{kernel!r}][{shape!r}] is not [rising numbers of rows, as many log ratios]"
    return None


def between(table: Mapping[str, Mapping[str, float]], names: Collection[str]) -> dict[str, dict[str, float]]:
    """The part of a sparse symmetric `table` between these `names`."""
    return {a: {b: value for b, value in row.items() if b in names} for a, row in table.items() if a in names}


def _covariance_problem(coefficients: Mapping[str, float], table: Mapping[str, Mapping[str, float]]) -> str | None:
    for a, row in table.items():
        for b, value in row.items():
            if not math.isfinite(value) or a not in coefficients or b not in coefficients:
                return f"log_covariance[{a!r}][{b!r}] is {value!r}; allowed: a number, between two coefficients"
            if table.get(b, {}).get(a) != value:
                return f"log_covariance[{a!r}][{b!r}] is {value!r}, but not so for {b!r} and {a!r}"
    matrix = _covariance_matrix(table, sorted(table))
    tolerance = 1e-9 * float(np.max(np.abs(matrix), initial=0.0)) or 1.0
    try:  # not eigenvalues, for which BLAS would wake its threads
        np.linalg.cholesky(matrix + tolerance * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return "log_covariance is not positive semidefinite"
    return None


def _covariance_matrix(table: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> NDArray[Any]:
    """The sparse symmetric `table` as an array of shape (names, names); zero where it has no entry."""
    matrix = np.zeros((len(names), len(names)))
    for number, name in enumerate(names):
        if row := table.get(name):
            matrix[number] = [*map(row.get, names, repeat(0.0))]
    return matrix
