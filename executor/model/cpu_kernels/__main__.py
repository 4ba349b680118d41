"""Compiles the kernels ahead of the first start: ``python -m executor.model.cpu_kernels [TILE ..]``.

Installation runs it for this CPU's tile; an image for all, as it will run on other CPUs.
"""

import sys

from executor.model.cpu_kernels.library import NoKernels, built, choose


def main() -> None:
    try:
        for tile in sys.argv[1:] or [choose("auto")]:
            built(tile)
    except (NoKernels, OSError) as error:
        print(f"No kernels for bfloat16 on this CPU, which stays slower: {error}")


if __name__ == "__main__":
    main()
