"""Who runs which ranks, and who keeps whose copies. PURE.

* Former members keep their places: their node memory holds what their ranks need, and their zygotes are warm.
* A lost place goes to a spare, first to one that holds copies of the place's ranks; a spare must be parked, that is warm.
* Copies go round the ring of members. A single member's copies go to a spare, if there is one: nowhere else would they
  survive the node.
* Too few nodes is a verdict with its reason (`Shortage`), never an exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.controller.core.settings import Settings
from surefoot.controller.core.standing import was_told_to_go
from surefoot.controller.core.state import KnownNode
from surefoot.controller.wire import Member, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All places are filled. `replaced`: some member is not the life that held the place before."""

    members: tuple[Member, ...]
    replaced: bool
    peers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Not all places can be filled: `found` of `wanted` can, `coming` names nodes that are there but not ready yet, `lost`
    those whose life is over, or whose agent was told to end."""

    wanted: int
    found: int
    coming: tuple[str, ...]
    lost: tuple[str, ...]
    detail: str


def ready_for_work(node: KnownNode, settings: Settings, *, former: bool) -> bool:
    """May the node be a member? A former member may be in the middle of anything; a spare must be parked."""
    status = node.present_status
    if not node.registered or node.lost or node.info is None or status is None:
        return False
    if node.info.slots < settings.ranks_per_node or status.state in ("leaving", "stopping", "warming"):
        return False
    return former or status.state == "parked"


def place(settings: Settings, nodes: Mapping[str, KnownNode], former: Plan | None) -> Placement | Shortage:
    """Fill all places, former members first.

    Args:
        former: the plan whose members keep their places; None at the first start.
    """
    kept = _kept(settings, nodes, former)
    taken = set(kept.values())
    spares = [n for n in nodes.values() if n.uid not in taken and ready_for_work(n, settings, former=False)]
    places = dict(kept)
    for index in range(settings.nodes):
        if index not in places and spares:
            best = min(spares, key=lambda n, i=index: _preference(n, settings, i))
            spares.remove(best)
            places[index] = best.uid
    if len(places) < settings.nodes:
        return _shortage(settings, nodes, found=len(places), taken=set(places.values()))
    members = tuple(_member(settings, nodes[places[i]], i) for i in range(settings.nodes))
    return Placement(
        members=members,
        replaced=former is not None and not set(members) <= set(former.members),
        peers=ring(members, [s.uid for s in sorted(spares, key=lambda n: n.uid)]),
    )


def _kept(settings: Settings, nodes: Mapping[str, KnownNode], former: Plan | None) -> dict[int, str]:
    """Index to uid of the former members that go on."""
    if former is None:
        return {}
    return {
        m.index: m.uid
        for m in former.members
        if m.index < settings.nodes and m.uid in nodes and ready_for_work(nodes[m.uid], settings, former=True)
    }


def _preference(node: KnownNode, settings: Settings, index: int) -> tuple[int, int, str]:
    """Sorts spares for a place: most of its ranks' snapshots first, then the longest there, then by name."""
    ranks = range(index * settings.ranks_per_node, (index + 1) * settings.ranks_per_node)
    status = node.present_status
    held = {s.rank for s in status.snapshots if s.rank in ranks} if status is not None else set[int]()
    return (-len(held), node.revision, node.uid)


def _member(settings: Settings, node: KnownNode, index: int) -> Member:
    return Member(
        uid=node.uid,
        incarnation=node.incarnation,
        index=index,
        first_rank=index * settings.ranks_per_node,
        ranks=settings.ranks_per_node,
    )


def _shortage(settings: Settings, nodes: Mapping[str, KnownNode], *, found: int, taken: set[str]) -> Shortage:
    known = (n for n in nodes.values() if (n.registered or n.lost) and n.uid not in taken)
    others = sorted(known, key=lambda n: n.uid)
    lost = tuple(n.uid for n in others if n.lost or was_told_to_go(n))
    coming = tuple(n.uid for n in others if n.uid not in lost)
    said = "".join(f"; {n.uid} {_why_not(n, settings)}" for n in others)
    detail = f"{found} of {settings.nodes} nodes are ready{said}"
    return Shortage(wanted=settings.nodes, found=found, coming=coming, lost=lost, detail=detail)


def _why_not(node: KnownNode, settings: Settings) -> str:
    if node.lost:
        return f"was lost ({node.lost})"
    if node.info is not None and node.info.slots < settings.ranks_per_node:
        return f"has room for {node.info.slots} ranks, {settings.ranks_per_node} are wanted"
    status = node.present_status
    return f"is {status.state}" if status is not None else "has not reported yet"


def ring(members: Sequence[Member], spares: Sequence[str]) -> dict[str, str]:
    """Node to the node that keeps its copies: the next member; for a single member the first spare, or nobody."""
    if len(members) > 1:
        return {m.uid: members[(i + 1) % len(members)].uid for i, m in enumerate(members)}
    return {members[0].uid: spares[0]} if spares else {}
