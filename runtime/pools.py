"""Small memory pools for use without SGLang, with the attributes that the backends read.

Row 0 of the request table, slot 0 of the token pool (a whole page) and slot 0 of the state pool are reserved: padding
points there, and nothing of a real request ever does. Allocation is all or nothing: None where it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime.arguments import E4M3
from tilewright.runtime.forward_batch import layer_scales
from tilewright.runtime.paged import write_kv
from tilewright.runtime.pool_memory import pool_zeros


class _FreeList:
    """Numbers first .. last that can be taken and given back; a double return is refused."""

    def __init__(self, first: int, last: int) -> None:
        self._free = list(range(last, first - 1, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def give_back(self, numbers: list[int], what: str) -> None:
        unknown = [number for number in numbers if number not in self._taken]
        if unknown or len(set(numbers)) != len(numbers):
            raise ValueError(f"{what}: got {unknown or numbers} to free, expected each allocated and named once")
        self._taken.difference_update(numbers)
        self._free.extend(numbers)


class ReqToTokenPool:
    """The request table: which slot holds which token of which request.

    Attributes:
        req_to_token: [size + 1, max_context_len] int32; row 0 is the padding row, all zeros.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str = "cpu") -> None:
        self.size, self.max_context_len = size, max_context_len
        self.device = torch.device(device)
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)
        self._free = _FreeList(1, size)

    def available_size(self) -> int:
        """Rows that can be allocated."""
        return len(self._free)

    def alloc(self, need_size: int) -> list[int] | None:
        """Take rows for so many requests, or None."""
        return self._free.take(need_size)

    def free(self, rows: list[int] | int) -> None:
        """Give rows back.

        Raises:
            ValueError: one that is not allocated.
        """
        self._free.give_back([rows] if isinstance(rows, int) else list(rows), "request rows")

    def write(self, indices: Any, values: Tensor) -> None:
        """req_to_token[indices] = values."""
        self.req_to_token[indices] = values.to(torch.int32)


class TokenToKVPool:
    """Keys and values of all layers, by token slot.

    Slots come in pages of `page_size`; page 0 is reserved. `alloc` hands out whole pages' slots, so a request keeps the
    promise of `page_size` by taking its slots in multiples of it.
    """

    def __init__(
        self,
        size: int,
        *,
        layer_num: int,
        head_num: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        page_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make room for `size` tokens, a multiple of page_size.

        Raises:
            ValueError: it is none.
        """
        if size % page_size:
            raise ValueError(f"size: got {size}, expected a multiple of page_size = {page_size}")
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.size, self.page_size, self.layer_num, self.dtype = size, page_size, layer_num, dtype
        self.device = torch.device(device)
        slots = size + page_size
        self.k_buffer = [pool_zeros((slots, head_num, head_dim), dtype, device) for _ in range(layer_num)]
        self.v_buffer = [pool_zeros((slots, head_num, v_head_dim), dtype, device) for _ in range(layer_num)]
        self._pages = _FreeList(1, size // page_size)

    def available_size(self) -> int:
        """Tokens that can be allocated."""
        return len(self._pages) * self.page_size

    def alloc(self, need_size: int) -> Tensor | None:
        """Take need_size slots (int64 [need_size]; a multiple of page_size), or None.

        Raises:
            ValueError: not a multiple.
        """
        if need_size % self.page_size:
            raise ValueError(f"need_size: got {need_size}, expected a multiple of page_size = {self.page_size}")
        pages = self._pages.take(need_size // self.page_size)
        if pages is None:
            return None
        first = torch.tensor(pages, dtype=torch.int64, device=self.device) * self.page_size
        return (first[:, None] + torch.arange(self.page_size, device=self.device)).flatten()

    def free(self, slots: Tensor) -> None:
        """Give slots back, whole pages at once.

        Raises:
            ValueError: a page that is not allocated, or part of one.
        """
        pages, counts = torch.unique(slots // self.page_size, return_counts=True)
        if (counts != self.page_size).any():
            raise ValueError(f"slots: got part of a page or a slot twice, expected whole pages of {self.page_size}")
        self._pages.give_back(pages.tolist(), "slots' pages")

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, D] of a layer.

        Raises:
            ValueError: there is no such layer.
        """
        return self.k_buffer[self._layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, Dv] of a layer; as `get_key_buffer`."""
        return self.v_buffer[self._layer(layer_id)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write [T, heads, dim] keys and values of a layer to slots loc [T]; -1 is skipped."""
        scales = layer_scales(layer) if self.dtype is E4M3 else (None, None)
        write_kv(k, v, *self.get_kv_buffer(layer.layer_id), loc, k_scale=scales[0], v_scale=scales[1])

    def _layer(self, layer_id: int) -> int:
        # Lists would take -1 for the last layer.
        if not 0 <= layer_id < len(self.k_buffer):
            raise ValueError(f"layer_id: got {layer_id}, expected 0..{len(self.k_buffer) - 1}, a layer with keys")
        return layer_id


@dataclass
class LayerState:
    """States of one layer: temporal [size + 1, heads, Dk, Dv] f32."""

    temporal: Tensor


class StatePool:
    """Recurrent states of the linear-attention layers, by state slot; slot 0 is reserved."""

    def __init__(
        self,
        size: int,
        *,
        layer_ids: list[int],
        head_num: int,
        head_dim: int,
        v_head_dim: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.size = size
        self.device = torch.device(device)
        self._layers = {
            layer: LayerState(pool_zeros((size + 1, head_num, head_dim, v_head_dim), torch.float32, device))
            for layer in layer_ids
        }
        self._free = _FreeList(1, size)

    def available_size(self) -> int:
        """Slots that can be allocated."""
        return len(self._free)

    def alloc(self, need_size: int) -> list[int] | None:
        """Take slots, or None. Their content is whatever was there: begin with has_initial_state false."""
        return self._free.take(need_size)

    def free(self, slots: list[int]) -> None:
        """Give slots back.

        Raises:
            ValueError: one that is not allocated.
        """
        self._free.give_back(list(slots), "state slots")

    def layer(self, layer_id: int) -> LayerState:
        """The states of a layer.

        Raises:
            ValueError: the layer has none.
        """
        if layer_id not in self._layers:
            raise ValueError(f"layer_id: got {layer_id}, expected a layer with states, one of {list(self._layers)}")
        return self._layers[layer_id]


class HybridReqToTokenPool(ReqToTokenPool):
    """The request table of a model with linear-attention layers: each request has a state slot too.

    Attributes:
        req_index_to_mamba_index_mapping: [size + 1] int32, row of the table -> state slot; 0 where not allocated.
    """

    def __init__(self, size: int, max_context_len: int, states: StatePool, device: torch.device | str = "cpu") -> None:
        super().__init__(size, max_context_len, device)
        self.states = states
        self.req_index_to_mamba_index_mapping = torch.zeros(size + 1, dtype=torch.int32, device=device)

    def alloc(self, need_size: int) -> list[int] | None:
        """Take rows and a state slot for each, or None."""
        if need_size > min(self.available_size(), self.states.available_size()):
            return None
        rows, slots = super().alloc(need_size), self.states.alloc(need_size)
        assert rows is not None and slots is not None
        self.req_index_to_mamba_index_mapping[rows] = torch.tensor(slots, dtype=torch.int32, device=self.device)
        return rows

    def free(self, rows: list[int] | int) -> None:
        """Give rows and their state slots back."""
        rows = [rows] if isinstance(rows, int) else list(rows)
        super().free(rows)
        self.states.free(self.req_index_to_mamba_index_mapping[rows].tolist())
        self.req_index_to_mamba_index_mapping[rows] = 0

    def mamba2_layer_cache(self, layer_id: int) -> LayerState:
        """The states of a layer, under upstream's name."""
        return self.states.layer(layer_id)
