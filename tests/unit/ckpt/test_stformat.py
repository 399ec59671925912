"""Headers of safetensors files that nobody wrote in good faith."""

from __future__ import annotations

import pytest

from surefoot.ckpt.errors import DamagedError
from surefoot.ckpt.format.stformat import decode_header


@pytest.mark.parametrize("shape", [[2**63 - 1] * 300, [1] * 20_000, [2**63 - 1] * 64, [-1, 4]])
def test_a_shape_that_no_tensor_has_is_refused_by_name(shape: list[int]) -> None:
    header = '{{"w":{{"dtype":"F32","shape":[{}],"data_offsets":[0,16]}}}}'.format(",".join(map(str, shape)))
    with pytest.raises(DamagedError, match="k: w"):
        decode_header(header.encode(), 16, key="k")
