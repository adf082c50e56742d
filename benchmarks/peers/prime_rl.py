"""prime-rl's loss (src/prime_rl/trainer/rl/loss.py) with fp8plan's loss in the place of its default one.

Of the checkout are the tests and that module, which sums up the components. prime-rl itself need not be installed.
Where a test draws log-probs from a normal distribution, they are drawn below 0 here: fp8plan refuses those above 0.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.adapted import answer, stand_in

FILES: Final = ("tests/unit/train/rl/test_loss.py",)
LOSS: Final = "src/prime_rl/trainer/rl/loss.py"
KNOWN: Final = {
    "test_disjoint_components_in_one_sequence": "it wants figures of DPPO's mask, which fp8plan's loss lacks",
}


def adapted_text(text: str) -> str:
    """The text of a test file without its GPU, and with log-probs that a model could have: normal ones are above 0."""
    text = text.replace(".cuda()", "").replace('device="cuda"', 'device="cpu"')
    lines = text.splitlines(keepends=True)
    return "".join(
        line.replace("torch.randn(", "-torch.rand(") if "logprobs = [" in line and "requires_grad" not in line else line
        for line in lines
    )


def install(checkout: Path) -> None:
    """Load the checkout's module, with fp8plan's loss in the place of the default one."""
    stand_in("beartype", beartype=lambda function: function)
    stand_in("jaxtyping", jaxtyped=lambda typechecker: lambda each: each, Bool=Shaped, Float=Shaped, Int=Shaped)
    names = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig")
    configs = {name: type(name, (SimpleNamespace,), {}) for name in names}
    stand_in("prime_rl.configs.trainer", LossConfig=object, **configs)
    stand_in("prime_rl.utils.utils", import_object=imported)
    module = stand_in("prime_rl.trainer.rl.loss")
    exec(compile((checkout / LOSS).read_text(encoding="utf-8"), LOSS, "exec"), vars(module))
    own = module.setup_rl_loss_fn
    module.setup_rl_loss_fn = lambda config: ours() if isinstance(config, configs["DefaultLossConfig"]) else own(config)


class Shaped:
    """A stand-in for jaxtyping's annotations: `Float[Tensor, "batch"]` is the tensor's type."""

    def __class_getitem__(cls, wanted: tuple[Any, str]) -> Any:
        return wanted[0]


def imported(path: str) -> Any:
    """The function at a path; one in the tests is that of the running file."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module.rpartition(".")[2] if module.startswith("tests.") else module), name)


def ours() -> Callable[[Any], Any]:
    """fp8plan's loss of one sequence."""
    from fp8plan.integrations import prime_rl

    @answer
    def loss(inputs: Any) -> Any:
        return prime_rl.loss(inputs)

    return loss
