"""Code lines of product and tests: ``python -m tests.repo.count_lines``.

Counted are hand-written Python files; not counted are blank lines, comments, docstrings, imports
and generated files.
"""

from collections import Counter

from tests.repo.source import PRODUCT, ROOT, code_lines, modules_of


def main() -> None:
    for title, tops in (("product", PRODUCT), ("tests", ("tests",))):
        counts: Counter[str] = Counter()
        for top in tops:
            for path in modules_of(ROOT / top):
                folder = "/".join(path.relative_to(ROOT).parts[:2][: len(path.parts) - 1])
                key = folder if (ROOT / folder).is_dir() else top
                counts[key] += len(code_lines(path.read_text()))
        print(f"{title}: {counts.total():,} code lines")
        for folder, count in sorted(counts.items()):
            print(f"  {folder:24}{count:8,}")


if __name__ == "__main__":
    main()
