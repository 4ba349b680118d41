"""The attention backends that a test is made with."""

import pytest


@pytest.fixture(params=["torch", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> str:
    """Returns a backend's name, its library in place."""
    if request.param == "flashinfer":
        request.getfixturevalue("library")
    name: str = request.param
    return name
