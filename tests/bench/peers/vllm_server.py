"""vLLM behind its OpenAI server, asked as Lockstep's service is: prompts of token ids, streamed.

    python -m tests.bench.peers.vllm_server CHECKPOINT PYTHON

PYTHON is that of vLLM's environment.
"""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator

from deploy.local.launch import held_port
from tests.bench.peers.workload import measure_service

HOST = "127.0.0.1"
START_TIMEOUT_S = 300


async def wait_until_ready(server: asyncio.subprocess.Process, port: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while server.returncode is None:
            try:
                await asyncio.to_thread(urllib.request.urlopen, f"http://{HOST}:{port}/health")
                return
            except OSError:
                await asyncio.sleep(0.5)
    sys.exit(f"vLLM's server ended with exit code {server.returncode}")


async def main(folder: str, python: str) -> None:
    with held_port(HOST) as port:
        server = await asyncio.create_subprocess_exec(
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
            *("--host", HOST, "--port", str(port), "--dtype", "bfloat16"),
            *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        )

        async def generate(prompt: list[int], num_tokens: int) -> AsyncIterator[int]:
            """A call by plain sockets: less work than an HTTP library's, and so better for vLLM."""
            asked = {
                "model": folder,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            body = json.dumps(asked).encode()
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            writer.write(body)
            async for line in reader:
                if line.startswith(b"data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    yield len(choice["token_ids"] or ())
            writer.close()

        try:
            await wait_until_ready(server, port)
            await measure_service(generate)
        finally:
            server.terminate()
            await server.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
