"""RolloutFleet: data-parallel replicas of a plan's engine, as Ray actors, that hold the same weights and KV scales.

    with RolloutFleet.from_plan(plan, "Qwen/Qwen3-8B", replicas=4) as fleet:
        for step in range(steps):
            outputs = fleet.generate(prompts, sampling_params)
            ...                                               # train on them
            fleet.sync_weights(trainer.named_bf16_tensors())

It is used as a RolloutEngine is. Ray places the replicas, on one host or several, and carries prompts, outputs and
weights. runtime.apply.fleet.sync merges the replicas' answers in a sync, runtime.apply.fleet.routing deals out prompts.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from fp8plan.checks import whole
from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.apply.engine.base import EngineBase, driven
from fp8plan.runtime.apply.engine.launch import Launch, launch, workers_of
from fp8plan.runtime.apply.engine.options import arguments_of
from fp8plan.runtime.apply.engine.returned_experts import refuse_request
from fp8plan.runtime.apply.fleet.members import Calls, Members, Terms
from fp8plan.runtime.apply.fleet.placement import FleetGuard
from fp8plan.runtime.apply.fleet.report import Routing
from fp8plan.runtime.apply.fleet.rollouts import Requests, Rollouts
from fp8plan.runtime.apply.fleet.routing import mean_response
from fp8plan.runtime.apply.weight_sync.calls import Call, Procedure, Restart, rpc
from fp8plan.runtime.apply.weight_sync.kv_calibration import rescaled
from fp8plan.runtime.apply.weight_sync.nccl import RemoteSource
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event, generating, refuse_dead, refuse_shut_down
from fp8plan.runtime.tokens import refuse_prompts
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
from fp8plan.runtime.watch.guard.rollout_record import rollout_fields

if TYPE_CHECKING:
    from fp8plan.model.architecture.kept import Kept
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.setup import EngineSetup
    from fp8plan.runtime.apply.weight_sync.nccl import Rendezvous
    from fp8plan.runtime.watch.guard.guard import Guard, Verdict

Answer = TypeVar("Answer")


class RolloutFleet(EngineBase["RolloutFleet", SyncReport, str | None, list[dict[str, dict[str, float]]], None]):
    """Replicas of one engine; `from_plan` or `from_setup` makes them. A context manager, which shuts them down.

    A replica that dies drops out, with a warning that names it, and the others go on. Once none is left the fleet
    refuses to generate, and the next sync_weights starts all again. Calls after `shutdown` raise LostEngineError.

    sync_weights reads the tensors once. They serve in all living replicas or in none. KV scales are the same in all:
    kv_prompts are dealt out, and the largest magnitudes of any replica count. Once a replica has died or was replaced,
    a trainer that sends over NCCL must be met again (join_transfer).
    """

    def __init__(
        self,
        launched: Launch,
        settings: SyncSettings,
        members: Members,
        *,
        expected_tokens: float = 1.0,
    ) -> None:
        super().__init__(launched, settings, None, members.terms.guard or GuardSettings())
        self._members = members
        self._rollouts = Rollouts(members, expected_tokens)
        self._met: tuple[list[int], int] | None = None  # the line-up that met a trainer over NCCL
        self._waiting: set[int] = set()
        try:
            self._members.start(range(members.count), launched)
            self.drive(self._opening())
        except BaseException:
            self._members.close()
            raise

    @classmethod
    def from_setup(
        cls,
        setup: EngineSetup,
        model_path: str | None = None,
        *,
        replicas: int | None = None,
        mode: Literal["inprocess", "multiprocess"] = "inprocess",
        sync: SyncSettings | None = None,
        guard: GuardSettings | None = None,
        keep_bf16: Kept | None = None,
        precisions: Sequence[str] | None = None,
        expected_tokens: float = 1.0,
        cpus_per_replica: float = 1.0,
        wait_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        **vllm_kwargs: Any,
    ) -> RolloutFleet:
        """Start replicas of vLLM, each on tensor_parallel_size GPUs of one host.

        model_path:       folder or Hugging Face id of the BF16 checkpoint, at hand on every host
        replicas:         number of replicas; None: the setup's data_parallel_size
        expected_tokens:  tokens to expect of a response to a new prompt
        cpus_per_replica: CPUs that Ray reserves for each replica
        wait_s:           seconds to wait until Ray's cluster has free places
        env:              environment variables of the replicas, beside their host's
        the rest:         as RolloutEngine.from_setup takes it

        Uses the Ray that runs, or starts one on this host. Raises ConfigError without ray or with too few GPUs, and as
        RolloutEngine does.
        """
        if workers_of(setup, vllm_kwargs) > 1:  # vLLM would let Ray place the workers, in other replicas' bundles
            vllm_kwargs.setdefault("distributed_executor_backend", "mp")
        launched = launch(setup, model_path, keep_bf16, vllm_kwargs, precisions, arguments_of(cls))
        settings = sync or SyncSettings.planned(launched.precision, remote=False)
        terms = Terms(
            settings, mode, guard, launched.workers, launched.device, cpus_per_replica, dict(env or {}), wait_s
        )
        count = whole("replicas", setup.limits.data_parallel_size if replicas is None else replicas)
        members = Members(count, terms)
        return cls(launched, settings, members, expected_tokens=expected_tokens)

    @classmethod
    def from_plan(
        cls, plan: Plan, model_path: str | None = None, *, choice: int | str | None = None, **settings: Any
    ) -> RolloutFleet:
        """Start the replicas of a plan, or as many as `replicas` says. The rest is as in RolloutEngine.from_plan.

        expected_tokens is the mean response of the plan's workload unless given.
        """
        settings = {"expected_tokens": mean_response(plan.workload)} | settings
        return super().from_plan(plan, model_path, choice=choice, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        expected_lengths: Sequence[float] | None = None,
        trajectory_ids: Sequence[str | int] | None = None,
        routed_experts: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Generate as vllm.LLM.generate does, and return its RequestOutputs, in the order of the prompts.

        expected_lengths: tokens to expect of one response to each prompt. None: those of the same prompt's last
                          responses, or else `expected_tokens`. They only decide the replica of a prompt
        trajectory_ids:   the name of each prompt's trajectory, the same in all its turns. A turn goes to the replica
                          that served the last one, unless that is overloaded (apply.fleet.routing). None: a prompt of
                          token ids that begins with a prompt and its answer continues them
        routed_experts:   as in RolloutEngine.generate

        The requests of a replica that dies are answered by the others, from the start. Raises NotServingError once none
        is left, while another generate runs, or while the weights must not be used. Raises ConfigError as
        RolloutEngine.generate does.
        """
        refuse_shut_down(self.state)
        refuse_request(routed_experts, self.facts)
        refuse_prompts(prompts, self.state.vocabulary)
        with generating(self.state, only=True):
            try:
                requests = Requests.of(prompts, sampling_params, kwargs)
                outputs = self._rollouts.run(
                    self.serves, requests, expected_lengths, trajectory_ids, self.state.version
                )
            finally:
                self._count_dead()
            self._remember(outputs, self._rollouts.how)
            return outputs

    def rollout(self) -> AbstractContextManager[None]:
        """Open a rollout, as RolloutEngine.rollout does: all calls in this `with` belong to one batch."""
        refuse_shut_down(self.state)
        return self._rollouts.rollout(self.state)

    def replace(self, number: int) -> None:
        """Start another replica in the place of one that died, or still lives. It serves from the next sync on.

        Before the first sync it serves at once, with the checkpoint's weights and the KV scales of the others.

        Raises ConfigError for an unknown number, NotServingError if no replica lives (then sync_weights starts all).
        """
        refuse_shut_down(self.state)
        if not isinstance(number, int) or not 0 <= number < self._members.count:
            raise ConfigError(f"replica {number!r}; allowed: 0 to {self._members.count - 1}")
        with self._alone():
            refuse_dead(self.state)
            try:
                self._waiting.add(number)  # first of all, so that it never serves without the weights, whatever fails
                self.state.prepared.clear()  # the new one has not seen any manifest
                self.state.base = self.state.stamp = None  # nor the weights that serve: the next sync sends all
                self._members.stop([number])
                self._rollouts.served.forget(number)
                self._members.start([number], self.launch)
                self._remind()
                if self.state.refusal is None and self.state.version == 0:
                    driven(rescaled(self.state), Calls(self._members, [number]).answer)
                    self._waiting.discard(number)
            finally:
                self._count_dead()

    @property
    def replicas(self) -> int:
        """The number of replicas, the lost ones among them."""
        return self._members.count

    @property
    def deaths(self) -> dict[int, str]:
        """The replicas that died -> cause; `replace` starts another in their place."""
        return dict(self._members.lost)

    @property
    def serving(self) -> bool:
        """Return whether rollouts may use the weights now, in any replica."""
        return super().serving and bool(self.serves)

    @property
    def serves(self) -> list[int]:
        """The replicas that live and have the weights that serve."""
        return sorted(self._members.living.keys() - self._waiting)

    @property
    def waiting(self) -> list[int]:
        """The replicas that live without the weights that serve. The next sync gives them new ones."""
        return sorted(self._members.living.keys() & self._waiting)

    @property
    def routing(self) -> Routing | None:
        """The routing of the last rollout beside the planner's static split; None before the first."""
        return self._judged()

    @property
    def verdicts(self) -> dict[int, Verdict | None]:
        """The guards' verdicts on the last rollout, by replica, each on its own part."""
        done = self._judged()
        return {} if done is None else {number: judged.verdict for number, judged in done.judgements.items()}

    @property
    def verdict(self) -> Verdict | None:
        """The verdict with an action, or else that of the replica that fell furthest behind its prediction."""
        verdicts = [verdict for verdict in self.verdicts.values() if verdict is not None]
        return min(verdicts, key=lambda verdict: (verdict.action == Action.NONE, verdict.ratio), default=None)

    @property
    def observation(self) -> Observation | None:
        """The lengths, seconds and preemptions of the last rollout, of all replicas together; None before the first."""
        done = self._judged()
        return None if done is None else done.observation

    def report_kl(self, kl_k3: float) -> None:
        """Report the trainer's mean k3 to the guards, as RolloutEngine.report_kl does."""
        self._every("report_kl", kl_k3)
        self._rollouts.followed()

    def engine_facts(self) -> EngineFacts:
        """Return the facts about the running engines, with data_parallel_size replicas."""
        facts = super().engine_facts()
        return replace(facts, limits=replace(facts.limits, data_parallel_size=self.replicas))

    def rollout_record(self) -> dict[str, Any]:
        """Return the rollout record of the last rollout, with its Routing under "routing"; Monitor.step takes it."""
        routing = self.routing
        record = rollout_fields(self.observation, self.engine_facts())
        return record if routing is None else record | {"routing": routing.to_dict()}

    def shutdown(self) -> None:
        """Stop all replicas and give their places back, for good: every later call raises LostEngineError."""
        self.state.note(Event.CLOSE)
        self._members.close()

    def sizes(self) -> tuple[int, int]:
        return self._members.sizes

    def _opening(self) -> Procedure:
        """Read the facts of the engines. Each replica has opened its own, and guards it."""
        yield from self._read()
        self._watch()
        self._remind()

    def _guarded_facts(self) -> EngineFacts:
        return super().engine_facts()  # of one replica

    def _guarding(self) -> Guard:
        return FleetGuard(self._guarded_facts(), self._guard_settings, self._tell)

    def _tell(self, rung: Action) -> None:
        if not self.state.shut_down:
            self._every("remember", rung)

    def _remind(self) -> None:
        if isinstance(self.guard, FleetGuard):
            self.guard.remind()

    def syncing(self, source: Any, *settings: Any) -> Generator[Call, Any, SyncReport]:
        if isinstance(source, RemoteSource):
            workers = yield from self._to_meet()
            if self._members.lineup != self._met:
                raise SyncError(
                    "the replicas that live are not those that met the trainer; type: "
                    f"transfer = connect(fleet.join_transfer, workers={workers}). Nothing was sent"
                )
        return (yield from super().syncing(source, *settings))

    def _join(self, where: Rendezvous) -> Procedure:
        workers = yield from self._to_meet()
        if where.world_size != 1 + workers:
            raise ConfigError(
                f"world_size is {where.world_size}; allowed: {1 + workers}, for the trainer and the workers of all "
                f"replicas that live; type: transfer = connect(fleet.join_transfer, workers={workers})"
            )
        yield from super()._join(where)
        self._met = self._members.lineup

    def _to_meet(self) -> Generator[Call, Any, int]:
        """Return the number of workers that a trainer meets: of the living replicas, or of all, which then start again.

        A first Call to all finds replicas that died while idle: the others would wait for them in the broadcast.
        """
        with self._alone(), suppress(NotServingError):
            yield from rpc("fp8plan_attention_layers")
        return (len(self._members.living) or self.replicas) * self._members.terms.workers

    def _scales_in_use(self) -> Procedure:
        refuse_shut_down(self.state)
        return (yield from rpc("fp8plan_kv_scales"))

    def _every(self, method: str, *arguments: Any) -> dict[int, Any]:
        refuse_shut_down(self.state)
        return self._members.collect(self._members.submit(method, dict.fromkeys(self._members.living, arguments)))

    def _judged(self) -> Routing | None:
        """Return the last rollout once the guards have judged it. Note the reason if one of them cannot."""
        done = self._rollouts.judged()
        if done is not None and self.guard is not None:
            self.guard_off = next((judged.off for judged in done.judgements.values() if judged.off), None)
        return done

    def drive(self, procedure: Generator[Call, Any, Answer]) -> Answer:
        calls = Calls(self._members)

        def reply(call: Call) -> Any:
            if isinstance(call, Restart):
                self._members.stop()
                self._waiting.clear()
                return self._members.start(range(self.replicas), self.launch)
            try:
                return calls.answer(call)
            finally:
                self._count_dead()

        answer = driven(procedure, reply)
        if calls.synced:
            self._waiting.clear()
        return answer

    def _count_dead(self) -> None:
        if not self._members.living:
            self.state.note(Event.DIE)
