"""The linear layer of sm_90: as triton_linear.py has it, with the Gluon kernel for what that takes."""

from __future__ import annotations

from subten.kernels.linear.gluon_decode import linear_decode
from subten.kernels.linear.inputs import LinearWeights
from subten.kernels.linear.plan import gluon_refusal, tune_gluon_linear
from subten.kernels.linear.triton_linear import TRITON, DecodeKernel, TritonLinear

GLUON = DecodeKernel(linear_decode, tune_gluon_linear)


class GluonLinear(TritonLinear):
    """See `TritonLinear`. Layers whose sizes the Gluon kernel does not take (`plan.gluon_refusal`) go through the
    Triton kernel: which one it is depends on the layer alone."""

    def kernel(self, weights: LinearWeights) -> DecodeKernel:
        """See `TritonLinear.kernel`."""
        return GLUON if gluon_refusal(weights) is None else TRITON


LINEAR = GluonLinear()
