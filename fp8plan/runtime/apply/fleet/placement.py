"""The places of a fleet's replicas, one bundle of a Ray placement group each, and the guard of a whole fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.packages import package
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import EngineFacts


def ray() -> Any:
    """Return the ray package. Raises ConfigError if it is not installed."""
    return package("ray", "a fleet", "pip install 'fp8plan[ray]'")


def bundle(gpus: int, cpus: float) -> dict[str, float]:
    """Return the resources of one replica. A bundle lies on one host, and so do all GPUs of a replica."""
    resources = {"CPU": cpus}
    if gpus:
        resources["GPU"] = gpus
    return resources


def placed(replicas: int, gpus: int, cpus: float, wait_s: float) -> Any:
    """Reserve places for all replicas, near each other where possible. Starts or joins a Ray cluster if there is none.

    gpus, cpus: of each replica; wait_s: seconds to wait for others to free theirs

    Raises ConfigError if the cluster has too few, or if they stay taken.
    """
    cluster = ray()
    if not cluster.is_initialized():
        cluster.init()
    from ray.util.placement_group import placement_group, remove_placement_group

    each = bundle(gpus, cpus)
    refuse_too_few(each, replicas, cluster.cluster_resources())
    group = placement_group([each] * replicas, strategy="PACK")
    try:
        await_places(group, range(replicas), wait_s)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def await_places(group: Any, numbers: Iterable[int], wait_s: float) -> None:
    """Wait until these bundles of a group have hosts. Ray looks for another host where one is lost.

    Raises ConfigError if they stay taken, as an actor would wait for ever.
    """
    from ray.util.placement_group import placement_group_table

    hosts = placement_group_table(group)["bundles_to_node_id"]
    homeless = [number for number in numbers if not hosts[number]]
    if homeless and not group.wait(wait_s):  # Ray places all that are homeless at once
        each, free = group.bundle_specs[homeless[0]], ray().available_resources()
        raise ConfigError(
            f"places for {len(homeless)} replicas of {_text(each)} on one host each did not get free in {wait_s:g} s; "
            f"free now, on all hosts: {_text({kind: free.get(kind, 0) for kind in each})}. End what uses them, ask for "
            "fewer replicas, or wait longer (wait_s=...)"
        )


def refuse_too_few(each: dict[str, float], replicas: int, whole: dict[str, float]) -> None:
    """Raises ConfigError for a cluster that could never hold so many replicas."""
    fit = min(int(whole.get(kind, 0) // amount) for kind, amount in each.items() if amount)
    if fit < replicas:
        have = _text({kind: whole.get(kind, 0) for kind in each})
        more = "add hosts (ray start --address=...)"
        allowed = f"replicas={fit}, or {more}" if fit else f"a replica on fewer GPUs, or {more}"
        raise ConfigError(
            f"{replicas} replicas of {_text(each)} each were asked for, and the Ray cluster has {have}; allowed: "
            f"{allowed}"
        )


def place(group: Any, number: int, gpus: int, cpus: float, env: dict[str, str]) -> dict[str, Any]:
    """Return the options of the actor in a bundle of the group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    more = {"scheduling_strategy": strategy, "runtime_env": {"env_vars": env}}
    return {"num_cpus": cpus, "num_gpus": gpus} | more


def _text(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}(s)" for kind, amount in sorted(resources.items(), reverse=True))


class FleetGuard(Guard):
    """A Guard that tells the replicas' guards the rung that the fleet has taken. Only the replicas' judge rollouts.

    facts: of one replica
    tell:  tells a rung to the replicas that live
    """

    def __init__(self, facts: EngineFacts, settings: GuardSettings, tell: Callable[[Action], Any]) -> None:
        super().__init__(facts, settings)
        self._tell = tell

    def took(self, action: Action) -> None:
        """Note that a rung was taken, here and in the replicas."""
        super().took(action)
        self.remind()

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state, and the replicas with its rung. Raises ConfigError as a Guard does."""
        super().load_state_dict(data)
        self.remind()

    def remind(self) -> None:
        """Tell the rung to the replicas, some of which may be new."""
        self._tell(self.state.rung)
