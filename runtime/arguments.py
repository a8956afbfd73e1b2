"""Checks of what callers pass. Always: shape, dtype, device (no tensor is read). In checked mode: index values too.

The plain checks run in every call, so they compare first and build a message only when something is wrong.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from tilewright.runtime.overlap import overlap, overlaps_itself
from tilewright.runtime.planner import OFF

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32"}
E4M3 = torch.float8_e4m3fn
KV_DTYPE = "fp8_e4m3"
"""The workload's kv_dtype of pools of E4M3."""
_NO_POOLS = tuple(
    getattr(torch, name)
    for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)


def dtype_name(tensor: Tensor, name: str = "q") -> str:
    """The workload's dtype of a call's first tensor, on whose device the others must be.

    Raises:
        TypeError: no kernel takes it. NotImplementedError: none runs on its device.
    """
    dtype = DTYPES.get(tensor.dtype) if isinstance(tensor, Tensor) else None
    if dtype is None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        raise TypeError(f"{name}: got {tensor.dtype}, expected torch.bfloat16, torch.float16 or torch.float32")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise NotImplementedError(f"{name}: got device {tensor.device}, expected a CPU or CUDA device")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected a dense tensor")
    return dtype


def sizes(name: str, tensor: Tensor, rank: int) -> torch.Size:
    """The shape of a tensor of the given rank.

    Raises:
        TypeError: not a tensor. ValueError: another rank.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    shape = tensor.shape
    if len(shape) != rank:
        raise ValueError(f"{name}: got shape {list(shape)}, expected {rank} dimensions")
    return shape


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Shape, dtype and device of a tensor.

    Raises:
        TypeError: not a tensor, not a dense one, or another dtype. NotImplementedError: a small float that no kernel
            reads.
        ValueError: another shape or device.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype is not dtype:
        if tensor.dtype in _NO_POOLS:
            raise NotImplementedError(f"{name}: got {tensor.dtype}; of the small types only {E4M3} is served, in pools")
        raise TypeError(f"{name}: got {tensor.dtype}, expected {dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, where the first tensor is")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected a dense tensor")


def expect_index(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """As `expect`, for int32 or int64."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype is not torch.int64 and tensor.dtype is not torch.int32:
        raise TypeError(f"{name}: got {tensor.dtype}, expected torch.int32 or torch.int64")
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, where the first tensor is")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected a dense tensor")


def dense_rows(tensor: Tensor) -> Tensor:
    """An input as the kernels read it: any strides, last dimension dense; a copy only where it is not."""
    if tensor.is_neg():  # memory that holds the values negated
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() or tensor.stride()[-1] == 1 else tensor.contiguous()


def aligned(tensor: Tensor, size: int = 16) -> bool:
    """Whether every row begins at a multiple of `size` bytes, a power of two; GPU kernels copy inputs by 16."""
    places = tensor.data_ptr()
    for stride in tensor.stride()[:-1]:
        places |= stride * tensor.itemsize
    return not places & (size - 1)


def expect_aligned(name: str, tensor: Tensor, size: int = 16) -> None:
    """A tensor that a GPU kernel must address as it is.

    Raises:
        ValueError: rows do not begin at multiples of `size` bytes.
    """
    if not aligned(tensor, size):
        raise ValueError(
            f"{name}: got rows at address {tensor.data_ptr():#x} with strides {list(tensor.stride())}, expected rows "
            f"that begin at multiples of {size} bytes (on a GPU)"
        )


def expect_multiple(name: str, dim: int, factor: int) -> None:
    """A head dim that GPU kernels copy in vectors.

    Raises:
        NotImplementedError: it is no whole number of them.
    """
    if dim % factor:
        raise NotImplementedError(f"{name}: got head dim {dim}, expected a multiple of {factor} (on a GPU)")


def gpu_rows(tensor: Tensor) -> Tensor:
    """An input as GPU kernels read it: as `dense_rows`, and aligned; a copy only where it is not."""
    return (
        tensor if tensor.stride()[-1] == 1 and aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
    )


def expect_writable(name: str, tensor: Tensor) -> None:
    """A tensor that a kernel writes must be addressable as it is: a copy would not reach the caller.

    Raises:
        ValueError: its last dimension is not dense, elements share memory (stride 0), or it requires a gradient.
    """
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name}: got strides {list(tensor.stride())}, expected a dense last dimension (it is written in place)"
        )
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(f"{name}: got strides {list(tensor.stride())}, expected memory of its own for every element")
    if tensor.is_neg():
        raise ValueError(f"{name}: got a negated view, expected memory that holds the values themselves")
    inference_only(name, tensor)


def expect_apart(name: str, written: Tensor, **others: Tensor | None) -> None:
    """No other argument may lie where a kernel writes: what is read would depend on what was written before.

    Looks at tensors only; what else an argument may be is for the other checks to say.

    Raises:
        ValueError: naming both.
    """
    if not isinstance(written, Tensor):
        return
    storage = written.untyped_storage().data_ptr()
    for other, tensor in others.items():
        if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == storage and overlap(written, tensor):
            raise ValueError(f"{name}: shares memory with {other}, expected memory of its own (clone one of the two)")


def inference_only(name: str, tensor: Tensor) -> Tensor:
    """A tensor without its gradient.

    Raises:
        ValueError: a gradient would be lost.
    """
    if not tensor.requires_grad:
        return tensor
    if torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, and there is no backward pass: call under torch.no_grad()")
    return tensor.detach()


def narrow(index: Tensor) -> Tensor:
    """An int32 or int64 tensor as int32 without a copy: the low words (little-endian; all values fit)."""
    if index.dtype is torch.int32:
        return index
    # unsqueeze gives a last dimension of stride 1, which view(dtype) asks for, whatever the strides are.
    return index.unsqueeze(-1).view(torch.int32).select(-1, 0)


def real(name: str, value: float, low: float, high: float, *, note: str = "") -> float:
    """A number within bounds, as a Python float.

    Raises:
        TypeError: not a number. ValueError: out of bounds, or NaN.
    """
    if type(value) is not float:
        try:
            value = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name}: got {value!r}, expected a number") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected {low:g} <= {name} <= {high:g}{note}")
    return value


def soft_cap(value: float) -> float:
    """logit_cap as a Python float: 0, or within the bounds in which the kernels' f32 products are numbers.

    Raises:
        As `real`.
    """
    if type(value) is not float:
        value = real("logit_cap", value, -math.inf, math.inf)
    return 0.0 if value == 0 else real("logit_cap", value, 1e-20, 1e20, note=" or 0 (off)")


def flag(name: str, value: bool) -> bool:
    """True or False; anything else that Python would take for one ("no", None) is a mistake.

    Raises:
        TypeError: not a boolean.
    """
    if value is True or value is False:
        return value
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's
        raise TypeError(f"{name}: got {value!r}, expected True or False")
    return bool(value)


def integer(name: str, value: int) -> int:
    """A Python integer.

    Raises:
        TypeError: not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, expected an integer") from None


def kernel_window(window: int) -> int:
    """The kernels' window of a public one (0 = off).

    Raises:
        TypeError: not an integer. ValueError: negative.
    """
    window = integer("window", window)
    if window < 0:
        raise ValueError(f"window: got {window}, expected >= 0 (visible keys including the query's own; 0 = off)")
    return min(window, OFF) or OFF


def pool_dtype(k_buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that both pools must have, for keys of `dtype`: E4M3 where the first is of it."""
    return E4M3 if isinstance(k_buffer, Tensor) and k_buffer.dtype is E4M3 else dtype


def pool_scale(name: str, value: float | Tensor | None) -> float:
    """What a number of the pool stands for, as a Python float; None = 1.

    Raises:
        TypeError: not a number. ValueError: a tensor of several, or on a device, which only waiting for it could read.
    """
    if value is None:
        return 1.0
    if isinstance(value, Tensor):
        if not value.is_cpu:
            raise ValueError(
                f"{name}: got a tensor on {value.device}, expected a Python float (SGLang's layers have {name}_float): "
                "reading it would wait for the device"
            )
        if value.numel() != 1:
            raise ValueError(f"{name}: got shape {list(value.shape)}, expected one number")
        value = value.item()
    return real(name, value, -math.inf, math.inf)


def expect_scales(k_buffer: Tensor, k_scale: float, v_scale: float) -> None:
    """Only fp8 pools have scales, and those are positive numbers.

    Raises:
        ValueError: out of bounds; another pool, and a scale other than 1.
    """
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        real(name, value, 1e-15, 1e15)
        if value != 1 and k_buffer.dtype is not E4M3:
            raise ValueError(f"{name}: got {value} with a pool of {k_buffer.dtype}, expected None or 1; {E4M3} has one")


def expect_mask(name: str, mask: Tensor, device: torch.device) -> None:
    """A mask's type and device; its size is the plan's to check.

    Raises:
        TypeError: not a dense tensor, or of another dtype. ValueError: another device.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: got {type(mask).__name__}, expected a torch.Tensor")
    if mask.dtype is not torch.bool and mask.dtype is not torch.uint8:
        raise TypeError(f"{name}: got {mask.dtype}, expected torch.bool or torch.uint8")
    expect(name, mask, tuple(mask.shape), mask.dtype, device)


def pages(page_size: int) -> int:
    """page_size as a Python integer; it is a promise about req_to_token.

    Raises:
        TypeError: not an integer. ValueError: out of bounds.
    """
    page_size = integer("page_size", page_size)
    if not 1 <= page_size <= OFF:
        raise ValueError(f"page_size: got {page_size}, expected 1..{OFF}")
    return page_size
