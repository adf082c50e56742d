"""Engines of this machine that the drill runs: one in this process, one in a process of its own, and a fleet of two."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import planted
import psutil
import torch
from http_files import Faults, http_files
from tiny_models import PROMPTS, checkpoint, cpu_plan, started, weights

from fp8plan.errors import NotServingError
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.weight_sync.calls import Rpc, rpc
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

from . import judge
from .drill import EVERY, VERSIONS, Tensors
from .fault import DIRECT, ENGINE, FLEET, FOLDER, LINK, STORE
from .on_tensors import EMBEDDING, HEAD

KIND: Final = "tied"  # embed_tokens and lm_head are one storage
PRECISION: Final = "fp8_block"
CHUNK: Final = 300_000  # bytes: a few modules, so that a sync can break off between two messages
CHANGED: Final = 0.02  # of all values, from one version to the next


class Link:
    """The folder of a store behind http://, which can be closed and opened again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self._stack = folder, 0, ExitStack()
        self.faults = Faults()
        self.open()

    def open(self) -> None:
        self.url, self.faults = self._stack.enter_context(http_files(self._folder, self._port))
        self._port = urlsplit(self.url).port or 0

    def close(self) -> None:
        self._stack.close()


def made_versions() -> list[Tensors]:
    """Weights of a trainer that some steps have changed. It gives the head that is tied to the embedding, too."""
    versions = [weights(KIND, "a")]
    for step in range(VERSIONS - 1):
        generator = torch.Generator().manual_seed(step)
        versions.append(
            {
                name: torch.where(torch.rand(x.shape, generator=generator) < CHANGED, x * 1.1, x).to(x.dtype)
                for name, x in versions[-1].items()
            }
        )
    return [tensors | {HEAD: tensors[EMBEDDING].clone()} for tensors in versions]


class OwnPlace:
    """A place whose engine is an object here. A context manager, which ends all it has started.

    folder:    of the store
    publisher: of the trainer that runs now
    """

    name: str
    engine: Any

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8plan-drill-"))) / "store"
        self.folder.mkdir()
        self._made = made_versions()
        self.link = Link(self.folder)
        self.stack.callback(self.link.close)
        self.now, self._way = 0, ""
        self.versions: Sequence[judge.Version] = ()
        self.publisher: Any = None
        self.puller = os.getpid()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stack.close()

    def tensors(self, version: int) -> Tensors:
        return {name: tensor.clone() for name, tensor in self._made[version].items()}

    # What the kinds of places have of their own

    def start(self) -> None:
        raise NotImplementedError

    def follow(self) -> None:
        """Follow the store by its folder and by its address."""
        self.followers = {FOLDER: Follower(str(self.folder)), LINK: Follower(self.link.url)}
        self.followers[FOLDER].pull(self.engine)  # writes engine.json
        self.new_trainer()

    def learn(self, way: str) -> None:
        """See what the engine says of each version after a sync of all its tensors."""
        seen = []
        for version in range(VERSIONS):
            if way != DIRECT:
                self.new_trainer()
            self.deliver(version, way)
            shown = self.look()
            assert not shown.refusal, shown.refusal
            seen.append(judge.Version(shown.digests[0], shown.answers[0]))
            assert judge.is_whole(shown, seen[-1])
        texts = {str(version.answers) for version in seen}
        assert len(texts) == VERSIONS
        self.versions, self.now, self._way = seen, VERSIONS - 1, way

    def new_trainer(self) -> None:
        self.publisher = Publisher(str(self.folder), every=EVERY)

    def pull(self, way: str) -> Any:
        return self.followers[way].pull(self.engine)

    def send(self, tensors: Any) -> Any:
        return self.engine.sync_weights(tensors)

    def deliver(self, version: int, way: str) -> None:
        self._way = way
        if way == DIRECT:
            self.send(self.tensors(version))
        else:
            self.publisher.publish(self.tensors(version))
            self.pull(way)

    def settle(self, way: str) -> None:
        """As drill.Place.settle."""
        if self._way != way or (way != DIRECT and not self._next_is_patches()):
            self.deliver(self.now, way)
        while way != DIRECT and not self._next_is_patches():
            self.deliver(self.now, way)

    def _next_is_patches(self) -> bool:
        latest = self.publisher._store.latest()
        return latest is not None and latest.newest.whole > 0

    def look(self) -> judge.Seen:
        try:
            answers = self.answers()
        except NotServingError as error:
            return judge.Seen(refusal=str(error))
        return judge.Seen(self.digests(), answers)

    def digests(self) -> list[Any]:
        digests: list[Any] = self.engine.ask(rpc("fp8plan_digests"))
        return digests

    def answers(self) -> list[Any]:
        return [[greedy(self.engine, prompt) for prompt in PROMPTS]]

    def processes(self) -> list[int]:
        return [os.getpid()]

    def inside(self, act: Any, *arguments: Any) -> None:
        """Do something inside of a worker."""
        self.engine.llm.collective_rpc(act, args=arguments)

    def mend(self) -> None: ...


class StorePlace(OwnPlace):
    """An engine in this process, which follows a store."""

    name = STORE

    def start(self) -> None:
        self.engine = self.stack.enter_context(
            started(KIND, "a", PRECISION, weights_in="fp8_block", look_every=EVERY, chunk_bytes=CHUNK)
        )
        self.follow()
        self.learn(FOLDER)


class EnginePlace(OwnPlace):
    """An engine in a process of its own. Its trainer holds it, and sends what has changed."""

    name = ENGINE

    def start(self) -> None:
        import warm_processes  # noqa: F401 -- it imports vLLM

        settings: dict[str, Any] = {"delta": "cpu", "look_every": EVERY, "chunk_bytes": CHUNK, "mode": "multiprocess"}
        self.engine = self.stack.enter_context(started(KIND, "a", PRECISION, **settings))
        self.learn(DIRECT)

    def core(self) -> psutil.Process:
        (core,) = self.engine.llm.llm_engine.engine_core.resources.engine_manager.processes
        return psutil.Process(core.pid)

    def processes(self) -> list[int]:
        try:
            core = self.core()
            return [os.getpid(), core.pid, *(child.pid for child in core.children(recursive=True))]
        except psutil.NoSuchProcess:
            return [os.getpid()]

    def kill(self) -> None:
        core = self.core()
        core.kill()
        core.wait(timeout=30)


class FleetPlace(OwnPlace):
    """Two replicas under Ray, with BF16 weights, most of which vLLM must reload on a CPU."""

    name = FLEET

    def start(self) -> None:
        import ray

        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(planted.__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
        self.stack.callback(ray.shutdown)
        settings = SyncSettings(delta="cpu", look_every=EVERY, chunk_bytes=CHUNK)
        made = RolloutFleet.from_plan(
            cpu_plan("bf16"), str(checkpoint(KIND, "a")), replicas=2, sync=settings, skip_tokenizer_init=True
        )
        self.engine = self.stack.enter_context(made)
        self.pids = self.engine.ask(rpc(planted.process))
        self.follow()
        self.learn(FOLDER)

    def answers(self) -> list[Any]:
        from vllm import SamplingParams

        self.engine.generate([{"prompt_token_ids": list(PROMPTS[0])}], SamplingParams(max_tokens=1))  # may refuse
        how = SamplingParams(**GREEDY)
        replicas = []
        for number in self.engine.serves:
            words = []
            for prompt in PROMPTS:
                asked = ([{"prompt_token_ids": list(prompt)}], how, {}, "alone")
                members = self.engine._members
                (request,), _ = members.collect(members.submit("generate", {number: asked}))[number]
                words.append(said(request))
            replicas.append(words)
        return replicas

    def processes(self) -> list[int]:
        return [os.getpid(), *self.pids]

    def inside(self, act: Any, *arguments: Any) -> None:
        members = self.engine._members
        members.collect(members.submit("answer", {1: (Rpc(act, arguments),)}))

    def kill(self) -> None:
        """End the second replica."""
        psutil.Process(self.pids[1]).kill()

    def mend(self) -> None:
        for number in list(self.engine.deaths):
            self.engine.replace(number)
        self.pids = self.engine.ask(rpc(planted.process))


GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


def greedy(engine: Any, prompt: Sequence[int]) -> Any:
    """Tokens and log-probs of one request alone, so that the same weights give the same bits."""
    from vllm import SamplingParams

    (request,) = engine.generate([{"prompt_token_ids": list(prompt)}], SamplingParams(**GREEDY))
    return said(request)


def said(request: Any) -> Any:
    (response,) = request.outputs
    return [(token, row[token].logprob) for token, row in zip(response.token_ids, response.logprobs, strict=True)]
