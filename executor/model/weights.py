"""Weights: safetensors files streamed into a model's parameters.

A model says which tensors it needs and where each goes; this file finds and copies them, one
group at a time, so that a group can be packed and its plain copy dropped before the next is
read. What other ranks hold, whole tensors or parts of one, is never read.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"[\w.-]+\.safetensors")  # a file's name, of no other folder
# Of a whole checkpoint. Its headers are parsed before anything is known of them, at some 6 us and
# 0.4 KB a tensor; DeepSeek-V3 has 91,000 tensors and 10 MiB of headers.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 400_000
_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Where one part of a checkpoint's tensor goes; the rest of it is not read.

    Attributes:
        target: The parameter, or the view of one, that it fills.
        dim: Dimension along which the tensor is cut.
        at: Indices along it that this executor holds, as many as ``target`` has there.
        size: All of its indices, which the tensor must have.
    """

    target: torch.Tensor
    dim: int
    at: range
    size: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = self.target.shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """What to index that tensor with."""
        return (*(slice(None),) * self.dim, slice(self.at.start, self.at.stop))


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Tensors that are loaded together and then finished.

    Attributes:
        targets: Checkpoint name to the parameter, or the view of one, that it fills.
        finish: Called once all of them are filled.
    """

    targets: Mapping[str, torch.Tensor | Part]
    finish: Callable[[], None] = field(default=lambda: None)


def load_weights(
    path: str | Path,
    groups: Iterable[WeightGroup],
    *,
    skipped: Callable[[str], bool] = lambda name: False,
    on_progress: OnProgress | None = None,
) -> None:
    """Fills every group from the checkpoint in ``path``.

    Values are converted to the type of the parameter: floats to floats, integers to integers.

    Args:
        path: Directory with model.safetensors, or shards and their index.
        groups: What to fill; consumed, so that a finished group's memory can go.
        skipped: Whether a tensor that no group names may be left unread.
        on_progress: Called with tensors loaded and tensors in all, after each.

    Raises:
        CheckpointError: A tensor is missing, has another shape, is of a type that cannot be
            converted, or is one that the model has no place for.
    """
    path = Path(path)
    pending = list(groups)[::-1]
    del groups  # or it would keep every group to the end
    needed = {name for group in pending for name in group.targets}
    with ExitStack() as stack:
        found = _open_tensors(path, stack)
        _check_names(path, needed, found, skipped)
        done = 0
        while pending:
            group = pending.pop()
            for name, target in group.targets.items():
                file, handle = found[name]
                _copy(file, handle, name, target)
                done += 1
                if on_progress is not None:
                    on_progress(done, len(needed))
            group.finish()
            del group


def tensor_names(path: str | Path) -> frozenset[str]:
    """Returns the names of the tensors in ``path``.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    with ExitStack() as stack:
        return frozenset(_open_tensors(Path(path), stack))


def _open_tensors(path: Path, stack: ExitStack) -> dict[str, tuple[Path, Any]]:
    """Returns each tensor's file and its open handle."""
    found: dict[str, tuple[Path, Any]] = {}
    left = MAX_HEADER_BYTES
    for file in _files(path):
        try:
            left -= _header_bytes(file, left)
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        found.update((name, (file, handle)) for name in list(handle.keys()))
        if len(found) > MAX_TENSORS:
            raise CheckpointError(f"{file}: with it {path} has more than {MAX_TENSORS:,} tensors")
    return found


def _header_bytes(file: Path, most: int) -> int:
    with file.open("rb") as opened:
        count = int.from_bytes(opened.read(8), "little")
    if count > most:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: its header says that it has {count:,} bytes; "
            f"those of all files may have {MAX_HEADER_BYTES:,}, and {most:,} are left"
        )
    return count


def _files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        if not (path / _SINGLE).exists():
            raise CheckpointError(f"{path} has neither {_SINGLE} nor {_INDEX}")
        return [path / _SINGLE]
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{index} has more than {MAX_HEADER_BYTES:,} bytes")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} has no readable weight_map: {error}") from error
    for name in names:
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{index} names {name!r}: a shard is a .safetensors file of the same folder"
            )
    files = sorted(path / name for name in names)
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{index} names {', '.join(absent)}, which {path} does not have")
    return files


def _check_names(
    path: Path,
    needed: Collection[str],
    found: dict[str, tuple[Path, Any]],
    skipped: Callable[[str], bool],
) -> None:
    missing = sorted(needed - found.keys())
    if missing:
        raise CheckpointError(f"{path} lacks {_listed(missing)}")
    unexpected = sorted(name for name in found.keys() - needed if not skipped(name))
    if unexpected:
        file = found[unexpected[0]][0]
        raise CheckpointError(
            f"{file} has {_listed(unexpected)}, for which this model has no place: "
            f"config.json and the tensors disagree"
        )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _copy(file: Path, handle: Any, name: str, target: torch.Tensor | Part) -> None:
    source = handle.get_slice(name)
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    needed = target.whole_shape if isinstance(target, Part) else tuple(target.shape)
    if shape != needed:
        raise CheckpointError(
            f"{name} in {file} has shape {list(shape)}; this model needs {list(needed)}"
        )
    parameter = target.target if isinstance(target, Part) else target
    loadable = _FLOATS if parameter.is_floating_point() else _INTEGERS
    if dtype not in loadable:
        raise CheckpointError(
            f"{name} in {file} has type {dtype}; {', '.join(loadable)} can be loaded"
        )
    if not isinstance(target, Part):
        target.copy_(handle.get_tensor(name))
    elif target.at:
        target.target.copy_(source[target.index])
