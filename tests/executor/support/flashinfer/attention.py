"""FlashInfer's attention over a KV pool, with a workspace as small as the stand-in's."""

from collections.abc import Sequence
from functools import partial

from executor.batch.kv_pool import KVPool
from executor.build.devices import AttentionGraphs
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import LayerOptions
from executor.model.layers.attention_flashinfer import FlashInferAttention, LayeredAttention
from executor.model.layers.attention_flashinfer import flashinfer_attention as layered
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.triton.operators import TritonOps
from tests.executor.support.flashinfer.cpu_flashinfer import WORKSPACE


def flashinfer_attention(
    num_heads: int,
    pool: KVPool,
    graphs: Sequence[AttentionGraphs] = (),
    *,
    workspace: AttentionWorkspace | None = None,
    max_num_tokens: int = 64,
    scale: float | None = None,
    layers: Sequence[LayerOptions] = (),
    triton: TritonOps | None = None,
) -> FlashInferAttention | LayeredAttention:
    """Returns the backend, ready for graphs; its workspace is its own if None."""
    ops = FlashInferOps(enable_pdl=True)
    workspace = workspace or AttentionWorkspace(pool.device, WORKSPACE[0])
    new = partial(
        FlashInferAttention,
        ops,
        pool,
        num_heads,
        workspace,
        max_num_tokens=max_num_tokens,
        scale=scale,
        triton=triton,
    )
    attention = layered(new, layers)
    for sizes, width, has_tree in graphs:
        attention.init_cuda_graph_state(sizes, width, has_tree=has_tree)
    return attention
