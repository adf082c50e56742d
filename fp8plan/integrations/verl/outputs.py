"""The outputs of a request of verl's: that the engine has it, and the finished one.

verl asks an AsyncLLM for cumulative outputs, one for each token, and needs two of them. The first one tells it that the
engine has the request: a pause waits for that, and then aborts the request. The last one is the answer. What vLLM does
for those between (text that verl never reads, an object, a wake-up of a task) costs the server's one Python thread
more than all else that it does for a token: benchmarks/verl_outputs.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fp8plan.runtime.server.rollout import enough


def of_verl(sampling_params: Any) -> bool:
    """True for a request of verl's own, which leaves the kind of its outputs at vLLM's default, cumulative; those over
    HTTP name another.
    """
    from vllm.sampling_params import RequestOutputKind

    return bool(sampling_params.output_kind is RequestOutputKind.CUMULATIVE)


async def two_outputs(
    engine: Any, prompt: Any, sampling_params: Any, request_id: str, **more: Any
) -> AsyncGenerator[Any]:
    """Generate one request as an AsyncLLM's `generate` does; yield an output without tokens once the engine has it,
    and the finished one, which after an abort holds the tokens so far.

    more: other arguments of the AsyncLLM's add_request
    """
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.exceptions import EngineDeadError

    answer = await engine.add_request(request_id, prompt, enough(sampling_params), **more)
    try:
        yield RequestOutput(request_id, None, None, None, [], finished=False)
        finished = await answer.get()
    except EngineDeadError:
        raise
    except BaseException:  # nobody waits for it any more, if it was cancelled
        await engine.abort(answer.request_id, internal=True)
        raise
    yield finished
