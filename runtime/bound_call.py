"""Bind a call that has passed its checks: a callable that makes it again in a few microseconds (bound_call.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Part of both launchers.
HEADER = Path(__file__).with_name("bound_call.h")
# In the order of BoundBindings in bound_call.h, after the two functions of torch.
_FFI_FUNCTIONS = ("TVMFFIFunctionCall", "TVMFFIEnvSetStream", "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef")
_APART, _TOGETHER = range(2)
_NARROW, _FLOATING, _RAW = 1, 2, 4
_SLOT, _INT, _FLOAT, _TENSOR = range(4)
_is_grad_enabled = torch.is_grad_enabled  # one object for good, whatever becomes of the attribute


class Slot(NamedTuple):
    """An operand of a kernel that is the call's argument of that number."""

    number: int


class Launch(NamedTuple):
    """One kernel of a bound call.

    Attributes:
        function: of a module (a tvm_ffi.Function).
        operands: the arguments of docs/kernel-abi.md: Slot, int, float, or a tensor that is the same in all calls.
        tasks: into how many tasks a loop on the CPU is cut, 0 = no wish.
    """

    function: Callable[..., Any]
    operands: tuple[Slot | int | float | Tensor, ...]
    tasks: int = 0


class Argument(NamedTuple):
    """An argument of the call as it was checked.

    Attributes:
        tensor: None: it must be None again.
        indices: int32 or int64, passed as int32; else a floating-point tensor, whose gradient matters.
        raw: passed as uint8; elements of one byte.
        alignment: its address must be a multiple of so many bytes.
    """

    tensor: Tensor | None
    indices: bool = False
    raw: bool = False
    alignment: int = 1


class Binder:
    """Makes bound calls with a launcher library; none where torch has no exchange interface of DLPack 1."""

    def __init__(self, library: ctypes.PyDLL, ffi: ctypes.CDLL) -> None:
        """Connect the library to torch and to libtvm_ffi."""
        from tilewright.runtime.launcher import address_of

        self._make: Any = None
        table = _exchange_table()
        if table is None:
            return
        addresses = [*table, *(address_of(ffi, name) for name in _FFI_FUNCTIONS)]
        # All of these live as long as the process does.
        addresses += [id(item) for item in (Tensor, torch.nn.Parameter, None, True, False, _is_grad_enabled)]
        library.tilewright_bound_connect.restype = None
        library.tilewright_bound_connect((ctypes.c_void_p * len(addresses))(*addresses))
        self._make = library.tilewright_bound_make
        self._make.argtypes, self._make.restype = [ctypes.py_object] * 5, ctypes.py_object

    @property
    def connected(self) -> bool:
        """Whether torch has what the library's functions for Python need."""
        return self._make is not None

    def bind(
        self,
        arguments: Sequence[Argument],
        options: tuple[object, ...],
        apart: Sequence[tuple[int, int]],
        together: Sequence[tuple[int, int]],
        launches: Sequence[Launch],
    ) -> Callable[..., bool] | None:
        """A callable that takes the tensors and options of a call and runs it if it is like the one that was checked.

        It returns True after starting the kernels, and False, having done nothing, where anything differs. Only the
        addresses of tensors may: also those of index tensors, as values are never checked here.

        Args:
            arguments: of the call.
            options: what it takes behind them, compared by type and value.
            apart: numbers of arguments that may not overlap.
            together: numbers of arguments that lie at the same distance from each other at every call.
            launches: the kernels in order.

        Returns:
            None where there can be none: a subclass of Tensor, too many dimensions.
        """
        if self._make is None:
            return None
        described = tuple(
            (_handle(launch.function), launch.tasks, tuple(map(_operand, launch.operands)), launch.function)
            for launch in launches
        )
        return self._make(
            tuple(item.tensor for item in arguments),
            tuple(((_NARROW if item.indices else _FLOATING) | item.raw * _RAW, item.alignment) for item in arguments),
            options,
            (*((*pair, _APART) for pair in apart), *((*pair, _TOGETHER) for pair in together)),
            described,
        )


def _operand(value: Slot | int | float | Tensor) -> tuple[int, object]:
    if isinstance(value, Slot):
        return _SLOT, value.number
    if isinstance(value, Tensor):
        return _TENSOR, value
    return (_INT, value) if isinstance(value, int) else (_FLOAT, value)


def _exchange_table() -> tuple[int, int] | None:
    """Addresses of torch's dltensor_from_py_object_no_sync and current_work_stream (dlpack.h, DLPackExchangeAPI)."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    signature = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer = signature(("PyCapsule_GetPointer", ctypes.pythonapi))
    address = pointer(capsule, b"dlpack_exchange_api")
    major = ctypes.c_uint32.from_address(address).value
    if major != 1:
        return None
    # Version, an older table, then the functions; these are the fourth and fifth.
    functions = (ctypes.c_void_p * 5).from_address(address + 16)
    return None if not functions[3] or not functions[4] else (functions[3], functions[4])


def _handle(function: Any) -> int:
    """Address of the function object of tvm-ffi."""
    return function.__chandle__()
