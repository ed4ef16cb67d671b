"""Support: tiny models behind the engine, and a sequence driven step by step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import transformers
from tests.models.tiny_models import CPU, MemoryCheckpoint, build, decoder_of
from tests.support.tiny_model import byte_tokenizer

from subten.engine import LLM, LoadedModel, Tokenizer, load_model
from subten.engine.calibrate import Calibration, calibrate
from subten.engine.runner import Runner, Work
from subten.formats import PageLayout, get_format
from subten.kernels import Use, select_attention
from subten.kernels.attention import PrefillRule
from subten.kvcache import CacheBooks

# Every family once, at sizes that the pages can hold: head_dim a multiple of 16.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"head_dim": 32},
    "olmoe": {},
    "granitemoe": {},
}


def reference_and_model(
    family: str, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[transformers.PreTrainedModel, LoadedModel]:
    """One random model twice: as transformers runs it, and behind our engine. A family, or a variant of one."""
    fixed = {"hidden_size": 96, **FAMILIES[family.split("-")[0]], **sizes}
    reference = build(family, max_position_embeddings=640, **fixed)
    state = reference.state_dict()
    if reference.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    config = reference.config.to_dict()
    return reference, _loaded(MemoryCheckpoint(config, _as_saved(reference, state), []), family, dtype)


def _as_saved(reference: transformers.PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as `save_pretrained` names them."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder, state_dict=state)
        return load_file(Path(folder) / "model.safetensors")


def _loaded(checkpoint: MemoryCheckpoint, name: str, dtype: torch.dtype) -> LoadedModel:
    decoder = decoder_of(checkpoint, dtype)
    return LoadedModel(
        name=name,
        path=Path("nowhere"),
        spec=decoder.spec,
        decoder=decoder,
        tokenizer=Tokenizer(byte_tokenizer()),
        fingerprint="0",
        dtype=dtype,
        device=CPU,
        kernels=decoder.kernels,
    )


@cache
def calibration_of(model: LoadedModel) -> Calibration:
    """Measured once per model; they are used as they are, whatever lies in a folder."""
    return calibrate(model)


class Driver:
    """Books and runner without the scheduler, for tests that decide themselves what runs when."""

    def __init__(
        self,
        model: LoadedModel,
        kv: str,
        rule: PrefillRule = "window",
        pages: int = 64,
        attention: str = "torch",
        recent: int = 8,
    ) -> None:
        fmt = get_format(kv, sinks=4, recent=recent)
        layout = PageLayout(fmt, model.geometry.head_dim)
        choice = select_attention(Use(model.device, model.dtype, (layout,)), attention)
        layout = replace(layout, ahead=choice.ahead)
        self.books = CacheBooks(layout, pages, 8)
        calibration = calibration_of(model) if fmt.calibrated else None
        self.runner = Runner(model, layout, pages, 8, calibration, rule, choice.load(), 8, 64)

    def step(self, tokens_of: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to sequences in one ragged batch; logits [tokens, vocab] of each."""
        batch = [Work(self.books.append(sequence, tokens), tokens) for sequence, tokens in tokens_of.items()]
        step, sizes = self.runner.begin(batch), [len(tokens) for tokens in tokens_of.values()]
        step.advance(step.layers_left)
        parts = torch.cat(list(step.all_logits(0, sum(sizes)))).split(sizes)
        return dict(zip(tokens_of, parts, strict=True))


def save_model(folder: Path, **sizes: int) -> Path:
    """A Llama checkpoint with a byte tokenizer, of any size."""
    tokenizer = byte_tokenizer()
    model = build("llama", vocab_size=len(tokenizer), **sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores(llm: LLM, tokens: list[int], decode_tail: int = 0) -> torch.Tensor:
    """All logits of a text along the serving path."""
    return torch.cat(list(llm.score(tokens, decode_tail)))


def load_float64(folder: Path) -> LoadedModel:
    """In float64 a rounding difference of a matrix product does not flip a code, so results can be compared."""
    return load_model(folder, dtype="float64")
