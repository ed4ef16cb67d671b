"""Noise-shaped rounding: codes chosen so that the error falls where the consumer of a vector does not look.

Rounding each coordinate to its nearest level makes an error of the same size in every direction. What an error
costs is not the same in every direction: a key is only ever seen through queries, a value only through the output
projection. With `metric` the second moment of that consumer, the cost of an error e is e^T metric e. The codes of
a row are found in two passes over its coordinates, one after the other:

1. *Feedback*: round a coordinate, and move those not yet rounded by what best makes up for its error. This is the
   closed form of GPTQ (Frantar et al., arXiv:2210.17323) and LDLQ (Chee et al., arXiv:2307.13304), which use it
   on weights; here it runs on each cached vector, with the two numbers of its grid fitted to it.
2. *Descent*: refit scale and offset by weighted least squares, round them to how they are stored, and set each
   coordinate to the level that is best given all others.

In the end scale and offset are refitted once more and *unbiased* (`unbiasing`).

Both kinds of pass are one forward substitution with a lower triangular matrix, so a kernel needs one loop. The
result is an ordinary row of codes with its scale and offset: reading it costs nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from subten.formats.affine import load_affine, store_affine, unbiasing
from subten.formats.spec import TensorFormat

DAMPING = 0.1
"""Added to the metric's diagonal, as a share of its mean: the moments are estimates from a short text."""

_TILE = 32
"""Tokens in a tile: a multiple of the columns that the kernels of a matrix product take at a time."""

_BLOCK = 16
"""Coordinates between two updates of all that follow: within a block only the block itself is kept up to date."""


@dataclass(frozen=True)
class NoiseShaper:
    """A metric per head, prepared for rounding; all float32, coordinates in the order of rounding.

    `metric` and `feedback` consist of float16 numbers: the moments behind them are known far less well, and a device
    that codes tokens waits for these bytes.

    Attributes:
        order: int64 [heads, n], the coordinates from the costliest to the cheapest.
        feedback: [heads, n, n], strictly lower: how much of coordinate i's error goes to coordinate j > i.
        descent: [heads, n, n], strictly lower: the metric with each row divided by its diagonal.
        coupling: [heads, n, n], the same with the diagonal (1) and the upper part.
        metric: [heads, n, n].
    """

    order: Tensor
    feedback: Tensor
    descent: Tensor
    coupling: Tensor
    metric: Tensor

    @classmethod
    def from_metric(cls, metric: Tensor, damping: float = DAMPING, *, ordered: bool = True) -> NoiseShaper:
        """Prepare symmetric positive semidefinite metrics [heads, n, n]; their scale does not matter.

        Without `ordered` coordinates are rounded as they come.
        """
        metric = metric.double()
        mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        eye = torch.eye(metric.shape[-1], dtype=torch.float64, device=metric.device)
        metric = torch.where(mean > 0, metric / mean.clamp_min(1e-300), eye) + damping * eye
        metric = metric.half().double()
        order = metric.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
        if not ordered:
            order = torch.arange(metric.shape[-1], device=metric.device).expand_as(order)
        metric = metric.take_along_dim(order[:, :, None], 1).take_along_dim(order[:, None], 2)
        # Not `linalg.inv`: with several threads torch's batched LU fails from 151 rows on (pytorch issue 142815).
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(metric))
        upper = torch.linalg.cholesky(inverse, upper=True)
        feedback = -(upper / upper.diagonal(dim1=-2, dim2=-1)[:, :, None]).transpose(1, 2)
        coupling = metric / metric.diagonal(dim1=-2, dim2=-1)[:, :, None]
        return cls(
            order,
            feedback.tril(-1).half().float().contiguous(),
            coupling.tril(-1).float().contiguous(),
            coupling.float(),
            metric.float(),
        )

    def and_(self, other: NoiseShaper) -> NoiseShaper:
        """The heads of both, to be rounded in one go."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return NoiseShaper(*(torch.cat(pair) for pair in pairs))


def shape(x: Tensor, fmt: TensorFormat, shaper: NoiseShaper, initial_step: float) -> tuple[Tensor, Tensor]:
    """Code rows with one scale and offset each so that the metric's error is small.

    Args:
        x: float32 [tokens, heads, n] in coded space.
        fmt: bits, and how scale and offset are stored.
        shaper: of the heads.
        initial_step: of the grid, in standard deviations of a row.

    Returns:
        Codes uint8 [tokens, heads, n], and the grids as they are stored, [tokens, heads, parts].
    """
    levels, tokens = (1 << fmt.bits) - 1, x.shape[0]
    # Tokens innermost: each step of a pass then works on contiguous rows.
    y = whole_tiles(x).permute(1, 2, 0).take_along_dim(shaper.order[:, :, None], 1).contiguous()
    mean = y.mean(1, keepdim=True)
    scale = (y - mean).square().mean(1, keepdim=True).sqrt() * initial_step
    offset = mean - scale * (levels / 2)
    codes = feedback_pass(in_steps(y, scale, offset), shaper, levels)
    scale, offset = fit_grid(y, codes, scale, shaper)
    scale, offset = load_affine(store_affine(scale, offset, fmt), fmt)
    codes = descent_pass(in_steps(y, scale, offset), codes, shaper, levels)
    scale, offset = fit_grid(y, codes, scale, shaper)
    weighted = shaper.metric @ y
    gain = unbiasing((y * weighted).sum(1, keepdim=True), ((scale * codes + offset) * weighted).sum(1, keepdim=True))
    grid = store_affine(scale * gain, offset * gain, fmt)
    # NaN has no code: it becomes 0 here and stays visible in the scale.
    stored = codes.nan_to_num(0.0).to(torch.uint8)
    unordered = torch.empty_like(stored).scatter_(1, shaper.order[:, :, None].expand_as(stored), stored)
    return unordered.permute(2, 0, 1)[:tokens], grid[:, 0].transpose(0, 1)[:tokens]


def whole_tiles(x: Tensor) -> Tensor:
    """Tokens filled up with zeros to whole tiles: a matrix product rounds differently where the number of its
    columns is another, and one code that falls otherwise moves those after it. What a token becomes must not depend
    on how many were coded with it."""
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -x.shape[0] % _TILE))


def in_steps(y: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Rows in units of their own grid: a code's level is the code itself."""
    return (y - offset) / scale.clamp_min(1e-12)


def feedback_pass(target: Tensor, shaper: NoiseShaper, levels: int) -> Tensor:
    """Round [heads, n, tokens] coordinate by coordinate, handing each error on. Uses `target` up."""
    return _substitute(target, shaper.feedback, levels, None)


def descent_pass(target: Tensor, codes: Tensor, shaper: NoiseShaper, levels: int) -> Tensor:
    """One sweep of coordinate descent on the metric's error."""
    # The best value of a coordinate, given the others, is its code minus what the others pull it by. It does not
    # depend on the coordinate's own code, so a sweep only has to follow the changes before it.
    best = codes + shaper.coupling @ (target - codes)
    return _substitute(best, shaper.descent, levels, codes)


def _substitute(best: Tensor, lower: Tensor, levels: int, old: Tensor | None) -> Tensor:
    """Round coordinate by coordinate; coordinate j is lowered by lower[j, i] times the step taken at i < j.

    The step is the rounding error where there are no old codes, and the change of the code where there are: with
    `feedback` the sign of the matrix carries the difference.
    """
    size = best.shape[1]
    codes, steps = torch.empty_like(best), torch.empty_like(best)
    # On a CPU the time goes into the number of operations: rows as views made once, one operation per update.
    best_rows, code_rows, step_rows = (x.unbind(1) for x in (best, codes, steps))
    old_rows = best_rows if old is None else old.unbind(1)
    columns = lower.unsqueeze(-1).unbind(2)
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        for i in range(start, end):
            torch.clamp(best_rows[i], 0, levels, out=code_rows[i]).round_()
            torch.sub(code_rows[i], old_rows[i], out=step_rows[i])
            if i + 1 < end:
                best[:, i + 1 : end].addcmul_(columns[i][:, i + 1 : end], steps[:, i : i + 1], value=-1)
        if end < size:
            best[:, end:].baddbmm_(lower[:, end:, start:end], steps[:, start:end], alpha=-1)
    return codes


def fit_grid(y: Tensor, codes: Tensor, scale: Tensor, shaper: NoiseShaper) -> tuple[Tensor, Tensor]:
    """Scale and offset of least metric error for given codes; the old scale where the codes say nothing."""
    weights = shaper.metric.sum(1)[:, :, None]
    total = weights.sum(1, keepdim=True)
    weighted = shaper.metric @ codes
    linear = weighted.sum(1, keepdim=True)
    square = (weighted * codes).sum(1, keepdim=True)
    y_one = (y * weights).sum(1, keepdim=True)
    y_code = (y * weighted).sum(1, keepdim=True)
    determinant = total * square - linear * linear
    slope = (total * y_code - linear * y_one) / determinant.clamp_min(1e-12)
    fitted = torch.where((determinant > 1e-3 * total * square) & (slope > 0), slope, scale)
    return fitted, (y_one - fitted * linear) / total
