"""The one line of a log that tells why its process ended."""

import pytest

from surefoot.controller.lastwords import first_error, how_ended


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("INFO up\nsurefoot: no etcd answers at :1. Start one\nbye\n", "no etcd answers at :1. Start one"),
        ("surefoot: first\nsurefoot: second", "first"),
        ("Traceback (most recent call last):\n  File x\nValueError: no\nmore", "ValueError: no"),
        ("Traceback:\nKeyError: 1\nDuring handling:\na.b.SomeError: last\n", "a.b.SomeError: last"),
        (
            "2026-01-01 00:00:00,000 INFO surefoot.agent: ERROR x\n2026-01-01 ERROR surefoot.agent: no room: free some",
            "no room: free some",
        ),
        ("one\ntwo\n\n", "two"),
        ("two\n2026-01-01 00:00:00,000 INFO surefoot.agent.daemon: following generation 2\n", "two"),
        ("2026-01-01 00:00:00,000 INFO surefoot.agent.daemon: the node is ready\n", ""),
    ],
)
def test_first_error(text: str, expected: str) -> None:
    assert first_error(text) == expected


def test_how_ended() -> None:
    assert how_ended("etcd", -9, "an unrelated line") == "etcd was ended by SIGKILL"
    assert how_ended("agent-n0", 5, "no room") == "agent-n0 ended with exit code 5: no room"
    assert how_ended("agent-n0", 1, "") == "agent-n0 ended with exit code 1"
