"""TRL's client of a vLLM server, with fp8plan's status, timed rollouts without text, and syncs from a CPU."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from requests.exceptions import InvalidJSONError, RequestException
from trl.generation.vllm_client import VLLMClient
from vllm.utils.network_utils import get_ip

from fp8plan.errors import ConfigError, SyncError
from fp8plan.integrations.trl.settings import SAMPLED
from fp8plan.model.limits import LIMITS
from fp8plan.runtime.apply.doctor.over_http.answers import Models, samples, total
from fp8plan.runtime.apply.engine.counters import COUNTERS, gains
from fp8plan.runtime.apply.engine.rollout_log import Response
from fp8plan.runtime.apply.plugin import ROLLOUT, STATUS, authorization
from fp8plan.runtime.apply.server.rollout import SAMPLING
from fp8plan.runtime.apply.worker.backend import StoreCommunicator, meet, send
from fp8plan.runtime.watch.mismatch.sampling import Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A server.

    url:    its address
    config: its VllmConfig as a JSON tree
    status: its status of fp8plan (runtime.apply.server.front.Front.status); None if it has none
    """

    url: str
    config: dict[str, Any]
    status: dict[str, Any] | None


class Responses(msgspec.Struct):
    """The answer of fp8plan's route for rollouts: the tokens of each response, and their log-probs."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]

    def __post_init__(self) -> None:
        if list(map(len, self.token_ids)) != list(map(len, self.logprobs)):
            raise ValueError("it has not one log-prob for each token")


class Facts(msgspec.Struct):
    """The facts of a server that a trainer reads (runtime.apply.worker.facts)."""

    vllm_version: str
    device: str
    layers: dict[str, int]
    kernels: dict[str, str]
    attention: list[str]
    e8m0: bool | None
    kv_cache_dtype: str | None
    cudagraph_mode: str | None
    host_loop_s: float | None = None  # servers of earlier versions time no host


class Status(msgspec.Struct):
    """The keys of a server's status that a trainer reads."""

    precision: str | None
    facts: Facts
    kv_cache_tokens: int | None
    serving: bool
    refusal: str | None
    kv_scales: dict[str, Any] | None
    last_update: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `generate`.

    seconds:  its wall time
    responses: all of them
    counted:  the server's counts during the call, by field of an Observation
    sampling: None: not known
    """

    seconds: float
    responses: list[Response]
    counted: Mapping[str, int]
    sampling: Sampling | None


def arguments_of(*args: Any, **how: Any) -> dict[str, Any]:
    """The arguments of a call of TRL's `VLLMClient.generate`, by name, with its defaults."""
    call = inspect.signature(VLLMClient.generate).bind(None, *args, **how)
    call.apply_defaults()
    return call.arguments


def sampling_of(*args: Any, **how: Any) -> dict[str, Any] | None:
    """vLLM's sampling parameters for a call of TRL's `VLLMClient.generate`; None if fp8plan's route cannot serve it.
    The route takes token ids, and returns tokens and their own log-probs only.
    """
    call = arguments_of(*args, **how)
    sampling = {name: call[name] for name in SAMPLING if name in call} | (call["generation_kwargs"] or {})
    plain = call["features"] is None and call["structured_outputs_regex"] is None and not call["logprobs"]
    text = any(isinstance(prompt, str) for prompt in call["prompts"])
    # vLLM's route takes None from its generation config, or as no limit for max_tokens.
    left_open = any(value is None for value in sampling.values())
    return None if text or not plain or left_open or sampling.keys() - set(SAMPLING) else sampling


@contextmanager
def read_from(address: str) -> Iterator[None]:
    """Raise ConfigError, with the address, for an answer of another shape than a vLLM server's."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, msgspec.MsgspecError) as error:
        if isinstance(error, RequestException) and not isinstance(error, InvalidJSONError):
            raise  # no answer at all
        kind = type(error).__name__
        raise ConfigError(
            f"{address} answers what no vLLM server does: {kind}: {error!s:.200}; give the address of a vllm serve"
        ) from error


class WorldSize(msgspec.Struct):
    """The answer of /get_world_size."""

    world_size: int


# The answers of a vLLM server that TRL's client reads without a look.
SHAPES: Final[dict[str, type[msgspec.Struct]]] = {"/v1/models": Models, "/get_world_size": WorldSize}


class PlannedClient(VLLMClient):
    """TRL's VLLMClient. It sends the API key in VLLM_API_KEY, if there is one.

    heard: gets each call of `generate` once it has ended
    """

    heard: Callable[[Call], None] | None = None
    _lacks_route = False  # True once the server has answered 404 to fp8plan's route

    def check_server(self, *args: Any, **how: Any) -> None:
        """Wait for the server, as TRL does before all other requests. From then on each request has the key."""
        self.session.headers.update(authorization())
        super().check_server(*args, **how)

    def _get(self, url: str, **how: Any) -> Any:
        """The answer to a GET, as TRL reads it. Raises ConfigError for another shape than a vLLM server's."""
        with read_from(url):
            answer = super()._get(url, **how)
            if (shape := SHAPES.get(url.removeprefix(self.base_url))) is not None:
                msgspec.convert(answer, shape)
        return answer

    def seen(self) -> Served:
        """The server. Raises TRL's error for one without vLLM's development endpoints, and ConfigError for answers of
        another shape."""
        with read_from(f"{self.base_url}/server_info"):
            config = msgspec.convert(self.get_server_info(), dict[str, Any])
            for part in {limit.part for limit in LIMITS if limit.part}:
                msgspec.convert(config[part], dict[str, Any])
        return Served(self.base_url, config, self.status())

    def status(self) -> dict[str, Any] | None:
        """The server's status of fp8plan; None if it has none. Raises ConfigError for any other answer."""
        where = f"{self.base_url}{STATUS}"
        answer = self.session.get(where, timeout=60)
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise ConfigError(f"{where} answers {answer.status_code}: {answer.text:.200}; look at the server's log")
        with read_from(where):
            status: dict[str, Any] = answer.json()
            msgspec.convert(status, Status)
        return status

    def generate(self, prompts: Any, *args: Any, **how: Any) -> Any:
        """Generate as TRL does. A call without text takes fp8plan's own route, with the same tokens and log-probs.

        vLLM's route makes objects and JSON for each token in the server's one Python thread.
        """
        before, begun = self._counts(), time.perf_counter()
        sampling = sampling_of(prompts, *args, **how)
        output = None if sampling is None or self._lacks_route else self._rolled_out(prompts, sampling)
        if output is None:
            output = super().generate(prompts, *args, **how)
        seconds, after = time.perf_counter() - begun, self._counts()
        counted = {} if before is None or after is None else gains(before, after)
        answers = output["completion_ids"]
        each = len(answers) // max(1, len(output["prompt_ids"]))
        sent = [prompt for prompt in output["prompt_ids"] for _ in range(each)]
        responses = [Response(prompt, answer) for prompt, answer in zip(sent, answers, strict=True)]
        call = arguments_of(prompts, *args, **how)
        call |= call["generation_kwargs"] or {}
        known = all(call[name] is not None for name in SAMPLED)  # None stands for the server's generation config
        sampled = Sampling.of(call) if known else None  # check_server made sure that log-probs are processed
        if self.heard is not None:
            self.heard(Call(seconds, responses, counted, sampled))
        return output

    def _rolled_out(self, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any] | None:
        """The output of `generate` by fp8plan's route; None if the server lacks it. Raises TRL's errors."""
        answer = self.session.post(f"{self.base_url}{ROLLOUT}", json={"prompts": prompts, "sampling": sampling})
        if answer.status_code == 404:
            self._lacks_route = True
            return None
        if answer.status_code != 200:
            raise Exception(f"Request failed: {answer.status_code}, {answer.text}")
        with read_from(f"{self.base_url}{ROLLOUT}"):
            body = msgspec.json.decode(answer.content, type=Responses)  # a third of the time of Python's own json
            if len(body.token_ids) != len(prompts) * sampling.get("n", 1):
                raise ValueError(f"{len(body.token_ids)} responses to {len(prompts)} prompts")
        logprobs = [[[logprob] for logprob in response] for response in body.logprobs]
        ids = [[[token] for token in response] for response in body.token_ids]
        return {"prompt_ids": prompts, "completion_ids": body.token_ids, "logprobs": logprobs, "logprob_token_ids": ids}

    def _counts(self) -> dict[str, int] | None:
        """The server's counts so far, by field of an Observation; None if its metrics cannot be read.

        A rollout does without.
        """
        try:
            page = samples(self.session.get(f"{self.base_url}/metrics", timeout=60).text)
            return {field: total(page, name) for name, field in COUNTERS.items() if name in page}
        except (RequestException, ConfigError) as error:
            logger.warning("the server's counters are not read: %s", error)
            return None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Meet the server's workers. From a CPU, which TRL does not support, use vLLM's rendezvous alone."""
        if torch.device(device).type != "cpu":
            super().init_communicator(device)
            return
        world_size = self.get_world_size() + 1
        where: dict[str, Any] = {"master_address": get_ip(), "master_port": self.group_port}
        info = where | {"rank_offset": 1, "world_size": world_size}
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
            self.communicator = meet(where["master_address"], self.group_port, 0, world_size)
            answer.result()

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Send tensors as TRL does. Raises SyncError with the server's address and answer."""
        try:
            if isinstance(self.communicator, StoreCommunicator):
                self._send_from_cpu(metadata, named_params)
            else:
                super().update_named_params(metadata, named_params)
        except Exception as error:
            raise SyncError(f"{self.base_url}: the server did not take the weights: {error}") from error

    def _send_from_cpu(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        names, dtypes, shapes = map(list, zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._start_weight_update()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": info})
            send(named_params, self.communicator)
            answer.result()
        self._finish_weight_update()
