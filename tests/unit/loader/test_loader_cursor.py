import json

import msgspec
import pytest

from surefoot.loader.cursor import (
    CURSOR_FORMAT,
    Cursor,
    Fingerprint,
    PackPrint,
    SourcePrint,
    check_fingerprint,
    decode_cursor,
    differences,
    encode_cursor,
)
from surefoot.loader.errors import CursorFormatError, CursorMismatchError

replace = msgspec.structs.replace

CODE = SourcePrint(
    weight="7/10",
    column="text",
    when_used_up="repeat",
    block_rows=4096,
    window_blocks=4,
    rows=30,
    file_count=2,
    files="aa",
    listing={"x.parquet": "10:11", "y.parquet": "20:22"},
)
PRINT = Fingerprint(
    order=1,
    seed=7,
    pack=PackPrint(tokens="bytes", seq_len=256, step_tokens=2048, window=16, pad_token=0),
    sources={"code": CODE, "prose": replace(CODE, weight="3/10", files="bb")},
)
CURSOR = Cursor(
    step=5,
    drawn={"code": 40, "prose": 17},
    segment={"code": 40, "prose": 17},
    waiting=[("code", 38), ("prose", 16)],
    fingerprint=PRINT,
)


def test_a_cursor_survives_json_unchanged():
    plain = encode_cursor(CURSOR)
    assert json.loads(json.dumps(plain)) == plain
    assert decode_cursor(plain) == CURSOR
    assert encode_cursor(decode_cursor(plain)) == plain


def test_a_cursor_of_a_later_version_is_refused():
    plain = encode_cursor(CURSOR) | {"format": CURSOR_FORMAT + 1}
    with pytest.raises(CursorFormatError, match=r"has format 2.*reads up to 1: use a newer one"):
        decode_cursor(plain)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": -1}, "step is below"),
        ({"step": "5"}, "Expected `int`"),
        ({"drawn": {"code": 1}}, "different sources"),
        ({"drawn": {"code": 1, "prose": 17}}, "segment longer"),
        ({"segment": {"code": -1, "prose": 17}}, "negative"),
        ({"waiting": [["code", 40]]}, "never drawn"),
        ({"waiting": [["other", 0]]}, "never drawn"),
        ({"fingerprint": None}, "Expected `object`"),
    ],
)
def test_a_damaged_cursor_is_refused(change, says):
    with pytest.raises(CursorFormatError, match=says):
        decode_cursor(encode_cursor(CURSOR) | change)


@pytest.mark.parametrize("nothing", [{}, [], None, {"format": 1}])
def test_what_is_no_cursor_is_refused(nothing):
    with pytest.raises(CursorFormatError):
        decode_cursor(nothing)


def with_code(**changes):
    return replace(PRINT, sources=PRINT.sources | {"code": replace(CODE, **changes)})


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (replace(PRINT, seed=8), ["seed was 7 and is 8"]),
        (replace(PRINT, order=2), ["order was 1 and is 2"]),
        (replace(PRINT, pack=replace(PRINT.pack, seq_len=512)), ["pack: seq_len was 256 and is 512"]),
        (replace(PRINT, sources={"code": CODE}), ["source 'prose' is gone"]),
        (replace(PRINT, sources=PRINT.sources | {"web": CODE}), ["source 'web' is new"]),
        (with_code(weight="1/2"), ["source 'code': weight was 7/10 and is 1/2"]),
        (with_code(column="body"), ["source 'code': column was text and is body"]),
        (
            with_code(files="cc", listing={"x.parquet": "10:11", "z.parquet": "20:22"}),
            ["source 'code': file y.parquet is gone", "source 'code': file z.parquet is new"],
        ),
        (
            with_code(files="cc", listing={"x.parquet": "10:11", "y.parquet": "21:23"}),
            ["source 'code': file y.parquet had 20 rows and has 21"],
        ),
        (
            with_code(files="cc", listing={"x.parquet": "10:11", "y.parquet": "20:23"}),
            ["source 'code': file y.parquet has as many rows, but other row groups or content"],
        ),
        (
            with_code(files="cc", listing=None, file_count=3, rows=31),
            ["source 'code': file_count was 2 and is 3", "source 'code': rows was 30 and is 31"],
        ),
        (
            with_code(files="cc", listing=None),
            ["source 'code': as many files and rows, but names, row groups or sizes are others"],
        ),
    ],
)
def test_every_difference_is_named(now, says):
    assert differences(PRINT, now) == says
    with pytest.raises(CursorMismatchError) as e:
        check_fingerprint(PRINT, now)
    assert e.value.differences == tuple(says)
    assert says[0] in str(e.value)


def test_the_same_data_elsewhere_is_the_same():
    check_fingerprint(PRINT, replace(PRINT))
