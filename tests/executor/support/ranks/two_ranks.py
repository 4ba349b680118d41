"""Rank of the parity test. Imports no Transformers: processes start here."""

from pathlib import Path

from executor.model.families.config import ModelConfig
from executor.parallel.communicators import DpCommunicator
from executor.parallel.layout import DpPaddingMode, Topology
from tests.executor.support.ranks.ranks import join
from tests.executor.support.serving import Rank, layout_of


def decode_on_two_ranks(
    rank: int, port: int, path: Path, prompts: list[list[list[int]]], num_tokens: int
) -> dict[str, list[list[int]]]:
    """Decodes greedily in both padding modes, each in an epoch of its own.

    Both ranks know every count, as the router tells them. Rank 1 starts 3 steps later, so that
    each rank is idle in some steps: rank 1 in the first, rank 0 in the last.
    """
    config = ModelConfig.from_dir(path)
    topology = Topology(dp_rank=rank, dp_size=2)
    communicator = DpCommunicator(
        topology=topology,
        max_tokens_per_rank=64,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        dtype=config.dtype,
    )
    served = Rank(path, topology=topology, communicator=communicator)
    results = {}
    for epoch, mode in enumerate(DpPaddingMode):
        groups = join(port, topology, epoch)
        communicator.join(groups)
        results[mode.name] = _decode(served, rank, prompts, num_tokens, mode)
        communicator.leave()
        groups.close()
        served.pool.row_num_blocks[:] = 0
        served.num_computed = [0] * len(served.num_computed)
    return results


def _decode(
    served: Rank, rank: int, prompts: list[list[list[int]]], num_tokens: int, mode: DpPaddingMode
) -> list[list[int]]:
    delays = [0, 3]
    own = prompts[rank]
    tokens: list[list[int]] = [[] for _ in own]
    feed = dict(enumerate(own))
    for step in range(num_tokens + max(delays)):
        counts = [_num_tokens(prompts[peer], step - delays[peer], num_tokens) for peer in range(2)]
        layout = layout_of(counts, mode, rank)
        logits = served.step(feed if counts[rank] else {}, layout)
        for row in logits:
            tokens[row].append(int(logits[row][-1].argmax()))
            feed[row] = [tokens[row][-1]]
    return tokens


def _num_tokens(prompts: list[list[int]], step: int, num_tokens: int) -> int:
    """Tokens that a rank runs in its own step ``step``, counted from its first."""
    if not 0 <= step < num_tokens:
        return 0
    return sum(map(len, prompts)) if step == 0 else len(prompts)
