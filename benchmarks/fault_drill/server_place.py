"""A `vllm serve` that the drill runs: it follows a store over HTTP, and a trainer updates it by vLLM's lifecycle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any, Final

import psutil
import requests
from native_client import trainer_of, without_cuda
from tiny_models import PROMPTS, started
from trl_runs import model
from vllm_server import BLOCK_FP8, Server, line_of, serving

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.plugin import LIMIT, PULL, STATUS, STORE, weight_sync_client
from fp8plan.runtime.apply.weight_sync.delta.files import TIMEOUT
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower

from . import judge
from .fault import LINK, SERVER
from .places import GREEDY, KIND, PRECISION, OwnPlace

LIMIT_S: Final = 3  # of silence that ends an open update
CALL_S: Final = 90  # that a call to the server may take


class Pairs:
    """A trainer's tensors, as vLLM's WeightSource. tensors: a dict, or pairs of which a name may come twice"""

    def __init__(self, tensors: Any) -> None:
        self._pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._pairs)


class ServerPlace(OwnPlace):
    """engine.json comes from an engine that has followed the folder before: HTTP cannot be written to."""

    name = SERVER

    def __init__(self) -> None:
        super().__init__()
        self._running = ExitStack()
        self.stack.callback(self._end)

    def start(self) -> None:
        with started(KIND, "a", PRECISION, weights_in="fp8_block") as own:
            Follower(str(self.folder)).pull(own)
        self.stack.enter_context(without_cuda())
        self.new_trainer()
        self._serve()
        self.learn(LINK)

    def _serve(self) -> None:
        env = f"{STORE}={self.link.url} {TIMEOUT}={os.environ[TIMEOUT]} {LIMIT}={LIMIT_S}"
        self.server: Server = self._running.enter_context(serving(f"{env} {line_of(model(KIND), *BLOCK_FP8)}"))
        self.client = weight_sync_client(self.server.url, timeout=CALL_S)
        self.connect()
        self.puller = self.server.process.pid or 0

    def connect(self) -> None:
        """Start a trainer, which meets the server's workers."""
        self.trainer = trainer_of(self.client)

    def _end(self) -> None:
        self._running.close()

    def mend(self) -> None:
        if not self.server.process.is_alive():
            self._end()
            self._serve()

    # Weights

    def pull(self, way: str) -> Any:
        answer = requests.post(self.server.url + PULL, timeout=CALL_S)
        if answer.status_code == 400:
            raise SyncError(answer.json()["error"])
        answer.raise_for_status()
        return answer.json()

    def send(self, tensors: Any) -> None:
        self.trainer.source = Pairs(tensors)
        self.trainer.send_weights()

    def announcement(self, tensors: Any) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        meta = Pairs(tensors).metadata()
        names, dtypes = [one.name for one in meta], [str(one.dtype).removeprefix("torch.") for one in meta]
        return asdict(NCCLWeightTransferUpdateInfo(names, dtypes, [list(one.shape) for one in meta]))

    def send_part(self, tensors: Any) -> None:
        """One part of an update that is open."""
        self.trainer.source = Pairs(tensors)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(self.client.update_weights, self.announcement(tensors))
            self.trainer._broadcast(self.trainer.source, self.trainer.source.metadata())
            answer.result()

    # What the server says

    def status(self) -> dict[str, Any]:
        return self.server.get(STATUS)

    def post(self, path: str, body: bytes = b"", fails: bool = False) -> str:
        """The text of an answer, which is 400 if it fails."""
        answer = requests.post(self.server.url + path, data=body, timeout=CALL_S)
        assert (answer.status_code == 400) == fails, f"{path} answers {answer.status_code}: {answer.text}"
        return answer.text

    def wait_for_no_update(self) -> None:
        while self.status()["open_update"] is not None:
            time.sleep(0.2)

    def look(self) -> judge.Seen:
        if not self.server.process.is_alive():
            return judge.Seen(refusal=f"the server has ended with code {self.server.process.exitcode}")
        answers = []
        for prompt in PROMPTS:
            answer = self.server.completion(list(prompt), **GREEDY)
            if answer.status_code == 400:
                return judge.Seen(refusal=answer.json()["error"]["message"])
            answer.raise_for_status()
            (choice,) = answer.json()["choices"]
            answers.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return judge.Seen(self.server.rpc("fp8plan_digests"), [answers])

    # Its processes

    def processes(self) -> list[int]:
        pid = self.server.process.pid
        try:
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        os.kill(self.server.engine_pid(), signal.SIGKILL)

    def kill_in(self, call: Callable[[], Any]) -> None:
        """Kill the engine while a call is under way, which then fails in any way."""

        def ended() -> None:
            with suppress(requests.RequestException):
                call()

        thread = threading.Thread(target=ended)
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive()
        self.kill()
        thread.join()

    def wait_for_end(self) -> str:
        self.server.process.join(50)
        return f"the server has ended with code {self.server.process.exitcode}"
