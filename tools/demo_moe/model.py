"""The demo model: Qwen3-MoE as it is trained, in plain torch.

The arithmetic is that of ``Qwen3MoeForCausalLM`` in transformers (RMSNorm before each block and per head on q and k,
rotary positions on two halves, grouped-query attention, softmax router with renormalised top-k, SwiGLU experts, tied
embeddings), so a state dict exported by ``export.py`` gives the same logits there. What differs is the layout of the
expert weights, ``[experts, intermediate, hidden]`` for all three matrices, which suits one large matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERT_METHODS = ("dense", "grouped")


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the model. The defaults are the shipped one: 34.6 million parameters, 15.8 million of them per
    token."""

    vocab_size: int = 8192
    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_context: int = 1024

    @property
    def parameters(self) -> int:
        """All parameters, the tied embedding counted once."""
        return self._outside_experts + self.num_layers * self.num_experts * self._expert

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, the output embedding included and the input one not."""
        return self._outside_experts + self.num_layers * self.experts_per_token * self._expert

    @property
    def _expert(self) -> int:
        return 3 * self.hidden_size * self.expert_size

    @property
    def _outside_experts(self) -> int:
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        norms = 2 * self.hidden_size + 2 * self.head_dim
        layer = heads + norms + self.num_experts * self.hidden_size
        return self.vocab_size * self.hidden_size + self.hidden_size + self.num_layers * layer

    def training_flops_per_token(self, context: int) -> float:
        """Six operations per active parameter, and causal attention over ``context`` tokens, forward and backward."""
        attention = 6 * self.num_layers * self.num_heads * self.head_dim * context
        return 6.0 * self.active_parameters + attention

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


class StepResult(NamedTuple):
    """What one forward pass over a batch gives; all scalars are means.

    Attributes:
        cross_entropy: nats per token.
        balance: load-balancing loss, 1 when the experts share the tokens evenly.
        router_z: mean of the squared log-sum-exp of the router's logits.
        load: float32 [layers, experts], the share of the routed slots that each expert got; rows sum to 1.
    """

    cross_entropy: Tensor
    balance: Tensor
    router_z: Tensor
    load: Tensor


class RMSNorm(nn.Module):
    """Root mean square norm in float32 over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; the result has x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Linear(nn.Module):
    """A matrix kept in float32 and used in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=std))

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with normalised and rotated heads."""

    def __init__(self, config: DemoConfig, out_std: float) -> None:
        super().__init__()
        self.config = config
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim, _INIT_STD)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim, _INIT_STD)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim, _INIT_STD)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, out_std)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, time, hidden]; cos and sin: [time, head_dim / 2]."""
        batch, time, _ = x.shape
        heads = (batch, time, -1, self.config.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, time, heads, head_dim], whose two halves form the pairs."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class MixtureOfExperts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, config: DemoConfig, method: str, out_std: float) -> None:
        super().__init__()
        self.config = config
        self.method = method
        shape = (config.num_experts, config.expert_size, config.hidden_size)
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size).normal_(std=_INIT_STD))
        self.gate = nn.Parameter(torch.empty(shape).normal_(std=_INIT_STD))
        self.up = nn.Parameter(torch.empty(shape).normal_(std=_INIT_STD))
        self.down = nn.Parameter(torch.empty(shape).normal_(std=out_std))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [tokens, hidden]. Returns the output, the balance loss, the router's z-loss and the load [experts]."""
        config = self.config
        logits = F.linear(x.float(), self.router)
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(config.experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        picked = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
        load = picked.mean(dim=0) / config.experts_per_token
        balance = config.num_experts * (load * probabilities.mean(dim=0)).sum()
        router_z = logits.logsumexp(dim=-1).square().mean()
        experts = self._dense if self.method == "dense" else self._grouped
        return experts(x, weights, chosen), balance, router_z, load

    def _dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert on every token, weight 0 where not chosen: twice the arithmetic, no data movement."""
        hidden = self.config.hidden_size
        spread = torch.zeros(x.shape[0], self.config.num_experts, device=x.device, dtype=weights.dtype)
        spread = spread.scatter(1, chosen, weights).to(x.dtype)
        gate = F.linear(x, self.gate.view(-1, hidden).to(x.dtype))
        up = F.linear(x, self.up.view(-1, hidden).to(x.dtype))
        act = (F.silu(gate) * up).view(x.shape[0], self.config.num_experts, -1) * spread[:, :, None]
        return act.flatten(1) @ self.down.view(-1, hidden).to(x.dtype)

    def _grouped(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Tokens sorted by expert, one grouped matrix product per matrix (bfloat16, compute capability 9.0)."""
        k = self.config.experts_per_token
        order = chosen.flatten().argsort()
        ends = F.one_hot(chosen.flatten(), self.config.num_experts).sum(dim=0).cumsum(0).to(torch.int32)
        rows = x[order // k]
        gate_up = torch.cat((self.gate, self.up), dim=1).to(x.dtype)
        gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        act = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
        out = torch._grouped_mm(act, self.down.to(x.dtype), offs=ends)
        position = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=x.device))
        return out[position].view(x.shape[0], k, -1).sum(dim=1)


class Layer(nn.Module):
    """Attention and experts, each on the normalised residual."""

    def __init__(self, config: DemoConfig, method: str) -> None:
        super().__init__()
        out_std = _INIT_STD / math.sqrt(2 * config.num_layers)
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, out_std)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.experts = MixtureOfExperts(config, method, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [batch, time, hidden]."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        out, balance, router_z, load = self.experts(self.post_norm(x).flatten(0, 1))
        return x + out.view_as(x), balance, router_z, load


class DemoModel(nn.Module):
    """The whole model.

    Args:
        config: its shape.
        experts: "dense" or "grouped", how the experts are computed; the result is the same up to rounding.
        compute_dtype: dtype of activations and matrix products; parameters stay float32.
    """

    def __init__(
        self, config: DemoConfig, experts: str = "dense", compute_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        if experts not in EXPERT_METHODS:
            raise ValueError(f"experts is one of {', '.join(EXPERT_METHODS)}, not {experts!r}")
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size).normal_(std=_INIT_STD))
        self.layers = nn.ModuleList(Layer(config, experts) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        frequencies = config.rope_theta ** (
            -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        angles = torch.arange(config.max_context, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """Float32 [batch, time, vocab] for tokens [batch, time]."""
        return self._run(tokens)[0]

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Float32 [batch, time - 1]: nats of each token of a [batch, time] batch but the first."""
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
            tokens.shape[0], -1
        )

    def forward(self, tokens: Tensor) -> StepResult:
        """Losses over int64 tokens [batch, time + 1]."""
        logits, balance, router_z, load = self._run(tokens[:, :-1])
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return StepResult(cross_entropy, balance, router_z, load)

    def _run(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = F.embedding(tokens, self.embedding).to(self.compute_dtype)
        balances, zs, loads = [], [], []
        for layer in self.layers:
            x, balance, router_z, load = layer(x, cos, sin)
            balances.append(balance)
            zs.append(router_z)
            loads.append(load)
        logits = F.linear(self.norm(x), self.embedding.to(self.compute_dtype)).float()
        return logits, torch.stack(balances).mean(), torch.stack(zs).mean(), torch.stack(loads)

    def matrices(self) -> Iterator[nn.Parameter]:
        """The hidden matrices, which Muon trains: [m, n] or a stack [experts, m, n]."""
        for layer in self.layers:
            yield from (p for n, p in layer.named_parameters() if p.ndim >= 2 and not n.endswith("router"))

    def other_parameters(self) -> Iterator[nn.Parameter]:
        """Embedding, norms and routers, which AdamW trains."""
        hidden = {id(p) for p in self.matrices()}
        yield from (p for p in self.parameters() if id(p) not in hidden)


def hugging_face_config(config: DemoConfig, end_of_text: int) -> dict[str, Any]:
    """The model's ``config.json`` for ``Qwen3MoeForCausalLM``, in bfloat16."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "decoder_sparse_step": 1,
        "eos_token_id": end_of_text,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": _INIT_STD,
        "intermediate_size": config.expert_size * config.experts_per_token,
        "max_position_embeddings": config.max_context,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def hugging_face_tensors(state: Mapping[str, Tensor], config: DemoConfig) -> dict[str, Tensor]:
    """The trained parameters under the names and in the layout of ``Qwen3MoeForCausalLM``, bfloat16."""
    tensors = {"model.embed_tokens.weight": state["embedding"], "model.norm.weight": state["norm.weight"]}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        tensors[theirs + "input_layernorm.weight"] = state[ours + "input_norm.weight"]
        tensors[theirs + "post_attention_layernorm.weight"] = state[ours + "post_norm.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            tensors[f"{theirs}self_attn.{name}.weight"] = state[f"{ours}attention.{name}.weight"]
        tensors[theirs + "mlp.gate.weight"] = state[ours + "experts.router"]
        for e in range(config.num_experts):
            expert = f"{theirs}mlp.experts.{e}."
            tensors[expert + "gate_proj.weight"] = state[ours + "experts.gate"][e]
            tensors[expert + "up_proj.weight"] = state[ours + "experts.up"][e]
            tensors[expert + "down_proj.weight"] = state[ours + "experts.down"][e].T
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


_INIT_STD = 0.02
