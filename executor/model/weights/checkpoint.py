"""Checkpoint: the tensors of a folder of safetensors files, by their names.

A file is opened once and mapped: a tensor, or a part of one, is read from it when it is copied.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"[\w.-]+\.safetensors")  # a file's name, of no other folder
# Of a whole checkpoint. Its headers are parsed before anything is known of them, at some 6 us and
# 0.4 KB a tensor; DeepSeek-V3 has 91,000 tensors and 10 MiB of headers, Kimi-K2.5 in NVFP4 has 280,000
# and 37 MiB.
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 400_000

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        name: Its name.
        file: Where it is.
        dtype: Its type, as safetensors names it.
        shape: Its shape.
        read: Returns what an index for each dimension takes of it.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Index], torch.Tensor]

    def dequantised(
        self, shape: tuple[int, ...], read: Callable[[Index], torch.Tensor]
    ) -> "Stored":
        """Returns the weight that this one and others make, in float32."""
        return replace(self, dtype="F32", shape=shape, read=read)


class Checkpoint(Mapping[str, Stored]):
    """The tensors in a folder, until ``stack`` closes.

    Args:
        path: Folder with model.safetensors, or shards and their index.
        stack: Closes the files.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._found: dict[str, tuple[Path, Any]] = {}
        left = MAX_HEADER_BYTES
        files, file_of = _files(path)
        for file in files:
            try:
                left -= _header_bytes(file, left)
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
            for name in list(handle.keys()):
                if name not in self._found or file_of.get(name) == file.name:
                    self._found[name] = (file, handle)
            if len(self._found) > MAX_TENSORS:
                raise CheckpointError(
                    f"{file}: with it {path} has more than {MAX_TENSORS:,} tensors"
                )

    def __getitem__(self, name: str) -> Stored:
        file, handle = self._found[name]
        tensor = handle.get_slice(name)  # maps it; what is indexed is read when it is copied
        return Stored(name, file, tensor.get_dtype(), tuple(tensor.get_shape()), tensor.__getitem__)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _header_bytes(file: Path, most: int) -> int:
    with file.open("rb") as opened:
        count = int.from_bytes(opened.read(8), "little")
    if count > most:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: its header says that it has {count:,} bytes; "
            f"those of all files may have {MAX_HEADER_BYTES:,}, and {most:,} are left"
        )
    return count


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files of a folder, and by tensor the name of the one to read it from, if several have it."""
    index = path / _INDEX
    if not index.exists():
        if not (path / _SINGLE).exists():
            raise CheckpointError(f"{path} has neither {_SINGLE} nor {_INDEX}")
        return [path / _SINGLE], {}
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{index} has more than {MAX_HEADER_BYTES:,} bytes")
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(file_of.values())
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
    return files, file_of
