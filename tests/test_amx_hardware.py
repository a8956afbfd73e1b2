"""What only a processor with AMX can show: large sizes, torch using tiles in between, the permission of threads."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from amx_modules import REAL, module, serving
from batches import make_decode_batch, make_paged_batch
from tolerances import PAGED, assert_close, assert_lse_close

from tilewright import decode_attention, extend_attention
from tilewright.runtime import features
from tilewright.schedules.targets import get_target

pytestmark = pytest.mark.amx
TOLERANCE = PAGED[torch.bfloat16]
SIZES = {"num_qo_heads": 32, "num_kv_heads": 8, "dim": 128, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def real():
    for name in ("paged_decode-bf16-g4-d128", "paged_extend-bf16-g4-d128"):
        module(name, REAL)
    module("merge-bf16")
    with serving(REAL):
        yield


class Requests:
    """Requests of `prefixes` keys in a pool in random order and `news` new tokens, and float64 attention over them.

    As tests/batches.py, for sizes at which its loops over tokens and heads take minutes.
    """

    def __init__(self, prefixes, news, from_pool):
        generator = torch.Generator().manual_seed(3)
        heads, kv_heads, dim = SIZES["num_qo_heads"], SIZES["num_kv_heads"], SIZES["dim"]

        def draw(*shape):
            return torch.randn(*shape, generator=generator).bfloat16()

        self.prefixes, self.news = prefixes, news
        in_pool = [p + n for p, n in zip(prefixes, news, strict=True)] if from_pool else prefixes
        self.pool = [draw(sum(in_pool) + 1, kv_heads, dim) for _ in range(2)]
        self.q = draw(sum(news), heads, dim)
        self.new = None if from_pool else [draw(sum(news), kv_heads, dim) for _ in range(2)]
        slots = torch.randperm(sum(in_pool), generator=generator).split(in_pool)
        self.table = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True).int()
        self.slots, self.rows = slots, torch.arange(len(news), dtype=torch.int32)
        self.lens = torch.tensor(prefixes) + torch.tensor(news)

    def expected(self, window=1 << 30, logit_cap=0.0):
        """(out, lse) of every token, float64 numpy."""
        outs, lses, first = [], [], 0
        for b, (prefix, new) in enumerate(zip(self.prefixes, self.news, strict=True)):
            rows = slice(first, first + new)
            first += new
            parts = [
                [x[self.slots[b]]] + ([] if self.new is None else [y[rows]])
                for x, y in zip(self.pool, self.new or self.pool, strict=True)
            ]
            # Heads of a group are rows over one KV head: expanded keys would be gigabytes.
            keys, values = (torch.cat(part).double().transpose(0, 1) for part in parts)
            kv_heads, _, dim = keys.shape
            rows_of_head = self.q[rows].double().view(new, kv_heads, -1, dim).permute(1, 0, 2, 3)
            scores = (rows_of_head.flatten(1, 2) @ keys.transpose(1, 2)).mul_(dim**-0.5).unflatten(1, (new, -1))
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            distance = torch.arange(prefix, prefix + new)[:, None] - torch.arange(prefix + new)
            scores.masked_fill_(((distance < 0) | (distance >= window))[:, None], -torch.inf)
            lse = scores.logsumexp(3)
            weighted = (scores.sub_(lse[..., None]).exp_().flatten(1, 2) @ values).unflatten(1, (new, -1))
            outs.append(weighted.transpose(0, 1).flatten(1, 2))
            lses.append(lse.transpose(0, 1).flatten(1, 2))
        return torch.cat(outs).numpy(), torch.cat(lses).numpy()


@functools.lru_cache(maxsize=1)
def decode_requests(*lengths):
    batch = Requests([n - 1 for n in lengths], [1] * len(lengths), from_pool=True)
    return batch, batch.expected()


@functools.lru_cache(maxsize=4)
def extend_requests(prefixes, news):
    return Requests(prefixes, news, from_pool=False)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    "lengths", [[16384], [4096] * 16, [1024] * 16, [2048] * 64, [65536, *[500] * 64]],
    ids=["1x16384", "16x4096", "16x1024", "64x2048", "65536 and 64x500"],
)  # fmt: skip
def test_large_decode(lengths, invariant):
    batch, (wanted, wanted_lse) = decode_requests(*lengths)
    out, lse = decode_attention(
        batch.q, *batch.pool, batch.table, batch.rows, batch.lens, return_lse=True, batch_invariant=invariant
    )
    assert_close(out, wanted, TOLERANCE)
    assert_lse_close(lse, wanted_lse, TOLERANCE)


@pytest.mark.parametrize(
    "prefixes, news",
    [((0,), (1024,)), ((0,), (2500,)), ((2048,) * 4, (256,) * 4), ((0, *(999,) * 40), (1000, *(1,) * 40))],
    ids=["1x1024", "1x2500", "4x(2048+256)", "1000 beside 40 decodes"],
)
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"logit_cap": 20.0}], ids=["plain", "window", "cap"])
def test_large_extend(prefixes, news, options):
    batch = extend_requests(prefixes, news)
    out, lse = extend_attention(
        batch.q, *batch.new, *batch.pool, batch.table, batch.rows, batch.lens, torch.tensor(news), return_lse=True,
        **options,
    )  # fmt: skip
    wanted, wanted_lse = batch.expected(**options)
    assert_close(out, wanted, TOLERANCE)
    assert_lse_close(lse, wanted_lse, TOLERANCE)


def test_torch_and_our_kernels_take_turns_on_the_tiles():
    """oneDNN keeps tile configurations of its own on the very threads that ours run on: neither may see the other's."""
    decode, extend = make_decode_batch([700, 33, 1500], **SIZES), make_paged_batch([0, 300], [200, 77], **SIZES)
    shapes = ((512, 512, 512), (33, 96, 70))
    products = [(torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()) for m, k, n in shapes]

    def ours():
        return decode_attention(*decode.decode_arguments()), extend_attention(*extend.extend_arguments())

    def theirs():
        return [a @ b for a, b in products]

    wanted_ours, wanted_theirs = ours(), theirs()
    for (a, b), product in zip(products, wanted_theirs, strict=True):
        assert_close(product, (a.double() @ b.double()).numpy(), TOLERANCE)
    for _ in range(200):
        for got, wanted in zip(theirs(), wanted_theirs, strict=True):
            assert_close(got, wanted.double().numpy(), TOLERANCE)
        assert all(torch.equal(got, wanted) for got, wanted in zip(ours(), wanted_ours, strict=True))


def test_a_thread_that_is_older_than_the_permission_may_use_tiles():
    """Permission is the process's: a thread that was there before the first module was loaded has it too."""
    script = f"""
import json, sys, threading, torch
sys.path[:0] = {sys.path!r}
from amx_modules import serving
from batches import make_decode_batch
from tilewright import decode_attention
(torch.randn(1 << 20) + 1).sum()  # the pool's threads are there
asked, outputs = threading.Event(), []
def attend():
    asked.wait()
    with serving({REAL!r}):
        batch = make_decode_batch([500], num_qo_heads=32, num_kv_heads=8, dim=128, dtype=torch.bfloat16)
        outputs.append(decode_attention(*batch.decode_arguments()).double().sum().item())
older = threading.Thread(target=attend)
older.start()
asked.set()
older.join()
print(json.dumps(outputs))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    batch = make_decode_batch([500], **SIZES)
    assert json.loads(done.stdout) == [decode_attention(*batch.decode_arguments()).double().sum().item()]


def test_a_child_by_fork_has_the_permission():
    assert features.missing_features(get_target(REAL).features) == []
    batch = make_decode_batch([500], **SIZES)
    wanted = decode_attention(*batch.decode_arguments())
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # as every forked worker must: libgomp's threads are not copied
        os._exit(not torch.equal(decode_attention(*batch.decode_arguments()), wanted))
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(decode_attention(*batch.decode_arguments()), wanted)
