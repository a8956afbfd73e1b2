"""Dense torch attention behind the same interface: the demo's peer in speed and its oracle in numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tilewright.codegen.demo.model import LlamaConfig
from tilewright.runtime.forward_batch import AttentionLayer


class SDPABackend:
    """`scaled_dot_product_attention` over a KV cache of its own: dense, one row [Hk, length, D] per request.

    Torch reads the cache in place, no gather and no page table. A decode is one call for the whole batch: the cache
    rows from the first to the last in use, padded to the longest request, under a mask. An extend is one causal call
    per request with `enable_gqa`. One batched decode was about twice as fast as a call per request in most cases of a
    short, noisy comparison; extend's forms were close, and a batched extend was not tried.
    """

    def __init__(self, config: LlamaConfig, *, rows: int, length: int, dtype: torch.dtype):
        """Hold caches for `rows` requests (row = req_pool_indices) of at most `length` tokens."""
        self.cache = torch.zeros(
            (config.num_layers, 2, rows, config.num_kv_heads, length, config.head_dim), dtype=dtype
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Work out what all layers share: the spans of an extend, or the mask of a decode."""
        self.rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode():
            self.first_row, self.longest = int(self.rows.min()), int(seq_lens.max())
            self.used = slice(self.first_row, int(self.rows.max()) + 1)
            # Rows between that are not in the batch see one key, so that no row is without any.
            visible = torch.ones(self.used.stop - self.first_row, dtype=torch.int64)
            visible[self.rows - self.first_row] = seq_lens
            self.mask = (torch.arange(self.longest) < visible[:, None])[:, None, None]
            self.last = seq_lens - 1
        else:
            added = forward_batch.extend_seq_lens
            ends = added.cumsum(0)
            columns = (self.rows, ends - added, ends, seq_lens - added)  # cache row, first and last row in q, prefix
            self.spans = list(zip(*(column.tolist() for column in columns), strict=True))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Append k, v [T, Hk, D] to the cache and attend causally with q [T, Hq, D]; returns [T, Hq * D]."""
        if not save_kv_cache:
            raise ValueError("save_kv_cache: got False; this backend attends to its own cache and must write it")
        run = self._decode if forward_batch.forward_mode.is_decode() else self._extend
        keys, values = self.cache[layer.layer_id]
        return run(q, k, v, keys, values, layer.scaling).flatten(1)

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys[self.rows, :, self.last] = k
        values[self.rows, :, self.last] = v
        keys, values = keys[self.used, :, : self.longest], values[self.used, :, : self.longest]
        grouped = q.unflatten(1, (keys.shape[1], -1))
        queries = grouped.new_zeros((len(keys), *grouped.shape[1:]))
        queries[self.rows - self.first_row] = grouped
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, scale=scale)
        return out[self.rows - self.first_row].flatten(1, 2)

    def _extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for row, begin, end, prefix in self.spans:
            length = prefix + end - begin
            keys[row, :, prefix:length] = k[begin:end].transpose(0, 1)
            values[row, :, prefix:length] = v[begin:end].transpose(0, 1)
            mask = torch.ones(end - begin, length, dtype=torch.bool).tril(prefix) if prefix else None
            out[begin:end] = F.scaled_dot_product_attention(
                q[None, begin:end].transpose(1, 2),
                keys[None, row, :, :length],
                values[None, row, :, :length],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out
