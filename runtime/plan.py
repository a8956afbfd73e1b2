"""`Plan`: the work lists of one batch on its device, with the workspaces of the kernels that run them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime import gpu_work
from tilewright.runtime.arguments import flag, integer, kernel_window, narrow
from tilewright.runtime.decode_planner import DecodeWork
from tilewright.runtime.gpu_work import GpuWork, lengths_on_host
from tilewright.runtime.plan_buffers import DeviceWork, PlanBuffers
from tilewright.runtime.planner import (
    ITEM_COLUMNS,
    MERGE_COLUMNS,
    OFF,
    Lengths,
    Tiling,
    WorkList,
    make_work,
)

# Converted index tensors that one plan remembers: a call has at most eight, layers pass the same ones.
_REMEMBERED = 16


def host_lengths(name: str, values: Any, batch: int | None = None) -> np.ndarray:
    """`values` (tensor of any device, array or list) as int64 [B] on the host, checked to be integers >= 0.

    Raises:
        TypeError, ValueError: naming `name`.
    """
    if isinstance(values, Tensor):
        if values.dtype is not torch.int32 and values.dtype is not torch.int64:
            raise TypeError(f"{name}: got {values.dtype}, expected torch.int32 or torch.int64")
        if values.is_meta or values.layout is not torch.strided:
            raise TypeError(f"{name}: got a {values.layout} tensor on {values.device}, expected one that holds numbers")
        array = values.cpu().numpy()
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            array = np.empty((0, 0))  # rows of different lengths
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name}: got {array.dtype}, expected int32 or int64")
    if array.ndim != 1 or (batch is not None and len(array) != batch):
        raise ValueError(f"{name}: got shape {list(array.shape)}, expected [{'B' if batch is None else batch}]")
    array = array.astype(np.int64)
    if array.size and not 0 <= array.min() <= array.max() < OFF:
        raise ValueError(f"{name}: got values {array.min()}..{array.max()}, expected 0..{OFF - 1}")
    return array


def _extend_lengths(kv_lens: np.ndarray, q_lens: np.ndarray, starts: np.ndarray | None) -> Lengths:
    if starts is None:
        return Lengths(kv_lens, q_lens, np.cumsum(q_lens) - q_lens)
    used = q_lens > 0
    order = np.argsort(starts[used], kind="stable")
    first, last = starts[used][order], (starts + q_lens)[used][order]
    if (first[1:] < last[:-1]).any():
        raise ValueError("extend_start_loc: the rows of two requests overlap (start + extend_seq_lens passes a start)")
    return Lengths(kv_lens, q_lens, starts)


class Plan:
    """How a batch is cut into work. Made by `plan_decode` or `plan_extend`, given to calls as `plan=`.

    A plan holds the lengths of its batch and, for every module it has served, a work list on the device. Modules differ
    in the query rows and keys they take per item, and only a call knows its module (by dtype), so a list is made at the
    first call that needs it, from the lengths that the plan holds: no call with a plan reads the device, and all but
    the first allocate nothing. Layers of one model share one plan and one list.

    A plan made with `buffers` keeps every address fixed; it serves one module (one list) and is refused a second.
    Work may run on one plan at a time: its workspaces are shared by the calls that use it.

    Attributes:
        phase: "decode" or "extend".
        batch: number of requests.
        tokens: query rows that q must have at least; covered: how many of them belong to a request.
        prefixes: smallest and largest prefix, 0 counted in.
        causal, window: what the ranges are trimmed to (extend; in decode a call's own window is used).
        handle: number by which compiled graphs refer to the plan.
        calls: outcomes of the checks of calls with this plan, for the lengths that it holds (paged_call.py).
        bound: the same calls where they can be made again without Python (bound_call.py).
    """

    _handles = itertools.count()
    by_handle: ClassVar[weakref.WeakValueDictionary[int, Plan]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        phase: str,
        lengths: Lengths,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        device: torch.device | str,
        causal: bool,
        window: int,
        batch_invariant: bool,
        buffers: PlanBuffers | None,
    ) -> None:
        num_qo_heads, num_kv_heads = integer("num_qo_heads", num_qo_heads), integer("num_kv_heads", num_kv_heads)
        head_dim_qk, head_dim_vo = integer("head_dim_qk", head_dim_qk), integer("head_dim_vo", head_dim_vo)
        for name, value in (("num_kv_heads", num_kv_heads), ("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if num_qo_heads < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads: got {num_qo_heads}, expected a multiple of num_kv_heads = {num_kv_heads}")
        window = kernel_window(window) % OFF
        self.phase = phase
        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim_qk, self.head_dim_vo = head_dim_qk, head_dim_vo
        self.dims = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        # Tensors say cuda:0 where a caller says cuda.
        try:
            self.device = torch.empty(0, device=device).device
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(f"device: got {device!r}: {error}") from error
        if self.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"device: got {self.device}, expected a CPU or CUDA device")
        self.causal, self.window = flag("causal", causal), window
        self.batch_invariant = flag("batch_invariant", batch_invariant)
        if buffers is not None:
            self._check_buffers(buffers)
        self._given = buffers
        self._processors = gpu_work.multiprocessors(self.device)
        self._work: dict[tuple[Tiling, int, bool], DeviceWork | GpuWork] = {}
        self.zeros = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._narrowed: dict[int, tuple[Tensor, int, torch.Size, Tensor]] = {}
        self._sinks: tuple[Tensor, int, Tensor] | None = None
        self.calls: list[tuple] = []
        self.bound: list[Callable[..., bool]] = []
        self._scratch_lse = torch.empty((0, num_qo_heads), dtype=torch.float32, device=self.device)
        self._set_lengths(lengths)
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self

    def _check_buffers(self, buffers: PlanBuffers) -> None:
        if not isinstance(buffers, PlanBuffers):
            raise TypeError(f"buffers: got {type(buffers).__name__}, expected PlanBuffers")
        expected = {
            "items": ((None, ITEM_COLUMNS), torch.int32),
            "rows": ((None, MERGE_COLUMNS), torch.int32),
            "part_o": ((None, self.num_qo_heads, self.head_dim_vo), torch.float32),
            "part_lse": ((None, self.num_qo_heads), torch.float32),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(buffers, name)
            fits = tensor.dim() == len(shape) and all(
                want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
            )
            if not fits or tensor.dtype != dtype or tensor.device != self.device or not tensor.is_contiguous():
                raise ValueError(
                    f"buffers.{name}: got {list(tensor.shape)} {tensor.dtype} on {tensor.device}, expected dense "
                    f"{[size or 'n' for size in shape]} {dtype} on {self.device}"
                )
        if buffers.part_o.shape[0] < 1 or buffers.part_lse.shape[0] != buffers.part_o.shape[0]:
            raise ValueError("buffers: part_o and part_lse need the same number of rows, at least 1")

    def _set_lengths(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.batch = len(lengths.kv_lens)
        if len(self.zeros) != self.batch:
            self.zeros = torch.zeros(1, dtype=torch.int32, device=self.device).expand(self.batch)
        if self.phase == "decode":
            self.tokens = self.covered = self.batch
            self.prefixes = (0, 0)  # looked at where new keys are given beside a prefix: never in decode
            return
        used = lengths.q_lens > 0
        self.tokens = int((lengths.q_starts + lengths.q_lens)[used].max(initial=0))
        self.covered = int(lengths.q_lens.sum())
        if self.tokens > OFF:
            raise ValueError(f"extend_seq_lens: got rows up to {self.tokens}, expected at most {OFF} in one call")
        prefix = (lengths.kv_lens - lengths.q_lens)[used]
        self.prefixes = (int(prefix.min(initial=0)), int(prefix.max(initial=0)))

    def update(
        self, seq_lens: Any, *, extend_seq_lens: Any = None, extend_start_loc: Any = None, seq_lens_cpu: Any = None
    ) -> None:
        """Refresh in place for another batch; arguments as in `plan_decode` and `plan_extend`.

        All lists made so far are rewritten. Where `buffers` were given and the new batch does not fit them, ValueError
        is raised and the plan stays as it was; memory of the plan's own grows instead (addresses then change).

        On a GPU the lists are copied on the current stream, without waiting (all updates of a plan on one stream);
        lengths on the GPU alone are waited for (give seq_lens_cpu). In decode, lengths that have only grown a little,
        as from one step to the next, keep the splits that they have: without `batch_invariant` a result's bits may
        depend on the plan's past.
        """
        if self._processors and self.phase == "decode" and extend_seq_lens is None and extend_start_loc is None:
            known = lengths_on_host(seq_lens if seq_lens_cpu is None else seq_lens_cpu)
            if known is not None and self._moved(known):
                return
        kv_lens = host_lengths("seq_lens", seq_lens if seq_lens_cpu is None else seq_lens_cpu)
        batch = len(kv_lens)
        if self.phase == "decode":
            if extend_seq_lens is not None or extend_start_loc is not None:
                raise ValueError("extend_seq_lens, extend_start_loc: a decode plan takes none")
            lengths = decode_lengths(kv_lens)
        else:
            if extend_seq_lens is None:
                raise ValueError("extend_seq_lens: an extend plan needs them")
            starts = None if extend_start_loc is None else host_lengths("extend_start_loc", extend_start_loc, batch)
            lengths = _extend_lengths(kv_lens, host_lengths("extend_seq_lens", extend_seq_lens, batch), starts)
        remade = {key: self._make(key, lengths) for key in self._work}
        if self._given is not None:
            for work in remade.values():
                self._check_capacity(work)
        self._set_lengths(lengths)
        self._narrowed.clear()
        self.calls.clear()
        self.bound.clear()
        for key, work in remade.items():
            self._store(key, work)

    def _moved(self, kv_lens: np.ndarray) -> bool:
        """Move all lists on to these lengths where they reach so far."""
        if len(self._work) == 1:
            (only,) = self._work.values()
            if not only.moved(kv_lens):  # type: ignore[union-attr]  # on a GPU all are of GpuWork
                return False
            self.lengths.kv_lens[:] = kv_lens
            return True
        for work in self._work.values():
            if not work.reaches(kv_lens):  # type: ignore[union-attr]
                return False
        for work in self._work.values():
            work.move(kv_lens)  # type: ignore[union-attr]
        self.lengths.kv_lens[:] = kv_lens
        return True

    def _make(self, key: tuple[Tiling, int, bool], lengths: Lengths) -> WorkList | DecodeWork:
        tiling, window, from_pool = key
        workers = self._processors * tiling.ctas
        if workers and self.phase == "decode":
            work = self._decode_work(lengths, tiling, window, workers)
            if self._given is not None and tiling.max_split and not self._fits(work):
                work = self._decode_work(lengths, tiling._replace(max_split=0), window, workers)
            return work
        return make_work(
            lengths,
            tiling,
            causal=self.causal,
            window=window,
            from_pool=from_pool,
            num_kv_heads=self.num_kv_heads,
            threads=workers or torch.get_num_threads(),
            batch_invariant=self.batch_invariant,
            gpu=workers > 0,
        )

    def _decode_work(self, lengths: Lengths, tiling: Tiling, window: int, workers: int) -> DecodeWork:
        return DecodeWork(
            lengths.kv_lens,
            tiling,
            window=window,
            num_kv_heads=self.num_kv_heads,
            workers=workers,
            batch_invariant=self.batch_invariant,
            cut=gpu_work.cutter(self.device),
        )

    def _fits(self, work: WorkList | DecodeWork) -> bool:
        assert self._given is not None
        needed = (len(work.items), len(work.rows), work.partials)
        return all(need <= have for need, have in zip(needed, self._given.capacity, strict=True))

    def _check_capacity(self, work: WorkList | DecodeWork) -> None:
        assert self._given is not None
        if not self._fits(work):
            needed = (len(work.items), len(work.rows), work.partials)
            raise ValueError(
                f"buffers: too small for this batch: (items, rows, partials) got {self._given.capacity}, "
                f"needed {needed}"
            )

    def _on_device(self, buffers: PlanBuffers) -> DeviceWork | GpuWork:
        return GpuWork(buffers, self._given is not None) if self._processors else DeviceWork(buffers)

    def _store(self, key: tuple[Tiling, int, bool], work: WorkList | DecodeWork) -> DeviceWork | GpuWork:
        device_work = self._work.get(key)
        needed = (len(work.items), len(work.rows), work.partials)
        if self._given is not None:
            self._check_capacity(work)
            device_work = device_work or self._on_device(self._given)
        elif device_work is None or any(
            need > have for need, have in zip(needed, device_work.buffers.capacity, strict=True)
        ):
            device_work = self._on_device(
                PlanBuffers.allocate(
                    items=needed[0],
                    rows=needed[1],
                    partials=needed[2],
                    num_qo_heads=self.num_qo_heads,
                    head_dim_vo=self.head_dim_vo,
                    device=self.device,
                )
            )
        device_work.fill(work)  # type: ignore[arg-type]  # a DecodeWork is only made for a GpuWork
        self._work[key] = device_work
        return device_work

    def work(self, tiling: Tiling, window: int, from_pool: bool) -> DeviceWork | GpuWork:
        """The work list for a module, made at first use.

        Args:
            tiling: the module's parameters.
            window: the kernel's window (planner.OFF = off).
            from_pool: whether all keys come from the buffers.
        """
        key = (tiling, window, from_pool)
        found = self._work.get(key)
        if found is None:
            if self._given is not None and self._work:
                raise ValueError(
                    f"plan: its buffers hold the work of {next(iter(self._work))}, this call needs {key} "
                    "(tiling, window, keys from the pool only); make another plan for it"
                )
            found = self._store(key, self._make(key, self.lengths))
        return found

    def narrowed(self, index: Tensor) -> Tensor:
        """`index` (int32 or int64) as an int32 view; remembered for as long as it is the same memory."""
        if index.dtype is torch.int32:
            return index
        known = self._narrowed.get(id(index))
        # The tensor is held, so its id is not reused; resize_ or set_ would change pointer or shape.
        if known is not None and known[0] is index and known[1] == index.data_ptr() and known[2] == index.shape:
            return known[3]
        if len(self._narrowed) >= _REMEMBERED:
            self._narrowed.clear()
        view = narrow(index)
        self._narrowed[id(index)] = (index, index.data_ptr(), index.shape, view)
        return view

    def scratch_lse(self, tokens: int) -> Tensor:
        """A [tokens, num_qo_heads] f32 tensor for an LSE that nobody asked for."""
        if self._scratch_lse.shape[0] != tokens:
            self._scratch_lse = torch.empty((tokens, self.num_qo_heads), dtype=torch.float32, device=self.device)
        return self._scratch_lse

    def new_out(self, q: Tensor) -> Tensor | None:
        """An uninitialised [T, num_qo_heads, head_dim_vo] like q; None where rows of no request would be left in it."""
        if type(q) is not Tensor or not q.dim() or q.shape[0] != self.covered:
            return None
        shape = (self.covered, self.num_qo_heads, self.head_dim_vo)
        return torch.empty_like(q) if q.shape == shape else q.new_empty(shape)

    def sinks_f32(self, sinks: Tensor) -> Tensor:
        """`sinks` as dense f32 without gradient; a conversion is remembered until the tensor is written to."""
        if sinks.dtype is torch.float32 and sinks.is_contiguous() and not sinks.requires_grad:
            return sinks
        if sinks.is_inference():  # keeps no version counter: cannot be remembered safely
            return sinks.detach().float().contiguous()
        known = self._sinks
        if known is None or known[0] is not sinks or known[1] != sinks._version:
            known = self._sinks = (sinks, sinks._version, sinks.detach().float().contiguous())
        return known[2]


def decode_lengths(kv_lens: np.ndarray) -> Lengths:
    """One new token per request, row b for request b."""
    return Lengths(kv_lens, np.ones_like(kv_lens), np.arange(len(kv_lens)))


def plan_decode(
    seq_lens: Any,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    device: torch.device | str,
    seq_lens_cpu: Any = None,
    batch_invariant: bool = False,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """Plan `decode_attention` for a batch.

    Args:
        seq_lens: [B] keys of each request, the current token included (cross attention: give kv_lens here). Read once,
            here: a tensor on another device is waited for.
        num_qo_heads: query heads.
        num_kv_heads: KV heads; num_qo_heads is a multiple.
        head_dim_qk: dimension of queries and keys.
        head_dim_vo: dimension of values and outputs.
        device: where the calls run.
        seq_lens_cpu: the same lengths where they are known on the host; seq_lens is then not read.
        batch_invariant: fix all split points, so that a request's result is bitwise the same in any batch.
        buffers: memory of the caller to plan into, see `PlanBuffers`; None = the plan's own.

    Raises:
        ValueError, TypeError: a length or size that cannot be; the message names it.
    """
    kv_lens = host_lengths("seq_lens", seq_lens if seq_lens_cpu is None else seq_lens_cpu)
    return Plan(
        "decode",
        decode_lengths(kv_lens),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        device=device,
        causal=True,
        window=0,
        batch_invariant=batch_invariant,
        buffers=buffers,
    )


def plan_extend(
    seq_lens: Any,
    extend_seq_lens: Any,
    extend_start_loc: Any = None,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    device: torch.device | str,
    causal: bool = True,
    window: int = 0,
    seq_lens_cpu: Any = None,
    batch_invariant: bool = False,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """Plan `extend_attention` for a batch.

    Args:
        seq_lens: [B] prefix + new tokens of each request (cross attention: give kv_lens here, and causal=False).
        extend_seq_lens: [B] new tokens; more than seq_lens only where all keys come from the pool.
        extend_start_loc: [B] first row of each request in q; None = packed in order.
        num_qo_heads: query heads.
        num_kv_heads: KV heads; num_qo_heads is a multiple.
        head_dim_qk: dimension of queries and keys.
        head_dim_vo: dimension of values and outputs.
        device: where the calls run.
        causal: the calls' causal.
        window: the calls' window.
        seq_lens_cpu: seq_lens where they are known on the host.
        batch_invariant: as in `plan_decode`.
        buffers: as in `plan_decode`.

    Raises:
        ValueError, TypeError: a length or size that cannot be; the message names it.
    """
    kv_lens = host_lengths("seq_lens", seq_lens if seq_lens_cpu is None else seq_lens_cpu)
    batch = len(kv_lens)
    starts = None if extend_start_loc is None else host_lengths("extend_start_loc", extend_start_loc, batch)
    return Plan(
        "extend",
        _extend_lengths(kv_lens, host_lengths("extend_seq_lens", extend_seq_lens, batch), starts),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        device=device,
        causal=causal,
        window=window,
        batch_invariant=batch_invariant,
        buffers=buffers,
    )
