"""Fixture of the CPU kernels' tests: the kernels of each tile that this machine runs."""

import pytest

from executor.model.cpu_kernels import library


@pytest.fixture(scope="session", params=library.TILES)
def kernels(request: pytest.FixtureRequest) -> library.Library:
    """Returns the kernels of each tile in turn."""
    try:
        [tile] = library.choose(request.param)
        return library.load_tile(tile)
    except library.NoKernels as error:
        pytest.skip(str(error))
