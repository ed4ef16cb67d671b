"""lm_eval's `local-completions` against the server: log-likelihoods and generated text of a small task of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.serving import Live

from subten.engine import LLM, SamplingParams

QUESTIONS = [
    ("The sea is", [" deep and blue.", " qqqq zzzz xkcd"], 0),
    ("Once upon a", [" vbnm qwpo zzxy", " time there was"], 1),
    ("The United States of", [" America", " qxzzv"], 0),
]


@pytest.mark.external
def test_a_task_of_choices_and_one_of_texts(demo_live: Live, tmp_path: Path) -> None:
    data = tmp_path / "questions.json"
    lines = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    tasks = {
        "choices": {
            **{"task": "choices", **files, "output_type": "multiple_choice", "doc_to_text": "question"},
            **{"doc_to_choice": "choices", "doc_to_target": "answer", "target_delimiter": ""},
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "texts": {
            **{"task": "texts", **files, "output_type": "generate_until", "doc_to_text": "question"},
            **{"doc_to_target": "question", "metric_list": [{"metric": "bypass"}]},
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        },
    }
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML.
    arguments = {
        **{"model": demo_live.name, "base_url": f"{demo_live.url}/v1/completions", "num_concurrent": 2},
        **{"tokenizer": str(demo_live.llm.model.path), "max_retries": 1, "max_length": 800},
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "choices,texts"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        command, env={**os.environ, **offline, "OPENAI_API_KEY": "none"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("out/**/results_*.json"))
    assert result["results"]["choices"]["acc,none"] == 1.0
    samples = {
        name: [json.loads(line) for path in tmp_path.glob(f"out/**/samples_{name}_*") for line in path.open()]
        for name in tasks
    }
    alone = LLM(demo_live.llm.model, max_context=800, max_batch=1)
    params = SamplingParams(temperature=0, max_tokens=8, stop=(".",))
    for sample, (question, _, _) in zip(samples["texts"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == alone.generate(question, params)[0].text
    for sample, (question, options, _) in zip(samples["choices"], QUESTIONS, strict=True):
        for (answer,), option in zip(sample["resps"], options, strict=True):
            prompt = demo_live.llm.tokenizer.encode(question)
            whole = demo_live.llm.tokenizer.encode(question + option)
            scored = alone.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
            expected = sum(own.logprob for own in scored[len(prompt) :] if own is not None)
            assert float(answer[0]) == pytest.approx(expected, abs=1e-3)
