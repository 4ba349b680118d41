"""If this fails, hidden states, experts or weights arrive as one another's bytes."""

import pytest
import torch

from executor.parallel.communicators import WORD, moe_words, pack, unpack, view_rows, words_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_columns_come_out_as_they_went_in(dtype: torch.dtype, num_rows: int):
    columns = (
        torch.randn(num_rows, 6).to(dtype),
        torch.randint(-(2**31), 2**31 - 1, (num_rows, 3), dtype=torch.int32),
        torch.randn(num_rows, 3),
    )
    num_words = moe_words(6, dtype, 3)
    out = view_rows(torch.zeros(5 * num_words, dtype=WORD), num_rows, num_words)
    pack(columns, out=out)
    for column, seen in zip(columns, unpack(out, columns), strict=True):
        assert seen.dtype == column.dtype
        assert torch.equal(seen, column)


def test_rows_that_are_no_whole_number_of_words_are_refused():
    with pytest.raises(ValueError, match=r"3 numbers of torch.bfloat16 are 6 bytes"):
        words_of(3, torch.bfloat16)


def test_rows_past_the_buffers_are_refused():
    with pytest.raises(AssertionError, match="3 rows of 4 words; the buffers were made for 11"):
        view_rows(torch.zeros(11, dtype=WORD), 3, 4)
