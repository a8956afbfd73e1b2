"""Makers of ragged batches as serving has them: permuted tables, slots in no order, NaN in all that is unused."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.schedules.paged_attention import reference

# Arguments of plan_decode and plan_extend for the sizes that `make_paged_batch` makes by default.
PLAN_SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8}


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN: what a kernel must write over, or never read."""
    return torch.full(shape, math.nan, dtype=dtype)


@dataclass
class PagedBatch:
    """Tensors of one call. Slot 0, unused slots and table entries of no request are poison (NaN, slot 0)."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_buffer: Tensor
    v_buffer: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    extend_seq_lens: Tensor
    kv_start: Tensor | None

    def to_fp8(self, k_scale: float = 1.0, v_scale: float = 1.0) -> PagedBatch:
        """Round the pools to float8_e4m3fn codes of numbers divided by the scales, in place; NaN stays NaN."""
        aliased = self.k_buffer.data_ptr() == self.v_buffer.data_ptr()
        dim_vo = self.v_buffer.shape[2]
        self.k_buffer = (self.k_buffer.float() / k_scale).to(torch.float8_e4m3fn)
        self.v_buffer = (self.v_buffer.float() / v_scale).to(torch.float8_e4m3fn)
        if aliased:
            self.v_buffer = self.k_buffer[..., :dim_vo]
        return self

    def tree_mask(self, *, whole_rows: bool = False, seed: int = 0) -> Tensor:
        """A random tree of drafts for each request: which new tokens each one sees, its ancestors and itself.

        whole_rows: rows over all keys of the request; what they say of its prefix is noise.
        """
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for new, keys in zip(self.extend_seq_lens.tolist(), self.seq_lens.tolist(), strict=True):
            tree = torch.eye(new, dtype=torch.bool, device="cpu")
            for i in range(1, new):
                tree[i] |= tree[int(torch.randint(-1, i, (), generator=generator, device="cpu"))]
                tree[i, i + 1 :] = False
            if whole_rows:
                noise = torch.rand((new, keys - new), generator=generator, device="cpu") < 0.5
                tree = torch.cat([noise, tree], 1)
            parts.append(tree.flatten())
        return torch.cat(parts).to(self.q.device)

    def placed(self, device: torch.device) -> PagedBatch:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PagedBatch(**{name: None if value is None else value.to(device) for name, value in values.items()})

    def decode_arguments(self) -> tuple[Tensor, ...]:
        """Positional arguments of `decode_attention`."""
        return (self.q, self.k_buffer, self.v_buffer, self.req_to_token, self.req_pool_indices, self.seq_lens)

    def extend_arguments(self) -> tuple[Any, ...]:
        """Positional arguments of `extend_attention`."""
        return (
            self.q, self.k, self.v, self.k_buffer, self.v_buffer, self.req_to_token, self.req_pool_indices,
            self.seq_lens, self.extend_seq_lens,
        )  # fmt: skip

    def out(self, rows: int | None = None) -> Tensor:
        """An output full of NaN."""
        dim = (self.v_buffer if self.v is None else self.v).shape[2]
        return poisoned(self.q.shape[0] if rows is None else rows, self.q.shape[1], dim, dtype=self.q.dtype)

    def expected(self, *, decode: bool, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) by the oracle; options as of the public functions, tensors allowed."""
        options = {name: as_numpy(value) for name, value in options.items()}
        if options.get("tree_mask") is not None:
            options["tree_mask"] = self._masks(options["tree_mask"].reshape(-1))
        if self.kv_start is not None:
            options.setdefault("kv_start", as_numpy(self.kv_start))
        arguments = [as_numpy(value) for value in (self.decode_arguments() if decode else self.extend_arguments())]
        return (reference.decode if decode else reference.extend)(*arguments, **options)

    def _masks(self, mask: np.ndarray) -> list[np.ndarray]:
        """For each request [new, new], of a mask as the public functions take it."""
        news, keys = self.extend_seq_lens.tolist(), self.seq_lens.tolist()
        widths = news if len(mask) == sum(n * n for n in news) else keys
        masks = []
        for new, width in zip(news, widths, strict=True):
            masks.append(mask[: new * width].reshape(new, width)[:, width - new :])
            mask = mask[new * width :]
        return masks


def as_numpy(value: Any) -> Any:
    """Tensors as numpy, bf16 and fp16 widened exactly; others as they are."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()


def _make_paged_batch(
    prefixes: list[int],
    news: list[int],
    *,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    dim: int = 8,
    dim_vo: int | None = None,
    dtype: torch.dtype = torch.float32,
    from_pool: bool = False,
    kv_starts: list[int] | None = None,
    page_size: int = 1,
    spare_slots: int = 7,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> PagedBatch:
    """A batch of requests with prefixes[b] keys in the pool and news[b] new tokens, on torch's default device.

    Args:
        prefixes: may be negative where from_pool (more query tokens than keys).
        news: query tokens; for decode all 1 with from_pool=True (prefixes then count the keys before the token).
        num_qo_heads: Hq.
        num_kv_heads: Hk.
        dim: D.
        dim_vo: Dv, None = D.
        dtype: of all floats.
        from_pool: the new keys are in the pool too, and k = v = None; else the pool holds NaN for them.
        kv_starts: first columns; the columns before point at poison.
        page_size: pages are consecutive slots, in permuted order.
        spare_slots: unused slots.
        index_dtype: of req_pool_indices, seq_lens, extend_seq_lens (req_to_token is int32).
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    dim_vo = dim if dim_vo is None else dim_vo
    batch, tokens = len(news), sum(news)
    lens = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
    starts = kv_starts or [0] * batch
    in_pool = [length if from_pool else prefix for length, prefix in zip(lens, prefixes, strict=True)]
    pages = [-(-max(count, 0) // page_size) for count in in_pool]
    # Page 0 is the padding page, as in serving.
    num_pages = 1 + sum(pages) + -(-spare_slots // page_size)
    order = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()
    table_rows = torch.randperm(batch + 2, generator=generator)[:batch]
    width = max([start + length for start, length in zip(starts, lens, strict=True)], default=0) + page_size + 2
    req_to_token = torch.zeros((batch + 2, width), dtype=torch.int32)
    k_buffer = poisoned(num_pages * page_size, num_kv_heads, dim, dtype=dtype)
    v_buffer = poisoned(num_pages * page_size, num_kv_heads, dim_vo, dtype=dtype)
    for b in range(batch):
        own, order = order[: pages[b]], order[pages[b] :]
        for j in range(in_pool[b]):
            slot = own[j // page_size] * page_size + j % page_size
            req_to_token[table_rows[b], starts[b] + j] = slot
            k_buffer[slot] = torch.randn((num_kv_heads, dim), generator=generator).to(dtype)
            v_buffer[slot] = torch.randn((num_kv_heads, dim_vo), generator=generator).to(dtype)
    new_keys = torch.randn((tokens, num_kv_heads, dim), generator=generator).to(dtype)
    new_values = torch.randn((tokens, num_kv_heads, dim_vo), generator=generator).to(dtype)
    return PagedBatch(
        q=torch.randn((tokens, num_qo_heads, dim), generator=generator).to(dtype),
        k=None if from_pool else new_keys,
        v=None if from_pool else new_values,
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        req_to_token=req_to_token,
        req_pool_indices=table_rows.to(index_dtype),
        seq_lens=torch.tensor(lens, dtype=index_dtype),
        extend_seq_lens=torch.tensor(news, dtype=index_dtype),
        kv_start=None if kv_starts is None else torch.tensor(kv_starts, dtype=index_dtype),
    )


@wraps(_make_paged_batch)
def make_paged_batch(*arguments: Any, **options: Any) -> PagedBatch:
    device = torch.get_default_device()
    with torch.device("cpu"):  # the same numbers on every device
        batch = _make_paged_batch(*arguments, **options)
    return batch if device.type == "cpu" else batch.placed(device)


def make_decode_batch(seq_lens: list[int], **options: Any) -> PagedBatch:
    """A decode batch: one query per request over seq_lens[b] keys in the pool; options as of `make_paged_batch`."""
    return make_paged_batch([n - 1 for n in seq_lens], [1] * len(seq_lens), from_pool=True, **options)


@dataclass
class LightningBatch:
    """Tensors of one lightning call; slots of no request are NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    state_indices: Tensor
    qo_indptr: Tensor
    slopes: Tensor


def make_lightning_batch(
    news: list[int],
    *,
    num_heads: int = 2,
    dim: int = 8,
    dim_vo: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare_slots: int = 3,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> LightningBatch:
    """A ragged batch of news[b] tokens per request with permuted state slots (slot 0 is padding, as in serving)."""
    generator = torch.Generator().manual_seed(seed)
    dim_vo = dim if dim_vo is None else dim_vo
    tokens, batch = sum(news), len(news)
    slots = 1 + torch.randperm(batch + spare_slots, generator=generator)[:batch]
    state = poisoned(1 + batch + spare_slots, num_heads, dim, dim_vo)
    state[slots] = 0.05 * torch.randn((batch, num_heads, dim, dim_vo), generator=generator)
    q, k, v = (torch.randn((tokens, num_heads, size), generator=generator).to(dtype) for size in (dim, dim, dim_vo))
    return LightningBatch(
        q=q,
        k=k,
        v=v,
        state=state,
        state_indices=slots.to(index_dtype),
        qo_indptr=torch.tensor([0, *np.cumsum(news)], dtype=index_dtype),
        slopes=torch.tensor([2.0 ** -(h + 1) for h in range(num_heads)]),
    )
