"""If these fail, one executor's word makes the router allocate or compute without end."""

from typing import Any

import pytest

from protos.executor.v1 import executor_pb2 as pb
from router.executors.description_bounds import problem_of
from tests.router.support.peers import description


def described(**fields: Any) -> pb.DescribeResponse:
    return description(0, 1, **fields)


def test_what_real_executors_say_is_within_the_bounds() -> None:
    large = pb.ModelInfo(
        vocab_size=262_144, max_model_len=10_485_760, block_size=1, eos_token_ids=[0, 262_143]
    )
    budget = pb.TokenBudget(
        max_num_batched_tokens=131_072, max_num_seqs=8192, max_num_logits=131_072
    )
    sizes = pb.GraphSizes(decode=[1, 2, *range(8, 8193, 8)], extend=[4, 131_072])
    drafts = pb.Speculation(num_draft_tokens=64, topk=8, num_reserved_tokens=128, kv_lookahead=64)
    agreement = {f"name {number}": str(list(sizes.decode)) for number in range(60)}
    for fields in (
        {},
        {"model": large, "budget": budget, "num_kv_blocks": 4_000_000, "num_rows": 8192},
        {"graph_sizes": sizes, "speculation": drafts, "agreement": agreement},
        {"kv_window": 131_072},
        {"instance_id": "0" * 32, "agreement_digest": bytes(32), "epoch": 2**63 - 1},
    ):
        assert problem_of(described(**fields)) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("epoch", 2**63),
        ("epoch", 2**64 - 1),
        ("num_kv_blocks", 1),
        ("num_kv_blocks", 2**31 - 1),
        ("num_rows", 0),
        ("num_rows", 2**22),
        ("kv_window", 2**31),
        ("joined_max_model_len", 2**31),
        *((f"coordinates.{name}", n) for name in ("dp_size", "attn_tp_size") for n in (0, 2**22)),
        *((f"model.{name}", 0) for name in ("vocab_size", "max_model_len", "block_size")),
        *((f"model.{name}", 2**31) for name in ("vocab_size", "max_model_len", "block_size")),
        *(
            (f"budget.{name}", n)
            for name in ("max_num_batched_tokens", "max_num_seqs", "max_num_logits")
            for n in (0, 2**32 - 1)
        ),
        *(
            (f"speculation.{name}", 2**20)
            for name in ("num_draft_tokens", "num_draft_steps", "topk")
        ),
        *((f"speculation.{name}", 2**20) for name in ("num_reserved_tokens", "kv_lookahead")),
    ],
)
def test_a_number_out_of_bounds_is_named_with_what_is_possible(path: str, value: int) -> None:
    told = described()
    *parents, field = path.split(".")
    setattr(getattr(told, parents[0]) if parents else told, field, value)
    assert problem_of(told).startswith(f"{path}={value}, where ")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"instance_id": "x" * 65}, "instance_id of length 65, where at most 64"),
        ({"peer_host": "x" * 256}, "peer_host of length 256, where at most 255"),
        ({"agreement": {str(n): "1" for n in range(300)}}, "agreement of length 300"),
        ({"agreement": {"name": "x" * 40_000}}, "agreement with an entry of 40004 characters"),
        ({"agreement_digest": bytes(99)}, "agreement_digest of length 99"),
        ({"graph_sizes": pb.GraphSizes(decode=[2, 1])}, "graph_sizes.decode that are not asc"),
        ({"graph_sizes": pb.GraphSizes(extend=[4, 4])}, "graph_sizes.extend that are not asc"),
        ({"graph_sizes": pb.GraphSizes(extend=[0, 4])}, "graph_sizes.extend that are not asc"),
        ({"graph_sizes": pb.GraphSizes(decode=range(1, 9000))}, "graph_sizes.decode of length"),
    ],
)
def test_what_is_too_much_or_out_of_order_is_named(fields: dict[str, Any], problem: str) -> None:
    assert problem_of(described(**fields)).startswith(problem)


def test_an_end_token_outside_the_vocabulary_is_named() -> None:
    model = pb.ModelInfo(vocab_size=50, max_model_len=48, block_size=4, eos_token_ids=[2, 50])
    assert "eos_token_ids=[2, 50], of a vocabulary of 50" in problem_of(described(model=model))
