"""The public lightning functions above the executable interface: views, options, errors."""

import math

import numpy as np
import pytest
import torch
from batches import as_numpy, make_lightning_batch, poisoned
from tolerances import LIGHTNING, LIGHTNING_STATE, assert_close

from tilewright.runtime.lightning import lightning_decode, lightning_extend


def expected(batch, scale, initial=None):
    """(out, states by request) of the recurrence in float64, token by token; rows of no request NaN."""
    q, k, v, slots, indptr, slopes = (
        as_numpy(x).astype(np.float64)
        for x in (batch.q, batch.k, batch.v, batch.state_indices, batch.qo_indptr, batch.slopes)
    )
    out = np.full(v.shape, np.nan)
    states = []
    for b in range(len(slots)):
        state = as_numpy(batch.state)[int(slots[b])].astype(np.float64)
        if initial is not None and not initial[b]:
            state = np.zeros_like(state)
        for t in range(int(indptr[b]), int(indptr[b + 1])):
            state = np.exp(-slopes)[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
            out[t] = scale * np.einsum("hd,hde->he", q[t], state)
        states.append(state)
    return out, states


@pytest.mark.parametrize("dtype", LIGHTNING)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_extend(model, dtype, index_dtype):
    batch = make_lightning_batch([5, 0, 1, 33], dim_vo=6, dtype=dtype, index_dtype=index_dtype)
    initial = torch.tensor([True, True, False, False])
    wanted, states = expected(batch, 8**-0.5, initial)
    untouched = batch.state[batch.state_indices[1].item()].clone()
    out = poisoned(*batch.v.shape, dtype=dtype)
    assert lightning_extend(*vars(batch).values(), has_initial_state=initial, out=out) is out
    assert_close(out, wanted, LIGHTNING[dtype])
    for b in (0, 2, 3):
        assert_close(batch.state[batch.state_indices[b].item()], states[b], LIGHTNING_STATE[dtype])
    assert torch.equal(batch.state[batch.state_indices[1].item()], untouched)
    assert batch.state[0].isnan().all(), "slots of no request are left alone"


def test_rows_past_the_last_request(model):
    """Casebook L17: zeros in a new out, left alone in a given one."""
    batch = make_lightning_batch([3, 2])
    batch.qo_indptr = torch.tensor([0, 3, 4], dtype=torch.int32)
    state = batch.state.clone()
    out = lightning_extend(*vars(batch).values())
    assert (out[4] == 0).all()
    batch.state.copy_(state)
    given = poisoned(*batch.v.shape)
    lightning_extend(*vars(batch).values(), out=given)
    assert given[4].isnan().all() and torch.equal(given[:4], out[:4])


def test_decode_with_a_padded_row(model):
    """Casebook L11."""
    batch = make_lightning_batch([1, 1, 1, 1])
    batch.state_indices[2] = -1
    wanted, states = expected(batch, 0.5)
    wanted[2] = 0
    before = batch.state.clone()
    out = lightning_decode(batch.q, batch.k, batch.v, batch.state, batch.state_indices, batch.slopes, scale=0.5)
    assert_close(out, wanted, LIGHTNING[torch.float32])
    touched = batch.state_indices[[0, 1, 3]].long()
    for slot, b in zip(touched, (0, 1, 3), strict=True):
        assert_close(batch.state[slot], states[b], LIGHTNING_STATE[torch.float32])
    rest = [slot for slot in range(len(before)) if slot not in touched]
    assert torch.equal(batch.state[rest].nan_to_num(7), before[rest].nan_to_num(7))


def test_views(model):
    batch, plain = make_lightning_batch([4, 3]), make_lightning_batch([4, 3])
    wanted = lightning_extend(*vars(plain).values())
    fused = torch.cat((batch.q, batch.k, batch.v), -1)
    batch.q, batch.k, batch.v = fused.split(8, -1)
    pool = poisoned(len(batch.state), 2, *batch.state.shape[1:])
    pool[:, 1] = batch.state
    batch.state = pool[:, 1]
    batch.state_indices = batch.state_indices.long().repeat_interleave(2)[::2]
    batch.qo_indptr = batch.qo_indptr.long()
    assert torch.equal(lightning_extend(*vars(batch).values()), wanted)
    assert torch.equal(batch.state.nan_to_num(7), plain.state.nan_to_num(7)) and pool[:, 0].isnan().all()


def test_nothing_to_do(model):
    batch = make_lightning_batch([])
    assert lightning_extend(*vars(batch).values()).shape == (0, 2, 8)
    out = lightning_decode(batch.q, batch.k, batch.v, batch.state, batch.state_indices, batch.slopes)
    assert out.shape == (0, 2, 8)
    assert model.calls == []


@pytest.mark.parametrize(("name", "change", "error", "message"), [
    ("q", lambda x: x.double(), TypeError, "q: got torch.float64"),
    ("q", lambda x: x.transpose(0, 1), ValueError, r"k: got shape \[7, 2, 8\], expected \[2, 7, 8\]"),
    ("k", lambda x: x[:, :1], ValueError, "k: got shape"),
    ("v", lambda x: x.half(), TypeError, "v: got torch.float16"),
    ("state", lambda x: x.half(), TypeError, "state: got torch.float16, expected torch.float32"),
    ("state", lambda x: x.transpose(2, 3), ValueError, "state: got strides"),
    ("state", lambda x: x[:, :1], ValueError, "state: got shape"),
    ("state_indices", lambda x: x[:1], ValueError, "qo_indptr: got shape"),
    ("state_indices", lambda x: x.float(), TypeError, "state_indices: got torch.float32"),
    ("qo_indptr", lambda x: x[1:], ValueError, "qo_indptr: got shape"),
    ("slopes", lambda x: x[:1], ValueError, "slopes: got shape"),
    ("slopes", lambda x: x.bfloat16(), TypeError, "slopes: got torch.bfloat16"),
    ("qo_indptr", lambda x: x + 1, ValueError, r"qo_indptr\[2\]: got 8"),
    ("qo_indptr", lambda x: x.flip(0), ValueError, r"qo_indptr\[1\]: got 4 after 7"),
    ("state_indices", lambda x: x * 0 + 2, ValueError, "slot 2 occurs twice"),
    ("state_indices", lambda x: x + 9, ValueError, r"state_indices\[\d\]: got"),
    ("state_indices", lambda x: x * 0 - 2, ValueError, r"state_indices\[0\]: got -2"),
    ("q", lambda x: x.to("meta"), NotImplementedError, "q: got device meta"),
    ("k", lambda x: x.to_sparse(), TypeError, "k: got layout torch.sparse_coo"),
    ("state", lambda x: x.requires_grad_(), ValueError, "state: requires a gradient"),
    ("state", lambda x: x[:1].expand(x.shape), ValueError, "state: got strides.*memory of its own"),
    ("slopes", lambda x: -x, ValueError, r"slopes\[0\]: got -0.5, expected a finite decay rate >= 0"),
    ("slopes", lambda x: x * math.nan, ValueError, r"slopes\[0\]: got nan"),
])  # fmt: skip
def test_wrong_arguments(model, name, change, error, message):
    """Casebook L09, L12, L18; nothing runs."""
    batch = make_lightning_batch([4, 3])
    setattr(batch, name, change(getattr(batch, name)))
    with pytest.raises(error, match=message):
        lightning_extend(*vars(batch).values())
    assert model.calls == []


def test_wrong_options(model):
    batch = make_lightning_batch([4, 3])
    for options, error, message in (
        ({"out": torch.zeros(7, 2, 7)}, ValueError, "out: got shape"),
        ({"out": torch.zeros(7, 2, 16)[..., ::2]}, ValueError, "out: got strides"),
        ({"has_initial_state": torch.ones(3, dtype=torch.bool)}, ValueError, "has_initial_state: got shape"),
        ({"has_initial_state": torch.ones(2)}, TypeError, "has_initial_state: got torch.float32"),
        ({"has_initial_state": [1, 1]}, TypeError, "has_initial_state: got list"),
        ({"scale": "x"}, TypeError, "scale: got 'x', expected a number"),
        ({"scale": math.nan}, ValueError, "scale: got nan"),
        ({"out": batch.q}, ValueError, "out: shares memory with q"),
        ({"out": batch.v}, ValueError, "out: shares memory with v"),
    ):
        with pytest.raises(error, match=message):
            lightning_extend(*vars(batch).values(), **options)
    with pytest.raises(ValueError, match=r"state_indices: got shape \[2\], expected \[7\]"):
        lightning_decode(batch.q, batch.k, batch.v, batch.state, batch.state_indices, batch.slopes)
    assert model.calls == []


def test_dims_of_nothing(model):
    for sizes in ({"num_heads": 0}, {"dim": 0}, {"dim_vo": 0}):
        with pytest.raises(ValueError, match="expected at least 1 of each"):
            lightning_extend(*vars(make_lightning_batch([4], **sizes)).values())
    assert model.calls == []


def test_any_integer_but_zero_says_that_there_is_a_state(model):
    """2**32 has low words of zero."""
    results = []
    for value in (torch.tensor([True, False]), torch.tensor([2**32, 0]), torch.tensor([-1, 0], dtype=torch.int32)):
        batch = make_lightning_batch([4, 3])
        results.append(lightning_extend(*vars(batch).values(), has_initial_state=value))
    assert all(torch.equal(result, results[0]) for result in results)


def test_one_and_many_tokens_return_the_same_kind(model):
    """Casebook L09: a tensor of q's rows and v's dim, in decode and in extend, whatever the number of tokens."""
    for news in ([1], [2], [1, 1]):
        batch = make_lightning_batch(news, dim_vo=5)
        extended = lightning_extend(*vars(batch).values())
        assert isinstance(extended, torch.Tensor) and extended.shape == (sum(news), 2, 5)
        if max(news) == 1:
            decoded = lightning_decode(batch.q, batch.k, batch.v, batch.state, batch.state_indices, batch.slopes)
            assert type(decoded) is type(extended) and decoded.shape == extended.shape


@pytest.mark.parametrize("run", [lightning_extend, lightning_decode])
def test_heads_first_tensors_are_refused_by_the_slopes(model, run):
    """Casebook L09: [H, T, D] tensors with state and slopes of H heads are no [T, H, D]."""
    batch = make_lightning_batch([3, 2], num_heads=2)
    first = [x.transpose(0, 1) for x in (batch.q, batch.k, batch.v)]
    rest = (batch.state, batch.state_indices, *([batch.qo_indptr] if run is lightning_extend else []), batch.slopes)
    with pytest.raises(ValueError, match=r"state: got shape \[6, 2, 8, 8\], expected \[6, 5, 8, 8\]"):
        run(*first, *rest)
    assert model.calls == []
