"""Images, built and run: router and CPU executors answer from containers. `make images-test` only."""

import asyncio
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.local.ports import held_port
from protos import __version__
from router.client import Chat, Client, Unavailable
from tests.deploy.images import buildah, dockerfiles
from tests.support.scraping import scrape_text

IMAGES = ("lockstep-router", "lockstep-executor-cpu")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "LOCKSTEP_IMAGES" not in os.environ, reason="minutes: make images-test builds and runs them"
    ),
    pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names of the images that were built, by ours."""
    base = buildah.find_base(tmp_path_factory.mktemp("debian"))
    if base is None:
        pytest.skip(
            "no base image: no registry can be reached, and debootstrap is not there or not allowed"
        )
    tags = {}
    for image in IMAGES:
        start, tags[image] = time.monotonic(), f"localhost/{image}:{__version__}"
        buildah.build(tags[image], dockerfiles.FILES[image], base, tmp_path_factory.mktemp("build"))
        elapsed_s = time.monotonic() - start
        print(f"\n{image}: {elapsed_s:.0f} s, {buildah.size_of(tags[image])}")
    return tags


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is_and_of_which_commit(built: dict[str, str], image: str) -> None:
    config = buildah.config_of(built[image])
    names = ("title", "version", "revision", "licenses")
    labels = {name: config["Labels"][f"org.opencontainers.image.{name}"] for name in names}
    head = buildah.run("git", "rev-parse", "HEAD", cwd=dockerfiles.ROOT).strip()
    assert labels == {
        "title": image,
        "version": __version__,
        "revision": head,
        "licenses": "Apache-2.0",
    }
    assert config["User"] == "65532:65532"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_its_program_and_nothing_to_install_more(
    built: dict[str, str], image: str
) -> None:
    name = buildah.run("buildah", "from", built[image]).strip()
    inside = ("buildah", "run", "--isolation", "chroot", name, "--")
    try:
        [python, *module] = buildah.config_of(built[image])["Entrypoint"]
        assert __version__ in buildah.run(*inside, python, *module, "--version")
        for package in ("pip", "huggingface_hub"):
            found = subprocess.run(
                [*inside, python, "-c", f"import {package}"], capture_output=True
            )
            assert b"ModuleNotFoundError" in found.stderr
    finally:
        buildah.run("buildah", "rm", name)


async def is_ready(client: Client) -> bool:
    try:
        return await client.health("readiness")
    except Unavailable:
        return False


async def test_a_router_and_two_executors_answer_from_containers(
    built: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        addresses = [f"127.0.0.1:{stack.enter_context(held_port())}" for _ in range(4)]
        router, page, *executors = addresses
        for rank, address in enumerate(executors):
            args = ["--model", "/opt/demo_model", "--device", "cpu", "--listen", address]
            args += ["--dp-size", "2", "--dp-rank", str(rank), "--num-kv-blocks", "400"]
            log = tmp_path / f"executor{rank}"
            stack.enter_context(buildah.container(built["lockstep-executor-cpu"], *args, log=log))
        args = ["--listen", router, "--metrics-listen", page, "--tokenizer", "/opt/demo_model"]
        args += ["--group", ",".join(executors)]
        log = tmp_path / "router"
        stack.enter_context(buildah.container(built["lockstep-router"], *args, log=log))
        async with asyncio.timeout(120), Client(router) as client:
            while not await is_ready(client):
                await asyncio.sleep(0.2)
            # The template of a chat is a process of its own.
            chat = Chat(messages=[{"role": "user", "content": "17+25="}])
            for prompt in ("\n17+25=", chat):
                completion = await client.complete(prompt, max_tokens=16)
                assert completion.text.startswith("42")
        assert "<html" in await scrape_text(page, "/")
