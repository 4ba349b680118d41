"""Triton's kernels, interpreted."""

import os

import pytest

from executor.model.triton.operators import TritonOps


@pytest.fixture(scope="session")
def triton() -> TritonOps:
    """Without Triton, or with a GPU for it, the test is skipped; on CI it fails."""
    if "CI" not in os.environ:
        pytest.importorskip("triton")
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("Triton compiles for the GPU, where tests/gpu has these")
    return TritonOps()
