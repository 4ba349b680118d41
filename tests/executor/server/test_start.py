"""If this fails, an executor starts more slowly, or PyTorch lacks what it left out at the start."""

import subprocess
import sys

import pytest

SCRIPT = """
import inspect, sys
from executor.__main__ import META_KERNELS, _without_meta_kernels, _without_modules_of_frames

found = inspect.getmodule
with _without_meta_kernels(), _without_modules_of_frames():
    import torch
print(META_KERNELS in sys.modules, "torch._refs" in sys.modules, inspect.getmodule is found, end=" ")
{use}
x, grid = torch.empty(1, 2, 3, 3, 3, device="meta"), torch.empty(1, 4, 4, 4, 3, device="meta")
print(tuple(torch.ops.aten.grid_sampler_3d(x, grid, 0, 0, False).shape), end="")
"""


@pytest.mark.parametrize(
    "use", ["import torch._meta_registrations", "torch._meta_registrations.aten"]
)
def test_what_pytorchs_import_leaves_out_is_imported_when_it_is_used(use: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(use=use)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "False False True (1, 2, 4, 4, 4)"
