"""Heads and dims that the paged kernels are tested at, and batches of them."""

from typing import NamedTuple

import torch
from batches import make_paged_batch

from tilewright.schedules.catalog import PAGED_SHAPES


class Size(NamedTuple):
    """Heads and dims of a call. general: served by the general module although a specialised one may be built."""

    dim: int
    dim_vo: int
    group: int
    kv_heads: int
    general: bool = True
    aliased: bool = False

    @property
    def plan(self):
        return {"num_qo_heads": self.group * self.kv_heads, "num_kv_heads": self.kv_heads, "head_dim_qk": self.dim,
                "head_dim_vo": self.dim_vo, "device": torch.get_default_device()}  # fmt: skip

    def __str__(self):
        kind = "general" if self.general else "special"
        return f"{kind}-d{self.dim}v{self.dim_vo}-g{self.group}" + ("-aliased" if self.aliased else "")


SPECIAL = [Size(dim, dim, group, 2, general=False) for dim, group in PAGED_SHAPES]
GENERAL = [
    Size(128, 128, 4, 2), Size(13, 13, 5, 1), Size(80, 80, 8, 1), Size(33, 55, 3, 2), Size(192, 128, 1, 3),
    Size(576, 512, 22, 1, aliased=True), Size(1, 1, 1, 1),
]  # fmt: skip
SIZES = [*SPECIAL, *GENERAL]
BOTH = [SPECIAL[1], GENERAL[3]]


def paged_batch(size, prefixes, news, **options):
    """A batch on the default device; dtype: f32, on a GPU bf16."""
    if torch.get_default_device().type != "cpu":
        options.setdefault("dtype", torch.bfloat16)
    batch = make_paged_batch(
        prefixes, news, num_qo_heads=size.group * size.kv_heads, num_kv_heads=size.kv_heads, dim=size.dim,
        dim_vo=size.dim_vo, **options,
    )  # fmt: skip
    if size.aliased:
        batch.v_buffer = batch.k_buffer[..., : size.dim_vo]
        batch.v = None if batch.k is None else batch.k[..., : size.dim_vo]
    return batch


def decode_batch(size, lens, **options):
    return paged_batch(size, [n - 1 for n in lens], [1] * len(lens), from_pool=True, **options)
