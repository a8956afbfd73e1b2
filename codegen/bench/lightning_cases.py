"""Lightning attention in the bench: our call through the public functions beside torch on the same data."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright
from tilewright.codegen.bench import peers
from tilewright.codegen.bench.inputs import DTYPES, SEED
from tilewright.codegen.bench.protocol import Call, Contestant
from tilewright.codegen.bench.setups import Case, Roots, Setup, copies, draw, first, ours
from tilewright.codegen.tolerances import LIGHTNING, LIGHTNING_STATE
from tilewright.runtime.lightning import slopes as model_slopes


def _data(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """q, k, v [tokens, H, D]; states [B, H, Dk, Dv]; slopes; scale."""
    workload, dtype, normal = case.workload, DTYPES[case.workload.dtype], draw()
    dim, dim_v = workload.head_dim_qk or 0, workload.head_dim_vo or 0
    q, v = normal(tokens, case.heads, dim).to(dtype), normal(tokens, case.heads, dim_v).to(dtype)
    k = (normal(tokens, case.heads, dim) * dim**-0.5).to(dtype)
    return q, k, v, normal(case.batch, case.heads, dim, dim_v), model_slopes(case.heads), dim**-0.5


def extend(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One request with an initial state."""
    del cold  # bound by arithmetic: the same data every time
    if case.batch != 1:
        raise ValueError(f"batch: got {case.batch}, expected 1 (the chunked torch form takes one length)")
    q, k, v, state, slopes, scale = _data(case, case.tokens)
    slot, indptr = torch.zeros(1, dtype=torch.int32), torch.tensor([0, case.tokens], dtype=torch.int32)

    def calls() -> list[Call]:
        mine, out = state.clone(), torch.empty_like(v)
        return [
            Call(
                lambda: tilewright.lightning_extend(q, k, v, mine, slot, indptr, slopes, scale=scale, out=out),
                lambda returned: (*first(returned), mine[0]),
            )
        ]

    queries, keys, values = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    contestants = ours(case, roots, calls)
    for name in peers.lightning_extend(queries, keys, values, state[0], slopes, scale):
        mine = state[0].clone()
        run = peers.lightning_extend(queries, keys, values, mine, slopes, scale)[name]

        def outputs(returned: object, mine: Tensor = mine) -> tuple[Tensor, ...]:
            assert isinstance(returned, Tensor)
            return returned.transpose(0, 1), mine

        contestants.append(Contestant(name, "peer", [Call(run, outputs)]))
    return Setup(
        contestants,
        (LIGHTNING[DTYPES[case.workload.dtype]], LIGHTNING_STATE[DTYPES[case.workload.dtype]]),
        4.0 * q.numel() * v.shape[2],
        float(sum(x.nbytes for x in (q, k, v, v)) + 2 * state.nbytes),
        "warm: bound by arithmetic",
    )


def decode(case: Case, roots: Roots | None, cold: int) -> Setup:
    """One token per request; states in slots drawn at random, for torch gathered beforehand."""
    batch = case.batch
    q, k, v, state, slopes, scale = _data(case, batch)
    count = copies(state.nbytes, cold)
    slots = torch.randperm(batch, generator=torch.Generator().manual_seed(SEED))
    indices = slots.to(torch.int32)

    def calls() -> list[Call]:
        out = torch.empty_like(v)

        def call(pool: Tensor) -> Call:
            return Call(
                lambda: tilewright.lightning_decode(q, k, v, pool, indices, slopes, scale=scale, out=out),
                lambda returned: (*first(returned), pool[slots]),
            )

        return [call(state[slots.argsort()]) for _ in range(count)]

    contestants = ours(case, roots, calls)
    for name in peers.lightning_decode(q, k, v, state, slopes, scale):
        own = [state.clone() for _ in range(count)]
        theirs = [
            Call(
                peers.lightning_decode(q, k, v, mine, slopes, scale)[name],
                lambda returned, mine=mine: (*first(returned), mine),  # type: ignore[misc]
            )
            for mine in own
        ]
        contestants.append(Contestant(name, "peer", theirs))
    return Setup(
        contestants,
        (LIGHTNING[DTYPES[case.workload.dtype]], LIGHTNING_STATE[DTYPES[case.workload.dtype]]),
        4.0 * q.numel() * v.shape[2],
        float(sum(x.nbytes for x in (q, k, v, v)) + 2 * state.nbytes),
        f"cold: {count} state pools of {state.nbytes / 1e6:.0f} MB in turn",
    )
