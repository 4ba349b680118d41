"""Calls by grpcurl: reflection, health and generation without code of ours."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.launch import LocalStack

GRPCURL = Path(sys.executable).parent / "grpcurl"
HEALTH_CHECK = "grpc.health.v1.Health/Check"

pytestmark = pytest.mark.skipif(
    not GRPCURL.exists(), reason="there is no grpcurl for this platform in the environment"
)


async def grpcurl(address: str, *what: str, data: dict[str, Any] | None = None) -> str:
    """Returns what grpcurl prints."""
    body = [] if data is None else ["-d", json.dumps(data)]
    process = await asyncio.create_subprocess_exec(
        *(GRPCURL, "-plaintext", *body, address, *what),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def json_objects(text: str) -> list[dict[str, Any]]:
    """Splits what grpcurl prints for a stream."""
    decoder, objects = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        objects.append(value)
        text = text[end:]
    return objects


async def test_reflection_lists_the_services(stack: LocalStack):
    assert (await grpcurl(stack.address, "list")).split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "lockstep.serving.v1.GenerationService",
        "vllm.grpc.engine.VllmEngine",
    ]


async def test_text_is_generated_without_a_proto_file(stack: LocalStack):
    output = await grpcurl(
        stack.address,
        "lockstep.serving.v1.GenerationService/Generate",
        data={"text": "\n17+25=", "stop": {"max_tokens": 16}},
    )

    responses = json_objects(output)
    assert "".join(response["text"] for response in responses) == "42\n"
    assert responses[-1]["finish"]["reason"] == "FINISH_REASON_STOP"


@pytest.mark.parametrize("service", ["readiness", "vllm.grpc.engine.VllmEngine"])
async def test_a_ready_router_is_serving(stack: LocalStack, service: str):
    answer = await grpcurl(stack.address, HEALTH_CHECK, data={"service": service})
    assert json.loads(answer)["status"] == "SERVING"
