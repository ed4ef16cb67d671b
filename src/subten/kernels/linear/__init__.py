"""The affine map of a linear layer, with what comes before and behind it in a decoder: a norm, a residual."""
