"""One layer's cache as the attention operations take it: memory, and how calibration has the layer coded."""

from __future__ import annotations

import torch
from torch import Tensor

from subten.engine.calibrate import Calibration
from subten.engine.loading import LoadedModel
from subten.formats import PageLayout
from subten.formats.coding import uncalibrated_coding
from subten.kernels.attention import LayerCache, MeanKey


def layer_cache(
    model: LoadedModel, index: int, memory: tuple[Tensor, Tensor], layout: PageLayout, calibration: Calibration | None
) -> LayerCache:
    """Of the model's layer `index`.

    Args:
        model: the model.
        index: of the layer.
        memory: its pages and windows.
        layout: of its pages.
        calibration: of the model; needed where the layout's format is a calibrated one.
    """
    geometry, fmt, mean_key = model.geometry, layout.format, None
    if calibration is None or not fmt.calibrated:
        none_kept = torch.zeros(geometry.num_kv_heads, 0, dtype=torch.int64, device=model.device)
        coding = uncalibrated_coding(fmt, geometry.head_dim, none_kept)
    else:
        coding = calibration.coding(index, fmt, model)
        removed = calibration.removed_mean(index, fmt)
        if removed is not None:
            mean_key = MeanKey(removed.to(model.device), model.decoder.rope)
    return LayerCache(*memory, coding, mean_key, layout)
