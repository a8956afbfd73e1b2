"""The built lightning modules against the float64 oracle; ids such as L01 name known faults of such kernels."""

import math
import re

import numpy as np
import pytest
import torch
from tolerances import LIGHTNING, LIGHTNING_STATE, assert_close

from tilewright.codegen.build import build
from tilewright.runtime import store
from tilewright.schedules.lightning_attention import reference
from tilewright.schedules.workload import Workload

TARGET = "x86-avx2"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOPES = (0.0, 3.9e-8, 0.917, 5.0)  # L03, L05: no decay, hardly any, and exponents beyond f32 within a chunk
SCALE = 0.125


def load(operator, dtype, dim=None):
    workload = Workload(operator, dtype, None, dim, dim)
    build(workload, TARGET)
    return store.load(workload, TARGET).function


@pytest.fixture(params=["f32", "bf16", "fp16"])
def dtype(request):
    return request.param


# (module, head dim qk, head dim vo): the specialised one, then the general one at sizes of every kind (L02).
SIZES = [(128, 128, 128), (None, 128, 128), (None, 13, 60), (None, 60, 13), (None, 1, 1), (None, 100, 72)]
SIZE_IDS = ["d128", "general-128", "general-13x60", "general-60x13", "general-1", "general-100x72"]


def fenced(shape, dtype, fill=math.nan):
    """A tensor in the middle of memory that is full of `fill`, at an address that is a multiple of the element only."""
    count = math.prod(shape)
    memory = torch.full((count + 2 * 4096 + 1,), fill, dtype=dtype)
    return memory[4097 : 4097 + count].view(shape), memory


class Call:
    """Tensors of one call of random values; everything that must not be read or written is NaN."""

    def __init__(self, dtype, dk, dv, slots, lengths, *, heads=4, spare=2, slack=0, seed=0, initial=None):
        generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        tokens = sum(lengths) + slack
        self.q, _ = fenced((tokens, heads, dk), DTYPES[dtype])
        self.k, _ = fenced((tokens, heads, dk), DTYPES[dtype])
        self.v, _ = fenced((tokens, heads, dv), DTYPES[dtype])
        used = sum(lengths)
        for x in (self.q, self.k, self.v):
            x[:used] = torch.randn((used, *x.shape[1:]), generator=generator).to(x.dtype)
        self.out, self.out_memory = fenced((tokens, heads, dv), DTYPES[dtype])
        self.state, self.state_memory = fenced((max(slots) + 1 + spare, heads, dk, dv), torch.float32)
        live = sorted({s for s in slots if s >= 0})
        self.state[live] = torch.randn((len(live), heads, dk, dv), generator=generator)
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.initial = torch.ones_like(self.slots) if initial is None else torch.tensor(initial, dtype=torch.int32)
        self.indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        self.slopes = torch.tensor([SLOPES[h % len(SLOPES)] for h in range(heads)])

    def arrays(self):
        return [x.float().numpy().copy() for x in (self.q, self.k, self.v, self.state)]

    def extend(self, function):
        function(
            self.q, self.k, self.v, self.state, self.slots, self.initial, self.indptr, self.slopes, self.out, SCALE
        )

    def decode(self, function):
        function(self.q, self.k, self.v, self.state, self.slots, self.slopes, self.out, SCALE)

    def check_extend(self, function):
        expected, pool = reference.extend(
            *self.arrays(), self.slots.numpy(), self.indptr.numpy(), self.slopes.numpy(),
            has_initial_state=self.initial.numpy(), scale=SCALE,
        )  # fmt: skip
        self.extend(function)
        self.compare(expected, pool)

    def check_decode(self, function):
        expected, pool = reference.decode(*self.arrays(), self.slots.numpy(), self.slopes.numpy(), scale=SCALE)
        self.decode(function)
        self.compare(expected, pool)

    def compare(self, expected, pool):
        """Head by head: a state without decay grows with the length and would hide the errors of the others."""
        for h in range(self.q.shape[1]):
            assert_close(self.out[:, h], expected[:, h], LIGHTNING[DTYPES[self.dtype]], f"out, head {h}")
            assert_close(self.state[:, h], pool[:, h], LIGHTNING_STATE[torch.float32], f"state, head {h}")
        for memory, tensor in ((self.out_memory, self.out), (self.state_memory, self.state)):
            fence = torch.cat([memory[:4097], memory[4097 + tensor.numel() :]])
            assert fence.isnan().all(), "memory around the tensor was written"


# The edges do not depend on the dtype: the half types see a chunk and a tail only.
LENGTHS = [("f32", n) for n in (1, 2, 63, 64, 65, 127, 300)] + [("bf16", 65), ("fp16", 65)]


@pytest.mark.parametrize(("module", "dk", "dv"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize(("dtype", "length"), LENGTHS)
def test_extend_lengths(dtype, length, module, dk, dv):
    """L01, L02, L15: every length around the chunk's edges, continuing a state; NaN memory around all tensors."""
    Call(dtype, dk, dv, [1], [length]).check_extend(load("lightning_extend", dtype, module))


@pytest.mark.parametrize(("module", "dk", "dv"), SIZES, ids=SIZE_IDS)
def test_extend_ragged(dtype, module, dk, dv):
    """L11, L13, L17: slots [0, 1, -1, 2], an empty request, a recycled slot, slack rows, guard slots."""
    call = Call(
        dtype, dk, dv, [0, 1, -1, 2, 3, 5], [70, 1, 33, 129, 0, 64], initial=[1, 0, 1, 0, 0, 1], slack=28
    )  # fmt: skip
    call.state[1] = 1e3
    call.state[2] = math.nan
    untouched = call.state.clone()
    call.check_extend(load("lightning_extend", dtype, module))
    for slot in (3, 4, 6, 7):
        assert torch.equal(call.state[slot].view(torch.int32), untouched[slot].view(torch.int32)), slot
    assert (call.out[71:104] == 0).all()
    assert call.out[297:].isnan().all()


@pytest.mark.parametrize(("module", "dk", "dv"), SIZES, ids=SIZE_IDS)
def test_decode(dtype, module, dk, dv):
    """L11: slots [0, 1, -1, 2] with guard slots; row 2 is 0."""
    call = Call(dtype, dk, dv, [0, 1, -1, 2], [1] * 4)
    untouched = call.state.clone()
    call.check_decode(load("lightning_decode", dtype, module))
    assert torch.equal(call.state[3:].view(torch.int32), untouched[3:].view(torch.int32))
    assert (call.out[2] == 0).all()


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
def test_every_split_equals_one_pass(module):
    """L08: 70 tokens as two calls, split everywhere, the state carried in the pool."""
    function = load("lightning_extend", "f32", module)
    dim = module or 24
    whole = Call("f32", dim, dim, [0], [70])
    start = whole.state.clone()
    whole.check_extend(function)
    for split in range(1, 70):
        state, out = start.clone(), torch.full_like(whole.out, math.nan)
        for first, last in ((0, split), (split, 70)):
            function(
                whole.q[first:last], whole.k[first:last], whole.v[first:last], state, whole.slots, whole.initial,
                torch.tensor([0, last - first], dtype=torch.int32), whole.slopes, out[first:last], SCALE,
            )  # fmt: skip
        for h in range(4):
            assert_close(out[:, h], whole.out[:, h].double().numpy(), LIGHTNING[torch.float32], f"split {split}")
            assert_close(
                state[:1, h], whole.state[:1, h].double().numpy(), LIGHTNING_STATE[torch.float32], f"split {split}"
            )


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
def test_decode_continues_extend(module):
    """L08: tokens one by one by the decode kernel are the same sequence."""
    dim = module or 24
    call = Call("f32", dim, dim, [1], [20])
    start = call.state.clone()
    call.check_extend(load("lightning_extend", "f32", module))
    decode, state, out = load("lightning_decode", "f32", module), start, torch.full_like(call.out, math.nan)
    for t in range(20):
        row = slice(t, t + 1)
        decode(call.q[row], call.k[row], call.v[row], state, call.slots, call.slopes, out[row], SCALE)
    for h in range(4):
        assert_close(out[:, h], call.out[:, h].double().numpy(), LIGHTNING[torch.float32])
        assert_close(state[:, h], call.state[:, h].double().numpy(), LIGHTNING_STATE[torch.float32])


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
@pytest.mark.parametrize("operator", ["lightning_extend", "lightning_decode"])
def test_strided_views(dtype, operator, module):
    """q, k, v as slices of one fused tensor, out with a gap, slots strided, index tensors as the low words of int64."""
    dim, heads, lengths = module or 20, 3, [65, 1, 40] if operator == "lightning_extend" else [1, 1, 1]
    call = Call(dtype, dim, dim, [2, 0, 4], lengths, heads=heads)
    tokens = sum(lengths)
    fused = torch.full((tokens, heads, 3 * dim + 1), math.nan, dtype=DTYPES[dtype])
    for n, name in enumerate("qkv"):
        view = fused[:, :, n * dim + 1 : (n + 1) * dim + 1]
        view.copy_(getattr(call, name))
        setattr(call, name, view)
    wide = torch.full((tokens, 2, heads, dim), math.nan, dtype=DTYPES[dtype])
    call.out = wide[:, 1]
    pool = torch.full((len(call.state), heads + 1, dim, dim), math.nan)
    pool[:, :heads] = call.state
    call.state = pool[:, :heads]
    for name in ("slots", "initial", "indptr"):
        setattr(call, name, getattr(call, name).long().view(torch.int32)[::2])
    call.out_memory, call.state_memory = torch.full((4097,), math.nan), torch.full((4097,), math.nan)
    (call.check_extend if operator == "lightning_extend" else call.check_decode)(load(operator, dtype, module))
    assert wide[:, 0].isnan().all()
    assert pool[:, heads].isnan().all()


@pytest.mark.parametrize("operator", ["lightning_extend", "lightning_decode"])
@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
@pytest.mark.parametrize("slope", [3.9e-8, 3.958e-8])  # the second is where the decay of 64 tokens rounds worst
def test_slow_decay_is_not_a_repeated_product(operator, module, slope):
    """L05, L06: a state under slope 3.9e-8 over 65536 tokens: the exact factor is 0.99745, f32 products give 0.99609.

    Keys are zero: the state only decays. Its values are spread, so that roundings do not all go one way.
    """
    dim, tokens = module or 16, 65536
    function = load(operator, "f32", module)
    state = torch.rand((1, 1, dim, dim)) + 1
    start = state.double()
    slot, slopes = torch.zeros(1, dtype=torch.int32), torch.tensor([slope])
    if operator == "lightning_extend":
        q, k, v, out = (torch.zeros((tokens, 1, dim)) for _ in range(4))
        function(q, k, v, state, slot, slot + 1, torch.tensor([0, tokens], dtype=torch.int32), slopes, out, SCALE)
    else:
        # 64 tokens a step: one token's decay is below half a rounding of the state itself.
        q, k, v, out = (torch.zeros((1, 1, dim)) for _ in range(4))
        for _ in range(tokens // 64):
            function(q, k, v, state, slot, slopes * 64, out, SCALE)
    factor = (state.double() / start).mean().item()
    # Without weight_rest the error is 3e-5 with the second slope; what is left is the rounding of the state itself.
    assert abs(factor - math.exp(-slope * tokens)) < 1e-5


def test_ones_without_decay_count_tokens():
    """L05: k = v = 1 and slope 0: the state is the number of tokens, exactly."""
    function = load("lightning_extend", "bf16", None)
    tokens = 65536
    ones = torch.ones((tokens, 1, 1), dtype=torch.bfloat16)
    state, out = torch.zeros((1, 1, 1, 1)), torch.empty_like(ones)
    zero = torch.zeros(1, dtype=torch.int32)
    function(
        ones, ones, ones, state, zero, zero, torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(1), out, 1.0
    )
    assert state.item() == tokens
    assert out[255].item() == 256


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 3, 63, 70])
def test_a_token_never_reaches_earlier_rows(module, poison, position):
    """A NaN or infinity of one token is in the rows from it on; the rows before it and other requests stay exact."""
    function = load("lightning_extend", "f32", module)
    dim = module or 16
    call = Call("f32", dim, dim, [0, 1], [80, 80])
    clean = Call("f32", dim, dim, [0, 1], [80, 80])
    clean.extend(function)
    for x in (call.q, call.k, call.v):
        x[position] = poison
    call.extend(function)
    assert torch.equal(call.out[:position], clean.out[:position])
    assert torch.equal(call.out[80:], clean.out[80:])
    assert torch.equal(call.state[1], clean.state[1])
    assert not call.out[position:80, 0].isfinite().any()


def test_long_prefill_and_decode_keep_an_f32_state():
    """L07: 16384 bf16 tokens, then 256 single ones: the state stays within the table of one pass in float64.

    A state in bf16 is refused (test_lightning_calls.py); this is what it would have to be measured against.
    """
    prefill, steps, heads, dim = 16384, 256, 2, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((prefill + steps, heads, dim), generator=generator).bfloat16() for _ in range(3))
    slopes, zero = torch.tensor([0.004, 0.1]), torch.zeros(1, dtype=torch.int32)
    state, out = torch.full((1, heads, dim, dim), math.nan), torch.empty_like(v)
    extend, decode = load("lightning_extend", "bf16", dim), load("lightning_decode", "bf16", dim)
    ends = torch.tensor([0, prefill], dtype=torch.int32)
    extend(q, k, v, state, zero, zero, ends, slopes, out, SCALE)
    for t in range(prefill, prefill + steps):
        one = slice(t, t + 1)
        decode(q[one], k[one], v[one], state, zero, slopes, out[one], SCALE)
    age = torch.arange(prefill + steps - 1, -1, -1, dtype=torch.float64)
    for h in range(heads):
        decayed = torch.exp(-slopes[h].double() * age)[:, None] * k[:, h].double()
        expected = decayed.T @ v[:, h].double()
        assert_close(state[0, h], expected.numpy(), LIGHTNING_STATE[torch.float32], f"state, head {h}")
        last = SCALE * q[-1:, h].double() @ expected
        assert_close(out[-1:, h], last.numpy(), LIGHTNING[torch.bfloat16], f"out, head {h}")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("slope", [0.0, 0.004])
def test_outputs_without_a_norm_grow_and_overflow_to_infinity(dtype, slope):
    """L22: nothing divides the sum, so outputs grow with the length: right while they fit, then +-inf, never NaN."""
    tokens, dim = 65536, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((tokens, 1, dim), generator=generator).to(DTYPES[dtype]) for _ in range(3))
    state, out, zero = torch.zeros((1, 1, dim, dim)), torch.empty_like(v), torch.zeros(1, dtype=torch.int32)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    extend = load("lightning_extend", dtype, dim)
    extend(q, k, v, state, zero, zero, ends, torch.tensor([slope]), out, dim**-0.5)
    assert out.isfinite().all() and state.isfinite().all()
    decayed = torch.exp(-slope * torch.arange(tokens - 1, -1, -1, dtype=torch.float64))[:, None] * k[:, 0].double()
    expected = decayed.T @ v[:, 0].double()
    assert_close(state[0, 0], expected.numpy(), LIGHTNING_STATE[torch.float32], "state")
    last = dim**-0.5 * q[-1:, 0].double() @ expected
    assert_close(out[-1:, 0], last.numpy(), LIGHTNING[DTYPES[dtype]])
    # The same tokens with a scale that takes outputs of the type's range: what does not fit is infinite, by its sign.
    scale = torch.finfo(DTYPES[dtype]).max / float(last.abs().max()) * 8 * dim**-0.5
    decode, big = load("lightning_decode", dtype, dim), torch.empty_like(out[-1:])
    decode(q[-1:], k[-1:] * 0, v[-1:] * 0, state, zero, torch.zeros(1), big, scale)
    exact = scale * q[-1:, 0].double() @ state[0, 0].double()
    rounded = exact.float().to(DTYPES[dtype])
    assert rounded.isinf().any() and not rounded.isinf().all()
    assert torch.equal(big[:, 0].isinf(), rounded.isinf()) and torch.equal(big[:, 0].sign(), rounded.sign())


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
def test_the_pool_is_updated_by_slot_as_gathered_states_would_be(module):
    """L23: no gather and no copy: bits of the states in the pool are those of the same states side by side."""
    function, dim = load("lightning_decode", "f32", module), module or 16
    slots = [7, 0, 5, 2]
    call = Call("f32", dim, dim, slots, [1] * 4)
    gathered, order = call.state[slots].clone(), torch.arange(4, dtype=torch.int32)
    out, address = torch.empty_like(call.out), call.state.data_ptr()
    function(call.q, call.k, call.v, gathered, order, call.slopes, out, SCALE)
    call.decode(function)
    assert torch.equal(call.out, out) and torch.equal(call.state[slots], gathered)
    assert call.state.data_ptr() == address and call.state[[1, 3, 4, 6]].isnan().all()


def test_heads_are_independent():
    """L18: the heads in two calls of a half each, with their slices of slopes and state, give the same bits."""
    function = load("lightning_extend", "bf16", 128)
    call = Call("bf16", 128, 128, [0, 1], [70, 20])
    state, out = call.state.clone(), torch.full_like(call.out, math.nan)
    call.extend(function)
    for half in (slice(0, 2), slice(2, 4)):
        part = state[:, half].contiguous()
        rows = torch.full_like(out[:, half], math.nan).contiguous()
        function(
            call.q[:, half], call.k[:, half], call.v[:, half], part, call.slots, call.initial, call.indptr,
            call.slopes[half].contiguous(), rows, SCALE,
        )  # fmt: skip
        assert torch.equal(rows, call.out[:, half])
        assert torch.equal(part[:2], call.state[:2, half])


@pytest.mark.parametrize("module", [128, None], ids=["d128", "general"])
def test_batch_of_decode_equals_one_by_one(module):
    """L12: a batch of 128 gives the bits of 128 batches of 1."""
    function = load("lightning_decode", "bf16", module)
    dim = module or 20
    call = Call("bf16", dim, dim, list(range(127, -1, -1)), [1] * 128, heads=2)
    state, out = call.state.clone(), torch.full_like(call.out, math.nan)
    call.decode(function)
    for b in range(128):
        row = slice(b, b + 1)
        function(call.q[row], call.k[row], call.v[row], state, call.slots[row], call.slopes, out[row], SCALE)
    assert torch.equal(out, call.out)
    assert torch.equal(state[:128], call.state[:128])


def test_products_stay_in_registers():
    """The inner loops of extend are multiply-adds of whole registers, without a spill and without a call."""
    folder = build(Workload("lightning_extend", "bf16", None, 128, 128), TARGET).folder
    blocks = re.split(r"^\.L\w+:.*$", (folder / "module.s").read_text(), flags=re.MULTILINE)
    loops = [re.split(r"^\tj\w+\t", block, maxsplit=1, flags=re.MULTILINE)[0] for block in blocks]
    products = [loop for loop in loops if loop.count("vfmadd") >= 8 and loop.count("vbroadcastss") >= 2]
    tight = [loop for loop in products if not re.search(r"\(%rsp|\bcall", loop) and "%ymm" in loop]
    assert len(tight) >= 3, "raw, inter and update: a loop each"
