"""Headers of safetensors files: those that nobody wrote in good faith, and ours with names of any kind."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.format.stformat import decode_header
from surefoot.ckpt.manifest import Piece, TensorMeta
from surefoot.ckpt.saving.upload import safetensors_header


@pytest.mark.parametrize("shape", [[2**63 - 1] * 300, [1] * 20_000, [2**63 - 1] * 64, [-1, 4]])
def test_a_shape_that_no_tensor_has_is_refused_by_name(shape: list[int]) -> None:
    header = '{{"w":{{"dtype":"F32","shape":[{}],"data_offsets":[0,16]}}}}'.format(",".join(map(str, shape)))
    with pytest.raises(DamagedError, match="k: w"):
        decode_header(header.encode(), 16, key="k")


WHOLE = (4,)
HALF = (2,)


@pytest.mark.parametrize(
    ("pieces", "names"),
    [
        ([("w", HALF), ("v", WHOLE)], ["w[0:2]", "v"]),
        ([("w", HALF), ("w[0:2]", WHOLE)], ["w[0:2](piece)", "w[0:2]"]),
        ([("w[0:2]", WHOLE), ("w", HALF)], ["w[0:2]", "w[0:2](piece)"]),
        ([("w", HALF), ("w[0:2]", HALF)], ["w[0:2]", "w[0:2][0:2]"]),
        (
            [("w", HALF), ("w[0:2]", WHOLE), ("w[0:2](piece)", WHOLE)],
            ["w[0:2](piece)(piece)", "w[0:2]", "w[0:2](piece)"],
        ),
        (
            [("w", HALF), ("w[0:2]", WHOLE), ("w[0:2](piece)", HALF)],
            ["w[0:2](piece)", "w[0:2]", "w[0:2](piece)[0:2]"],
        ),
    ],
)
def test_the_library_reads_pieces_whatever_tensors_are_called(
    pieces: list[tuple[str, tuple[int, ...]]], names: list[str]
) -> None:
    """A tensor may be called as a piece of another is; an entry has a name of its own nevertheless."""
    placed: list[Piece] = []
    data = b""
    for number, (name, extent) in enumerate(pieces):
        placed.append(Piece(name=name, offset=(0,), extent=extent, at=len(data)))
        data += bytes([number]) * extent[0]
    tensors = {name: TensorMeta(dtype="uint8", shape=WHOLE) for name, _ in pieces}
    found = load(safetensors_header(placed, tensors, {"format": "surefoot"}) + data)
    want = {
        name: torch.full(extent, k, dtype=torch.uint8)
        for k, (name, (_, extent)) in enumerate(zip(names, pieces, strict=True))
    }
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], t) for name, t in want.items())
