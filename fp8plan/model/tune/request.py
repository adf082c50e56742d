"""The question of a tuned plan: that of a plan, the limits that stay, and drafts to weigh."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Final

from fp8plan.errors import ConfigError
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.scene import CONCURRENT
from fp8plan.model.tune.speculation import DRAFT_OPTIONS, Speculation

SEARCHED: Final = ("max_num_seqs", "max_cudagraph_capture_size", "max_num_batched_tokens", "enable_prefix_caching")


@dataclass(frozen=True)
class TuneRequest(PlanRequest):
    """A PlanRequest whose limits may be changed.

    keep:        names of limits that stay as they are, and "concurrent". One that `limits` or the turns of the workload
                 give stays as well, and gpu_memory_utilization is a ceiling
    speculation: drafts to weigh as a lever

    Raises ConfigError as PlanRequest does, and for an unknown name in `keep`.
    """

    _: KW_ONLY
    keep: Collection[str] = ()
    speculation: Annotated[Speculation | None, DRAFT_OPTIONS] = None

    def __post_init__(self) -> None:
        PlanRequest.__post_init__(self)
        names = (*SEARCHED, CONCURRENT)
        if isinstance(self.keep, str) or not set(self.keep) <= set(names):
            raise ConfigError(f"keep is {self.keep!r}; allowed: a list with some of {', '.join(names)}")
