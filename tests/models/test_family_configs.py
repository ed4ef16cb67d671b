from __future__ import annotations

import json

import pytest
import torch
from tests.models.tiny_models import CASES, build
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from subten.errors import CheckpointError, UnknownArchitectureError
from subten.kernels.rope import rope_frequencies
from subten.models import FAMILIES, spec_from_config


def stored_config(case, **changes):
    """The config.json that transformers writes, with changes; None removes an entry."""
    config = {**json.loads(build(case).config.to_json_string()), **changes}
    config["architectures"] = changes.get("architectures", [FAMILIES[config["model_type"]].architecture])
    return {key: value for key, value in config.items() if value is not None}


def in_transformers_4_style(config, kind="rope_type"):
    parameters = dict(config["rope_parameters"])
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    rest["rope_theta"] = parameters["rope_theta"]
    default = parameters["rope_type"] == "default"
    return {**rest, "rope_scaling": None if default else {kind: parameters["rope_type"], **scaling}}


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_rope_mean_the_same(case, kind):
    config = stored_config(case)
    assert spec_from_config(in_transformers_4_style(config, kind)) == spec_from_config(config)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"])
def test_both_names_of_the_number_of_experts_mean_the_same(case):
    config = stored_config(case)
    number = config.get("num_experts") or config.get("num_local_experts")
    rest = {key: value for key, value in config.items() if key not in ("num_experts", "num_local_experts")}
    for key in ("num_experts", "num_local_experts"):
        assert spec_from_config({**rest, key: number}) == spec_from_config(config)


ROPE_VARIANTS = [
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 20_000.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768},
    {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.1,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    # The blend begins before the first channel, or ends behind the last.
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 131_072},
]


@pytest.mark.parametrize("parameters", ROPE_VARIANTS)
def test_scaled_frequencies_equal_transformers(parameters):
    config = build("llama").config
    config.rope_parameters = dict(parameters)
    config.head_dim, config.max_position_embeddings = 128, 131_072
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = spec_from_config({**json.loads(config.to_json_string()), "architectures": None}).rope
    torch.testing.assert_close(rope_frequencies(rope), frequencies.double(), rtol=3e-6, atol=0)
    assert rope.scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_yarn_takes_the_factor_from_the_two_contexts_where_it_is_missing():
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope = spec_from_config(stored_config("llama", rope_parameters=parameters)).rope
    assert rope.scaling.factor == 128 / 32


@pytest.mark.parametrize(("stated", "positions"), [(32_768, 131_072), (40_960, 131_072), (262_144, 262_144)])
def test_yarn_stretches_the_context_even_where_the_config_states_the_old_one(stated, positions):
    parameters = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = stored_config("qwen3", rope_parameters=None, rope_scaling=parameters, max_position_embeddings=stated)
    assert spec_from_config(config).max_positions == positions


def test_a_stated_original_context_wins_over_the_rope_entry():
    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    config = stored_config("llama", rope_parameters=parameters, original_max_position_embeddings=8192)
    assert spec_from_config(config).rope.scaling.original_positions == 8192


@pytest.mark.parametrize("case", CASES)
def test_the_architecture_name_alone_is_enough(case):
    config = stored_config(case)
    without = {key: value for key, value in config.items() if key != "model_type"}
    assert spec_from_config(without) == spec_from_config(config)
    assert spec_from_config({**config, "architectures": None}) == spec_from_config(config)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mixtral", "olmoe"])
def test_defaults_are_those_of_transformers(case):
    config = stored_config(case)
    optional = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "attention_bias", "head_dim")
    spec = spec_from_config({key: value for key, value in config.items() if key not in optional})
    theirs = CASES[case][0]()
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.tied_embeddings == theirs.tie_word_embeddings
    assert spec.attention.head_dim == (128 if case == "qwen3" else 48 // 6)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]},
        {"model_type": "gemma3"},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["LlamaModel"]},
        {},
    ],
)
def test_an_unknown_architecture_is_refused_with_the_supported_ones(config):
    with pytest.raises(UnknownArchitectureError) as refusal:
        spec_from_config(config)
    message = str(refusal.value)
    assert message.startswith(f"architecture {(config.get('architectures') or [config.get('model_type', '(')])[0]}")
    for family in FAMILIES.values():
        assert f"{family.architecture} ({family.model_type})" in message


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu' is not supported, only 'silu' is"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor other than 1 is not supported",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "RoPE scaling 'dynamic' is not supported; supported are default, linear, llama3, yarn",
        ),
        ("qwen2", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2]}}, "RoPE scaling 'mrope'"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters differs between layers",
        ),
        (
            "mixtral",
            {"sliding_window": 64},
            r"sliding-window attention is not supported \(window 64, context 128\)",
        ),
        *(
            (case, {"use_sliding_window": True, "sliding_window": 127, "layer_types": None}, "sliding-window")
            for case in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            "sliding-window attention",
        ),
    ],
)
def test_an_unsupported_feature_is_refused(case, changes, message):
    with pytest.raises(UnknownArchitectureError, match=message):
        spec_from_config(stored_config(case, **changes))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mixtral", {"sliding_window": 128}),
        ("mixtral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "layer_types": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 3}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
    ],
)
def test_a_window_that_never_cuts_anything_off_is_accepted(case, changes):
    assert spec_from_config(stored_config(case, **changes)).max_positions == 128


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"hidden_size": None}, "config.json has no 'hidden_size', which the model needs"),
        ("llama", {"hidden_size": "48"}, "'hidden_size' in config.json is '48' where a positive integer is"),
        ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' in config.json is 0 where a positive integer"),
        ("llama", {"vocab_size": True}, "'vocab_size' in config.json is True where a positive integer"),
        ("llama", {"rms_norm_eps": -1e-6}, "'rms_norm_eps' in config.json is -1e-06 where a positive number"),
        ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' in config.json is nan where a positive number"),
        ("llama", {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' .* is 'yes' where true or false is"),
        ("llama", {"hidden_size": 1 << 40}, "'hidden_size' in config.json is 1099511627776 where at most 1048576 is"),
        ("llama", {"num_hidden_layers": 10**9}, "'num_hidden_layers' in config.json is 1000000000 where at most"),
        ("qwen3_moe", {"num_hidden_layers": 10**9}, "'num_hidden_layers' in config.json is 1000000000 where at most"),
        ("mixtral", {"num_local_experts": 10**9}, "'num_local_experts' in config.json is 1000000000 where at most"),
        (
            "llama",
            {"max_position_embeddings": 1 << 62},
            "'max_position_embeddings' in config.json is .* where at most",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e12, "original_max_position_embeddings": 32_768}},
            "YaRN stretches the context to 32768000000000000 positions; it can be 16777216",
        ),
        ("llama", {"hidden_act": 3}, "'hidden_act' in config.json is 3 where a string is expected"),
        ("llama", {"num_key_value_heads": 4}, r"num_attention_heads \(6\) is not a multiple of .*heads \(4\)"),
        ("llama", {"head_dim": 7}, "head_dim is 7, but RoPE rotates channels in pairs"),
        ("llama", {"rope_parameters": [1]}, r"'rope_parameters' in config.json is \[1\] where an object is"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters of config.json has no 'factor', which the model needs",
        ),
        ("qwen2_moe", {"mlp_only_layers": [0.5]}, r"'mlp_only_layers' .* is \[0.5\] where a list of integers"),
        ("qwen2", {"layer_types": [1]}, r"'layer_types' in config.json is \[1\] where a list of strings is"),
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_local_experts \(5\)"),
    ],
)
def test_a_senseless_configuration_is_refused(case, changes, message):
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(stored_config(case, **changes))
