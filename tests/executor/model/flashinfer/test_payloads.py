"""If this fails, experts on other ranks read other numbers than were sent."""

import pytest
import torch

from executor.budget.token_budget import dispatch_bytes_per_token
from executor.model.flashinfer.payloads import PAYLOADS

CPU = torch.device("cpu")
WORST = {"off": 0.0, "mxfp8": 2**-4, "nvfp4": 1 / 6 + 2**-4}  # of a block's largest number
PER_SCALE = {"off": 1, "mxfp8": 32, "nvfp4": 16}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_rounded_to_their_blocks_largest_number(name: str, dtype: torch.dtype) -> None:
    payload = PAYLOADS[name](dtype, CPU)
    x = (torch.randn(7, 96) * torch.logspace(0, 2, 7)[:, None]).to(dtype)
    x[3] = 0
    parts = payload.pack(x)
    got = payload.unpack([part.clone() for part in parts])
    assert got.dtype == dtype
    blocks = x.float().unflatten(1, (-1, PER_SCALE[name]))
    errors = (got.float() - x.float()).unflatten(1, (-1, PER_SCALE[name])).abs()
    assert bool((errors <= WORST[name] * blocks.abs().amax(-1, keepdim=True)).all())
    assert not got[3].any()
    again = payload.unpack(payload.pack(got))
    torch.testing.assert_close(again, got, rtol=0, atol=0)
    assert payload.unpack(payload.pack(x[:0])).shape == (0, 96)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_numbers_that_a_format_has_arrive_as_they_are(name: str) -> None:
    numbers = torch.tensor([0, 0.5, -1, 1.5, 2, -3, 4, 6], dtype=torch.bfloat16).repeat(2, 8)
    payload = PAYLOADS[name](torch.bfloat16, CPU)
    for scale in (1, 2**-5, 2**4):
        assert torch.equal(payload.unpack(payload.pack(numbers * scale)), numbers * scale)


@pytest.mark.parametrize(("name", "of_row"), [("off", 8192), ("mxfp8", 4224), ("nvfp4", 2304)])
def test_fewer_bytes_of_a_row_are_sent(name: str, of_row: int) -> None:
    x = torch.randn(3, 4096).bfloat16()
    parts = PAYLOADS[name](torch.bfloat16, CPU).pack(x)
    sizes = [part.itemsize for part in parts]
    assert sizes == sorted(sizes, reverse=True), "as the library wants them"
    assert sum(part[0].nbytes for part in parts) == of_row
    quantized = None if name == "off" else name
    assert (
        dispatch_bytes_per_token(4096, 0, itemsize=1 if quantized else 2, quantized=quantized)
        >= of_row
    )
