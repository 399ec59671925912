import math

from surefoot.controller.wire import AgentToRank, Plan, PoolReadyMsg, Reason, StartingPoint, decode, encode


def test_mappings_with_numbers_travel_too() -> None:
    message = PoolReadyMsg(paths=("a", "b"), held={1: 20, 0: 19})
    assert decode(AgentToRank, encode(message)) == message  # pyright: ignore[reportArgumentType]  (a union is no type[T])


def plan(peers: dict[str, str], mesh: dict[str, int]) -> Plan:
    return Plan(
        job="j",
        run_id="r",
        generation=1,
        members=(),
        world_size=math.prod(mesh.values()),
        mesh=mesh,
        start=StartingPoint(),
        peers=peers,
        reason=Reason(kind="first_start"),
        spec_hash="",
        code_version="",
        controller="",
    )


def test_values_are_canonical() -> None:
    a, b = {"a": "b", "b": "a"}, {"b": "a", "a": "b"}
    assert encode(plan(a, {"dp": 1})) == encode(plan(b, {"dp": 1}))


def test_the_order_of_axes_survives_the_wire() -> None:
    """It says who is whose neighbour; a mapping's own order is gone."""
    there = decode(Plan, encode(plan({}, {"pp": 4, "dp": 3, "tp": 2})))
    assert list(there.axes.items()) == [("pp", 4), ("dp", 3), ("tp", 2)]
