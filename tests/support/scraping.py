"""Scrape of a metrics port, as Prometheus does it."""

import asyncio
import urllib.request
from base64 import b64encode

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 120.0

Samples = dict[str, dict[tuple[str, ...], float]]


async def scrape_text(address: str, path: str = "/metrics", token: str | None = None) -> str:
    """Returns what a port for metrics answers.

    Args:
        token: Or ``"NAME:PASSWORD"``, which Envoy asks for.

    Raises:
        urllib.error.HTTPError: It refuses.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if token is not None and ":" in token:
        headers = {"Authorization": f"Basic {b64encode(token.encode()).decode()}"}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)

    def get() -> str:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(get)


async def scrape(address: str) -> Samples:
    """Returns every sample by name and label values, labels in the order of their names."""
    samples: Samples = {}
    for family in text_string_to_metric_families(await scrape_text(address)):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[
                tuple(value for _, value in sorted(sample.labels.items()))
            ] = sample.value
    return samples
