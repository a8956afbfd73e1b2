"""A small continuous-batching loop: requests arrive, extend in chunks, decode together and give their slots back."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tilewright.codegen.demo.model import Attention
from tilewright.runtime.forward_batch import ForwardBatch, ForwardMode
from tilewright.runtime.pools import ReqToTokenPool, TokenToKVPool


@dataclass
class Request:
    """One prompt on its way through the engine; `output` grows by a token a step."""

    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0  # the step before which it is not there
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # f32 [vocab] an output token, where the engine keeps them
    computed: int = 0  # tokens whose keys and values are in the pool
    row: int = -1
    slots: torch.Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """The whole sequence so far."""
        return self.prompt + self.output

    @property
    def cache_len(self) -> int:
        """Slots of its whole life: the last token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Spent:
    """Work of one kind: tokens fed to the model and seconds in its forwards."""

    tokens: int = 0
    seconds: float = 0.0


class Model(Protocol):
    """What the engine needs of a model; `Llama` is one."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, forward_batch: Any
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of int64 tokens [T] at positions [T]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores f32 [N, vocab] of hidden states [N, hidden]."""


class Engine:
    """Greedy generation for many requests at once.

    A request is admitted, in order of arrival, when a row of the request table and the slots of its whole life are
    free, so none is ever thrown out again. Each step is one extend forward of at most `chunk` prompt tokens, shared by
    the requests whose prompts are not yet read, then one decode forward of all that have a token to go on from.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        *,
        chunk: int,
        end_token: int | None = None,
        keep_logits: bool = False,
    ):
        """Wire a model to a backend and to the pools that the backend reads.

        Args:
            model: makes hidden states and logits.
            attention: the backend that serves the model's layers.
            req_to_token_pool: the request table.
            token_to_kv_pool: the KV pool, which hands out the slots.
            chunk: most prompt tokens in one extend forward.
            end_token: a request that produces it leaves early; None: each makes all its tokens.
            keep_logits: keep the scores each output token was chosen from.
        """
        if chunk < 1:
            raise ValueError(f"chunk: got {chunk}, expected at least 1 token")
        self.model = model
        self.attention = attention
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.chunk = chunk
        self.end_token = end_token
        self.keep_logits = keep_logits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.spent = {mode: Spent() for mode in (ForwardMode.EXTEND, ForwardMode.DECODE)}

    def run(self, requests: list[Request]) -> None:
        """Serve requests until each has its `max_new_tokens`, or the end token; a request joins at step `arrival`.

        Raises:
            ValueError: a request that is empty, or too long for the pools even alone.
        """
        for request in requests:
            self._check(request)
        coming = deque(sorted(requests, key=lambda request: request.arrival))
        step = 0
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= step:
                self.waiting.append(coming.popleft())
            self.step()
            step += 1

    def step(self) -> None:
        """Admit, extend by one chunk, decode one token."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        room, extending = self.chunk, []
        for request in self.running:
            count = min(room, len(request.prompt) - request.computed)
            if count > 0:
                extending.append((request, count))
                room -= count
        if extending:
            self._forward(ForwardMode.EXTEND, extending)
        decoding = [(request, 1) for request in self.running if request.output]
        if decoding:
            self._forward(ForwardMode.DECODE, decoding)

    def _check(self, request: Request) -> None:
        room = min(self.req_to_token_pool.max_context_len, self.token_to_kv_pool.size)
        asked = f"{len(request.prompt)} prompt and {request.max_new_tokens} new tokens"
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(f"request: {asked}, expected at least 1 of each")
        if request.cache_len > room:
            raise ValueError(
                f"request: {asked} need {request.cache_len} slots, got {room}: shorten it or make larger pools"
            )

    def _admit(self, request: Request) -> bool:
        rows = self.req_to_token_pool.alloc(1)
        if rows is None:
            return False
        slots = self.token_to_kv_pool.alloc(request.cache_len)
        if slots is None:
            self.req_to_token_pool.free(rows)
            return False
        request.row, request.slots = rows[0], slots
        self.req_to_token_pool.write((request.row, slice(request.cache_len)), slots)
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.req_to_token_pool.free(request.row)
        assert request.slots is not None
        self.token_to_kv_pool.free(request.slots)
        request.row, request.slots = -1, None

    def _forward(self, mode: ForwardMode, work: list[tuple[Request, int]]) -> None:
        """Feed each request its next `count` tokens; those that reach the end of their sequence get one more."""
        started = time.perf_counter()
        spans = [range(request.computed, request.computed + count) for request, count in work]
        tokens = [request.tokens[i] for (request, _), span in zip(work, spans, strict=True) for i in span]
        positions = torch.tensor([position for span in spans for position in span])
        hidden = self.model.forward(torch.tensor(tokens), positions, self.attention, self._batch(mode, work, positions))

        last_row, ended = -1, []
        for request, count in work:
            request.computed += count
            last_row += count
            if request.computed == len(request.tokens):
                ended.append((request, last_row))
        if ended:
            logits = self.model.logits(hidden[[row for _, row in ended]])
            for (request, _), scores, token in zip(ended, logits, logits.argmax(dim=-1).tolist(), strict=True):
                request.output.append(token)
                if self.keep_logits:
                    request.logits.append(scores)
                if token == self.end_token or len(request.output) == request.max_new_tokens:
                    self._leave(request)
        self.spent[mode].tokens += len(tokens)
        self.spent[mode].seconds += time.perf_counter() - started

    def _batch(self, mode: ForwardMode, work: list[tuple[Request, int]], positions: torch.Tensor) -> ForwardBatch:
        rows = torch.tensor([request.row for request, _ in work])
        prefix = torch.tensor([request.computed for request, _ in work], dtype=torch.int32)
        added = torch.tensor([count for _, count in work], dtype=torch.int32)
        seq_lens = (prefix + added).long()
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(work),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=self.req_to_token_pool.req_to_token[rows.repeat_interleave(added), positions].long(),
            extend_seq_lens=added,
            extend_prefix_lens=prefix,
            extend_start_loc=added.cumsum(0, dtype=torch.int32) - added,
            seq_lens_cpu=seq_lens,
        )
