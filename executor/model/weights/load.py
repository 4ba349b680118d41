"""Loading: what a model says that it needs, checked against a checkpoint and copied.

A group at a time is finished, in order, so that it can be packed and its plain copy dropped; threads
read and dequantise the next few meanwhile. What other ranks hold, whole tensors or parts of one, is
never read.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from operator import itemgetter
from pathlib import Path

import torch

from executor.errors import CheckpointError
from executor.model.weights.checkpoint import Checkpoint, Stored
from executor.model.weights.formats import Format
from executor.model.weights.targets import Cut, WeightGroup
from executor.model.weights.uploads import READERS, Uploads

_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")

OnProgress = Callable[[int, int], None]
Skips = Callable[[str], bool]


class Loader:
    """Fills parameters from one checkpoint, whose files stay open until ``close``.

    Args:
        path: Directory with model.safetensors, or shards and their index.
        weight_format: Of quantised weights, which are dequantised where a group does not keep them;
            None if there are none.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """

    def __init__(self, path: str | Path, weight_format: Format | None = None) -> None:
        self._stack = ExitStack()
        self._found = Checkpoint(Path(path), self._stack)
        self._format = weight_format

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def check(self, groups: Iterable[WeightGroup]) -> None:
        """Checks that every group can be filled; reads no weight.

        Raises:
            CheckpointError: As of ``fill``.
        """
        _checked(self._found, groups, self._format, lambda name: True)

    def fill(
        self,
        groups: Sequence[WeightGroup] | deque[WeightGroup],
        *,
        skipped: Skips = lambda name: True,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Fills every group, and reads nothing else.

        Values are converted to the type of the parameter: floats to floats, integers to integers.
        Parameters on the meta device are checked like all others, and read nothing.

        Args:
            groups: What to fill. A deque is consumed, so that a finished group's memory can go.
            skipped: Whether a tensor that no group names may be there; of a quantised one, asked
                once, with the weight's name.
            on_progress: Called with tensors loaded and tensors in all, after each.

        Raises:
            CheckpointError: A tensor is missing, has another shape, is of a type that cannot be
                converted, or is one that the model has no place for.
        """
        pending = groups if isinstance(groups, deque) else deque(groups)
        weights = _checked(self._found, pending, self._format, skipped)
        num_threads = torch.get_num_threads()
        with ExitStack() as stack:
            # Which threads of the pool set for those to come.
            stack.callback(torch.set_num_threads, num_threads)
            pool = stack.enter_context(ThreadPoolExecutor(READERS, initializer=_keep_to_one_core))
            uploads = Uploads()
            done, total = 0, sum(len(_cuts(group)) for group in pending)
            ahead: deque[tuple[list[Future[None]], Callable[[], None]]] = deque()
            while pending or ahead:
                while pending and len(ahead) < READERS:  # which bounds the memory beside the model
                    group = pending.popleft()
                    group.begin()
                    ahead.append((_submit(pool, group, weights, uploads), group.finish))
                    del group
                copies, finish = ahead.popleft()
                for copy in copies:
                    copy.result()
                    done += 1
                    if on_progress is not None:
                        on_progress(done, total)
                finish()
                del finish
            uploads.wait()


def load_weights(
    path: str | Path,
    groups: Iterable[WeightGroup],
    *,
    weight_format: Format | None = None,
    skipped: Skips = lambda name: False,
    on_progress: OnProgress | None = None,
) -> None:
    """Fills every group from the checkpoint in ``path``, which is closed then.

    Args and errors are those of ``Loader`` and its ``fill``. By default, no tensor may be skipped.
    """
    pending = deque(groups)
    del groups  # or it would keep every group to the end
    with closing(Loader(path, weight_format)) as loader:
        loader.fill(pending, skipped=skipped, on_progress=on_progress)


def tensor_names(path: str | Path) -> frozenset[str]:
    """Returns the names of the tensors in ``path``.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    with ExitStack() as stack:
        return frozenset(Checkpoint(Path(path), stack))


def _checked(
    found: Checkpoint,
    groups: Iterable[WeightGroup],
    weight_format: Format | None,
    skipped: Skips,
) -> dict[str, Stored]:
    """Returns every weight that a group names, once all of them are seen to fit."""
    needs = {
        (cut.source.name, cut.shape, cut.types, cut.takes_floats)
        for group in groups
        for cut in _cuts(group)
    }
    _check_names(found, {name for name, *_ in needs}, weight_format, skipped)
    weights: dict[str, Stored] = {}
    for name, shape, types, is_float in sorted(needs, key=itemgetter(0, 1)):
        if name not in weights:
            opened = weight_format if types is None else None
            weights[name] = opened.open(name, found) if opened else found[name]
        _check(weights[name], shape, types or (_FLOATS if is_float else _INTEGERS))
    return weights


def _check_names(
    found: Checkpoint, needed: set[str], weight_format: Format | None, skipped: Skips
) -> None:
    weight_of = {name: name for name in found}
    names = needed
    if weight_format is not None:
        weight_of = {name: weight_format.weight_of(name) for name in found}
        quantised = {weight for name, weight in weight_of.items() if name != weight}
        names = needed | quantised
        names = {part for name in names for part in weight_format.names_of(name, found)}
    missing = sorted(names - found.keys())
    if missing:
        raise CheckpointError(f"{found.path} lacks {_listed(missing)}")
    unexpected = sorted(
        name
        for name, weight in weight_of.items()
        if needed.isdisjoint((name, weight)) and not skipped(weight)
    )
    if unexpected:
        raise CheckpointError(
            f"{found[unexpected[0]].file} has {_listed(unexpected)}, for which this model has no "
            f"place: config.json and the tensors disagree"
        )


def _check(weight: Stored, shape: tuple[int, ...], loadable: tuple[str, ...]) -> None:
    where = f"{weight.name} in {weight.file}"
    if weight.shape != shape:
        raise CheckpointError(
            f"{where} has shape {list(weight.shape)}; this model needs {list(shape)}"
        )
    if weight.dtype not in loadable:
        raise CheckpointError(
            f"{where} has type {weight.dtype}; {', '.join(loadable)} can be loaded, and others with "
            f"their scales, as quantization_config in config.json says"
        )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _submit(
    pool: ThreadPoolExecutor, group: WeightGroup, weights: Mapping[str, Stored], uploads: Uploads
) -> list[Future[None]]:
    return [pool.submit(_copy, weights[cut.source.name], cut, uploads) for cut in _cuts(group)]


def _cuts(group: WeightGroup) -> list[Cut]:
    return [cut for target in group.targets.items() for cut in Cut.all_of(*target)]


@torch.inference_mode()  # which is a thread's own
def _copy(weight: Stored, cut: Cut, uploads: Uploads) -> None:
    if cut.index is not None and not cut.target.is_meta:
        cut.fill(weight.read(cut.index), uploads.fill)


def _keep_to_one_core() -> None:
    torch.set_num_threads(1)
