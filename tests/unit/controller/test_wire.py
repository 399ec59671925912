from surefoot.controller.wire import AgentToRank, Plan, PoolReadyMsg, Reason, StartingPoint, decode, encode


def test_mappings_with_numbers_travel_too() -> None:
    message = PoolReadyMsg(paths=("a", "b"), held={1: 20, 0: 19})
    assert decode(AgentToRank, encode(message)) == message  # pyright: ignore[reportArgumentType]  (a union is no type[T])


def test_values_are_canonical() -> None:
    def plan(peers: dict[str, str]) -> Plan:
        return Plan(
            job="j",
            run_id="r",
            generation=1,
            members=(),
            world_size=1,
            mesh={"pp": 1, "dp": 1},
            start=StartingPoint(),
            peers=peers,
            reason=Reason(kind="first_start"),
            spec_hash="",
            code_version="",
            controller="",
        )

    assert encode(plan({"a": "b", "b": "a"})) == encode(plan({"b": "a", "a": "b"}))
