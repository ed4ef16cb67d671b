"""A real but tiny checkpoint: random Llama weights, a byte-level tokenizer with a chat template, all offline."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, then <|begin|> and <|end|>; the latter ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True) for token in ("<|begin|>", "<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>", chat_template=chat_template)


def save_tiny_model(folder: Path, *, max_positions: int = 1024, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a checkpoint with 2 layers, 2 KV heads of 64 channels and a vocabulary of bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(chat_template)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder
