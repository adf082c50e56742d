"""The folders of profiles, and the choice of the profile for a GPU and an engine version.

A profile is data: `profiles/<gpu>/<engine>-<version>/profile.json`, or `profiles/datasheet.json` for any GPU. No
fallback is silent: a near engine version comes with a warning and a wider interval, the datasheet profile with the
label "uncalibrated".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.profile.profile import ASSUMED, ENGINE, HOST_LOOP, Profile, between, parsed
from fp8plan.version import DEFAULT_VERSION

T = TypeVar("T")
OWN_PROFILES = "FP8PLAN_PROFILES"  # environment variable

# Kernels that few models have. A profile need not have measured them: the datasheet lends its own (`with_kernels`).
_MIXERS = ("mla.", "delta_net.", "mamba2.", "short_conv.")
WIDE_HEADS = "wide_attention."
NO_BLOCKS = "gemm.fp8."  # FP8 with one scale for a matrix or a row, which only checkpoints have
_ROUTES = ("routes.", "host.routes.")
_HOSTS = ("host.groups.", *(f"host.{mixer}" for mixer in _MIXERS))
RARE_PARTS = (*_MIXERS, "front.", WIDE_HEADS, NO_BLOCKS, *_HOSTS, *_ROUTES)
WIDENED_KV = "attention.fp8."
DTYPES = ("bf16", "fp8", "fp8_block")  # words in the names of coefficients
WITH_HBM = (8, 0), (9, 0)  # compute capabilities, beside data center Blackwell's


class ProfileEntry(NamedTuple):
    """One line of `fp8plan profiles`."""

    gpu: str
    engine: str
    engine_version: str
    kind: str
    source: str
    path: Path
    table_rows: dict[str, dict[str, int]] | None  # this and `flat` as in Profile
    flat: dict[str, str]


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
    """The folders of profiles, the user's own first. Raises ConfigError if $FP8PLAN_PROFILES names none that exists."""
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
    """A warning if $FP8PLAN_PROFILES names a folder that holds no profile; else []."""
    named = os.environ.get(OWN_PROFILES)
    if not named or any(Path(named).glob("*/*/profile.json")):
        return []
    return [
        f"{OWN_PROFILES} is {named}, which holds no profile (GPU/{ENGINE}-VERSION/profile.json): it changes nothing"
    ]


def profile_path(folder: Path, gpu: str, engine_version: str) -> Path:
    return folder / gpu / f"{ENGINE}-{engine_version}" / "profile.json"


def list_profiles(profiles_dir: Path | None = None) -> tuple[ProfileEntry, ...]:
    """Every profile that exists: the user's own first, the datasheet profile (gpu "*") last."""
    folders = _folders(profiles_dir)
    entries = [_entry(path) for folder in folders for path in sorted(_files(folder, "*"))]
    sheet = folders[-1] / "datasheet.json"
    if sheet.is_file():
        source = _datasheet(sheet.read_text(encoding="utf-8"), str(sheet)).source
        entries.append(ProfileEntry("*", ENGINE, "*", "datasheet", source, sheet, None, {}))
    return tuple(entries)


def _files(folder: Path, gpu: str) -> Iterator[Path]:
    """The profiles of a GPU in a folder of profiles; "*": of every GPU."""
    return folder.glob(f"{gpu}/*/profile.json")


def _entry(path: Path) -> ProfileEntry:
    p = _read(path)
    return ProfileEntry(p.gpu, p.engine, p.engine_version, p.kind, p.source, path, p.table_rows, p.flat)


def load_profile(
    gpu: Gpu | str, engine_version: str = DEFAULT_VERSION, strict: bool = False, profiles_dir: Path | None = None
) -> tuple[Profile, list[str]]:
    """The best profile for `gpu`, a Gpu or its name, and an engine version, and its warnings.

    A profile of this very version comes first, the user's own (`own_profiles_path`) before a shipped one. `strict`
    allows no other. Then come others with a wider interval: measured here, measured on a sibling, imported for this
    GPU, imported for a sibling, each of the nearest engine version. The datasheet's is the last. The profile holds for
    a host that nobody timed (`Profile.on_unknown_host`).

    Raises ProfileError if there is none or if its file is corrupt, and ConfigError if $FP8PLAN_PROFILES does not name a
    folder.
    """
    gpu = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    if not re.match(r"\d+(\.\d+)*", engine_version):
        raise ConfigError(
            f"engine_version is {engine_version!r}; allowed: a version of {ENGINE} such as {DEFAULT_VERSION}"
        )
    folders = _folders(profiles_dir)
    unused = [] if profiles_dir else unused_folder()
    for exact in (profile_path(folder, gpu.name, engine_version) for folder in folders):
        if exact.is_file():
            profile = _for(exact, gpu, engine_version)
            return profile, [*unused, *profile.remarks]
    entries, absent = _nearest(gpu, engine_version, profiles_dir), f"no profile of {gpu.name}"
    near = entries[0] if entries else None
    whose = "" if near is None or near.gpu == gpu.name else f"{near.gpu}'s "
    if strict:
        have = f"the nearest is {whose}{near.path.parent.name}" if near else "there is only the datasheet profile"
        raise ProfileError(
            f"{absent} for {ENGINE} {engine_version}, and {have}, which --strict does not allow; type "
            "`fp8plan profiles` to see what was measured, or leave --strict out"
        )
    if near is None:
        generic = "datasheet peaks with generic efficiencies (uncalibrated, wide interval)"
        warnings = [*unused, f"no measured profile of {gpu.name}: {generic}"]
        return datasheet_profile(gpu, engine_version, profiles_dir).on_unknown_host(), warnings
    profile = _for(near.path, gpu, engine_version)
    which = f"{whose or 'the one of '}{profile.engine} {profile.engine_version}"
    alike = " (same architecture)" if whose else ""
    warning = f"{absent} for {ENGINE} {engine_version}: using {which}{alike} with a wider interval"
    return profile, [*unused, warning, *([] if whose else profile.remarks)]


def of_another_version(gpu: Gpu, engine_version: str) -> Profile | None:
    """The profile that was calibrated on this GPU with the nearest other engine version, as it is; None without one.

    A CPU has none: CPUs differ by several times.
    """
    entries = [] if gpu.is_cpu else _nearest(gpu, engine_version, None)
    others = [x for x in entries if (x.kind, x.gpu) == ("calibrated", gpu.name) and x.engine_version != engine_version]
    return _read(others[0].path) if others else None


def _for(path: Path, gpu: Gpu, engine_version: str) -> Profile:
    """A file's profile with the error of its use for another engine version or GPU, and for a host that nobody timed.

    A user's other hosts are expected to be like the one that the user has calibrated.
    """
    profile = _read(path)
    profile = profile if profile.engine_version == engine_version else profile.of_another_version()
    profile = profile if profile.gpu == gpu.name else profile.of_sibling(gpu.name)
    if HOST_LOOP in profile.coefficients and path.is_relative_to(own_profiles_path()):
        return profile.on_unknown_host(profile.coefficient(HOST_LOOP))
    return profile.on_unknown_host()


def _nearest(gpu: Gpu, engine_version: str, profiles_dir: Path | None) -> list[ProfileEntry]:
    """The profiles of a GPU and its siblings from the best down.

    Those that were measured come before imported tables, which know no engine. Then this GPU's come before a sibling's,
    which has the same kernels, and the nearest version comes first.
    """

    def distance(entry: ProfileEntry) -> tuple[Any, ...]:
        versions = zip(_version(entry.engine_version), _version(engine_version), strict=True)
        return (entry.kind == "imported", entry.gpu != gpu.name, *(abs(a - b) for a, b in versions))

    names = [gpu.name, *(other.name for other in gpus() if other != gpu and _are_siblings(gpu, other))]
    files = (path for root in _folders(profiles_dir) for name in names for path in sorted(_files(root, name)))
    return sorted(map(_entry, files), key=distance)


def _are_siblings(gpu: Gpu, other: Gpu) -> bool:
    """True if two GPUs with HBM have the same kernels: Ampere, Hopper or Blackwell of data centers.

    An RTX 4090 and an L40S share their compute capability, but differ too much in clock and power.
    """
    if gpu.is_blackwell_data_center:
        return other.is_blackwell_data_center
    return gpu.compute_capability in WITH_HBM and gpu.compute_capability == other.compute_capability


def _version(text: str) -> tuple[int, int, int]:
    major, minor, patch, *_ = [*map(int, re.findall(r"\d+", text)[:3]), 0, 0, 0]
    return major, minor, patch


def datasheet_profile(gpu: Gpu, engine_version: str = DEFAULT_VERSION, profiles_dir: Path | None = None) -> Profile:
    """The datasheet profile of one GPU, measured or not: the common coefficients, then those of its architecture.

    Architectures have different kernels (FlashAttention 3 exists on sm90 only), so backends and their few coefficients
    are listed per architecture. An unlisted one, such as 8.6, has the kernels of the nearest earlier one of its
    generation. A CPU has nothing in common with GPUs.
    """
    path = (profiles_dir or profiles_path()) / "datasheet.json"
    if not path.is_file():
        raise ProfileError(f"{path} is missing: reinstall fp8plan")
    sheet = _datasheet(path.read_text(encoding="utf-8"), str(path))
    common = Coefficients() if gpu.is_cpu else sheet.common
    own = sheet.by_architecture.get(_listed(gpu, sheet.by_architecture), Coefficients())
    facts = common.coefficients | sheet.everywhere.coefficients | own.coefficients
    return Profile(
        gpu=gpu.name,
        engine=ENGINE,
        engine_version=engine_version,
        kind="datasheet",
        source=sheet.source,
        kernel_backends=common.kernel_backends | own.kernel_backends,
        coefficients={name: fact.value for name, fact in facts.items()},
        log_covariance=_covariance({name: fact.log_sd for name, fact in facts.items()}, sheet.alike.value),
        residuals=sheet.residuals,
        model_error=sheet.model_error.value,
        hull=None,
        date=sheet.date,
        notes={name: fact.source for name, fact in facts.items()},
    )


def kind_of(name: str) -> str:
    """The name of a coefficient without its dtype: GEMMs in BF16 and in FP8 have efficiencies of one kind."""
    return ".".join(part for part in name.split(".") if part not in DTYPES)


def _covariance(sds: Mapping[str, float], alike: float) -> dict[str, dict[str, float]]:
    """The covariance of coefficients with these `sds`. alike: the correlation of two coefficients of one kind"""
    kinds: dict[str, list[str]] = {}
    for name in sds:
        kinds.setdefault(kind_of(name), []).append(name)
    covariance: dict[str, dict[str, float]] = {}
    for names in kinds.values():
        for name in names:
            covariance[name] = {other: sds[name] * sds[other] * alike for other in names}
            covariance[name][name] = sds[name] * sds[name]
    return covariance


def _listed(gpu: Gpu, architectures: Iterable[str]) -> str:
    """The listed architecture whose kernels a GPU has; the GPU's own if none is listed."""
    if gpu.compute_capability is None:
        return gpu.architecture
    major, minor = gpu.compute_capability
    minors = {int(name.partition(".")[2]): name for name in architectures if name.startswith(f"{major}.")}
    return minors[max(known)] if (known := [x for x in minors if x <= minor]) else gpu.architecture


@lru_cache(maxsize=8)
def _datasheet(text: str, path: str) -> Datasheet:
    return parsed(text, path, Datasheet)


def with_kernels(profile: Profile, gpu: Gpu, kernels: Iterable[str]) -> Profile:
    """The profile with the datasheet's coefficients for those `kernels` that it lacks, and a note on each."""
    missing = tuple(f"{k}." for k in kernels if not any(name.startswith(f"{k}.") for name in profile.coefficients))
    if not missing:
        return profile
    sheet = datasheet_profile(gpu, profile.engine_version)
    names = [name for name in sheet.coefficients if name.startswith(missing)]
    if not names:  # a kernel of other GPUs
        return profile
    backends = {name: backend for name, backend in sheet.kernel_backends.items() if f"{name}." in missing}
    whole = profile.with_coefficients_of(sheet, {name: ASSUMED + sheet.notes[name] for name in names})
    return replace(whole, kernel_backends=backends | profile.kernel_backends)


def rare_parts(gpu: Gpu) -> tuple[str, ...]:
    """The prefixes of coefficients that a profile of this GPU need not have.

    A GPU that only stores FP8 adds attention over an FP8 KV cache, which neither AIConfigurator nor `calibrate` times.
    """
    return (*RARE_PARTS, WIDENED_KV) if gpu.stores_fp8_only else RARE_PARTS


def without_rare_parts(profile: Profile, timed: Iterable[str] = (), parts: tuple[str, ...] = RARE_PARTS) -> Profile:
    """The profile without the coefficients of rare `parts`. timed: prefixes of those that stay"""
    stay, every = tuple(timed), profile.coefficients
    common = {name for name in every if not name.startswith(parts) or name.startswith(stay)}

    def kept(table: Mapping[str, T]) -> dict[str, T]:
        return {name: value for name, value in table.items() if name in common}

    covariance = between(profile.log_covariance, common)
    return replace(profile, coefficients=kept(every), log_covariance=covariance, notes=kept(profile.notes))


class Fact(msgspec.Struct):
    """A coefficient, the standard deviation of its log over GPUs, and its source."""

    value: float
    log_sd: float
    source: str


class Figure(msgspec.Struct):
    """A number and its source."""

    value: float
    source: str


class Coefficients(msgspec.Struct):
    """The part of the datasheet profile for one architecture, for all GPUs (common), or for CPUs too (everywhere)."""

    kernel_backends: dict[str, str] = {}
    coefficients: dict[str, Fact] = {}


class Datasheet(msgspec.Struct):
    """The content of profiles/datasheet.json.

    alike:       correlation of the errors of two coefficients of one kind, such as the efficiencies of GEMMs in BF16
                 and in FP8
    model_error: as in Profile
    """

    source: str
    date: str
    common: Coefficients
    everywhere: Coefficients
    by_architecture: dict[str, Coefficients]
    residuals: dict[str, float]
    alike: Figure
    model_error: Figure


def _read(path: Path) -> Profile:
    return _profile_of(path.read_text(encoding="utf-8"), str(path))


@lru_cache(maxsize=16)
def _profile_of(text: str, path: str) -> Profile:
    """The profile of a file's text. A validation asks once for each record, and the check takes 20 ms."""
    return Profile.from_json(text, path)
