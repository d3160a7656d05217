"""Keep freed memory in the process. One setting, for the trainer's process on a CPU."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Make glibc's allocator reuse large buffers instead of returning them to the system; True if it could be set.

    A training step frees and takes the same hundreds of megabytes again and again; each time the system hands out
    zeroed pages, one fault per 4 KiB. Measured on the output head's product: 2 times as fast without.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
