"""RMSNorm against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from titan.kernels.torch.norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 16)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype, bound: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * scale + scale).to(dtype)  # a mean that layer norm would take away
    weight = torch.randn(shape[1:], generator=generator).to(dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert (rms_norm(x, weight, 1e-6).double() - expected).norm() <= bound * expected.norm()
