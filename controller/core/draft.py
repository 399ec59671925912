"""The working copy of one `advance`: a state in the making, and the decisions so far. PURE at its edges: nobody outside of
`advance` ever sees a draft, and an exception leaves the former state untouched.

Nodes are copied once per batch of events and frozen again at the end (style.md: fold a batch into one local dict).
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.controller.core import moves
from surefoot.controller.core.decisions import Decision, ListLineage, Report
from surefoot.controller.core.moves import Turn
from surefoot.controller.core.state import STORY_MAX, Forming, KnownNode, Stage, State
from surefoot.controller.wire import Plan


class Draft:
    """A state in the making. `s` is replaced piece by piece; `nodes` is the copy that may be changed in place."""

    def __init__(self, state: State, now_s: float) -> None:
        self.s = state
        self.now = now_s
        self.nodes = dict(state.nodes)
        self.touched: set[str] = set()
        """Nodes that something new is known of in this batch."""
        self.ticked = False
        self.cause = ""
        """The cause id of the event being taken."""
        self.decisions: list[Decision] = []

    def freeze(self) -> State:
        """The new state."""
        return replace(self.s, nodes=self.nodes)

    # ---- small steps

    def set(self, **changes: object) -> None:
        """Change fields of the state. (Not `d.s = replace(d.s, ...)`: that would read the state before the arguments, and
        forget what they changed.)"""
        self.s = replace(self.s, **changes)  # pyright: ignore[reportArgumentType] - names are checked at run time

    def decide(self, decision: Decision) -> None:
        self.decisions.append(replace(decision, cause_id=self.cause) if not decision.cause_id else decision)

    def report(self, topic: str, text: str) -> None:
        self.decide(Report(topic=topic, text=text))

    def op(self) -> int:
        """A fresh number for an operation."""
        op = self.s.next_op
        self.s = replace(self.s, next_op=op + 1)
        return op

    def turn(self, turn: Turn) -> None:
        """Move the mind by the table. Raises IllegalMoveError."""
        mind = moves.move(self.s.mind, turn, self.s.story)
        if mind is not self.s.mind:
            self.report("mind", f"{self.s.mind.value} -> {mind.value}: {turn.value}")
        self.s = replace(self.s, mind=mind)

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.s = replace(self.s, story=(*self.s.story[1 - STORY_MAX :], f"{self.now:.3f} {line}"))

    def put(self, node: KnownNode) -> None:
        self.nodes[node.uid] = node
        self.touched.add(node.uid)

    def stage(self, stage: Stage, *, retry_s: float | None = None) -> None:
        """Go on to the next stage of forming; what failed before does not count any more."""
        assert self.s.forming is not None
        self.s = replace(self.s, forming=replace(self.s.forming, stage=stage, retry_s=retry_s, failures=0))

    def form(self, **changes: object) -> Forming:
        """Change fields of the formation."""
        assert self.s.forming is not None
        forming = replace(self.s.forming, **changes)  # pyright: ignore[reportArgumentType] - names are checked at run time
        self.s = replace(self.s, forming=forming)
        return forming

    def list_lineage(self) -> int:
        """Ask for a fresh listing; returns its op."""
        op = self.op()
        self.s = replace(self.s, listings={**self.s.listings, op: self.now})
        self.decide(ListLineage(op=op))
        return op

    @property
    def token(self) -> int:
        """What fences our writes. Only a leader decides, so there is one."""
        assert self.s.token is not None
        return self.s.token

    @property
    def plan(self) -> Plan | None:
        return self.s.in_force.plan if self.s.in_force is not None else None

    def member(self, uid: str) -> bool:
        return self.plan is not None and self.plan.member(uid) is not None
