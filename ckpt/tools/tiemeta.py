"""Ties in the metadata of safetensors files, which are text by text. PURE.

An export of ours has them all in one entry, `TIES`, as JSON: second names to the names that the tensors stand under. So no
name can be taken for another word of the metadata. Others, and exports of ours from before, write ``second name: kept name``
among whatever else the metadata say, and what is meant has to be guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from surefoot.ckpt.errors import CkptUserError

TIES = "surefoot.ties"
FRAMEWORKS = ("pt", "tf", "flax", "np", "mlx", "surefoot")
"""What stands under ``format`` by convention."""


def about_export(ties: Mapping[str, str]) -> dict[str, str]:
    """The metadata of an exported file: transformers wants to be told whose format it is."""
    return {"format": "pt", TIES: msgspec.json.encode(dict(ties)).decode()}


def is_export(about: Mapping[str, str]) -> bool:
    """Whether a file with these metadata is an export of ours, or one of our data objects."""
    return about.get("format") == "surefoot" or _listed(about) is not None


def ties_told(said: Iterable[Mapping[str, str]], tensors: Collection[str], where: object) -> dict[str, str]:
    """Second names to the tensors that they are names of, from the metadata of all files.

    A value that is no tensor's name says nothing. A second name may lead to another. What has data of its own is tied to nothing.

    Raises CkptUserError: a name leads to two tensors. `where` is for its message.
    """
    seconds: dict[str, dict[str, None]] = {}
    for about in said:
        for second, kept in _pairs(about):
            if second not in tensors:
                seconds.setdefault(kept, {})[second] = None
    ties: dict[str, str] = {}
    for kept in tensors:
        leading_here = [kept]
        while leading_here:
            for second in seconds.get(leading_here.pop(), ()):
                if second not in ties:
                    ties[second] = kept
                    leading_here.append(second)
                elif ties[second] != kept:
                    raise CkptUserError(
                        f"{where}: by the metadata of its files {second} is another name of {ties[second]} and of {kept}: files of "
                        f"different models? Import each into a root of its own, or mend their metadata"
                    )
    return ties


def _pairs(about: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What may be a tie by the metadata of one file. Of a data object, whose metadata are generation, step and ranks, nothing."""
    listed = _listed(about)
    if listed is not None:
        yield from listed.items()
    elif about.get("format") != "surefoot":
        yield from (pair for pair in about.items() if _may_tie(*pair))


def _listed(about: Mapping[str, str]) -> dict[str, str] | None:
    """The ties of an export of ours; None where it is none."""
    try:
        return msgspec.json.decode(about.get(TIES, ""), type=dict[str, str])
    except msgspec.DecodeError:
        return None


def _may_tie(second: str, kept: str) -> bool:
    """Whether this pair can be meant as a tie: ``format: pt`` never is, nor is a number of something (``epoch: 3``); lists of
    parameters have numbers for names, but then all of them are."""
    if second == "format":
        return kept not in FRAMEWORKS
    return second.isdecimal() or not kept.isdecimal()
