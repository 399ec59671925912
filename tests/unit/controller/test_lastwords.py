"""The one line of a log that tells why its process ended."""

import pytest

from surefoot.controller.lastwords import first_error


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
    ],
)
def test_first_error(text: str, expected: str) -> None:
    assert first_error(text) == expected
