"""The Muon optimiser for stacks of hidden matrices.

Method: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): the momentum of each
matrix
is replaced by the nearest semi-orthogonal matrix, found with five Newton-Schulz iterations. The step is scaled by
0.2 sqrt(max(m, n)), so that its root mean square is that of an AdamW step of the same rate (J. Liu et al., "Muon is
scalable for LLM training", 2025). Written here instead of ``torch.optim.Muon`` because that one takes single matrices
only: all experts of all layers are one batched product here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Semi-orthogonal matrices near [batch, m, n] ones: singular values come to lie between about 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(-2, -1)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.transpose(-2, -1)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        parameters: matrices [m, n] or stacks of them [batch, m, n].
        lr: the rate; a step changes an element by about 0.2 ``lr``.
        momentum: of the gradient average.
        weight_decay: times ``lr`` is taken off every weight each step.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step. All parameters must have a gradient."""
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            averages = [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            directions = torch._foreach_lerp(gradients, averages, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for indices in _by_shape(parameters).values():
                stacked = torch.cat([directions[i].view(-1, *directions[i].shape[-2:]) for i in indices])
                scale = 0.2 * max(stacked.shape[-2:]) ** 0.5
                steps = orthogonalise(stacked).split([directions[i].numel() // stacked[0].numel() for i in indices])
                chosen = [parameters[i] for i in indices]
                torch._foreach_add_(
                    chosen,
                    [s.reshape(p.shape).to(p.dtype) for s, p in zip(steps, chosen, strict=True)],
                    alpha=-group["lr"] * scale,
                )


def _by_shape(parameters: list[nn.Parameter]) -> dict[torch.Size, list[int]]:
    groups: dict[torch.Size, list[int]] = defaultdict(list)
    for i, p in enumerate(parameters):
        groups[p.shape[-2:]].append(i)
    return groups
