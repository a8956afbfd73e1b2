"""The same values in other memory: strided and interleaved views, index types."""

import torch
from batches import poisoned


def strided(tensor):
    """The same values in a view whose strides are all odd, at an odd offset, NaN between.

    On a GPU in units of 16 bytes, which its kernels take.
    """
    before, after = EDGES[tensor.device.type]
    width = before + tensor.shape[-1] + after
    base = poisoned(*[size * 2 + 1 for size in tensor.shape[:-1]], width, dtype=tensor.dtype)
    view = base[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., before : before + tensor.shape[-1]]
    view.copy_(tensor)
    return view


# Elements before and after a row of a strided view.
EDGES = {"cpu": (1, 2), "cuda": (16, 32)}
LAYOUTS = {
    "dense": lambda x: x,
    "strided": strided,
    "heads_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "not_dense": lambda x: torch.stack((x, x), -1)[..., 0],
}


def lay_out(batch, layout):
    """K and V of one row next to each other ("interleaved"), or every float tensor in the given layout."""
    if layout == "interleaved":
        dim = batch.k_buffer.shape[2]
        pool = torch.cat((batch.k_buffer, batch.v_buffer), -1)
        batch.k_buffer, batch.v_buffer = pool[..., :dim], pool[..., dim:]
        return
    for name in ("q", "k", "v", "k_buffer", "v_buffer"):
        value = getattr(batch, name)
        if value is not None:
            setattr(batch, name, LAYOUTS[layout](value))


INDEXES = {
    "int32": lambda x: x.int(),
    "int64": lambda x: x.long(),
    "int32-strided": lambda x: x.int().repeat_interleave(2, -1)[..., ::2],
    "int64-strided": lambda x: x.long().repeat_interleave(3, -1)[..., ::3],
    "int64-transposed": lambda x: x.long().mT.contiguous().mT if x.dim() > 1 else x.long(),
}
INDEX_NAMES = ("req_to_token", "req_pool_indices", "seq_lens", "extend_seq_lens", "kv_start")
