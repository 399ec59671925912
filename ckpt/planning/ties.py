"""Which of its names a tied tensor is stored under. PURE.

Ranks do not talk about it, and each may walk its state in another order, so it follows from the names alone. Export writes
tensors under the same names: they are those that Hugging Face's models keep, and whose others they tie again.
"""

from __future__ import annotations

import re

_WORDS = re.compile(r"[._]")
_OF_EMBEDDINGS = ("wte", "shared")
"""What GPT-2 and T5 call theirs."""


def precedence(name: str) -> tuple[bool, bool, int, str]:
    """Sorts the names of one tensor: it is stored under the first.

    What all ranks have comes before what is one rank's own, an embedding before the head that is tied to it, a short path
    before a long one, and then the alphabet decides.
    """
    return "@rank" in name, not _names_embedding(name), name.count("."), name


def _names_embedding(name: str) -> bool:
    words = _WORDS.split(name.lower())
    return any(w in _OF_EMBEDDINGS or w.startswith("emb") for w in words) and "out" not in words
