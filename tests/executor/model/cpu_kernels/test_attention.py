"""If this fails, attention on the CPU is wrong, or a row's bits depend on its batch."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from executor.model.cpu_kernels.library import Library
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    num_threads,
    random_of,
    random_shapes,
    relative_error,
)

BLOCK_SIZE = 16
TOLERANCE = {torch.bfloat16: ROUNDING, torch.float32: 3e-6}  # of the softmax's exp: 1e-6
KERNELS = {torch.bfloat16: "attention", torch.float32: "attention_float32"}
EVERY_TYPE = pytest.mark.parametrize("dtype", KERNELS, ids=str)


@dataclass(frozen=True)
class Heads:
    """A layer's heads."""

    query: int
    kv: int
    width: int
    values: int | None = None  # of latents

    def layer(
        self, window: int = 0, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | float | None, ...]:
        values, scale = self.values or self.width, 1 / math.sqrt(self.width)
        return self.query, self.kv, self.width, values, window, sinks, scale


GQA, MHA, LATENT = Heads(8, 2, 64), Heads(3, 3, 32), Heads(5, 1, 96, values=64)
MANY_HEADS = Heads(70, 1, 32, values=32)


@dataclass(frozen=True)
class Case:
    """Sequences of ``lengths`` keys, of which the last ``counts`` are queries, in shuffled blocks."""

    heads: Heads
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    tree_mask: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    block_size: int = BLOCK_SIZE
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        columns = max(self.lengths) // self.block_size + 1
        order = torch.randperm(len(self.lengths) * columns, generator=torch.manual_seed(0))
        size = (len(order) + 1) * self.block_size, self.heads.kv, self.heads.width
        keys = random_of(self.dtype, *size, seed=1)
        values = keys
        if self.heads.values is None:
            values = random_of(self.dtype, *size, seed=2)
        num_rows = sum(self.counts or [1] * len(self.lengths))
        made = {
            "table": (order + 1).view(-1, columns).int(),
            "keys": keys,
            "values": values,
            "q": random_of(self.dtype, num_rows, self.heads.query, self.heads.width, seed=3),
        }
        for name, tensor in made.items():
            object.__setattr__(self, name, tensor)

    def part(self, start: int, stop: int) -> "Case":
        """Returns rows of the only sequence as a pass of their own."""
        case = replace(self, lengths=(stop,), counts=(stop - start,))
        for name in ("table", "keys", "values"):
            object.__setattr__(case, name, getattr(self, name))
        object.__setattr__(case, "q", self.q[start:stop])
        return case

    def run(self, kernels: Library, padding: int = 0) -> torch.Tensor:
        q = torch.cat((self.q, self.q[:padding]))
        slots = torch.zeros(len(q), dtype=torch.int64)
        return self.attend(kernels, (q, None, None), slots, self.keys, self.values)

    def attend(
        self,
        kernels: Library,
        rows: tuple[torch.Tensor | None, ...],
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        counts = None if self.counts is None else torch.tensor(self.counts)
        width = 0 if self.tree_mask is None else self.tree_mask.shape[-1]
        sizes = len(slots), len(self.lengths), self.block_size, self.table.shape[1], width
        sequences = torch.arange(len(self.lengths)), torch.tensor(self.lengths), counts
        batch = *sizes, *sequences, slots, self.tree_mask
        strides = (0 if x is None else x.stride(0) for x in rows)
        heads = self.heads
        out = keys.new_empty(len(slots), heads.query * (heads.values or heads.width))
        places = keys, values, self.table, out
        kernel = KERNELS[self.dtype]
        kernels(kernel, *heads.layer(**self.options), *batch, *rows, *strides, *places)
        return out

    def expected(self) -> torch.Tensor:
        """Returns what float32 gives."""
        counts = self.counts or (1,) * len(self.lengths)
        queries = self.q.float().split(counts)
        return torch.cat(
            [self._attend(i, q, n) for i, (q, n) in enumerate(zip(queries, counts, strict=True))]
        )

    def _attend(self, i: int, q: torch.Tensor, count: int) -> torch.Tensor:
        positions = torch.arange(self.lengths[i])
        blocks = self.table[i].long()[positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        group = self.heads.query // self.heads.kv
        keys = self.keys[slots].float().repeat_interleave(group, 1)
        values = self.values[slots].float()[..., : self.heads.values or self.heads.width]
        own = positions[-count:, None]
        seen = positions <= own
        if self.tree_mask is not None:
            width = self.tree_mask.shape[-1]
            seen[:] = True
            seen[:, -width:] = self.tree_mask[i][:, -len(positions) :]
        if window := self.options.get("window"):
            seen &= positions > own - window
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(self.heads.width)
        scores = scores.masked_fill(~seen, -torch.inf)
        if (sinks := self.options.get("sinks")) is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, count, 1)), -1)
        weights = scores.softmax(-1)[..., : len(positions)]
        return torch.einsum("hqk,khv->qhv", weights, values.repeat_interleave(group, 1)).flatten(1)


SHAPES = {
    "decode": ((1, 2, 63, 64, 65, 130), None),
    "verify": ((4, 66, 130), (4, 4, 4)),
    "a prompt": ((150,), (150,)),
    "prompts behind prefixes among decodes": ((40, 1, 130, 67), (7, 1, 1, 67)),
}


@pytest.mark.parametrize("heads", [GQA, MHA, LATENT, MANY_HEADS], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@EVERY_TYPE
def test_rows_are_those_of_float32(
    kernels: Library, heads: Heads, shape: tuple[Any, ...], dtype: torch.dtype
):
    case = Case(heads, *shape, dtype=dtype)
    assert relative_error(case.run(kernels), case.expected()) < TOLERANCE[dtype]


@EVERY_TYPE
def test_attention_of_random_shapes_is_that_of_float32(kernels: Library, dtype: torch.dtype):
    """Blocks of any size; windows and sinks anywhere, so at the edges of blocks and tiles, too."""
    for rng in random_shapes():
        kv, width = rng.randint(1, 4), 32 * rng.randint(1, 4)
        heads = Heads(kv * rng.randint(1, 9), kv, width)
        if rng.random() < 0.3:
            heads = Heads(rng.randint(1, 20), 1, width, values=32 * rng.randint(1, width // 32))
        lengths = tuple(rng.randint(1, 150) for _ in range(rng.randint(1, 5)))
        counts = tuple(rng.randint(1, min(length, 40)) for length in lengths)
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["window"] = rng.choice([1, 63, 64, 65, rng.randint(2, 150)])
        if rng.random() < 0.5:
            options["sinks"] = torch.linspace(-3, 3, heads.query)
        block_size = rng.choice([1, 5, 16, 64, rng.randint(2, 40)])
        case = Case(heads, lengths, counts, options=options, block_size=block_size, dtype=dtype)
        assert relative_error(case.run(kernels), case.expected()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 40, 64, 128])
@pytest.mark.parametrize("heads", [GQA, LATENT], ids=str)
@EVERY_TYPE
def test_a_window_hides_what_is_before_it(
    kernels: Library, heads: Heads, window: int, dtype: torch.dtype
):
    """Keys before all windows are not even read: there may be anything."""
    sinks = torch.linspace(-3, 3, heads.query)
    for options in ({"window": window}, {"window": window, "sinks": sinks}):
        case = Case(heads, (130, 40, 64), (7, 40, 1), options=options, dtype=dtype)
        assert relative_error(case.run(kernels), case.expected()) < TOLERANCE[dtype]
    alone = replace(case, lengths=(170,), counts=None, options={"window": window})
    result = alone.run(kernels)
    for column in range((170 - window) // BLOCK_SIZE):
        alone.keys[alone.table[0, column] * BLOCK_SIZE :][:BLOCK_SIZE] = torch.nan
        alone.values[alone.table[0, column] * BLOCK_SIZE :][:BLOCK_SIZE] = torch.nan
    assert torch.equal(alone.run(kernels), result)


@pytest.mark.parametrize("heads", [GQA, LATENT], ids=str)
@EVERY_TYPE
def test_a_tree_says_which_of_the_last_keys_are_seen(
    kernels: Library, heads: Heads, dtype: torch.dtype
):
    tree_mask = torch.rand(3, 4, 6, generator=torch.manual_seed(0)) < 0.5
    tree_mask[:, :, 2:] |= torch.eye(4, dtype=torch.bool)
    case = Case(heads, (4, 66, 130), (4, 4, 4), tree_mask, dtype=dtype)
    assert relative_error(case.run(kernels), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"sinks": torch.ones(8)}], ids=str)
@pytest.mark.parametrize("heads", [GQA, Heads(8, 1, 96, values=64)], ids=str)
@EVERY_TYPE
def test_a_row_has_the_same_bits_decoded_verified_and_prefilled(
    kernels: Library, heads: Heads, options: dict[str, Any], dtype: torch.dtype
):
    case = Case(heads, (150,), (150,), options=options, dtype=dtype)
    whole = case.run(kernels)
    for step in (1, 4, 77):
        parts = [case.part(i, min(i + step, 150)) for i in range(0, 150, step)]
        assert torch.equal(torch.cat([part.run(kernels) for part in parts]), whole)
        chain = torch.ones(1, step, step).tril().bool()
        if step == 4 and "window" not in options:
            verified = [replace_tree(part, chain).run(kernels) for part in parts[:-1]]
            assert torch.equal(torch.cat(verified), whole[:148])
    with num_threads(2):
        assert torch.equal(case.run(kernels), whole)


@pytest.mark.parametrize("heads", [GQA, LATENT], ids=str)
@pytest.mark.parametrize("length", [20, 64, 70])
def test_a_row_behind_a_path_of_a_tree_has_the_bits_of_decoding(
    kernels: Library, heads: Heads, length: int
):
    path = [0, 2, 3, 7]
    tree_mask = torch.eye(8).bool()[None]
    tree_mask[0, 7, path] = True
    tree = Case(heads, (length,), (8,), tree_mask)
    verified = tree.run(kernels)[7:]
    positions = torch.arange(length - 8, length)
    slots = tree.table[0].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    for x in (tree.keys, tree.values)[: 1 if tree.keys is tree.values else 2]:
        x[slots[:4]] = x[slots[path]]
    decode = tree.part(7, 8)
    object.__setattr__(decode, "lengths", (length - 4,))
    assert torch.equal(replace_tree(decode, None).run(kernels), verified)


def replace_tree(case: Case, tree_mask: torch.Tensor | None) -> Case:
    object.__setattr__(case, "tree_mask", tree_mask)
    return case


@EVERY_TYPE
def test_a_row_has_the_same_bits_in_every_batch(kernels: Library, dtype: torch.dtype):
    case = Case(GQA, tuple(range(1, 150, 11)), dtype=dtype)
    whole = case.run(kernels, padding=3)
    assert (whole[-3:] == 0).all(), "padding is finite"
    with num_threads(2):
        assert torch.equal(case.run(kernels, padding=3), whole)
    for i in range(len(case.lengths)):
        one = Case(GQA, (case.lengths[i],), dtype=dtype)
        for name in ("keys", "values"):
            object.__setattr__(one, name, getattr(case, name))
        object.__setattr__(one, "table", case.table[i : i + 1])
        object.__setattr__(one, "q", case.q[i : i + 1])
        assert torch.equal(one.run(kernels), whole[i : i + 1])


@pytest.mark.parametrize("heads", [GQA, LATENT], ids=str)
@EVERY_TYPE
def test_keys_and_values_are_stored_and_seen(kernels: Library, heads: Heads, dtype: torch.dtype):
    """Rows of keys may be parts of wider ones. Without keys of its own, a query changes nothing."""
    case = Case(heads, (40, 70), (3, 1), dtype=dtype)
    slots = torch.tensor([case.table[0, 2] * BLOCK_SIZE + 8 - 3 + i for i in range(3)])
    slots = torch.cat((slots, case.table[1, 4:5] * BLOCK_SIZE + 5)).long()
    wide = random_of(dtype, 4, 3 * heads.kv, heads.width, seed=9)
    k, v = wide[:, : heads.kv], None if heads.values else wide[:, heads.kv : 2 * heads.kv]
    keys, values = case.keys.clone(), case.values.clone()
    if heads.values:
        values = keys
    result = case.attend(kernels, (case.q, k, v), slots, keys, values)
    for cache, stored in ((case.keys, k), (case.values, k if v is None else v)):
        cache.index_copy_(0, slots, stored)
    assert torch.equal(keys, case.keys)
    assert torch.equal(values, case.values)
    assert torch.equal(result, case.run(kernels))


def test_sequences_without_keys_and_batches_without_rows_give_finite_rows(kernels: Library):
    assert (Case(GQA, (0, 2), (1, 4)).run(kernels)[:3] == 0).all()
    assert Case(GQA, (3,), (0,)).run(kernels).shape == (0, 512)


def test_nan_stays_in_the_rows_that_see_it(kernels: Library):
    case = Case(GQA, (70, 70))
    case.keys[case.table[1, 0] * BLOCK_SIZE] = torch.nan
    result = case.run(kernels)
    assert result[0].isfinite().all()
    assert result[1].isnan().all()
