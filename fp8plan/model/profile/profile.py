"""Profiles: the coefficients that turn shapes into seconds on one GPU with one engine version.

A profile is data: `profiles/<gpu>/<engine>-<version>/profile.json`, or `profiles/datasheet.json` for any GPU. Nothing
falls back in silence: a near engine version comes with a warning and a doubled interval, the datasheet profile with
the label "uncalibrated", and a kernel that was never measured is an error that names the command that measures it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.hardware import Gpu
from fp8plan.model.profile.checks import check_facts, check_fields, covariance_matrix, hull_ranges, parse, problem

ENGINE = "vllm"
OWN_PROFILES = "FP8PLAN_PROFILES"  # environment variable
CALIBRATE_COMMAND = "fp8plan calibrate --gpu auto"

# sd of log step time for each doubling of tensor_parallel_size away from what was measured; the doublings are taken as
# independent. As much as makespans by the H200's import are wrong (0.083: nobody measured its engine) beyond those by
# its calibration (0.037).
UNMEASURED_DOUBLING_SD = 0.074


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of the cost functions, how well they are known, and where they may be used.

    gpu:             GPU name, as `Gpu.name`
    engine, engine_version: what was measured, e.g. "vllm", "0.26.0"
    kind:            "datasheet" (generic efficiencies), "calibrated" (measured here) or "imported" (others' tables)
    source:          where the numbers come from
    kernel_backends: kernel ("gemm.fp8_block", "attention.bf16", ...) -> implementation
    coefficients:    name -> value; positive; SI units; an "..._efficiency" is a fraction of a datasheet peak, at most 1
    log_covariance:  covariance of the logs of the coefficients, as a symmetric sparse table: name -> name -> value
    residuals:       kernel -> relative RMS error left by the fit, on held-out points where there are any
    model_error:     sd of log step time that the coefficients cannot explain
    hull:            kernel -> quantity -> (lowest, highest) measured; None when nothing was measured
    date:            of the measurement, ISO 8601
    notes:           coefficient -> source of its value
    tensor_parallel: the sizes whose rollouts are behind model_error
    layers:          kernel -> shape ("NxK" of a GEMM, "EXPERTSxTOP_KxHIDDENxINNER") -> [rows, log(measured / what the
                     coefficients say)]: layers that were timed themselves
    """

    gpu: str
    engine: str
    engine_version: str
    kind: str
    source: str
    kernel_backends: dict[str, str]
    coefficients: dict[str, float]
    log_covariance: dict[str, dict[str, float]]
    residuals: dict[str, float]
    model_error: float
    hull: dict[str, dict[str, tuple[float, float]]] | None
    date: str
    notes: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    tensor_parallel: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        found = problem(self.kind, self.model_error, self.coefficients, self.log_covariance, self.layers)
        if not self.tensor_parallel or any(not isinstance(x, int) or x < 1 for x in self.tensor_parallel):
            found = f"tensor_parallel is {self.tensor_parallel!r}; allowed: whole numbers of at least 1"
        if found:
            raise ProfileError(f"profile {self.label}: {found}")

    def layout_error(self, tensor_parallel_size: int) -> float:
        """sd of log step time that a layout adds which no measured rollout had: 0 for one that was measured."""
        doublings = min(abs(math.log2(tensor_parallel_size / size)) for size in self.tensor_parallel)
        return UNMEASURED_DOUBLING_SD * math.sqrt(doublings)

    def has_measured(self, tensor_parallel_size: int) -> bool:
        """Whether a rollout on this layout was measured. Of an imported or a datasheet profile none was."""
        return self.kind == "calibrated" and not self.layout_error(tensor_parallel_size)

    @property
    def label(self) -> str:
        """How a profile is called in tables and messages."""
        note = {"datasheet": " (uncalibrated)", "imported": " (not measured here)"}.get(self.kind, "")
        return f"{self.gpu}/{self.engine}-{self.engine_version} {self.kind}{note}"

    @property
    def remarks(self) -> list[str]:
        """What everyone who uses the profile is told."""
        if self.gpu == "cpu" and self.kind == "calibrated":
            return [f"CPUs differ by several times, and the interval knows one: {self.source}"]
        if self.kind != "imported":
            return []
        return [f"the profile of {self.gpu} is imported, not measured here; `fp8plan profiles` says how far off it is"]

    def coefficient(self, name: str) -> float:
        """The coefficient called `name`. Raises ProfileError, naming the missing measurement, when it has none."""
        try:
            return self.coefficients[name]
        except KeyError:
            kernel = name.rsplit(".", 1)[0]
            raise ProfileError(
                f"profile {self.label} has no {name!r}: kernel {kernel!r} was not measured; {self._way_out}"
            ) from None

    def named(self, name: str) -> tuple[str, float]:
        """The name and the value of a coefficient, as the cost functions take them. Raises as `coefficient` does."""
        return name, self.coefficient(name)

    def layer_factor(self, kernel: str, shape: Sequence[int], rows: NDArray[Any]) -> NDArray[Any]:
        """What `rows` rows of a layer take, relative to what the coefficients say, shape of `rows`: 1 where no layer of
        this shape was timed, between the timed numbers of rows interpolated in the logs of both."""
        timed = self.layers.get(kernel, {}).get(layer_name(shape))
        if timed is None:
            return np.ones(np.shape(rows))
        return np.asarray(np.exp(np.interp(np.log(np.maximum(rows, 1)), np.log(timed[0]), timed[1])))

    def backend(self, kernel: str) -> str:
        """The implementation of `kernel`. Raises ProfileError when the profile does not know it."""
        try:
            return self.kernel_backends[kernel]
        except KeyError:
            raise ProfileError(
                f"profile {self.label} has no kernel {kernel!r}: it was not measured; {self._way_out}"
            ) from None

    @property
    def _way_out(self) -> str:
        """Of a missing kernel. What is calibrated on a CPU is every kernel of dense models, and no other."""
        return "on a CPU only dense models are" if self.gpu == "cpu" else f"run `{CALIBRATE_COMMAND}`"

    def covariance(self, names: Sequence[str]) -> NDArray[Any]:
        """Covariance of the logs of the coefficients `names`, shape (names, names); zero where nothing is known."""
        return covariance_matrix(self.log_covariance, names)

    def widened(self, factor: float) -> Profile:
        """The same profile with every standard deviation `factor` times as large."""
        table = {a: {b: value * factor**2 for b, value in row.items()} for a, row in self.log_covariance.items()}
        return replace(self, log_covariance=table, model_error=self.model_error * factor)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, path: str = "profile.json") -> Profile:
        """Parse `to_json`'s text. Raises ProfileError naming `path` and the field that cannot be used."""
        raw = parse(text, path)
        check_fields(raw, path, _FIELD_TYPES, optional=("notes", "layers", "tensor_parallel"))
        try:
            return cls(**{**raw, "hull": hull_ranges(raw["hull"], path)})
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("gpu", "engine", "engine_version", "kind", "source", "date"), (str,)),
    **dict.fromkeys(("kernel_backends", "coefficients", "log_covariance", "residuals", "notes", "layers"), (dict,)),
    "model_error": (int, float),
    "hull": (dict, type(None)),
    "tensor_parallel": (list,),
}


def layer_name(shape: Sequence[int]) -> str:
    return "x".join(str(int(size)) for size in shape)


class ProfileEntry(NamedTuple):
    """One line of `fp8plan profiles`."""

    gpu: str
    engine: str
    engine_version: str
    kind: str
    source: str
    path: Path


def profiles_path() -> Path:
    """The folder of shipped profiles: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "profiles"
    return inside if inside.is_dir() else package.parent / "profiles"


def own_profiles_path() -> Path:
    """The folder of profiles that `fp8plan calibrate` measured on the user's GPUs; $FP8PLAN_PROFILES names another."""
    if named := os.environ.get(OWN_PROFILES):
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "fp8plan" / "profiles"


def _folders(profiles_dir: Path | None) -> list[Path]:
    """Where profiles are looked for: the user's own go first. Raises ConfigError where these are said to lie in a
    folder that is not there."""
    if profiles_dir:
        return [profiles_dir]
    named, own = os.environ.get(OWN_PROFILES), own_profiles_path()
    if named and not own.is_dir():
        raise ConfigError(
            f"{OWN_PROFILES} is {named}, and there is no such folder; name the one that `fp8plan calibrate` wrote, or "
            f"type: unset {OWN_PROFILES}"
        )
    return [own, profiles_path()]


def unused_folder() -> list[str]:
    """The warning that the folder which $FP8PLAN_PROFILES names holds no profile; else nothing."""
    named = os.environ.get(OWN_PROFILES)
    if not named or any(Path(named).glob("*/*/profile.json")):
        return []
    return [
        f"{OWN_PROFILES} is {named}, which holds no profile (GPU/{ENGINE}-VERSION/profile.json): it changes nothing"
    ]


def profile_path(folder: Path, gpu: str, engine_version: str) -> Path:
    """Where the profile of a GPU and an engine version stands in a folder of profiles."""
    return folder / gpu / f"{ENGINE}-{engine_version}" / "profile.json"


def list_profiles(profiles_dir: Path | None = None) -> tuple[ProfileEntry, ...]:
    """Every profile there is, the user's own first, the datasheet profile (gpu "*") last."""
    entries = []
    for path in (path for folder in _folders(profiles_dir) for path in sorted(folder.glob("*/*/profile.json"))):
        p = _read(path)
        entries.append(ProfileEntry(p.gpu, p.engine, p.engine_version, p.kind, p.source, path))
    sheet = _folders(profiles_dir)[-1] / "datasheet.json"
    if sheet.is_file():
        raw = parse(sheet.read_text(), str(sheet))
        entries.append(ProfileEntry("*", ENGINE, "*", "datasheet", str(raw.get("source")), sheet))
    return tuple(entries)


def load_profile(
    gpu: Gpu, engine_version: str = "0.26.0", strict: bool = False, profiles_dir: Path | None = None
) -> tuple[Profile, list[str]]:
    """The best profile for `gpu` and an engine version, and the warnings that go with it.

    The exact one, the user's own (`own_profiles_path`) before a shipped one; else the nearest engine version of the
    same GPU, its standard deviations doubled; else the datasheet profile. `strict` allows the exact one only. Raises
    ProfileError when there is none, or when its file is corrupt, ConfigError when $FP8PLAN_PROFILES names no folder.
    """
    if not re.match(r"\d+(\.\d+)*", engine_version):
        raise ConfigError(f"engine_version is {engine_version!r}; allowed: a version of {ENGINE} such as 0.26.0")
    folders = _folders(profiles_dir)
    unused = [] if profiles_dir else unused_folder()
    for exact in (profile_path(folder, gpu.name, engine_version) for folder in folders):
        if exact.is_file():
            found = _read(exact)
            return found, [*unused, *found.remarks]
    near = _nearest([folder / gpu.name for folder in folders], engine_version)
    if strict:
        raise ProfileError(_strict_message(gpu, engine_version, near))
    if near is not None:
        found = _read(near)
        warning = (
            f"no profile of {gpu.name} for {ENGINE} {engine_version}: using the one of {found.engine} "
            f"{found.engine_version} with its interval doubled"
        )
        return found.widened(2), [*unused, warning, *found.remarks]
    warning = (
        f"no measured profile of {gpu.name}: datasheet peaks with generic efficiencies (uncalibrated, wide interval)"
    )
    return datasheet_profile(gpu, engine_version, profiles_dir), [*unused, warning]


def _strict_message(gpu: Gpu, engine_version: str, near: Path | None) -> str:
    have = f"the nearest is {near.parent.name}" if near is not None else "there is only the datasheet profile"
    return (
        f"no profile of {gpu.name} for {ENGINE} {engine_version}, and {have}, which --strict does not allow; "
        "type `fp8plan profiles` to see what was measured, or leave --strict out"
    )


def _nearest(folders: Sequence[Path], engine_version: str) -> Path | None:
    def distance(path: Path) -> tuple[int, ...]:  # what was measured here goes before what was imported
        other = _version(path.parent.name.removeprefix(f"{ENGINE}-"))
        apart = (abs(a - b) for a, b in zip(other, _version(engine_version), strict=True))
        return (_read(path).kind == "imported", *apart)

    found = [path for folder in folders for path in sorted(folder.glob(f"{ENGINE}-*/profile.json"))]
    return min(found, key=distance, default=None)


def _version(text: str) -> tuple[int, int, int]:
    numbers = [int(x) for x in re.findall(r"\d+", text)[:3]] + [0, 0, 0]
    return numbers[0], numbers[1], numbers[2]


def datasheet_profile(gpu: Gpu, engine_version: str = "0.26.0", profiles_dir: Path | None = None) -> Profile:
    """datasheet.json resolved for one GPU, measured or not: common coefficients, then those of its architecture's.

    A kernel of another architecture is another kernel (FlashAttention 3 exists on sm90 only), so backends and the few
    coefficients that belong to a backend are listed per architecture. A CPU has nothing in common with GPUs.
    """
    path = (profiles_dir or profiles_path()) / "datasheet.json"
    if not path.is_file():
        raise ProfileError(f"{path} is missing: reinstall fp8plan")
    raw = parse(path.read_text(), str(path))
    check_fields(raw, str(path), _DATASHEET_TYPES)
    nothing: dict[str, dict[str, Any]] = {"kernel_backends": {}, "coefficients": {}}
    common = nothing if gpu.is_cpu else raw["common"]
    own = raw["by_architecture"].get(gpu.architecture, nothing)
    backends = {**common["kernel_backends"], **own["kernel_backends"]}
    facts = {**common["coefficients"], **own["coefficients"]}
    check_facts(facts, str(path))
    return Profile(
        gpu=gpu.name,
        engine=ENGINE,
        engine_version=engine_version,
        kind="datasheet",
        source=raw["source"],
        kernel_backends=backends,
        coefficients={name: fact["value"] for name, fact in facts.items()},
        log_covariance={name: {name: fact["log_sd"] ** 2} for name, fact in facts.items()},
        residuals=raw["residuals"],
        model_error=raw["model_error"],
        hull=None,
        date=raw["date"],
        notes={name: fact["source"] for name, fact in facts.items()},
    )


_DATASHEET_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("source", "date"), (str,)),
    **dict.fromkeys(("common", "by_architecture", "residuals"), (dict,)),
    "model_error": (int, float),
}


def _read(path: Path) -> Profile:
    return Profile.from_json(path.read_text(), str(path))
