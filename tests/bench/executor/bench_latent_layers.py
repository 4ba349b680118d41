"""Times decode with latent attention beside grouped queries that read as many bytes, on the CPU.

    python -m tests.bench.executor.bench_latent_layers [--threads 1] [--batches 1,8,32]

    kernel     attention itself, over what the cache has of all sequences
    attention  with norms, projections and rotation around it
    layer      with router, experts and shared expert as well

Shapes: DeepSeek-V2-Lite; DeepSeek-V3 with a quarter of each width, of heads and of what is in them.
Both layers are the executor's own. They run the same experts with the same rows, so that they read
the same ones. The peer has as many weights in its projections, and its sequences are as much longer
as its rows of the cache are narrower. MB are what a step reads, MAC/B the multiply-adds for each of
these bytes: a core of a Zen 4 does 32 in a cycle, in which it reads 2 to 4 bytes from memory.

The ratio is the peer's time through that of latents, the median over rounds in which they take turns:
below 1 latents are slower. A step finds the caches full of experts, as in a model. One thread is
timed in CPU seconds; with several the machine must be quiet.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from executor.batch.kv_pool import KVPool
from executor.model.decoder.kernels import Peers, cpu_kernels
from executor.model.decoder.layer import DecoderLayer
from executor.model.decoder.sizes import kv_shape
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.spec import (
    GqaSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    RouterSpec,
    SharedSpec,
)
from executor.model.weights import Part, WeightGroup
from tests.bench.support.options import parse_options
from tests.bench.support.timing import median_ratio
from tests.executor.support.kv import batch_of, full_pool

BLOCK_SIZE = 16
CONTEXTS = (512, 2048, 8192)
PARTS = ("kernel", "attention", "layer")


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer with latents, its peer's heads, and how much longer the peer's sequences are."""

    hidden: int
    latents: MlaSpec
    peer: GqaSpec
    longer: float
    experts: MoeSpec

    def model(self, attention: MlaSpec | GqaSpec) -> ModelSpec:
        rotary_dim = (
            attention.head_dim if isinstance(attention, GqaSpec) else attention.qk_rope_head_dim
        )
        return ModelSpec(
            architecture="",
            vocab_size=32,
            hidden_size=self.hidden,
            layers=(LayerSpec(attention=attention, feed_forward=self.experts),),
            ropes=(RopeSpec(rotary_dim=rotary_dim, theta=10000.0),),
            norm_eps=1e-6,
            tied=True,
            dtype=torch.bfloat16,
            max_position_embeddings=2 * max(CONTEXTS),
        )


def latents(heads: int, q_rank: int | None, rank: int, nope: int, rope: int, value: int) -> MlaSpec:
    return MlaSpec(
        num_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        rope=0,
        scale=(nope + rope) ** -0.5,
    )


def grouped(heads: int, kv_heads: int, width: int) -> GqaSpec:
    return GqaSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, rope=0, scale=width**-0.5
    )


def experts(count: int, top_k: int, size: int, shared: int) -> MoeSpec:
    return MoeSpec(
        num_experts=count,
        top_k=top_k,
        intermediate_size=size,
        router=RouterSpec(),
        shared=SharedSpec(intermediate_size=shared),
    )


SHAPES = {
    "v2-lite": Shape(
        2048,
        latents(16, None, 512, 128, 64, 128),
        grouped(24, 2, 128),
        9 / 8,
        experts(64, 6, 1408, 2816),
    ),
    "v3/4": Shape(
        1792,
        latents(32, 384, 128, 32, 32, 32),
        grouped(32, 2, 32),
        5 / 4,
        experts(256, 8, 512, 512),
    ),
}


def fill(groups: list[WeightGroup]) -> int:
    """Fills parameters with noise and finishes them; returns how many numbers they have."""
    count = 0
    for group in groups:
        group.begin()
        for target in group.targets.values():
            weight: Any = target.target if isinstance(target, Part) else target
            weight.normal_(std=weight.shape[-1] ** -0.5)
            count += weight.numel()
        group.finish()
    return count


class Timed:
    """A layer whose steps note the time at each part of it.

    Args:
        model: One layer.
        mlp: Its experts and shared expert; None to have some of its own.
        clock: In seconds.
    """

    def __init__(self, model: ModelSpec, mlp: Any, clock: Callable[[], float]) -> None:
        self.spec = model.layers[0].attention
        kernels = cpu_kernels(model, dtype=model.dtype)
        peers = Peers.gathering(model.num_experts)
        cpu = torch.device("cpu")
        self.layer = DecoderLayer(model, 0, peers, kernels, dtype=model.dtype, device=cpu)
        self.mlp = mlp or self.layer.mlp
        groups = self.layer.weight_groups("")
        attention = self.layer.self_attn.weight_groups("")
        self.num_weights = fill(groups[: 1 + len(attention)])
        if mlp is None:
            fill(groups[1 + len(attention) :])
        self.layer.mlp = self._run_mlp
        self._operators = kernels.operators
        self._shape = kv_shape(model, BLOCK_SIZE, model.dtype)
        self._attention = cpu_attention(self.spec.num_heads, self._shape, scale=self.spec.scale)
        self._clock = clock
        self._before_mlp = 0.0

    @property
    def width(self) -> int:
        """Numbers that the cache has of a token."""
        return sum(part.num_heads * part.width for part in self._shape.parts)

    @property
    def adds(self) -> int:
        """Multiply-adds of attention for each key."""
        part = self._shape.parts[0]
        return self.spec.num_heads * (part.width + self._shape.value_width)

    def pool(self, num_rows: int, max_len: int) -> KVPool:
        pool = full_pool(self._shape, num_rows, max_len)
        for cache in pool.tensors:
            cache.normal_()
        return pool

    def begin(self, pool: KVPool, rows: torch.Tensor, length: int) -> None:
        """Lets steps be of these rows of hidden states, each with so many keys."""
        count = len(rows)
        self._batch = batch_of(pool, range(count), [length - 1] * count, [1] * count)
        self._attention.init_forward_metadata_out_graph(self._batch, pool)
        self._rotations = self._operators.rotations(self._batch.positions)
        self._rows = rows

    def step(self) -> list[float]:
        """Returns the seconds of each of PARTS."""
        layer, layout, now = self.layer, self._batch.layout, self._clock
        x = self._rows.clone()
        began = now()
        call, residual = layer.before_attention(x, None, self._rotations, layout)
        before = now()
        attended = self._attention.forward(*call[:4])
        kernel = now() - before
        layer.after_attention(attended, residual, layout, None)
        return [kernel, self._before_mlp - began, now() - began]

    def _run_mlp(self, x: torch.Tensor, layout: Any, is_padding: Any) -> torch.Tensor:
        self._before_mlp = self._clock()
        y: torch.Tensor = self.mlp(self._rows, layout, is_padding)
        return y


def mlp_work(shape: Shape, mlp: Any, rows: torch.Tensor) -> tuple[int, int]:
    """Returns how many weights the experts' part of a layer reads for these rows, and its products."""
    moe = shape.experts
    assert moe.shared is not None
    expert = 3 * shape.hidden * moe.intermediate_size
    fixed = shape.hidden * (3 * moe.shared.intermediate_size + moe.num_experts)
    used = mlp.router(rows)[0].unique().numel()
    return fixed + used * expert, len(rows) * (fixed + moe.top_k * expert)


def measure(name: str, shape: Shape, batches: tuple[int, ...], rounds: int) -> None:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ours = Timed(shape.model(shape.latents), None, clock)
    peer = Timed(shape.model(shape.peer), ours.mlp, clock)
    longer = (1, shape.longer)
    pools = [
        timed.pool(max(batches), int(max(CONTEXTS) * factor))
        for timed, factor in zip((ours, peer), longer, strict=True)
    ]
    for batch_size in batches:
        rows = torch.randn(batch_size, shape.hidden).bfloat16()
        weights, products = mlp_work(shape, ours.mlp, rows)
        for context in CONTEXTS:
            times: list[list[list[float]]] = [[], []]
            for timed, pool, factor in zip((ours, peer), pools, longer, strict=True):
                timed.begin(pool, rows, int(context * factor))
            for _ in range(rounds + 1):
                for column, timed in zip(times, (ours, peer), strict=True):
                    column.append(timed.step())
            work = []
            for timed, factor in zip((ours, peer), longer, strict=True):
                keys = batch_size * int(context * factor)
                read, adds = [keys * timed.width], [keys * timed.adds]
                read.append(read[0] + timed.num_weights)
                adds.append(adds[0] + batch_size * timed.num_weights)
                work.append(([*read, read[1] + weights], [*adds, adds[1] + products]))
            for i, part in enumerate(PARTS):
                print_row(name, batch_size, context, part, i, times, work)


def print_row(
    name: str, batch_size: int, context: int, part: str, i: int, times: Any, work: Any
) -> None:
    seconds = [[step[i] for step in column[1:]] for column in times]
    cells = [
        f"{2 * read[i] / 1e6:8.1f} {adds[i] / read[i] / 2:6.1f} {statistics.median(s) * 1e3:8.3f} |"
        for s, (read, adds) in zip(seconds, work, strict=True)
    ]
    ratio = median_ratio(seconds[1], seconds[0])
    print(f"{name:8} {batch_size:3} {context:5} {part:9} |", *cells, f"{ratio:5.2f}", flush=True)


@torch.inference_mode()
def main() -> None:
    names = tuple(SHAPES)
    options = parse_options(__doc__, threads=1, rounds=9, batches=(1, 8, 32), shapes=names)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.threads} threads; of latents, of the peer, and the peer's time through theirs")
    columns = f"{'MB':>8} {'MAC/B':>6} {'ms':>8} |"
    print(f"{'shape':8} {'B':>3} {'keys':>5} {'part':9} | {columns} {columns} ratio")
    for name in options.shapes:
        measure(name, SHAPES[name], options.batches, options.rounds)


if __name__ == "__main__":
    main()
