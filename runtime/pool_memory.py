"""Memory for pools whose rows are read in random order: huge pages where the system has them.

A decode call touches a row of 256 bytes in every small page of a KV pool; with pages of 4 KiB the address translation
costs as much as the data.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.runtime.env import get_logger

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def pool_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A dense tensor of zeros; on Linux CPUs from 2 MiB on it begins at a huge page and asks for such pages.

    The request is a hint to the system (madvise): where it is refused the tensor is as good, only slower to read, and
    the "tilewright.pools" logger says so at level info.
    """
    device = torch.device(device)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or not sys.platform.startswith("linux") or size < _HUGE_PAGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    storage = torch.empty(whole + _HUGE_PAGE, dtype=torch.uint8)
    offset = -storage.data_ptr() % _HUGE_PAGE
    address, length = ctypes.c_void_p(storage.data_ptr() + offset), ctypes.c_size_t(whole)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(address, length, _MADV_HUGEPAGE):
        get_logger("pools").info("no huge pages for a pool of %d bytes: errno %d", size, ctypes.get_errno())
    return storage[offset : offset + size].view(dtype).view(tuple(shape)).zero_()
