"""Profiles of GPUs that nobody measured here, fitted to the tables of aiconfigurator-core (Apache-2.0).

    python tools/import_aic.py [--gpu b200 ...] [--rollouts FILE ...] [--kernels FILE ...] [--output FOLDER]

It needs `pip install 'fp8plan[aic]'`. The rollouts and kernels are measurements of an H200, which test its import.

`read_tables` gives the tables in the form of our own measurements: a row per timing, in seconds. It leaves out rows
that differ from a step of an engine, and counts them by reason:

- fp8_block GEMMs of vLLM's table that take less time than their launch by the host. They were timed without CUDA
  graphs, so they hold 0.06 to 0.34 ms of launching (ai-dynamo/aiconfigurator issue 1414). Below m = 2048 SGLang's
  table of the same GPU, timed in graphs, takes their place. Without it only vLLM's long rows are left.
- GEMMs whose weights stay in the L2 cache, and decode attention whose KV does. An engine reads both from memory.
- MoE with balanced routing, which sends neighbouring tokens to different experts. No router does that.
- Shapes that our models and engines do not run: matrices narrower than 1024 or deeper than 16384, more than 16384
  tokens a step, attention without grouped queries, heads other than 128 wide, sliding windows, expert parallelism, and
  all-reduces outside CUDA graphs.

fp8_block rows include the quantisation of the activations; FP8 KV rows do not include that of the queries.

Costs that the tables do not time keep the datasheet profile's value and uncertainty: the host, sampling, small kernels,
and the split of an fp8_block layer into quantisation and GEMM. The sustained clock is the ratio of short rows to long
ones. `try_out` imports the tables of a GPU that we measured; its error is every imported profile's model error.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import metadata, util
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.calibrate.fit import Observations, fit, robust_sd
from fp8plan.model.calibrate.kernel_rows import hull, observe, read_all
from fp8plan.model.cost.base import Array, Cost
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES
from fp8plan.model.profile.library import (
    datasheet_profile,
    profile_path,
    profiles_path,
    rare_parts,
    without_rare_parts,
)
from fp8plan.model.profile.profile import FITTED, KEPT, Profile
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

PACKAGE = "aiconfigurator-core"
INSTALL = "pip install 'fp8plan[aic]'"
SYSTEMS = {"b200": "b200_sxm"}  # our name -> the package's, where they differ
VLLM_GEMM = "gemm/vllm/*/gemm"
FP8_LINEAR = "linear.fp8_block"  # its rows include the quantisation of the input

DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block"}
GEMM_COPIES = 6  # copies of the weights, which vLLM's and SGLang's collectors time in turn
LONG_ROWS = 2048  # from so many rows on, SGLang's GEMMs differ from vLLM's (15% faster on Hopper)
LONGEST_STEP = 16384  # tokens
NARROWEST, DEEPEST = 1024, 16384  # n and k of a GEMM
LEAST_INNER = 128  # width of an expert on one rank: a scale block
LARGEST_MESSAGE = 1 << 28  # bytes of an all-reduce: 16k tokens of a 70B model


TRIED_ON = "h200_sxm"  # the GPU that we measured; its import is for the trial only
SAMPLE = 1000  # rows of each kernel: more do not move the coefficients
UNSEEN = 4  # one weight shape or head layout in four is kept from the fit
FEWEST_SHAPES = 8  # a kernel with fewer keeps none from the fit
SHAPES = "sizes that no modelled engine runs"  # a reason to leave a row out
Counts: TypeAlias = dict[str, dict[str, int]]
# sd of the error of makespans that is one precision's own, chosen so that the interval of a speed-up lies between those
# by calibrated and by datasheet profiles: too few rollouts were measured on imported GPUs to tell it.
OWN_ERROR = 0.026
ASSUMED = ("quantise",)  # the tables time them as a part of another kernel


@dataclass(frozen=True, slots=True)
class Tables:
    """The package's usable timings of one GPU.

    rows: kernel, seconds, backend (implementation that ran, as the package names it) and, NaN where they do not apply,
          gemm.bf16, linear.fp8_block:             m, n, k
          attention_decode.bf16|fp8 (dtype of KV): batch, context, heads, kv_heads, head_dim
          attention_prefill.bf16|fp8:              chunks, chunk, context (0), heads, kv_heads, head_dim
          moe.bf16|fp8_block:                      tokens, experts, top_k, hidden, inner (width of an expert on one
                                                   rank), skew (exponent of the power law of the experts' shares)
          all_reduce:                              gpus, bytes
    counts: kernel -> KEPT, or the reason why it was left out -> rows of vLLM's tables
    flat:   kernel -> times of vLLM's rows, as in `flat_kernels`
    engine_version: version of the vLLM whose kernels were timed
    source:         package, versions, and what stands in for vLLM's own rows
    """

    rows: pd.DataFrame
    engine_version: str
    source: str
    counts: Counts = field(default_factory=dict)
    flat: dict[str, str] = field(default_factory=dict)


def find_data() -> tuple[Path, str]:
    """The folder of the installed package's tables, and its version. Raises ConfigError if it is not installed."""
    spec = util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(f"{PACKAGE}, whose tables are imported, is not installed; type: {INSTALL}")
    return Path(spec.origin).parent / "systems" / "data", metadata.version(PACKAGE)


def importable(data: Path) -> tuple[Gpu, ...]:
    """The known GPUs with vLLM's tables in `data`."""
    return tuple(card for card in gpus() if _newest(_folder(data, card), VLLM_GEMM))


def read_tables(card: Gpu, data: Path, package_version: str) -> Tables:
    """The usable rows of `card`. Raises ConfigError without its tables, ProfileError for tables with other columns."""
    folder = _folder(data, card)
    newest = _newest(folder, VLLM_GEMM)
    if newest is None:
        known = ", ".join(gpu.name for gpu in importable(data)) or "none"
        raise ConfigError(f"{PACKAGE} {package_version} has no vLLM tables of {card.name}; it has: {known}")
    counts: Counts = {}
    gemm = _gemm(folder, "vllm", counts)
    fp8, stand_in = _fp8_block(gemm, _gemm(folder, "sglang", {}), card, counts)
    others = (
        _decode(folder, card, counts),
        _prefill(folder, counts),
        _moe(folder, counts),
        _all_reduce(folder, counts),
    )
    parts = [_bf16(gemm, card, counts), fp8, *others]
    rows = pd.concat([part for part in parts if not part.empty], ignore_index=True)
    version = newest.parent.name
    source = f"{PACKAGE} {package_version} (Apache-2.0): tables of vLLM {version}{stand_in}"
    return Tables(rows, version, source, counts, flat_kernels(gemm))


def _folder(data: Path, card: Gpu) -> Path:
    return data / SYSTEMS.get(card.name, card.name)


def _newest(folder: Path, pattern: str) -> Path | None:
    """The path of the table from the newest version of its framework; None if there is no table."""
    tables = folder.glob(f"{pattern}_perf.parquet")
    return max(tables, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)], default=None)


def _read(folder: Path, pattern: str, **columns: str) -> pd.DataFrame:
    """A table's `columns` (ours = the package's), seconds and backend; empty without the table."""
    path = _newest(folder, pattern)
    columns |= {"seconds": "latency", "backend": "kernel_source"}
    if path is None:
        return pd.DataFrame(columns=list(columns))
    table = pd.read_parquet(path)
    if "window_size" in columns.values() and "window_size" not in table:  # vLLM 0.14's tables have no windows
        table = table.assign(window_size=0)
    missing = sorted(set(columns.values()) - set(table.columns))
    if missing:
        raise ProfileError(f"{path} has no column {missing[0]!r}; fp8plan reads those of {INSTALL}")
    table = table[list(columns.values())].set_axis(list(columns), axis=1)
    return table[table.seconds > 0].assign(seconds=table.seconds / 1e3)  # theirs are milliseconds


def _named(kernel: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with their dtype in the kernel's name. Rows of other dtypes are of no kernel that is modelled."""
    named = rows.assign(kernel=f"{kernel}." + rows.dtype.map(DTYPES)).drop(columns="dtype")
    return named[named.kernel.notna()]


def _keep(rows: pd.DataFrame, conditions: Mapping[str, pd.Series], counts: Counts) -> pd.DataFrame:
    """The rows that pass all conditions. The others are counted by kernel under the first condition that they fail.

    counts: as in Tables; rows that pass count as kept until they are left out later
    """
    for kernel, group in rows.groupby("kernel"):
        of_kernel = counts.setdefault(str(kernel), {KEPT: len(group)})
        for reason, passes in conditions.items():
            failed = ~passes[group.index]
            group = group[~failed]
            of_kernel[KEPT] -= int(failed.sum())
            if failed.any():
                of_kernel[reason] = of_kernel.get(reason, 0) + int(failed.sum())
    every = [passes[rows.index] for passes in conditions.values()]
    return rows[np.logical_and.reduce(every)]


def _gemm(folder: Path, framework: str, counts: Counts) -> pd.DataFrame:
    rows = _read(folder, f"gemm/{framework}/*/gemm", dtype="gemm_dtype", m="m", n="n", k="k")
    rows = _named("gemm", rows[rows.dtype.isin(("bfloat16", "fp8_block"))])
    rows = rows.assign(kernel=rows.kernel.replace("gemm.fp8_block", FP8_LINEAR))
    run = (rows.m <= LONGEST_STEP) & (rows.n >= NARROWEST) & rows.k.between(NARROWEST, DEEPEST)
    return _keep(rows, {SHAPES: run}, counts)


def _cold(weights: pd.Series, card: Gpu) -> pd.Series:
    """True for rows that read `weights` (bytes) from memory. L40S caches up to 1.5 times its L2 size."""
    return GEMM_COPIES * weights > 2 * card.l2_bytes


def _bf16(gemm: pd.DataFrame, card: Gpu, counts: Counts) -> pd.DataFrame:
    rows = gemm[gemm.kernel == "gemm.bf16"]
    return _keep(rows, {"weights in the L2 cache": _cold(rows.n * rows.k * BF16_BYTES, card)}, counts)


def _fp8_block(gemm: pd.DataFrame, sglang: pd.DataFrame, card: Gpu, counts: Counts) -> tuple[pd.DataFrame, str]:
    """vLLM's rows that outlast the host's launch, SGLang's short ones, and a remark about them."""
    own, other = gemm[gemm.kernel == FP8_LINEAR], sglang[sglang.kernel == FP8_LINEAR]
    if own.empty or card.fp8_flops is None:
        return _keep(own, {"no FP8 tensor cores": own.m < 0}, counts), ""
    launch = own.seconds[own.m <= 16].median()
    read_s = own.n * own.k * FP8_BYTES / card.memory_bandwidth
    roofline = np.maximum(2.0 * own.m * own.n * own.k / card.fp8_flops, read_s)
    other = other[(other.m < LONG_ROWS) & _cold(other.n * other.k * FP8_BYTES, card)]
    long_rows = (own.m >= LONG_ROWS) | other.empty
    conditions = {"shorter than the host's launch": roofline > launch, "SGLang's rows in their place": long_rows}
    own = _keep(own, conditions, counts)
    remark = f", fp8_block GEMMs below m = {LONG_ROWS} of SGLang" if len(other) else ", only long fp8_block GEMMs"
    return pd.concat([own, other]), remark


def _attention(folder: Path, phase: str, kernel: str, counts: Counts, **columns: str) -> pd.DataFrame:
    columns |= {"heads": "num_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    columns |= {"dtype": "kv_cache_dtype", "window": "window_size"}
    rows = _named(kernel, _read(folder, f"attention/vllm/*/{phase}_attention", **columns))
    grouped = (rows.kv_heads <= 8) & (rows.heads >= 4)
    kept = _keep(rows, {SHAPES: grouped & (rows.window == 0) & (rows.head_dim == 128)}, counts)
    return kept.drop(columns="window")


def _decode(folder: Path, card: Gpu, counts: Counts) -> pd.DataFrame:
    kernel = "attention_decode"
    rows = _attention(folder, "generation", kernel, counts, batch="batch_size", context="step")
    rows = rows.assign(context=rows.context + 1)  # a query reads its own key too
    element = np.where(rows.kernel == f"{kernel}.fp8", FP8_BYTES, BF16_BYTES)
    share = rows.batch * rows.context * (2 * rows.kv_heads * rows.head_dim * element) / card.l2_bytes
    # Little KV costs nothing, cached or not.
    return _keep(rows, {"KV in the L2 cache": (share > 1) | (share < 1 / 16)}, counts)


def _prefill(folder: Path, counts: Counts) -> pd.DataFrame:
    rows = _attention(folder, "context", "attention_prefill", counts, chunks="batch_size", chunk="isl")
    return _keep(rows, {SHAPES: rows.chunks * rows.chunk <= LONGEST_STEP}, counts).assign(context=0)


def _moe(folder: Path, counts: Counts) -> pd.DataFrame:
    shape = {"tokens": "num_tokens", "experts": "num_experts", "top_k": "topk", "hidden": "hidden_size"}
    split = {"inner": "inter_size", "tp": "moe_tp_size", "ep": "moe_ep_size", "skew": "distribution"}
    rows = _read(folder, "moe/vllm/*/moe", dtype="moe_dtype", **shape, **split)
    rows = _named("moe", rows[rows.dtype.isin(("bfloat16", "fp8_block"))])
    rows = rows.assign(inner=rows.inner // rows.tp, skew=rows["skew"].str.extract(r"power_law_([\d.]+)", expand=False))
    conditions = {"balanced routing": rows["skew"].notna(), "expert parallelism": rows.ep == 1}
    kept = _keep(rows, conditions | {SHAPES: rows.inner >= LEAST_INNER}, counts)
    return kept.astype({"skew": float}).drop(columns=["tp", "ep"])


def _all_reduce(folder: Path, counts: Counts) -> pd.DataFrame:
    rows = _read(folder, "comm/vllm/*/custom_allreduce", gpus="num_gpus", bytes="message_size")
    rows = rows.assign(bytes=rows.bytes * BF16_BYTES, kernel="all_reduce")  # their sizes are in elements
    graphed = rows.backend.str.endswith("graph")
    return _keep(rows, {"outside of CUDA graphs": graphed, SHAPES: rows.bytes <= LARGEST_MESSAGE}, counts)


# A GEMM of so few rows waits for memory. If those with FLAT_TRAFFIC times the traffic of the smallest tenth take less
# than FLAT_TIMES as long in the median, the host launched them too slowly. AIConfigurator 0.12 has vLLM's fp8_block
# tables of four GPUs with 1.01 to 1.05 times, and the other tables that are imported with 2.3 to 18 times.
FEW_ROWS, FLAT_TRAFFIC, FLAT_TIMES = 64, 4.0, 1.5


def flat_kernels(rows: pd.DataFrame) -> dict[str, str]:
    """The kinds of GEMMs whose time does not grow with their traffic -> their median times, in words."""
    flat, gemms = {}, rows[rows.kernel.astype(str).str.startswith(("gemm.", "linear."))]
    for kernel, group in gemms.groupby("kernel"):
        group = group[group.m <= FEW_ROWS]
        element = BF16_BYTES if str(kernel).endswith(".bf16") else FP8_BYTES
        bytes_ = element * (group.n + group.m) * group.k + BF16_BYTES * group.m * group.n
        least = bytes_ <= bytes_.quantile(0.1)
        more = bytes_ >= FLAT_TRAFFIC * bytes_[least].median()
        little, much = (group.seconds[part].median() for part in (least, more))
        if more.any() and much < FLAT_TIMES * little:
            flat[str(kernel)] = f"{1e6 * little:.0f} us with the least traffic, {1e6 * much:.0f} with 4 times"
    return flat


@dataclass(frozen=True, slots=True)
class Trial:
    """A test of the import on a measured GPU: its errors against the measurements.

    kernels:  kernel -> median |log(predicted / measured)| of our own timings
    rollouts: log(predicted / measured) of each rollout's makespan
    """

    gpu: str
    kernels: dict[str, float]
    rollouts: tuple[float, ...]

    @property
    def error_parts(self) -> tuple[float, float]:
        """The standard deviations of the error that precisions share, and of their own, as `Profile.with_errors`."""
        variance = float(np.mean(np.square(self.rollouts)))
        own = min(OWN_ERROR, variance**0.5)
        return math.sqrt(variance - own**2), own

    def __str__(self) -> str:
        errors = np.abs(np.expm1(self.rollouts))
        text = (
            f"tested on {self.gpu}: makespan of {errors.size} measured rollouts, mean error {errors.mean():.1%}, "
            f"worst {errors.max():.1%}"
        )
        kernels = ", ".join(f"{kernel} {error:.1%}" for kernel, error in self.kernels.items())
        return f"{text}; median error of kernels: {kernels}" if kernels else text


def import_all(
    names: Sequence[str], rollouts: Sequence[Path], kernels: Sequence[Path], output: Path
) -> list[tuple[Path, Profile]]:
    """Write the profiles of the GPUs called `names` (none: all) to `output`. Returns (path, profile) of each.

    rollouts, kernels: measurements of TRIED_ON, which test its import

    Raises ConfigError without the package, for a GPU without tables in it, and for TRIED_ON.
    """
    named = [find_gpu(name) for name in names]
    data, version = find_data()
    cards = named or [card for card in importable(data) if card.name != TRIED_ON]
    if any(card.name == TRIED_ON for card in cards):
        raise ConfigError(
            f"{TRIED_ON} was measured, so its tables serve as the test of the others; leave it out of --gpu"
        )
    if kernels and not rollouts:
        raise ConfigError("--kernels is given without --rollouts, whose error is the profiles' model error; give both")
    imports = [(card, read_tables(card, data, version)) for card in cards]
    trial = None
    if rollouts:
        card, rows = find_gpu(TRIED_ON), read_all(kernels)
        records = [record for path in rollouts for record in read_records(path)]
        trial = try_out(card, read_tables(card, data, version), rows, records)
    return [_written(import_profile(card, tables, trial), output) for card, tables in imports]


def _written(profile: Profile, folder: Path) -> tuple[Path, Profile]:
    path = profile_path(folder, profile.gpu, profile.engine_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    return path, profile


def import_profile(card: Gpu, tables: Tables, trial: Trial | None = None) -> Profile:
    """Fit the profile of `card` to its tables. Without a trial, the errors are the datasheet profile's."""
    prior = without_rare_parts(datasheet_profile(card, tables.engine_version), parts=rare_parts(card))
    rows = tables.rows.sample(frac=1, random_state=0).groupby("kernel").head(SAMPLE)
    parts = [_split(observation) for observation in observe(rows, card)]
    used = dict.fromkeys(name for seen, _ in parts for name in seen.predict(prior).partials)
    free = [name for name in used if name.partition(".")[0] not in ASSUMED]
    fitted = fit([seen for seen, _ in parts], prior, free)
    unseen = {rest.kernel: robust_sd(rest.errors(fitted.profile)) for _, rest in parts if rest.seconds.size}
    imported = replace(
        fitted.profile,
        kind="imported",
        source=f"{tables.source}; {trial if trial else 'not tested against measurements'}",
        residuals=fitted.residuals | unseen,
        hull=hull(tables.rows),
        date=date.today().isoformat(),
        notes=prior.notes | dict.fromkeys(free, f"{FITTED}{tables.source}"),
        table_rows=tables.counts,
        flat=tables.flat,
    )
    return imported if trial is None else imported.with_errors(*trial.error_parts)


def try_out(card: Gpu, tables: Tables, rows: pd.DataFrame, records: Sequence[Record]) -> Trial:
    """Compare the import of `card` with our own measurements of it: `rows` as `kernel_rows.observe` takes them.

    Raises ConfigError if there is no record of a rollout on this GPU.
    """
    records = [record for record in records if record.fields["gpu"] == card.name]
    if not records:
        raise ConfigError(f"the records hold no rollout on {card.name}, the GPU whose import is tested")
    profile = import_profile(card, tables)
    kernels = {timed.kernel: float(np.median(np.abs(timed.errors(profile)))) for timed in observe(rows, card)}
    ratios = [simulated(record, profile).rollout.makespan_s / record.seconds for record in records]
    return Trial(card.name, kernels, tuple(np.log(ratios).tolist()))


def _split(observation: Observations) -> tuple[Observations, Observations]:
    """Split the rows into (seen, unseen), by whole groups."""
    few = np.unique(observation.groups).size < FEWEST_SHAPES
    unseen = np.zeros_like(observation.groups, dtype=bool) if few else observation.groups % UNSEEN == 0
    return subset(observation, ~unseen), subset(observation, unseen)


def subset(observation: Observations, keep: Array) -> Observations:
    """The rows where `keep` (bool, shape (rows,)) is true."""

    def predict(profile: Profile) -> Cost:
        cost = observation.predict(profile)
        return Cost(cost.seconds[keep], {name: partial[keep] for name, partial in cost.partials.items()})

    return replace(observation, seconds=observation.seconds[keep], groups=observation.groups[keep], predict=predict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", default=[], metavar="NAME", help="repeat; all that the tables have")
    parser.add_argument("--rollouts", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--kernels", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--output", default=profiles_path(), type=Path, metavar="FOLDER", help="fp8plan's own")
    typed = parser.parse_args()
    for path, profile in import_all(typed.gpu, typed.rollouts, typed.kernels, typed.output):
        print(f"{path}: {profile.label}, {profile.source}")


if __name__ == "__main__":
    main()
