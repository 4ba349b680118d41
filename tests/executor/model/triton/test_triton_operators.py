"""Kernels in Triton, interpreted on the CPU, compute what PyTorch does."""

import pytest
import torch

from executor.model.triton.operators import TritonOps
from tests.executor.support.flashinfer.triton_checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_kernel_computes_what_pytorch_does(check: Check, triton: TritonOps) -> None:
    torch.manual_seed(0)
    check(triton, torch.device("cpu"))
