"""What is said of a job: the story, what is new, and the whole of one incident."""

from view_listings import KEYS, manifest, plan, put, running, seen_of

from surefoot.controller import wire
from surefoot.controller.view.words import incident_story, news


def test_the_story_is_in_causal_order() -> None:
    start = wire.StartingPoint(generation=1, step=22, tier="memory")
    incident = wire.Incident(
        id="i1", fault="node_loss", cause="infrastructure", generation=1, step=23, node="n1", new_generation=2,
        decision="n2 takes its place", first_step_s=1.25, closed=True,
    )  # fmt: skip
    keys = [*running(generation=2), put(KEYS.incident("i1"), incident)]
    reason = wire.Reason(kind="replace", cause="infrastructure", fault="node_loss", detail="node n1 was lost")
    seen = seen_of(
        keys, plan(1), plan(2, start=start, reason=reason), manifests=[manifest(1, 20), manifest(2, 40)]
    )
    assert [(e.kind, e.generation) for e in seen.events] == [
        ("generation", 1),
        ("commit", 1),
        ("incident", 1),
        ("generation", 2),
        ("commit", 2),
    ]
    assert (
        seen.events[2].text == "i1: step 23: node n1 was lost; n2 takes its place; stepping again after 1.2 s"
    )
    assert seen.now == "training; last restart: node n1 was lost"


def test_news_tells_each_thing_once() -> None:
    first = seen_of([put(KEYS.leader, b"a")])
    assert news(None, first) == ["waiting for nodes: 0 ready, 2 wanted"]
    assert news(first, first) == []
    second = seen_of(running(), plan(1))
    assert news(first, second) == ["generation 1 on n0, n1 from the beginning: first start"]


def test_news_of_an_incident_come_with_its_decision_and_with_its_end() -> None:
    stages = [
        {},
        {"decision": "restart"},
        {"decision": "restart", "first_step_s": 1.3, "closed": True},
    ]
    told: list[list[str]] = []
    before = seen_of(running(), plan(1))
    for stage in stages:
        incident = wire.Incident(
            id="i1", fault="rank_exit", cause="infrastructure", generation=1, step=23, node="n1", rank=2,
            evidence=("rank 2 on n1 (initiating): signal 9",), **stage,
        )  # fmt: skip
        now = seen_of([*running(), put(KEYS.incident("i1"), incident)], plan(1))
        told.append(news(before, now))
        before = now
    assert told == [
        [],
        ["i1: step 23: rank 2 on n1 died (signal 9); restart"],
        ["i1: stepping again 1.3 s after it was noticed"],
    ]


def test_what_a_job_is_held_for_is_news_once() -> None:
    held = put(KEYS.held, wire.Held(reason="generations/0001.json is damaged: restore it"))
    for keys in ([held], [*running(), held]):
        seen = seen_of(keys, plan(1))
        assert news(None, seen)[-1] == "held: generations/0001.json is damaged: restore it"
        assert news(seen, seen) == []


def test_the_whole_of_an_incident() -> None:
    incident = wire.Incident(
        id="i1", fault="hang", cause="workload", generation=1, step=23, evidence=("rank 0: nothing moved", "stacks kept"),
        rule="no progress", decision="restart", new_generation=2, budget_left=2, decided_s=0.1, first_step_s=1.5, closed=True,
        start=wire.StartingPoint(generation=1, step=22, tier="memory"),
    )  # fmt: skip
    assert incident_story(incident) == [
        "incident:  i1 (closed)",
        "what:      the job stopped making progress",
        "struck:    generation 1, step 23",
        "evidence:  rank 0: nothing moved",
        "evidence:  stacks kept",
        "cause:     hang; charged to the budget of workload failures (2 left)",
        "rule:      no progress",
        "decision:  restart",
        "answer:    generation 2 from step 22 of generation 1 (memory)",
        "cost:      decided after 0.10 s, first step after 1.50 s",
    ]
