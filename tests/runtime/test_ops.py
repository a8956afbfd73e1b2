"""Under torch.compile the functions are opaque operators with the same results, and they are what they declare."""

import pytest
import torch
from batches import make_decode_batch, make_lightning_batch, make_paged_batch, poisoned

from tilewright.runtime import ops
from tilewright.runtime.lightning import lightning_decode, lightning_extend
from tilewright.runtime.paged import decode_attention, extend_attention, merge_states, write_kv
from tilewright.runtime.plan import plan_decode

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_dynamo(model):
    torch._dynamo.reset()


def compiled(function, backend):
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(backend):
    batch = make_decode_batch([5, 9, 0])
    sinks = torch.tensor([0.5, -1.0, 3.0, -2.0])

    def step(*arguments):
        out, lse = decode_attention(*arguments, sinks=sinks, window=4, logit_cap=2.0, return_lse=True)
        return out * 2, lse + 1

    for got, wanted in zip(compiled(step, backend)(*batch.decode_arguments()), step(*batch.decode_arguments()),
                           strict=True):  # fmt: skip
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_writes_and_uses_plan_and_out(backend):
    batch = make_decode_batch([5, 9])
    wanted = decode_attention(*batch.decode_arguments())
    last = torch.stack([
        batch.req_to_token[row, n - 1] for row, n in zip(batch.req_pool_indices, batch.seq_lens, strict=True)
    ]).long()  # fmt: skip
    key, value = batch.k_buffer[last].clone(), batch.v_buffer[last].clone()
    batch.k_buffer[last] = torch.nan
    batch.v_buffer[last] = torch.nan
    plan = plan_decode(batch.seq_lens, num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_vo=8, device="cpu")

    def step(out, key, value, *arguments):
        return decode_attention(*arguments, key=key, value=value, loc=last, out=out, plan=plan) + 0

    out = batch.out()
    got = compiled(step, backend)(out, key, value, *batch.decode_arguments())
    assert torch.equal(got, wanted) and torch.equal(out, wanted)
    assert torch.equal(batch.k_buffer[last], key) and torch.equal(batch.v_buffer[last], value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("from_pool", [False, True])
def test_extend(backend, from_pool):
    batch = make_paged_batch([4, 9], [3, 2], from_pool=from_pool)
    wanted = extend_attention(*batch.extend_arguments())
    assert torch.equal(compiled(lambda *a: extend_attention(*a) + 0, backend)(*batch.extend_arguments()), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_and_merge(backend):
    k, v, loc = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([2, -1, 0])
    buffers = poisoned(4, 2, 8), poisoned(4, 2, 8)

    def step(k, v, k_buffer, v_buffer, loc):
        write_kv(k, v, k_buffer, v_buffer, loc)
        return merge_states(k_buffer[None], v_buffer[None, ..., 0].contiguous())

    got = compiled(step, backend)(k, v, *buffers, loc)
    assert torch.equal(buffers[0][[2, 0]], k[[0, 2]]) and torch.equal(buffers[1][[2, 0]], v[[0, 2]])
    assert buffers[0][[1, 3]].isnan().all()
    wanted = merge_states(buffers[0][None], buffers[1][None, ..., 0].contiguous())
    assert torch.equal(got[0][[0, 2]], wanted[0][[0, 2]]) and torch.equal(got[1][[0, 2]], wanted[1][[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lightning(backend):
    one, two = make_lightning_batch([5, 2]), make_lightning_batch([5, 2])

    def extend(q, k, v, state, indices, indptr, slopes):
        return lightning_extend(q, k, v, state, indices, indptr, slopes) * 2

    def decode(q, k, v, state, indices, slopes):
        return lightning_decode(q, k, v, state, indices, slopes) * 2

    arguments = [[b.q, b.k, b.v, b.state, b.state_indices, b.qo_indptr, b.slopes] for b in (one, two)]
    assert torch.equal(compiled(extend, backend)(*arguments[0]), extend(*arguments[1]))
    assert torch.equal(one.state.nan_to_num(7), two.state.nan_to_num(7))
    arguments = [[b.q[:2], b.k[:2], b.v[:2], b.state, b.state_indices, b.slopes] for b in (one, two)]
    assert torch.equal(compiled(decode, backend)(*arguments[0]), decode(*arguments[1]))
    assert torch.equal(one.state.nan_to_num(7), two.state.nan_to_num(7))


def test_a_plan_that_is_gone_is_said_so():
    batch = make_decode_batch([5])
    with pytest.raises(ValueError, match="plan: number 99999999 is gone"):
        torch.ops.tilewright.decode_attention(
            *batch.decode_arguments(), None, None, None, batch.out(), None, None, 0.0, 0, 1.0, 1.0, 1, False, 99999999
        )


def test_schemas_declare_what_is_written():
    batch = make_decode_batch([5, 9])
    options = (0.0, 0, 1.0, 1.0, 1, False, -1)  # logit_cap, window, scales, page_size, batch_invariant, plan
    torch.library.opcheck(
        torch.ops.tilewright.decode_attention.default,
        (*batch.decode_arguments(), *[None] * 3, torch.zeros(2, 4, 8), torch.zeros(2, 4), None, *options),
        test_utils=("test_schema", "test_faketensor"),
    )
    k, loc = torch.randn(3, 2, 8), torch.tensor([2, -1, 0])
    torch.library.opcheck(
        ops.write_kv.default,
        (k, k.clone(), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), loc),
        test_utils=("test_schema", "test_faketensor"),
    )
