"""Compiles the kernels ahead of the first start: ``python -m executor.model.cpu_kernels [TILE ..]``.

Installation runs it for this CPU's tiles; an image for all, as it will run on other CPUs.
"""

import sys

from executor.model.cpu_kernels.library import NoKernels, built, choose


def main() -> None:
    tiles = sys.argv[1:]
    try:
        tiles = tiles or choose("auto")
    except NoKernels as error:
        print(f"No kernels for bfloat16 on this CPU, which stays slower: {error}")
    for tile in tiles:
        try:
            with built(tile):
                pass
        except (NoKernels, OSError) as error:
            print(f"No kernels for bfloat16 by {tile}: {error}")


if __name__ == "__main__":
    main()
