"""Time that vLLM's front end takes for a token: asked as verl 0.9.1 asks it, and as fp8plan does for verl.

    .venv-test/bin/python benchmarks/verl_outputs.py [--requests 256] [--runs 3]

writes benchmarks/results/verl_outputs.jsonl, a line for each run, and prints the table of docs/evidence/speed.md.

What runs is vLLM's own AsyncLLM, with its OutputProcessor and its tasks, and the loop in which verl reads outputs;
the engine process is replaced by the messages that it would have sent, one for each step, in vLLM's encoding, which
wait already. So this is the time that the server's one Python thread needs for a token, and no engine, however fast,
gives verl its tokens faster. No GPU is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tables import markdown

RESULTS = Path(__file__).parent / "results" / "verl_outputs.jsonl"
PROMPT = 64  # tokens
VOCABULARY = 32768

STOCK = "cumulative (as verl asks)"
PLANNED = "fp8plan"

# Name -> how to ask: what differs from verl's SamplingParams, or None for fp8plan's way.
WAYS: dict[str, dict[str, Any] | None] = {
    STOCK: {},
    "cumulative, no text": {"detokenize": False},
    "delta": {"output_kind": "DELTA"},
    "final only": {"output_kind": "FINAL_ONLY"},
    "final only, no text": {"output_kind": "FINAL_ONLY", "detokenize": False},
    "final only, no text, no log-probs": {"output_kind": "FINAL_ONLY", "detokenize": False, "logprobs": None},
    PLANNED: None,
}


def tokenizer() -> Any:
    """A byte-level BPE tokenizer, as Qwen's and Llama's are, learned from the sources of Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    found.train([str(path) for path in sorted(Path(asyncio.__file__).parents[1].glob("*.py"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found)


def messages(requests: int, length: int, logprobs: bool, words: int) -> list[list[bytes]]:
    """The messages of the engine process: frames of each step's EngineCoreOutputs."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    draw, encoder = np.random.default_rng(0), MsgpackEncoder()

    def output(request: int, token: int, last: bool) -> Any:
        of_token = LogprobsLists(np.array([[token]], np.int32), np.array([[-0.5]], np.float32), np.array([1], np.int32))
        end = FinishReason.LENGTH if last else None
        return EngineCoreOutput(str(request), [token], of_token if logprobs else None, finish_reason=end)

    return [
        [bytes(frame) for frame in encoder.encode(EngineCoreOutputs(outputs=[
            output(request, int(token), step == length - 1)
            for request, token in enumerate(draw.integers(0, words, requests))
        ]))]
        for step in range(length)
    ]  # fmt: skip


class Replay:
    """The client of an engine process that has sent its messages already."""

    def __init__(self, sent: list[list[bytes]]) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        self.resources = SimpleNamespace(engine_dead=False)
        self.begin = asyncio.Event()
        self.decode_s = 0.0
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._sent = iter(sent)

    async def add_request_async(self, request: Any) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    async def get_output_async(self) -> Any:
        await self.begin.wait()
        await asyncio.sleep(0)  # vLLM's own comes from another task
        frames = next(self._sent, None)
        if frames is None:
            await asyncio.Event().wait()
        start = time.perf_counter()
        found = self._decoder.decode(frames)
        self.decode_s += time.perf_counter() - start
        return found


def front_end(words: Any, core: Replay) -> Any:
    """An AsyncLLM whose engine process is a Replay."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    found = AsyncLLM.__new__(AsyncLLM)
    found.engine_core, found.output_processor = core, OutputProcessor(words, log_stats=False)
    found.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
    found.input_processor = SimpleNamespace(assign_request_id=_identified)
    found.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    found.check_admission = lambda **_: None
    found.output_handler = found.logger_manager = None
    found.log_requests = found.log_stats = False
    return found


def _identified(request: Any) -> None:
    request.external_req_id = request.request_id


async def read_as_verl(outputs: AsyncGenerator[Any], deltas: bool) -> tuple[list[int], list[float] | None]:
    """Tokens and log-probs of a request, as verl's vLLMHttpServer.generate takes them. deltas: they are joined."""
    last: Any = None
    async for output in outputs:
        if deltas and last is not None:
            last.add(output, aggregate=True)
        else:
            last = output
    tokens, found = last.outputs[0].token_ids, last.outputs[0].logprobs
    return tokens, None if found is None else [one[tokens[i]].logprob for i, one in enumerate(found)]


async def replayed(words: Any, sent: list[list[bytes]], requests: int, way: dict[str, Any] | None) -> dict[str, float]:
    """Run the messages through the front end: seconds, those in decoding them and those in process_outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    from fp8plan.integrations.verl.front import two_outputs
    from fp8plan.runtime.server.rollout import enough

    how = {"max_tokens": len(sent), "logprobs": 0} | (way or {})
    kind = RequestOutputKind[how.pop("output_kind", "CUMULATIVE")]
    core = Replay(sent)
    engine = front_end(words, core)
    processing = timed(engine.output_processor, "process_outputs")

    def begun(number: int) -> AsyncGenerator[Any]:
        asked = SamplingParams(**how, output_kind=kind)
        params = asked if way is not None else enough(asked)  # what vLLM's input processor would put into a request
        prompt = list(range(PROMPT))
        request = EngineCoreRequest(str(number), prompt, None, params, None, 0.0, None, None, None)
        if way is None:
            return two_outputs(engine, request, asked, str(number))
        return engine.generate(request, asked, str(number))

    deltas = kind is RequestOutputKind.DELTA
    tasks = [asyncio.create_task(read_as_verl(begun(number), deltas)) for number in range(requests)]
    while engine.output_processor.get_num_unfinished_requests() < requests:
        await asyncio.sleep(0)
    with collecting() as collections:
        start = time.perf_counter()
        core.begin.set()
        found = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
    assert {len(tokens) for tokens, _ in found} == {len(sent)}
    engine.output_handler.cancel()
    parts = {"decode_s": core.decode_s, "process_s": sum(processing), "collect_s": sum(collections)}
    return {"seconds": seconds, **parts}


@contextmanager
def collecting() -> Iterator[list[float]]:
    """The seconds of each garbage collection in the block. What there is before is left alone, as in verl's server."""
    from vllm.utils.gc_utils import freeze_gc_heap

    took: list[float] = []

    def note(phase: str, _: Any) -> None:
        now = time.perf_counter()
        if phase == "start":
            took.append(-now)
        else:
            took[-1] += now

    freeze_gc_heap()  # vLLM does when its HTTP server begins, which verl starts
    gc.callbacks.append(note)
    yield took
    gc.callbacks.remove(note)
    gc.unfreeze()


def timed(owner: Any, name: str) -> list[float]:
    """Have a method of an object add each call's seconds to the list that is returned."""
    own, took = getattr(owner, name), []

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        found = own(*args)
        took.append(time.perf_counter() - start)
        return found

    setattr(owner, name, call)
    return took


def measured(requests: int, tokens: int, ways: Sequence[str], runs: int) -> Iterator[dict[str, Any]]:
    """Run each way, in turn; yield a row for each run."""
    words = tokenizer()
    sent = {logprobs: messages(requests, tokens, logprobs, len(words)) for logprobs in (True, False)}
    for _ in range(runs):
        for what in ways:
            way = WAYS[what]
            found = asyncio.run(replayed(words, sent[(way or {}).get("logprobs", 0) is not None], requests, way))
            yield {"what": what, "requests": requests, "tokens": tokens} | found


def table(path: Path = RESULTS) -> str:
    """The medians of the committed runs, in microseconds per token, in Markdown: all, and three parts that make it up.
    Garbage collections happen within the parts.
    """
    from fp8plan import jsonl

    rows = jsonl.rows(path)
    parts = ("messages", "outputs", "queues, tasks, reader")
    heads = ("asked for", "requests x tokens", "all", *parts, "garbage collection")
    lines = []
    for what, tokens in dict.fromkeys((row["what"], row["tokens"]) for row in rows):
        of_way = [row for row in rows if (row["what"], row["tokens"]) == (what, tokens)]
        all_us, decode_us, process_us, collect_us = (
            statistics.median(row[name] / row["requests"] / tokens * 1e6 for row in of_way)
            for name in ("seconds", "decode_s", "process_s", "collect_s")
        )
        cells = [f"{us:.1f}" for us in (all_us, decode_us, process_us, all_us - decode_us - process_us, collect_us)]
        lines.append((what, f"{rows[0]['requests']} x {tokens:,}", *cells))
    row = rows[0]
    made = f"Medians of {len(of_way)} runs, in microseconds, on {row['date']}; {row['cpu_model']}, vLLM {row['vllm']}"
    return f"{markdown.table(heads, lines)}\n\n{made}, Python {row['python']}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    from fp8plan.runtime.measure.machine import machine_facts
    from fp8plan.runtime.vllm_versions import check_vllm_version

    facts = {name: machine_facts()[name] for name in ("cpu_count", "cpu_model")}
    facts |= {"vllm": check_vllm_version(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    list(measured(8, 8, list(WAYS), 1))  # what is imported and compiled on the first call
    with given.output.open("w") as file:
        for tokens, ways in ((512, list(WAYS)), (2048, [STOCK, PLANNED])):
            for row in measured(given.requests, tokens, ways, given.runs):
                file.write(json.dumps(row | facts) + "\n")
                file.flush()
    print(table(given.output))


if __name__ == "__main__":
    main()
