"""Checksums of a step request: what an executor answers that it ran (see StepResponse)."""

from typing import Any
from zlib import crc32

from protos.executor.v1 import executor_pb2 as pb


def agreement_crc32(request: pb.StepRequest) -> int:
    """Returns the CRC-32 of the request's agreement, which every executor is sent alike."""
    return _crc32(agreement=request.agreement)


def part_crc32(request: pb.StepRequest) -> int:
    """Returns the CRC-32 of the request's part, which attention-TP peers are sent alike."""
    return _crc32(ranks=request.ranks)


def _crc32(**field: Any) -> int:
    return crc32(pb.StepRequest(**field).SerializeToString())
