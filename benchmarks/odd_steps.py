"""Training steps whose measurement is missing, untrue or not comparable; each function prints what a Monitor says.

benchmarks/odd_measurements.py runs them in a process of their own, with the package of two commits: `run("no_figure")`.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed

import fp8plan
from fp8plan import AlarmLimits, ConstantThresholds, CorrectionSettings, JsonLines, Monitor, Thresholds

RUN = Path("run.jsonl")
EOS = -4.4  # the trainer's log-prob of an EOS that the engine never sampled, which its side has as 0


def run(name: str, *arguments: Any, remedies: bool = False, **more: Any) -> None:
    """Call a function of this module; print its refusal, and the warnings of fp8plan.

    remedies: also those of alarms, which say what to do
    """
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            globals()[name](*arguments, **more)
        except fp8plan.Fp8PlanError as error:
            print(f"refused: {error}")
    for text in dict.fromkeys(str(x.message) for x in told):
        if text.startswith("fp8plan: ") and (remedies or not text.startswith("fp8plan: alarm ")):
            print("warns:", text.removeprefix("fp8plan: "))


# Batches


def policies(rows: int = 8, length: int = 2_000, sigma: float = 0.08) -> tuple[torch.Tensor, ...]:
    """(train, rollout) log-probs [rows, length] of two policies of 200 tokens, sampled from the second."""
    logits = 2 * torch.randn(rows, length, 200)
    rollout = logits.log_softmax(-1)
    train = (logits + sigma * torch.randn(logits.shape)).log_softmax(-1)
    sampled = torch.multinomial(rollout.exp().view(-1, 200), 1).view(rows, length, 1)
    return train.gather(-1, sampled).squeeze(-1), rollout.gather(-1, sampled).squeeze(-1)


def noise(k3: float, rows: int, length: int) -> torch.Tensor:
    """Log ratios [rows, length] of two policies whose KL is k3, and whose ratios have the mean 1."""
    return -k3 + math.sqrt(2 * k3) * torch.randn(rows, length)


def noisy(rows: int, length: int, k3: float, bias: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, rollout) with such log ratios, less a bias for each token."""
    rollout = -4 * torch.rand(rows, length) - 3
    return rollout + noise(k3, rows, length) - bias, rollout


# What is printed


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def figures(step: Any) -> str:
    """The figures and the alarms of a step."""
    names = {
        "k1": "rollout_corr/kl",
        "k3": "rollout_corr/k3_kl",
        "ESS": "rollout_corr/rollout_is_eff_sample_size",
        "lost tokens": "fp8plan/lost_tokens",
        "mean weight": "rollout_corr/rollout_is_mean",
    }
    shown = ", ".join(f"{name} {number(step.metrics.get(metric))}" for name, metric in names.items())
    return f"{shown}; alarms: {', '.join(step.decided.alarms) or 'none'}"


def diagnosed(target: Any, **settings: Any) -> str:
    """The faults that the doctor finds, and its warnings."""
    found = fp8plan.doctor(target, **settings).findings
    names = {state: [str(x.fault) for x in found if x.state.value == state] for state in ("fault", "warning")}
    warned = f"; warnings: {', '.join(names['warning'])}" if names["warning"] else ""
    return f"doctor: {', '.join(names['fault']) or 'no fault'}{warned}"


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this version of the function has; prints those that it has not."""
    known = inspect.signature(function).parameters
    if missing := [name for name in arguments if name not in known]:
        print(f"takes no {', '.join(missing)};")
    return {name: value for name, value in arguments.items() if name in known}


def stepped(train: torch.Tensor, rollout: torch.Tensor, mask: Any = None, steps: int = 1, **settings: Any) -> Any:
    """The last step of a Monitor with a run file, after its figures and the doctor's word on the file are printed."""
    mask = torch.ones(train.shape, dtype=torch.bool) if mask is None else mask
    with Monitor(sinks=[JsonLines(RUN)], **taken(Monitor, settings)) as monitor:
        for _ in range(steps):
            step = monitor.step(train, rollout, mask)
    print(f"{figures(step)}; {diagnosed(RUN)}")
    return step


# 1. Absent


def invalid(share: float, side: str = "rollout", value: float = math.nan) -> None:
    """Six steps in which a share of one side's log-probs are no number."""
    train, rollout = policies()
    spoilt = train if side == "train" else rollout
    spoilt[torch.rand(spoilt.shape) < share] = value
    stepped(train, rollout, steps=6)


def recipe() -> None:
    """The loss that README and the guides tell to use, with one NaN among the trainer's log-probs."""
    train, rollout = policies()
    train[0, 3] = math.nan
    mask = torch.ones(train.shape)
    step = Monitor().step(train, rollout, mask)
    if hasattr(step, "loss"):
        loss = step.loss(-train)
    else:
        loss = (step.weights * -train * step.mask).sum() / step.mask.sum().clamp(min=1)
    print(f"loss {float(loss):.3f}")


def hooks() -> None:
    """A step of slime's, prime-rl's and SkyRL's hooks whose rollout log-probs are all NaN."""
    from fp8plan.integrations import hooks as micro_batches
    from fp8plan.integrations import prime_rl, skyrl, slime

    for name, contents in {
        "prime_rl.trainer.rl.loss": {"LossOutputs": SimpleNamespace},
        "skyrl.backends.skyrl_train.utils.ppo_utils": {
            "PolicyLossRegistry": SimpleNamespace(get=lambda base: lambda *args, **more: (args[0].sum(), {}))
        },
    }.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(module).update(contents)
    train, rollout = policies(4, 50)
    rollout[:] = math.nan
    mask = torch.ones(4, 50, dtype=torch.int)
    flat = torch.zeros(200)

    def of_slime(path: str) -> None:
        import os

        os.environ["FP8PLAN_MONITOR"] = path
        slime.correct(
            SimpleNamespace(use_tis=True), pg_loss=flat, train_log_probs=list(train), rollout_log_probs=list(rollout),
            loss_masks=list(mask), total_lengths=[50] * 4, response_lengths=[50] * 4,
        )  # fmt: skip

    def of_prime_rl(path: str) -> None:
        for ours, theirs in zip(train, rollout, strict=True):
            inputs = SimpleNamespace(
                trainer_logprobs=ours, inference_logprobs=theirs, advantages=torch.ones(50),
                loss_mask=torch.ones(50, dtype=torch.bool), loss_weights=None,
            )  # fmt: skip
            prime_rl.loss(inputs, settings=path)

    def of_skyrl(path: str) -> None:
        from fp8plan.integrations.hooks import settings_at

        skyrl.policy_loss(train, train, torch.ones(4, 50), SimpleNamespace(), mask, rollout, settings=settings_at(path))

    for hook in (of_slime, of_prime_rl, of_skyrl):
        name = hook.__name__.removeprefix("of_")
        settings = Path(f"{name}.json")
        settings.write_text(json.dumps({"run_file": f"{name}.jsonl"}))
        hook(str(settings.absolute()))
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight]).step()
        micro_batches.stop()
        records = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        print(f"{name}: {len(records)} records, alarms: {[x['alarms'] for x in records]};")


# 2. The correction's own work


def sequence_level(mode: str, k3: float, length: int, bias: float = 0.0, eos: bool = False) -> None:
    """Sequence weights of ordinary noise, of a bias for each token, or of an EOS that nobody sampled."""
    thresholds = Thresholds(2.0) if mode == "tis" else Thresholds(None, (0.5, 2.0))
    train, rollout = noisy(32, length, k3, bias)
    if eos:
        train[:, -1], rollout[:, -1] = EOS, 0.0
    settings = CorrectionSettings("sequence", mode, thresholds)  # type: ignore[arg-type]
    step = stepped(train, rollout, settings=settings)
    kept = (step.weights * step.mask).ne(0).any(1).float().mean()
    print(f"({kept:.0%} of the sequences have a weight);")


# 3. The same distribution, units and identity


def nucleus(sampling: bool, top_p: float = 0.8) -> None:
    """Identical weights on both sides; the engine samples with top_p (shared/reference/top_p.py of the issue)."""
    full = (torch.randn(32, 256, 2_000) * 3).log_softmax(-1)
    order, index = full.exp().sort(-1, descending=True)
    kept = torch.where(order.cumsum(-1) - order < top_p, order, torch.zeros(()))
    mass = kept.sum(-1, keepdim=True)
    token = index.gather(-1, torch.multinomial((kept / mass).view(-1, 2_000), 1).view(32, 256, 1))
    train = full.gather(-1, token).squeeze(-1)
    step = stepped(train, train - mass.squeeze(-1).log(), **({"sampling": {"top_p": top_p}} if sampling else {}))
    print(f"; reason: {step.decided.reason}")


def samplings() -> None:
    """Each way of sampling that biases the ratios, as fp8plan.Sampling knows it."""
    for params in (
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.7},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
    ):
        remarks = fp8plan.Sampling.of(params, trainer_temperature=1.0).remarks()
        print(f"{params}: {'; '.join(remarks)[:60] or 'no remark'} ...")


UNITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nll": torch.neg,
    "probabilities": torch.exp,
    "log10": lambda x: x / math.log(10),
}


def units(unit: str) -> None:
    train, rollout = map(UNITS[unit], policies(16, sigma=0.2))
    stepped(train, rollout)


def negated_row() -> None:
    train, rollout = policies()
    train[5], rollout[5] = -train[5], -rollout[5]
    stepped(train, rollout)


def same_tensor() -> None:
    train, _ = policies()
    stepped(train, train)


def mask_of(kind: str) -> None:
    """A mask of other numbers than 0 and 1, the second half of each row meant to be left out."""
    train, rollout = policies()
    half = torch.arange(train.shape[1]) < train.shape[1] // 2
    masks = {
        "a half": torch.where(half, 1.0, 0.5),
        "labels": torch.where(half, 7, -100),
        "token ids": torch.where(half, torch.arange(train.shape[1]) + 5, 0),
    }
    mask = masks[kind].expand(train.shape)
    step = Monitor().step(train, rollout, mask)
    print(f"{step.mismatch.tokens:,.0f} of {mask.numel():,} tokens count; {figures(step)}")


def mixture(stale: float, precision: float, top_p: float = 1.0) -> None:
    """A KL whose parts are known: log ratios of the trainer's updates, of the precision, and of the kept mass."""
    rollout = -4 * torch.rand(64, 4_000) - 3
    synced = rollout + noise(precision, 64, 4_000)
    train = synced + noise(stale, 64, 4_000) if stale else synced
    if top_p < 1:
        mass = 1 - (1 - top_p) * torch.rand(64, 4_000)
        rollout = rollout - mass.log()
    plan = fp8plan.plan("Qwen/Qwen3-8B", "h200", fp8plan.Workload(4, 4, fp8plan.Fixed(64), fp8plan.Fixed(128)))
    known = {"kl_k3": precision, "kl_k3_low": precision / 2, "kl_k3_high": 2 * precision}
    choices = tuple(replace(choice, **known) for choice in plan.choices)
    monitor = Monitor(
        plan=replace(plan, choices=choices, thresholds={}), **taken(Monitor, {"sampling": {"top_p": top_p}})
    )
    step = monitor.step(
        train, rollout, torch.ones(train.shape), **taken(monitor.step, {"synced_logprobs": synced if stale else train})
    )
    cut = float((mass - 1 - mass.log()).mean()) if top_p < 1 else 0.0
    print(
        f"known: staleness {stale:.2g}, sampling {cut:.2g}, precision {precision:.2g}; said: k3 {step.mismatch.k3:.2g}"
    )
    for part in getattr(step, "attribution", ()):
        print(f"{' or '.join(part.causes)} {part.kl:.2g} ({part.low:.2g}-{part.high:.2g}),")


# 4. Settings and saved state


def disarmed(**settings: Any) -> None:
    """A step whose KL is far too high, with a law that these settings disarm."""
    train, rollout = noisy(8, 2_000, 0.1)
    step = Monitor(controller=ConstantThresholds(**settings)).step(train, rollout, torch.ones(train.shape))
    print(f"accepted; {figures(step)}")


def limit_kl(value: Any) -> None:
    disarmed(limit_kl=value)


def limits(**values: Any) -> None:
    disarmed(limits=AlarmLimits(**values) if values else None)


def tail_bound() -> None:
    limits(tail_bound=0)


def state(**changes: Any) -> None:
    """A saved state with an impossible value."""
    monitor = Monitor()
    monitor.step(*policies(length=20), torch.ones(8, 20))
    saved = monitor.state_dict()
    own = {name: value for name, value in changes.items() if name in saved}
    saved |= own | {"controller": saved["controller"] | {k: x for k, x in changes.items() if k not in own}}
    monitor.load_state_dict(saved)
    print(f"accepted: steps {monitor.steps}, KL {monitor.state.kl}")


def state_steps() -> None:
    state(steps=-5)


def state_kl() -> None:
    state(kl=-1.0)


def state_file() -> None:
    from fp8plan.integrations.common import STATE_FILE, load_state

    Path(STATE_FILE).write_bytes(b"\xff\xfe{")
    load_state(Monitor(), Path())


# 5. Ranks


def ranks() -> None:
    """Two processes, of which the second refuses its first batch and goes on."""
    words = [sys.executable, "-c", "import sys, odd_steps; odd_steps.rank(int(sys.argv[1]))"]
    running = [
        subprocess.Popen([*words, str(n)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for n in range(2)
    ]
    for n, process in enumerate(running):
        print(f"rank {n}: {', '.join(process.communicate(timeout=100)[0].splitlines())};")


def rank(n: int) -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{Path('meet').absolute()}", rank=n, world_size=2, timeout=timedelta(seconds=6)
    )
    monitor = Monitor()
    for batch in range(3):
        train, rollout = noisy(4, 16 * (batch + 1), 1e-3)
        try:
            step = monitor.step(train, rollout[:2] if (n, batch) == (1, 0) else rollout, torch.ones(train.shape))
        except fp8plan.Fp8PlanError as error:
            print(f"batch {batch} refused ({str(error)[:70]} ...)", flush=True)
        except RuntimeError as error:
            print(f"batch {batch}: {type(error).__name__} of gloo after the timeout", flush=True)
            return
        else:
            print(f"batch {batch} is step {monitor.steps} of {step.mismatch.tokens:.0f} tokens", flush=True)


# 7. Run files


def shown_of(path: Path) -> str:
    """The records of a run file, and the steps that `fp8plan monitor` shows."""
    from fp8plan.runtime.monitor.record import RunReader

    reader = RunReader(path)
    reader.read()
    return f"{len(path.read_text().splitlines())} records, {len(reader.steps)} steps shown;"


def two_writers() -> None:
    batch = *policies(length=20), torch.ones(8, 20)
    monitors = [Monitor(sinks=[JsonLines(RUN)]) for _ in range(2)]
    for _ in range(5):
        for monitor in monitors:
            monitor.step(*batch)
    print(shown_of(RUN))


def old_file() -> None:
    batch = *policies(length=20), torch.ones(8, 20)
    for steps in (6, 2):
        with Monitor(sinks=[JsonLines(RUN)]) as monitor:
            for _ in range(steps):
                monitor.step(*batch)
    print(shown_of(RUN))


def full_disk() -> None:
    batch = *policies(length=20), torch.ones(8, 20)
    with Monitor(sinks=[JsonLines("/dev/full")]) as monitor:
        for _ in range(300):
            monitor.step(*batch)
    print(f"failures {monitor.failures};")


# 9. Options of an engine, which does not start


def misspelt() -> None:
    """An option of vLLM's that it has not."""
    fp8plan.RolloutEngine.from_setup(fp8plan.EngineSetup(tiny(), "cpu", "bf16"), max_num_seq=8)


def not_modelled(option: str) -> None:
    """An option of vLLM's that no prediction knows."""
    from fp8plan.runtime.engine.launch import launch

    value = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "enable_lora": True}[option]
    launch(fp8plan.EngineSetup(tiny(), "cpu", "bf16"), tiny(), more={option: value})
    print("accepted;")


def tiny() -> str:
    """The folder of a small model's configuration."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    Path("tiny").mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"} | sizes
    Path("tiny/config.json").write_text(json.dumps(config))
    return "tiny"
