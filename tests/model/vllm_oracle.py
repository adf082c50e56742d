"""vLLM's own V1 Scheduler driven over a finite batch, without a model: what the simulator must reproduce."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


class Drafts(NamedTuple):
    """Drafts of n-grams: their number in a step, the number accepted, and the slots that a draft head would need."""

    tokens: int
    accepted: Callable[[], int]
    lookahead: int = 0


class Step(NamedTuple):
    prefill_tokens: int
    decode_tokens: int
    used_blocks: int
    preemptions: int


@cache
def _model_config(max_model_len: int):
    from vllm.config import ModelConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # an engine does it
    folder = tempfile.mkdtemp(prefix="fp8plan-oracle-")
    with open(f"{folder}/config.json", "w") as file:
        json.dump(CONFIG, file)
    return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len, seed=0)


def _scheduler(limits, num_blocks: int, max_model_len: int, groups, retain_all: bool, drafts: Drafts | None):
    """The scheduler, and the block size its requests are hashed by."""
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler_config = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=limits.async_scheduling and not drafts,  # n-grams forbid it, and are only stand-ins here
        scheduler_reserve_full_isl=limits.scheduler_reserve_full_isl,
    )
    cache_config = CacheConfig(
        block_size=limits.block_size, cache_dtype="auto", enable_prefix_caching=limits.enable_prefix_caching
    )
    config = VllmConfig(
        model_config=_model_config(max_model_len),
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
        speculative_config=drafts and _ngrams(drafts.tokens, max_model_len),
    )
    # VllmConfig has turned it off where vLLM runs on a CPU; max_in_flight_tokens reads it.
    config.scheduler_config.async_scheduling = limits.async_scheduling
    with_null_block = num_blocks + 1  # vLLM keeps one block for padding
    cache_config.num_gpu_blocks = with_null_block
    states = any(group.kind == "state" for group in groups)
    if states and limits.enable_prefix_caching:
        cache_config.mamba_cache_mode = "align"  # as MambaModelConfig sets it
    if groups:
        cache_config.block_size = groups[0].block_size
    specs = [_spec(group, limits, max_model_len) for group in groups] or [_full(limits.block_size)]
    kv = KVCacheConfig(
        num_blocks=with_null_block,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        prefix_cache_retention_interval=None if retain_all else 0,  # 0.30's default is 0
    )
    kind = AsyncScheduler if limits.async_scheduling else Scheduler
    block, hashed = resolve_kv_cache_block_sizes(kv, config)
    structured = StructuredOutputManager(config)
    scheduler = kind(config, kv, structured, block_size=block, hash_block_size=hashed, log_stats=True)
    if drafts:
        scheduler.num_lookahead_tokens = drafts.lookahead
    return scheduler, hashed


def _ngrams(tokens: int, max_model_len: int):
    from vllm.config import ParallelConfig, SpeculativeConfig

    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=tokens,
        prompt_lookup_max=3,
        target_model_config=_model_config(max_model_len),
        target_parallel_config=ParallelConfig(),
    )


def _full(block_size: int):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def _spec(group, limits, max_model_len: int):
    """vLLM's own description of a Spec."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    shape = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    size = group.block_size
    if group.kind == "sliding":
        return SlidingWindowSpec(block_size=size, sliding_window=group.window, **shape)
    if group.kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=group.window, **shape)
    if group.kind == "latent":
        return MLAAttentionSpec(block_size=size, **{**shape, "num_kv_heads": 1})
    if group.kind == "full":
        return _full(size)
    caching = limits.enable_prefix_caching
    checkpoint = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if group.checkpoints else {}
    return MambaSpec(
        block_size=size if caching else max_model_len,  # as MambaModelConfig sets mamba_block_size
        shapes=((2, 64),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if caching else "none",
        **checkpoint,
    )


def _hasher(hashed: int, limits):
    """The hasher of the blocks of requests; None without prefix caching."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(hashed, sha256) if limits.enable_prefix_caching else None


def _prompt(number: int, length: int) -> list[int]:
    """Distinct prompts differ from their first token on; equal ones are equal."""
    return [10_000 + number] + [(number * 7919 + position * 31) % 1000 for position in range(length - 1)]


def _sampled(number: int, position: int) -> int:
    """Every sample generates its own tokens, so that siblings share prompt blocks and nothing else."""
    return 2_000 + (number * 104_729 + position * 31) % 900_000


def _request(name: str, tokens: list[int], response: int, hasher):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=response, ignore_eos=True),
        pooling_params=None,
        block_hasher=hasher,
    )


def run(
    prompts,
    responses,
    prompt_ids,
    turns,
    num_blocks: int,
    limits,
    groups=(),
    retain_all: bool = False,
    served=None,
    drafts: Drafts | None = None,
) -> list[Step]:
    """One Step per engine step that does any work, until every request has finished.

    A preemption in a step without work is counted in the next step with some.

    turns:  None: all requests wait at the start (`run_turns` runs turns)
    served: a list that receives, for each Step, the requests that got a token
    drafts: every decoding request has so many drafts in each step (only with synchronous scheduling)
    """
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    assert turns is None
    longest = int((prompts + responses).max()) + (3 * drafts.tokens if drafts else 0)  # so that no draft is cut off
    max_model_len = max(longest, limits.max_num_batched_tokens)
    scheduler, hashed = _scheduler(limits, num_blocks, max_model_len, groups, retain_all, drafts)
    hasher = _hasher(hashed, limits)
    for number, (length, response, prompt) in enumerate(
        zip(prompts.tolist(), responses.tolist(), prompt_ids.tolist(), strict=True)
    ):
        scheduler.add_request(_request(str(number), _prompt(prompt, length), response, hasher))
    in_flight: deque = deque()
    steps: list[Step] = []
    preemptions = 0
    while scheduler.has_unfinished_requests():
        decoding = {request.request_id for request in scheduler.running if not request.is_prefill_chunk}
        output = scheduler.schedule()
        ids, sampled, prefill, decode = [], [], 0, 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            if request_id in decoding:
                decode += tokens
            else:
                prefill += tokens
            ids.append(request_id)
            done = request.num_computed_tokens >= request.num_tokens
            token = _sampled(int(request_id), request.num_computed_tokens)
            accepted = drafts.accepted() if drafts and request_id in output.scheduled_spec_decode_tokens else 0
            sampled.append([token + 7 * i for i in range(1 + accepted)] if done else [])
        used = num_blocks - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        preemptions += len(output.preempted_req_ids or ())
        if ids:
            steps.append(Step(prefill, decode, used, preemptions))
            if served is not None:
                served.append([int(name) for name, tokens in zip(ids, sampled, strict=True) if tokens])
            preemptions = 0
        result = ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, sampled)
        in_flight.append((output, result))
        # The asynchronous engine schedules a step before it has seen the tokens of the one before.
        if len(in_flight) > limits.async_scheduling or not ids:
            scheduler.update_from_output(*in_flight.popleft())
        if drafts and not limits.async_scheduling:  # which has placeholders for drafts
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[1] * drafts.tokens for _ in ids]))
    return steps


class TimedStep(NamedTuple):
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    queried_tokens: int
    hit_tokens: int
    used_blocks: int
    preemptions: int
    begin_s: float


class _Client:
    """Sends the requests of trajectories: the first ones at the start, the others when a tool has answered."""

    def __init__(self, batch, hasher) -> None:
        self.hasher = hasher
        self.turns = batch.turns
        self.tokens = [_prompt(*each) for each in zip(batch.prompt_ids.tolist(), batch.prompts.tolist(), strict=True)]
        self.turn = batch.turns.first.tolist()[:-1]
        self.unsent = deque(range(len(self.tokens)))
        self.sent: list[tuple[float, int]] = []  # a heap of (seconds of arrival, trajectory)
        self.requests: dict[str, object] = {}
        for _ in range(batch.turns.concurrent or len(self.tokens)):
            self._send_next(0.0)

    def _send_next(self, now: float) -> None:
        if self.unsent:
            heappush(self.sent, (now, self.unsent.popleft()))

    def arrived(self, now: float):
        """The requests that have arrived, in order."""
        while self.sent and self.sent[0][0] <= now:
            _, trajectory = heappop(self.sent)
            name = f"{trajectory}-{self.turn[trajectory]}"
            generated = int(self.turns.generated[self.turn[trajectory]])
            request = _request(name, list(self.tokens[trajectory]), generated, self.hasher)
            self.requests[name] = request
            yield request

    def receive(self, name: str, now: float) -> None:
        """Take the tokens of a finished request, and start the tool, or another trajectory."""
        trajectory, turn = map(int, name.split("-"))
        request = self.requests.pop(name)
        prompt, dropped = request.num_prompt_tokens, int(self.turns.dropped[turn])
        self.tokens[trajectory] = list(request.all_token_ids)
        del self.tokens[trajectory][prompt : prompt + dropped]
        self.turn[trajectory] += 1
        if self.turn[trajectory] == self.turns.first[trajectory + 1]:
            self._send_next(now)
            return
        tool = int(self.turns.tool[turn])
        self.tokens[trajectory] += [1_000_000 + (trajectory * 31 + turn * 7 + i) % 90_000 for i in range(tool)]
        heappush(self.sent, (now + float(self.turns.wait_s[turn]), trajectory))


class _Engine:
    """The loop of vLLM's EngineCore (vllm/v1/engine/core.py) on a virtual clock.

    now:      seconds at which the loop is
    gpu_free: seconds at which the GPU has done all steps that were scheduled
    queue:    batches in flight, as in `step_with_batch_queue`: (scheduler's output, runner's output, end in seconds)
    """

    def __init__(self, scheduler, limits, num_blocks: int, clock) -> None:
        self.scheduler, self.clock, self.num_blocks = scheduler, clock, num_blocks
        self.size = 2 if limits.async_scheduling else 1
        self.now = self.gpu_free = 0.0
        self.queue: deque = deque()
        self.steps: list[TimedStep] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def step(self) -> list[str]:
        """`step`, or `step_with_batch_queue`. Returns the requests that have finished."""
        if self.scheduler.has_requests():
            batch, served = self._schedule()
            self.queue.appendleft(batch)
            if len(self.queue) < self.size and (served or self.scheduler.has_requests()):
                return []
        elif not self.queue:
            return []
        output, result, end = self.queue.pop()
        self.now = max(self.now, end)
        every = self.scheduler.update_from_output(output, result)
        return [each.request_id for part in every.values() for each in part.outputs if each.finish_reason is not None]

    def _schedule(self):
        """Schedule a step; returns the batch, and whether it serves anybody."""
        from turn_batches import seconds_of
        from vllm.v1.outputs import ModelRunnerOutput

        decoding = {request.request_id for request in self.scheduler.running if not request.is_prefill_chunk}
        output = self.scheduler.schedule()
        hits = self.scheduler.kv_cache_manager.make_prefix_cache_stats()
        served = output.num_scheduled_tokens
        sampled, work = [], dict.fromkeys(("prefill", "chunks", "prefill_kv", "pairs", "decode", "decode_kv"), 0)
        for name, tokens in served.items():
            request = self.scheduler.requests[name]
            after = request.num_computed_tokens
            done = after >= request.num_tokens
            trajectory, turn = map(int, name.split("-"))
            sampled.append([_sampled(64 * trajectory + turn, after)] if done else [])
            if name in decoding:
                work["decode"] += tokens
                work["decode_kv"] += after
                continue
            work["prefill"] += tokens
            work["chunks"] += 1
            work["prefill_kv"] += after
            work["pairs"] += tokens * (2 * after - tokens + 1) // 2
        self.preemptions += len(output.preempted_req_ids or ())
        begin = max(self.now, self.gpu_free)
        if served:
            numbers = [work[x] for x in ("decode", "decode_kv", "prefill", "chunks", "prefill_kv", "pairs")]
            self.gpu_free = begin + seconds_of(self.clock, *numbers, sum(map(len, sampled)))
            used = self.num_blocks - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            cached = hits.hits + hits.preempted_hits, hits.queries, hits.hits
            self.steps.append(TimedStep(work["prefill"], work["decode"], *cached, used, self.preemptions, begin))
            self.preemptions = 0
        result = ModelRunnerOutput(list(served), {name: row for row, name in enumerate(served)}, sampled)
        return (output, result, max(begin, self.gpu_free)), bool(served)


def run_turns(batch, num_blocks: int, limits, groups, retain_all: bool, clock):
    """One TimedStep per engine step that serves anybody, until every trajectory has ended its last turn.

    clock: gives the seconds of a step, as in `schedule`
    """
    longest = int((batch.prompts + batch.turns.added).max())
    max_model_len = max(longest, limits.max_num_batched_tokens)
    scheduler, hashed = _scheduler(limits, num_blocks, max_model_len, groups, retain_all, None)
    client = _Client(batch, _hasher(hashed, limits))
    engine = _Engine(scheduler, limits, num_blocks, clock)
    while engine.has_work or client.sent:
        if not engine.has_work:  # EngineCore waits for its input queue
            engine.now = max(engine.now, client.sent[0][0])
        for request in client.arrived(engine.now):
            scheduler.add_request(request)
        for name in engine.step():
            client.receive(name, engine.now)
    return engine.steps
