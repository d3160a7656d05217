"""Bodies derived by hand from the descriptions in codec.py, codec_ctx.py, gaps.py and steps.py.

They are data at rest: a change that breaks one needs a new codec version.
"""

from __future__ import annotations

import base64

import numpy as np
import pytest

from headrace.sync.codec import Chunk, Mode, decode_chunk, encode_chunk

ONES = np.full(16, 0x3F80, "<u2")  # 1.0 in bfloat16: exponent class 127
MOVED = ONES.copy()
MOVED[1], MOVED[4] = 0x3F81, 0x3F7F  # a step up, a step down

OLD_DIGEST, NEW_DIGEST = "447a3e9b96ea58f0033ab84946708d5d", "d2a4fcb0ff96a7b55672866de444eeac"

BODIES: dict[Mode, bytes] = {
    # one bucket, classes 127 to 127, two changes | gaps 1, 2: no remainder bits, one byte, 01 001 from the lowest bit |
    # signs and magnitudes, up is 1 and down is 0, none larger
    "ctx": bytes.fromhex("01 7f7f02  00 01 12  01 01 00"),
    # the same gaps | two low bytes, stored | two high bytes, stored
    "set": bytes.fromhex("00 01 12  02 817f  02 3f3f"),
    "raw": bytes.fromhex("803f 813f 803f 803f 7f3f" + " 803f" * 11),
}

BODY = (
    "0R<3*2mgczDJZos{a}Ow{Qv-P00aO71OWmB0s#aA00agAOQEU&=mU%a#sFhv01E($0VuUE{a}Ow1q1+;1OEX80R#aA0R#a80R#aA0R#aA0RjO80R"
    "#aA0R#a80R#aA0R#aA0RjO80R#aA0R#a70ssF2|NkKX;1d#{05S-ew*nLkm|_A1panr?G;kO=3>*dy1BZdbz+vDpa2PlY90m>phk?VuVc;-u7&r_"
    "Z1`Y#<fy2OI7hnMe0000000sQ~{QUd"
)
BODY_DIGEST = "93e40b2334267962e36a40f4346afb88"
BODY_OLD = "a5f09244c26d975af7406ad0758a2178"
BODY_NEW = "760a2d6f2e62b740ec29157eda97ce80"


@pytest.mark.parametrize("mode", sorted(BODIES))
def test_bytes_are_fixed(mode: Mode) -> None:
    chunk = encode_chunk(ONES, MOVED, tensor="w", start=0, dtype="BF16", allowed=[mode])
    assert chunk.mode == mode
    assert chunk.body.hex() == BODIES[mode].hex()
    assert chunk.new_digest == NEW_DIGEST
    assert chunk.old_digest == (OLD_DIGEST if mode == "ctx" else "")
    assert decode_chunk(chunk, ONES).tobytes() == MOVED.tobytes()


def test_an_old_body_is_still_read() -> None:
    """float16 in three buckets, near and far steps, a zstd frame; the weights follow from a formula."""
    i = np.arange(4096, dtype=np.uint32)
    old = (0x1400 + (i * 2654435761 >> 7) % 0x3000).astype(np.uint16)
    new = old.copy()
    new[::5] += 1
    new[::41] -= 3
    new[::1000] = 0x7E00
    chunk = Chunk(
        tensor="w",
        start=0,
        elems=4096,
        changed=int((old != new).sum()),
        mode="ctx",
        dtype="F16",
        body=base64.b85decode(BODY),
        body_digest=BODY_DIGEST,
        old_digest=BODY_OLD,
        new_digest=BODY_NEW,
    )
    assert decode_chunk(chunk, old).tobytes() == new.tobytes()
    made = encode_chunk(old, new, tensor="w", start=0, dtype="F16", allowed=["ctx"])
    assert (made.old_digest, made.new_digest) == (BODY_OLD, BODY_NEW)
    assert len(made.body) <= len(chunk.body)
