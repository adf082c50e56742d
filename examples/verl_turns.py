"""verl's agent loop with tools, which logs its trajectories for `fp8plan import jsonl`: exact tokens, and waits.

verl's own dump has text, and no seconds of tools. Put this file into PYTHONPATH, and this line into agents.yaml:

    [{name: logged_tool_agent, _target_: verl_turns.LoggedToolAgent}]

    actor_rollout_ref.rollout.agent.agent_loop_config_path=agents.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=logged_tool_agent

Each step's trajectories go into $TRAJECTORIES/STEP.jsonl on the node of their worker, those of a validation, too.
"""

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

FOLDER = Path(os.environ.get("TRAJECTORIES", "trajectories"))


class Asked(NamedTuple):
    prompt: int  # tokens
    generated: int  # tokens
    begun: float  # seconds
    ended: float


class Listening:
    """An LLM server that keeps the lengths and times of its requests."""

    def __init__(self, server: Any) -> None:
        self.server, self.requests = server, list[Asked]()

    async def generate(self, *, prompt_ids: list[int], **request: Any) -> Any:
        begun = time.monotonic()
        output = await self.server.generate(prompt_ids=prompt_ids, **request)
        self.requests.append(Asked(len(prompt_ids), len(output.token_ids), begun, time.monotonic()))
        return output


class LoggedToolAgent(ToolAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        listening = Listening(self.server_manager)  # verl makes a loop for each trajectory
        self.server_manager = listening
        output = await super().run(sampling_params, **row)
        requests = listening.requests
        turns = [
            [turn.generated, after.prompt - turn.prompt - turn.generated, after.begun - turn.ended]
            for turn, after in pairwise(requests)
        ]
        turns.append([requests[-1].generated, 0, 0])
        name = hash(tuple(output.prompt_ids))  # equal for the samples of a prompt
        line = {"prompt": requests[0].prompt, "prompt_id": name, "turns": turns}
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / f"{row.get('global_steps', 0)}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        return output
