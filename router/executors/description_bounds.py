"""Bounds of a DescribeResponse: far above any real executor, and far below what harms the router."""

from operator import attrgetter

import numpy as np

from protos.executor.epochs import MAX_EPOCH
from protos.executor.v1 import executor_pb2 as pb

MAX_SIZE = 1 << 22  # of a step in tokens, and of a pool in blocks, which take 36 bytes each
MAX_TOKENS = 1 << 24  # of a sequence, a window, and a vocabulary
MAX_SEQUENCES = 1 << 16
MAX_EXECUTORS = 1 << 12
MAX_EXPERTS = 1 << 14
MAX_DRAFTS = 1 << 10
MAX_INSTANCE_ID_LEN = 64

BOUNDS = {
    "epoch": (0, MAX_EPOCH),
    "coordinates.dp_size": (0, MAX_EXECUTORS),
    "coordinates.attn_tp_size": (1, MAX_EXECUTORS),
    "num_kv_blocks": (2, MAX_SIZE),
    "num_rows": (1, MAX_SEQUENCES),
    "kv_window": (0, MAX_TOKENS),
    "joined_max_model_len": (0, MAX_TOKENS),
    "model.vocab_size": (1, MAX_TOKENS),
    "model.max_model_len": (1, MAX_TOKENS),
    "model.block_size": (1, 1 << 16),
    "model.num_experts": (0, MAX_EXPERTS),
    "model.bytes_per_expert": (0, 1 << 48),
    "capability.min_dp_size": (0, MAX_EXECUTORS),
    "capability.max_dp_size": (0, MAX_EXECUTORS),
    "capability.max_expert_slots": (0, MAX_EXPERTS),
    "budget.max_num_batched_tokens": (1, MAX_SIZE),
    "budget.max_num_seqs": (1, MAX_SEQUENCES),
    "budget.max_num_logits": (1, MAX_SIZE),
    "speculation.num_draft_tokens": (0, MAX_DRAFTS),
    "speculation.num_draft_steps": (0, MAX_DRAFTS),
    "speculation.topk": (0, MAX_DRAFTS),
    "speculation.num_reserved_tokens": (0, 1 << 16),
    "speculation.kv_lookahead": (0, 1 << 16),
}
LENGTHS = {
    "instance_id": MAX_INSTANCE_ID_LEN,
    "kv_id": MAX_INSTANCE_ID_LEN,
    "peer_host": 255,
    "store_address": 263,
    "model.architecture": 256,
    "model.fingerprint": 256,
    "model.eos_token_ids": 256,
    "graph_sizes.decode": 4096,
    "graph_sizes.extend": 4096,
    "graph_sizes.extend_runner": 256,
    "speculation.algorithm": 256,
    "resident_experts": 4 * MAX_EXPERTS,
    "agreement": 256,
    "agreement_digest": 64,
}
MAX_ENTRY_LEN = 1 << 15  # of the agreement, name and value


def problem_of(description: pb.DescribeResponse) -> str:
    """Returns what cannot be in an executor's description, by field; "" if nothing."""
    for name, (least, most) in BOUNDS.items():
        value = attrgetter(name)(description)
        if not least <= value <= most:
            return f"{name}={value}, where {least} to {most} is possible"
    for name, max_len in LENGTHS.items():
        length = len(attrgetter(name)(description))
        if length > max_len:
            return f"{name} of length {length}, where at most {max_len} is possible"
    longest = max((len(n) + len(v) for n, v in description.agreement.items()), default=0)
    if longest > MAX_ENTRY_LEN:
        return f"agreement with an entry of {longest} characters, {MAX_ENTRY_LEN} at most"
    return _problem_of_place(description) or _problem_of_sizes(description)


def _problem_of_place(description: pb.DescribeResponse) -> str:
    place, capability = description.coordinates, description.capability
    if not description.HasField("capability"):
        is_placed = place.dp_size > 0
        return "" if is_placed else "coordinates.dp_size=0, where only an elastic one has no place"
    if not 1 <= capability.min_dp_size <= capability.max_dp_size:
        return f"capability.min_dp_size={capability.min_dp_size} and max_dp_size={capability.max_dp_size}"
    if place.attn_tp_rank >= place.attn_tp_size:
        return f"attn_tp_rank={place.attn_tp_rank} of attn_tp_size={place.attn_tp_size}"
    num_bytes, num_slots = len(description.resident_experts), capability.max_expert_slots
    if num_bytes != 4 * num_slots:
        return f"resident_experts of {num_bytes} bytes, for {num_slots} slots"
    resident = np.frombuffer(description.resident_experts, "<i4")
    if num_slots and not -1 <= resident.min() <= resident.max() < description.model.num_experts:
        return f"resident_experts that are none of {description.model.num_experts}"
    return ""


def _problem_of_sizes(description: pb.DescribeResponse) -> str:
    model, sizes = description.model, description.graph_sizes
    if max(model.eos_token_ids, default=0) >= model.vocab_size:
        return f"eos_token_ids={list(model.eos_token_ids)}, of a vocabulary of {model.vocab_size}"
    for name, captured in (("decode", sizes.decode), ("extend", sizes.extend)):
        if list(captured) != sorted({*captured} - {0}):
            return f"graph_sizes.{name} that are not ascending from 1 on"
    return ""
