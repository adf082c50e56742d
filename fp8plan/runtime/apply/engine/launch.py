"""The start of an EngineSetup: vLLM's arguments and environment, and checks of the engine that then runs.

`held_back` keeps the output of a start, about a hundred lines, in a file that is shown only if something fails.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError, Fp8PlanError, warn
from fp8plan.model.architecture.kept import Kept
from fp8plan.model.configs import find_config
from fp8plan.model.emit.vllm import vllm_env, vllm_kwargs
from fp8plan.model.limits import Derived, EngineLimits, Lowerable
from fp8plan.model.precision import find_precision, quantisation
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.engine.options import not_predicted, refuse_unknown, remarks
from fp8plan.runtime.apply.engine.returned_experts import refuse_dense
from fp8plan.runtime.apply.vllm_versions import check_vllm_version, untested
from fp8plan.runtime.apply.weight_sync.checkpoint import local_manifest
from fp8plan.runtime.apply.weight_sync.fixed_scales import has_fixed_scales, keeps_scales
from fp8plan.runtime.apply.weight_sync.manifest import Manifest
from fp8plan.runtime.apply.worker.extension import EXTENSION
from fp8plan.runtime.watch.guard.observation import EngineFacts, kernel_names

# Arguments that decide the precision. The setup sets them.
THE_SETUPS = ("model", "dtype", "quantization", "quantization_config", "kv_cache_dtype", "worker_extension_cls")

# Arguments of which only some values can be synced and corrected for -> those values, and why.
NOT_SUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((1,), "a sync reaches one replica; start an engine for each"),
    "enable_eplb": ((False,), "experts that move between syncs would get each other's weights"),
    "logprobs_mode": (("processed_logprobs", "raw_logprobs"), "a correction needs log-probs, and logits are none"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to start one engine, again and again.

    setup:      the setup that runs. Its limits are the engine's own. The cost model reads its model's shape
    kwargs:     arguments of vllm.LLM
    env:        environment variables of its processes
    more:       the caller's part of `kwargs`
    precisions: presets that the engine may be started again in; None: any
    """

    setup: EngineSetup
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    more: Mapping[str, Any]
    precisions: Sequence[str] | None

    @property
    def precision(self) -> str:
        return self.setup.precision.name

    @property
    def limits(self) -> EngineLimits:
        return self.setup.limits

    @property
    def device(self) -> str:
        """The device of the engine's tensors, as torch names it."""
        return "cpu" if self.setup.gpu.is_cpu else "cuda"

    @property
    def workers(self) -> int:
        """Number of vLLM's workers in a replica, on a GPU each."""
        return workers_of(self.setup, self.more)

    @property
    def not_predicted(self) -> tuple[str, ...]:
        """Options that the cost model does not know, so that no guard can judge the engine."""
        return not_predicted(self.more)

    @property
    def fp8_weights(self) -> bool:
        return self.setup.precision.weights == "fp8_block"

    @property
    def fp8_kv(self) -> bool:
        return self.setup.precision.kv == "fp8"

    def with_precision(self, name: str) -> Launch:
        """The same engine in another precision. Raises ConfigError if its plan lacks that on this layout."""
        if self.precisions is not None and name not in self.precisions:
            size = self.limits.tensor_parallel_size
            raise ConfigError(f"the plan has no {name} on {size} GPU(s); allowed: a plan with all precisions")
        limits = replace(self.limits, max_num_seqs=Lowerable(self.limits.max_num_seqs))
        setup = replace(self.setup, precision=find_precision(name), limits=limits)
        return launch(setup, str(self.kwargs["model"]), None, self.more, self.precisions)

    def holding(self, longest: int) -> Launch:
        """The same engine with max_model_len filled in, where the setup left it to vLLM."""
        limits = replace(self.limits, max_model_len=self.limits.max_model_len or longest)
        return replace(self, setup=replace(self.setup, limits=limits))

    def prepare(self) -> None:
        """Set the environment for vLLM's start. Raises ConfigError for blockwise FP8 on a CPU that cannot run it."""
        os.environ.update(self.env)
        if self.fp8_weights and self.device == "cpu" and not _cpu_has_blockwise_fp8():
            raise ConfigError(
                f"{self.precision} was planned, and vLLM has no blockwise FP8 for this CPU (its own kernel wants AMX); "
                "allowed here: bf16, fp8_kv (choice=...), or a GPU with FP8"
            )

    def checkpoint(self) -> Manifest | None:
        """The tensors of the model's safetensors files; None if they are not on this machine."""
        return local_manifest(str(self.kwargs["model"]), self.kwargs.get("revision"), self.kwargs.get("download_dir"))

    def refuse_other(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError if another engine runs than was planned, or its KV scales cannot be measured or kept."""
        wanted_e8m0 = self.env.get("VLLM_USE_DEEP_GEMM_E8M0")
        if facts["e8m0"] and wanted_e8m0 == "0":
            raise ConfigError(
                "DeepGEMM uses power-of-two scales although VLLM_USE_DEEP_GEMM_E8M0=0 was planned; vLLM read its "
                "environment earlier in this process: set the variable before vLLM is first used"
            )
        runs_fp8_kv = str(facts["kv_cache_dtype"]).startswith("fp8")
        if runs_fp8_kv != self.fp8_kv:
            raise ConfigError(f"the KV cache runs as {facts['kv_cache_dtype']}, and {self.precision} was planned")
        if self.fp8_kv:
            has_fixed_scales(facts)
        quantised = any("Fp8" in kind for kind in facts["layers"])
        if quantised != self.fp8_weights:
            raise ConfigError(f"the layers run as {', '.join(facts['layers'])}, and {self.precision} was planned")


def workers_of(setup: EngineSetup, more: Mapping[str, Any]) -> int:
    """Number of vLLM's workers in a replica. more: arguments of vllm.LLM"""
    size: int = more.get("tensor_parallel_size", setup.limits.tensor_parallel_size)
    others = ("pipeline_parallel_size", "prefill_context_parallel_size")
    return size * math.prod(int(more.get(name) or 1) for name in others)


def facts_of(setup: EngineSetup, facts: Mapping[str, Any], unknown: Sequence[str]) -> EngineFacts:
    """The guard's facts about an engine.

    setup: the planned engine with the running one's limits
    facts: those of a worker (runtime.apply.worker.facts)
    unknown: options of the engine that the cost model does not know
    """
    preset = setup.precision
    return EngineFacts(
        model=setup.model if isinstance(setup.model, str) else setup.path,
        gpu=setup.gpu.name,
        engine_version=facts["vllm_version"].partition("+")[0],
        precision=preset.name,
        limits=setup.limits.settled(),
        kernel_backends=kernel_names(facts, preset),
        e8m0=facts["e8m0"],
        cudagraph_mode=facts["cudagraph_mode"],
        not_predicted=unknown,
        inside=setup.inside,
        remedies=setup.remedies,
        kv_fixed=preset.kv == "fp8" and keeps_scales(facts["attention"]),
        host_loop_s=facts.get("host_loop_s"),
    )


def launch(
    setup: EngineSetup,
    model_path: str | None = None,
    keep_bf16: Kept | None = None,
    more: Mapping[str, Any] | None = None,
    precisions: Sequence[str] | None = None,
    beside: Collection[str] = (),
    server: bool = False,
) -> Launch:
    """Return the Launch of one replica. Warns of options in `more` that predictions, guard or correction do not know.

    model_path: the checkpoint, if it is not the setup's model
    keep_bf16:  as in Remedies, in place of the setup's
    beside:     the caller's own arguments, one of which may be misspelt in `more`
    server:     `more` may hold arguments of `vllm serve`, too
    the rest:   as in Launch

    Raises ConfigError for a setup that vLLM or the GPU cannot run, and for wrong arguments.
    """
    if note := untested(check_vllm_version()):
        warn(note)
    more, preset = more or {}, setup.precision
    refuse_unknown(more, beside, server)
    if fixed := sorted(set(more).intersection(THE_SETUPS)):
        whose = (
            "plan; allowed: another choice of the plan (choice=...)" if precisions else "setup; allowed: another one"
        )
        raise ConfigError(f"{', '.join(fixed)} come from the {whose}")
    for name, (allowed, why) in NOT_SUPPORTED.items():
        if name in more and more[name] not in allowed:
            raise ConfigError(f"{name} is {more[name]!r}; allowed: {' or '.join(map(repr, allowed))}: {why}")
    setup.check_precision()
    if keep_bf16 is not None:
        setup = replace(setup, remedies=replace(setup.remedies, keep_bf16=keep_bf16))
        if any(keep_bf16) and preset.weights != "fp8_block":
            raise ConfigError(f"keep_bf16 is {keep_bf16}, and {preset.name} has no FP8 weights; leave it out")
    model = str(setup.path if model_path is None else model_path)
    local = (Path(model) / "config.json").is_file()
    config = _config(Path(model).resolve() if local else model, setup.path)
    if quantised := quantisation(config):
        where, how = quantised
        method = how.get("quant_method") if isinstance(how, Mapping) else None
        raise ConfigError(
            f"{model} is quantised already ({method or where}); allowed: the BF16 checkpoint that the trainer started "
            "from, which vLLM quantises while it loads"
        )
    limit_names = {field.name for field in fields(EngineLimits)}
    limits = replace(setup.limits, **{name: value for name, value in more.items() if name in limit_names})
    runs = replace(setup, model=model if local else setup.model, limits=replace(limits, data_parallel_size=1))
    runs = _lowered_to_blocks(runs)
    kwargs = vllm_kwargs(runs) | {"model": model, "disable_log_stats": False} | dict(more)
    kwargs["worker_extension_cls"] = EXTENSION
    refuse_dense(runs.limits, config, model)
    for remark in remarks(more):
        warn(remark)
    return Launch(runs, kwargs, vllm_env(setup), more, precisions)


def _lowered_to_blocks(setup: EngineSetup) -> EngineSetup:
    """The engine with as many running requests as `EngineSetup.placed` allows, and a warning if these are fewer.

    A number that the caller insists on stays, and so does one of a model whose memory cannot be predicted.
    """
    if setup.gpu.is_cpu or not isinstance(setup.limits.max_num_seqs, Derived | Lowerable):
        return setup
    try:
        started, _ = setup.placed()
    except Fp8PlanError:  # its memory cannot be predicted; vLLM reports a real fault at its start
        return setup
    for sentence in started.lowered_from(setup.limits):
        warn(sentence)
    return started


def _config(model: str | Path, planned: str) -> dict[str, Any]:
    """The config.json of the checkpoint, or of the planned model if that is not at hand (a new hub id, offline)."""
    try:
        return find_config(model)[0]
    except ConfigError:
        return find_config(planned)[0]


def _cpu_has_blockwise_fp8() -> bool:
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return any(kernel.is_supported()[0] for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU])


STREAMS = (1, 2)  # stdout and stderr, which the processes started meanwhile inherit


@contextmanager
def held_back(engine_stays: bool = True) -> Iterator[Path]:
    """Write the output of this process, and of those it starts, to a file; yield its path.

    engine_stays: keep the file until Python ends, as the processes started here write to it while they live

    An exception gets a note that names the file. The file then stays; so it does if an exception ends Python.
    """
    number, name = tempfile.mkstemp(prefix="fp8plan-engine-", suffix=".log")
    try:
        with _into(number):
            yield Path(name)
    except BaseException as error:
        cause = first_error(Path(name).read_text(encoding="utf-8", errors="replace"))
        cause = f", first error there: {cause}" if cause and cause.partition(": ")[2] not in str(error) else ""
        error.add_note(f"its output is in {name}{cause}")
        raise
    if engine_stays:
        atexit.register(_forget, name, _last_error())
    else:
        with suppress(OSError):
            os.unlink(name)


def first_error(output: str) -> str | None:
    """The first error in an engine's output. vLLM passes errors up through its processes, and the last one is empty."""
    first = re.search(r"^(?!.*\bWARNING\b).*?\b(\w*Error: .*)$", output, re.MULTILINE)
    return first and first[1][:300]


@contextmanager
def _into(number: int) -> Iterator[None]:
    """Send STREAMS to the file of this descriptor, which is then closed."""
    _flush()
    kept = {stream: os.dup(stream) for stream in STREAMS if _is_open(stream)}
    try:
        for stream in kept:
            os.dup2(number, stream)
        os.close(number)
        yield
    finally:
        try:
            _flush()
        finally:
            for stream, before in kept.items():
                os.dup2(before, stream)
                os.close(before)


def _last_error() -> BaseException | None:
    """The last exception whose traceback Python has shown, after an interactive line or at its end."""
    return getattr(sys, "last_value", None)


def _forget(name: str, before: BaseException | None) -> None:
    """Remove the file when Python ends, unless it ends with an exception.

    before: `_last_error` when the engine had started
    """
    if _last_error() is not before:
        print(f"the engine's output is in {name}", file=sys.stderr)
    else:
        with suppress(OSError):
            os.unlink(name)


def _is_open(stream: int) -> bool:
    with suppress(OSError):
        return os.fstat(stream) is not None
    return False


def _flush() -> None:
    """Flush stdout and stderr. The engine survives if one is closed or broken (full disk, unread pipe)."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
