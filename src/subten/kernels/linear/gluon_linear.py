"""The linear layer of sm_90: as triton_linear.py has it, with the Gluon kernel for what that takes."""

from __future__ import annotations

from torch import Tensor

from subten.kernels.linear.gluon_decode import linear_decode
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.linear.plan import gluon_refusal, tune_gluon_linear
from subten.kernels.linear.triton_linear import TRITON, DecodeKernel, TritonLinear

GLUON = DecodeKernel(linear_decode, tune_gluon_linear)


class GluonLinear(TritonLinear):
    """See `TritonLinear`. What the Gluon kernel does not take goes through the Triton kernel (`gluon_refusal`)."""

    def kernel(self, x: Tensor, weights: LinearWeights) -> DecodeKernel:
        """See `TritonLinear.kernel`."""
        return GLUON if gluon_refusal(x, weights) is None else TRITON


LINEAR = GluonLinear()
