"""Serve the same requests through the paged backend and through dense torch attention, and time both."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tilewright.codegen.demo.engine import Engine, Request, Spent
from tilewright.codegen.demo.gguf_model import ChatModel
from tilewright.codegen.demo.model import Attention, Llama
from tilewright.codegen.demo.sdpa import SDPABackend
from tilewright.runtime.backend import PagedAttentionBackend
from tilewright.runtime.forward_batch import ForwardMode
from tilewright.runtime.pools import ReqToTokenPool, TokenToKVPool

MAX_RUNNING = 4  # requests at a time; more wait for a free row
ARRIVAL_STEPS = 4  # steps between two arrivals


def paged_engine(model: Llama, *, max_running: int, length: int, **options: Any) -> Engine:
    """Wire a model to the paged backend over pools for `max_running` requests of `length` tokens; options go to Engine.

    This is all that a serving loop needs: a request table, a KV pool, and an object that carries both to the backend.
    """
    c = model.config
    table = ReqToTokenPool(max_running, length)
    pool = TokenToKVPool(
        max_running * length, layer_num=c.num_layers, head_num=c.num_kv_heads, head_dim=c.head_dim, dtype=model.dtype
    )
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        model_config=SimpleNamespace(context_len=length, num_attention_heads=c.num_qo_heads),
    )
    return Engine(model, PagedAttentionBackend(runner), table, pool, **options)


def dense_engine(model: Llama, *, max_running: int, length: int, **options: Any) -> Engine:
    """The same over dense torch attention; of the pools it uses the numbering alone."""
    table = ReqToTokenPool(max_running, length)
    pool = TokenToKVPool(max_running * length, layer_num=1, head_num=1, head_dim=1, dtype=model.dtype)
    backend = SDPABackend(model.config, rows=len(table.req_to_token), length=length, dtype=model.dtype)
    return Engine(model, backend, table, pool, **options)


class Timed:
    """A backend that counts the seconds spent in it, planning included."""

    def __init__(self, backend: Attention):
        """Wrap a backend."""
        self.backend = backend
        self.seconds = 0.0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Pass on."""
        started = time.perf_counter()
        self.backend.init_forward_metadata(forward_batch)
        self.seconds += time.perf_counter() - started

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """Pass on."""
        started = time.perf_counter()
        out = self.backend.forward(*args, **options)
        self.seconds += time.perf_counter() - started
        return out


@dataclass(frozen=True)
class Run:
    """One measured run of all requests."""

    extend: Spent
    decode: Spent
    attention_seconds: float

    @property
    def seconds(self) -> float:
        """Of all forwards together."""
        return self.extend.seconds + self.decode.seconds


@dataclass(frozen=True)
class Comparison:
    """Answers of the paged run, and the faster of the measured runs of each kind."""

    answers: list[str]
    paged: Run
    dense: Run
    new_tokens: int
    same_tokens: int  # how many of new_tokens dense attention chose too


def compare(chat: ChatModel, prompts: list[str], *, max_new_tokens: int, chunk: int, rounds: int = 2) -> Comparison:
    """Answer prompts through the paged backend, then time it beside dense attention.

    The first, untimed run fixes how many tokens each request makes (up to the end token) and warms the kernels up;
    every timed run makes exactly those numbers, so both backends do the same work. Timed runs alternate.
    """
    tokens = [chat.encode(prompt) for prompt in prompts]
    longest = max(len(prompt) for prompt in tokens) + max_new_tokens
    room = {"max_running": MAX_RUNNING, "length": longest, "chunk": chunk}
    requests = [Request(prompt, max_new_tokens, arrival=i * ARRIVAL_STEPS) for i, prompt in enumerate(tokens)]
    paged_engine(chat.model, end_token=chat.end_token, **room).run(requests)
    answers = [chat.decode(request.output) for request in requests]
    dense_engine(chat.model, **room).run([Request(prompt, 2) for prompt in tokens])

    runs: dict[Any, list[tuple[Run, list[Request]]]] = {paged_engine: [], dense_engine: []}
    for _ in range(rounds):
        for make, results in runs.items():
            again = [Request(request.prompt, len(request.output), request.arrival) for request in requests]
            results.append((_timed(make(chat.model, **room), again), again))
    paged, dense = (min(results, key=lambda result: result[0].seconds) for results in runs.values())
    pairs = [pair for a, b in zip(paged[1], dense[1], strict=True) for pair in zip(a.output, b.output, strict=True)]
    return Comparison(answers, paged[0], dense[0], len(pairs), sum(a == b for a, b in pairs))


def _timed(engine: Engine, requests: list[Request]) -> Run:
    engine.attention = timed = Timed(engine.attention)
    engine.run(requests)
    return Run(engine.spent[ForwardMode.EXTEND], engine.spent[ForwardMode.DECODE], timed.seconds)
