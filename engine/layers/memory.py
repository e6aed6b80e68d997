"""How the C library's allocator treats a model's temporaries.

Knows glibc's `mallopt` and `malloc_trim`. Does nothing with other C libraries.
"""

import ctypes

# From malloc.h: how much free memory at the top of the heap is kept, and the size above which an
# allocation gets pages of its own that are unmapped when it is freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc refuses more


def keep_freed_memory() -> bool:
    """Let freed temporaries stay mapped, instead of faulting their pages in again every layer.

    A prompt of 2048 tokens took a fifth less processor time with it (1.86 s to 1.53 s on one
    core). The process then stays as large as its largest step. Returns whether glibc agreed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
    return trimmed == 1 and mapped == 1


def return_freed_memory() -> bool:
    """Give freed memory back to the system now; returns whether there was any, and a glibc."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return False
    return malloc_trim(ctypes.c_size_t(0)) == 1
