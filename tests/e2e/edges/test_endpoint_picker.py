"""Endpoint pickers of Kubernetes' gateways: Envoy sends each call where one says that it should go."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from protos.telemetry.scrapes import serve_metrics
from router.api.generate import GenerationServicer
from router.api.health import Health
from router.api.vllm_engine import VllmEngineServicer, add_vllm_engine
from router.engine.engines import Engines
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.telemetry.prometheus import collector
from tests.e2e.support.endpoint_picker import DESTINATION, NAMESPACE, Picker, load_at, picking
from tests.e2e.support.envoy import address_of, envoy_before
from tests.router.support.fake_engines import listening
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.running_engines import drive_group, stepping
from tests.router.support.stepper import make_shape

TYPES = "type.googleapis.com/envoy.extensions"
ENDLESS_TOKENS = 4000  # at 10 ms each
NUM_CALLS = 5


class Router:
    """A router over fake executors.

    Attributes:
        address, metrics_address: Where it listens.
    """

    def __init__(self, engines: Engines, address: str, metrics_address: str) -> None:
        self.engines, self.address, self.metrics_address = engines, address, metrics_address

    @property
    def num_ended(self) -> int:
        return self.engines.measures.ended["LENGTH"]


@asynccontextmanager
async def routing() -> AsyncIterator[Router]:
    engines, health = Engines(Listeners(max_listeners=50)), Health()
    shape = make_shape(max_model_len=ENDLESS_TOKENS + 100, num_blocks=2000)
    executors = FakeExecutors(shape, random.Random(0))
    engine = drive_group(engines, executors, WaitingQueue(max_sequences=9, max_tokens=1000))
    generation = GenerationServicer(engines, None, "1")
    servicer = VllmEngineServicer(generation, engines, None, "1", is_ready=lambda: True)
    metrics = serve_metrics("127.0.0.1:0", collector(engines, "1"))
    try:
        health.set_ready(True)
        add = partial(add_vllm_engine, servicer=servicer)
        async with stepping(engine), listening(add, health.add_to) as address:
            yield Router(engines, address, f"127.0.0.1:{metrics.number}")
    finally:
        await asyncio.to_thread(metrics.close)


def ask_a_picker(picker: str, config: Any) -> None:
    """Changes Envoy's configuration as a gateway of an InferencePool has it."""
    [listener, _] = config["static_resources"]["listeners"]
    [http] = [each["typed_config"] for each in listener["filter_chains"][0]["filters"]]
    http["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
                "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "120s"},
                "message_timeout": "120s",
                "processing_mode": {
                    "request_header_mode": "SEND",
                    "request_body_mode": "FULL_DUPLEX_STREAMED",
                    "request_trailer_mode": "SEND",
                    "response_header_mode": "SKIP",
                },
                "metadata_options": {"receiving_namespaces": {"untyped": [NAMESPACE]}},
            },
        },
    )
    [_, routers] = config["static_resources"]["clusters"]
    del routers["lb_policy"]
    by_metadata = {"metadata": {"key": NAMESPACE, "path": [{"key": DESTINATION}]}}
    round_robin = policy("round_robin", "RoundRobin")
    routers["load_balancing_policy"] = policy(
        "override_host",
        "OverrideHost",
        override_host_sources=[by_metadata],
        fallback_policy=round_robin,
    )
    http2 = routers["typed_extension_protocol_options"]
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address_of(picker)}}]}]
    config["static_resources"]["clusters"].append(
        {
            "name": "picker",
            "typed_extension_protocol_options": http2,
            "load_assignment": {"cluster_name": "picker", "endpoints": endpoints},
        }
    )


def policy(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    config = {"@type": f"{TYPES}.load_balancing_policies.{name}.v3.{kind}", **fields}
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config}
    return {"policies": [{"typed_extension_config": extension}]}


def generate(prompt: list[int], max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_a_picker_sends_each_call_to_the_router_that_has_least_to_do(tmp_path: Path):
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(routing()) for _ in range(2)]
        picker = Picker({router.address: router.metrics_address for router in routers})
        at = await stack.enter_async_context(picking(picker))
        addresses = [router.address for router in routers]
        envoy = await stack.enter_async_context(
            envoy_before(addresses, tmp_path, partial(ask_a_picker, at))
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(envoy.address))
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for busy, idle in (routers, routers[::-1]):
            direct = await stack.enter_async_context(grpc.aio.insecure_channel(busy.address))
            endless = vllm_engine_pb2_grpc.VllmEngineStub(direct).Generate(
                generate([1, 2, 3], ENDLESS_TOKENS)
            )
            while (await load_at(busy.metrics_address))[1] != 1:
                await asyncio.sleep(0.05)
            before = idle.num_ended
            for _ in range(NUM_CALLS):
                answers = [answer async for answer in stub.Generate(generate([5, 6, 7], 3))]
                assert len(answers[-1].complete.output_ids) == 3
            assert picker.picks == NUM_CALLS * [([5, 6, 7], idle.address)]
            assert idle.num_ended - before == NUM_CALLS
            picker.picks.clear()
            endless.cancel()
            while (await load_at(busy.metrics_address))[1] != 0:
                await asyncio.sleep(0.05)
        picker.endpoints = {}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generate([5], 3)).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
