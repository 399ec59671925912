"""What ranks agree on before a save: that all save the same step under one root, and can. (torch)"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from surefoot.ckpt.channel import Channel
from surefoot.ckpt.errors import CkptUserError
from surefoot.ckpt.format.plain import encode_plain
from surefoot.ckpt.live.livestate import LiveState
from surefoot.ckpt.planning.agreeing import Verdict, Word, decode_verdict, decode_word, judge
from surefoot.ckpt.saving.generation import OwnGeneration
from surefoot.ckpt.saving.troubles import refusal, words_of

Plain = dict[str, dict[str, Any] | None]
"""What a caller gives beside the state, by name: first as it was given, then as it is stored."""


class Agreement:
    """Between the ranks of one `Checkpointer`. Collective."""

    def __init__(self, root: str, own: OwnGeneration) -> None:
        self._root = root
        self._own = own

    def ask(
        self, step: int, state: Mapping[str, Any], plain: Plain, live: LiveState, channel: Channel
    ) -> tuple[Verdict, Exception | None]:
        """One round: what all ranks together say to this save, and why this rank cannot. What is given in `plain` becomes what is
        stored of it."""
        word, error = self._look(step, state, plain, live)
        attempt = secrets.token_hex(8)

        def answer(words: list[bytes]) -> bytes:
            return msgspec.json.encode(judge([decode_word(w) for w in words], attempt))

        return decode_verdict(channel.decide(msgspec.json.encode(word), answer)), error

    def to_save(
        self, step: int, state: Mapping[str, Any], plain: Plain, live: LiveState, channel: Channel
    ) -> str:
        """`ask`, and where a layout is new all tell theirs. Returns the attempt.

        Raises, the same on all ranks: CkptUserError (StateError) where a rank cannot save this or ranks do not save the same;
        CommitError where something else is in a rank's way.
        """
        verdict, error = self.ask(step, state, plain, live, channel)
        if verdict.roots:
            raise CkptUserError(
                f"ranks save under different roots ({verdict.roots}): give all the same, a folder or bucket that all of them see"
            )
        if verdict.failure:
            refused = refusal(verdict.kind, f"step {step} cannot be saved: {verdict.failure}")
            if error is not None and type(error) is type(refused):
                raise error
            raise refused from error
        if verdict.others:
            raise CkptUserError(
                f"this rank saves step {step}, others do not ({verdict.others}): all ranks save together"
            )
        if verdict.fresh:
            live.agree()
        return verdict.attempt

    def _look(
        self, step: int, state: Mapping[str, Any], plain: Plain, live: LiveState
    ) -> tuple[Word, Exception | None]:
        """Can this rank save that?"""
        try:
            self._own.require_new(step)
            plain |= {name: encode_plain(name, given) for name, given in plain.items()}
            return Word(step=step, root=self._root, fresh=live.look(state)), None
        except Exception as e:  # the others must hear of it before this rank raises
            word = Word(step=step, root=self._root, failure=words_of(e), kind=type(e).__name__)
            return word, e
