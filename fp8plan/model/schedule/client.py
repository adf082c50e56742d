"""The client of an engine: which turn each trajectory is in, when its next request arrives, and who begins next."""

from __future__ import annotations

from fp8plan.model.schedule.loop import Loop
from fp8plan.model.turn_table import TurnTable


class Client:
    """Sends the requests of trajectories, turn by turn.

    begun: number of trajectories that have begun, which is the index of the next to begin
    away:  trajectories whose tool works, from the end of a turn until the next one's request is seen
    """

    def __init__(self, turns: TurnTable, loop: Loop) -> None:
        self._generated: list[int] = turns.generated.tolist()
        self._tool: list[int] = turns.tool.tolist()
        self._wait_s: list[float] = turns.wait_s.tolist()
        self._dropped: list[int] = turns.dropped.tolist()
        self._turn: list[int] = turns.first[:-1].tolist()
        self._end: list[int] = turns.first[1:].tolist()
        self._loop = loop
        self.begun = len(self._turn) if turns.concurrent is None else min(turns.concurrent, len(self._turn))
        self.away: set[int] = set()

    def generated(self, trajectory: int) -> int:
        """Tokens that its turn generates."""
        return self._generated[self._turn[trajectory]]

    def end_turn(self, trajectory: int) -> None:
        """Let the next request of a trajectory arrive when its tool has answered, or let another trajectory begin."""
        turn = self._turn[trajectory]
        if turn + 1 < self._end[trajectory]:
            self.away.add(trajectory)
            self._loop.expect(self._wait_s[turn], trajectory)
        elif self.begun < len(self._turn):
            self._loop.expect(0.0, self.begun)
            self.begun += 1

    def next_turn(self, trajectory: int, prompt: int) -> tuple[int, int]:
        """Go on to the next turn, whose prompt has all tokens so far, but for the first `dropped` ones of the answer.

        prompt: tokens of the last turn's prompt

        Returns the tokens of the next prompt, and how many of the first ones are the same as before.
        """
        turn = self._turn[trajectory]
        self.away.remove(trajectory)
        self._turn[trajectory] += 1
        tokens, dropped = prompt + self._generated[turn], self._dropped[turn]
        return tokens - dropped + self._tool[turn], prompt if dropped else tokens
