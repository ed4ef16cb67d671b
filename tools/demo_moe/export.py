"""Turn trained weights into the folder that is shipped, and check it against transformers.

    python -m tools.demo_moe.export --weights DIR --tokenizer DIR --out DIR [--bf16-out DIR]

``--out`` receives the FP8 form: every linear layer in e4m3 with one scale per block of 128 x 128, embedding, norms
and routers in bfloat16, in the layout of the public Qwen3 FP8 checkpoints. ``--bf16-out`` receives everything in
bfloat16.
Fails if the FP8 folder is over 40 MB, if a text file in it names a path of this machine, or if transformers computes
other logits from the bfloat16 weights than the model that was trained.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tools.demo_moe.folders import load_folder
from tools.demo_moe.model import DemoConfig, DemoModel, hugging_face_config, hugging_face_tensors
from tools.demo_moe.weights_file import read_weights
from torch import Tensor

from subten.checkpoints.fp8 import DEFAULT_BLOCK, quantise_blocks

SIZE_LIMIT = 40_000_000
_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


def quantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The linear layers as e4m3 codes with float32 scales ``NAME_scale_inv`` per block; the rest as it is."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _LINEAR.search(name):
            out[name], out[f"{name}_scale_inv"] = quantise_blocks(tensor)
        else:
            out[name] = tensor
    return out


def quantisation_config(config: DemoConfig) -> dict[str, Any]:
    """What a public Qwen3 FP8 checkpoint says about its quantisation."""
    kept = ["lm_head"]
    for i in range(config.num_layers):
        kept += [f"model.layers.{i}.{part}" for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": kept,
        "quant_method": "fp8",
        "weight_block_size": list(DEFAULT_BLOCK),
    }


def write_folder(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], tokenizer: Path, out: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    end = settings["eos_token_id"]
    generation = {"bos_token_id": end, "eos_token_id": end, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def check_folder(folder: Path) -> int:
    """The bytes of a folder. Raises ValueError if it is too large or a text file names a path of this machine."""
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > SIZE_LIMIT:
        raise ValueError(f"{folder} has {size} bytes, and at most {SIZE_LIMIT} may ship")
    for path in folder.glob("*config.json"):
        found = re.search(r'"(/[\w.-]+){2,}|/(home|root|tmp|work)/', path.read_text(encoding="utf-8"))
        if found:
            raise ValueError(f"{path.name} names a path: {found.group(0)}")
    return size


@torch.inference_mode()
def logit_difference(model: DemoModel, folder: Path, seed: int = 0) -> float:
    """Relative difference of transformers' logits from the trained model's, both in float32, on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (2, min(96, model.config.max_context)), generator=generator)
    ours, theirs = model.logits(tokens), load_folder(folder)(tokens).logits
    return float((ours - theirs).norm() / ours.norm())


def main() -> None:
    """Parse the command line, export, check, and print sizes and differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder written by the training command")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bf16-out", type=Path)
    arguments = parser.parse_args()
    state, about = read_weights(arguments.weights)
    config = DemoConfig(**about["config"])
    model = DemoModel(config, compute_dtype=torch.float32)
    model.load_state_dict(state)
    tensors = hugging_face_tensors(state, config)
    settings = hugging_face_config(config, end_of_text=config.vocab_size - 2)
    with tempfile.TemporaryDirectory() as temporary:
        wide = arguments.bf16_out or Path(temporary)
        write_folder(tensors, settings, arguments.tokenizer, wide)
        difference = logit_difference(model, wide)
        print(f"transformers on bfloat16 weights: logits differ by {difference:.1e}")
        if difference > 1e-4:
            raise SystemExit("transformers computes other logits than the model that was trained")
    fp8_settings = {**settings, "quantization_config": quantisation_config(config)}
    write_folder(quantised(tensors), fp8_settings, arguments.tokenizer, arguments.out)
    size = check_folder(arguments.out)
    print(
        f"{arguments.out.name}: {size / 1e6:.2f} MB; "
        f"FP8 logits differ by {logit_difference(model, arguments.out):.1e}"
    )


if __name__ == "__main__":
    main()
