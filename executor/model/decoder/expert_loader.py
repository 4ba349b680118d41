"""Experts of an elastic executor: which are in its slots, and loading others from the checkpoint.

    Join      compute thread, between two epochs    all that its placement lacks
    Stage     a thread of its own, beside steps     slots that the group does not use, at a bounded rate

Neither reads what is there already, and one waits for the other.
"""

import time
from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Protocol

import torch

from executor.batch.placement import Placement
from executor.errors import CheckpointError, LoadFailed, NoRoom
from executor.model.moe.experts import ExpertSlots
from executor.model.weights import Loader, WeightGroup
from executor.parallel.expert_places import ExpertPlaces
from executor.parallel.layout import Capacity, Place
from protos.executor.placement import GHOST


class HasExperts(Protocol):
    """A model, target or draft."""

    @property
    def expert_slots(self) -> list[ExpertSlots]:
        """Of each layer that has experts."""
        ...

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        """Returns what the checkpoint must hold of experts that are not in their slots yet."""
        ...


def check_experts(model: HasExperts, loader: Loader, num_experts: int) -> None:
    """Checks that a checkpoint holds all experts as a model needs them; reads no weight.

    Args:
        model: With slots for some, none of them loaded.
        loader: Of the checkpoint.
        num_experts: E.

    Raises:
        CheckpointError: One is missing, or has another shape or type.
    """
    num_slots = min((len(layer.resident) for layer in model.expert_slots), default=num_experts)
    for first in range(0, num_experts, num_slots):
        experts = [*range(first, min(first + num_slots, num_experts))]
        loader.check(model.missing_groups([*experts, *[GHOST] * (num_slots - len(experts))]))


class ElasticExperts:
    """The place of an elastic executor, and its experts.

    Args:
        capacity: What it is built for.
        place: Where it stands.
        places: The dispatcher's tables.
        models: The target, and its draft if it has one, each with its checkpoint.
        device: Where they are.
    """

    def __init__(
        self,
        capacity: Capacity,
        place: Place,
        places: ExpertPlaces,
        models: Sequence[tuple[HasExperts, Loader]],
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self._place = place
        self._places = places
        self._models = [each for each in models if each[0].expert_slots]
        self._device = device
        self._loading = Lock()

    @property
    def num_experts(self) -> int:
        """E, of the model."""
        return self._places.num_experts

    @property
    def resident(self) -> list[int]:
        """The expert that each slot holds in all layers, or GHOST."""
        held = [layer.resident for model, _ in self._models for layer in model.expert_slots]
        of_slots = zip(*held, strict=True)
        return [each[0] if len(set(each)) == 1 else GHOST for each in of_slots]

    @property
    def places_crc32(self) -> int:
        """Checksum of where rows for each expert go; 0 of a model without experts."""
        return self._places.crc32 if self._models else 0

    def check(self) -> None:
        """Checks that the checkpoints hold all experts as the models need them; reads no weight.

        Raises:
            CheckpointError: One is missing, or has another shape or type.
        """
        for model, loader in self._models:
            check_experts(model, loader, self.num_experts)

    def take(self, placement: Placement) -> None:
        """Stands there from now on. No step may run."""
        self._place.topology = placement.topology
        if self._models:
            self._places.write(placement.slot_map, placement.topology.ep_rank)

    def missing_bytes(self, slots: Sequence[int]) -> int:
        """Returns what experts that are not in their slots yet will take.

        Args:
            slots: The expert wanted in each, or GHOST, where anything may be.
        """
        wanted = [slot for slot, expert in enumerate(slots) if expert != GHOST]
        return sum(
            layer.bytes_per_slot
            for model, _ in self._models
            for layer in model.expert_slots
            for slot in wanted
            if layer.resident[slot] != slots[slot]
        )

    @torch.inference_mode()
    def load(self, slots: Sequence[int], on_progress: Callable[[int], None]) -> int:
        """Loads the experts that are not in their slots yet, slot by slot. Returns their bytes.

        Args:
            slots: As in ``missing_bytes``.
            on_progress: Called, again and again, with the bytes loaded so far; what it raises ends this.

        Raises:
            LoadFailed: They cannot be read.
        """
        with self._loading:
            if self._device.type == "cuda":  # this thread's own
                torch.cuda.set_device(self._device)
            total = 0
            for slot, expert in enumerate(slots):
                only = [GHOST] * len(slots)
                only[slot] = expert
                num_bytes = self.missing_bytes(only)
                if num_bytes:
                    self._load_slot(only, total, num_bytes, on_progress)
                total += num_bytes
            return total

    def stage(
        self, slots: Sequence[int], used: Sequence[int] | None, max_bytes_per_s: int
    ) -> "Staging":
        """Returns what loads experts beside steps.

        Args:
            slots: As in ``missing_bytes``.
            used: The experts that the group which this executor is in has there; None: it is in none.
            max_bytes_per_s: At most, on average; 0: no bound.

        Raises:
            NoRoom: A slot is in use for another expert.
        """
        for slot, (wanted, there) in enumerate(zip(slots, used or (), strict=False)):
            if GHOST not in (wanted, there) and wanted != there:
                raise NoRoom(
                    f"slot {slot} is to have expert {wanted}, and the group uses expert {there} there: "
                    f"only a Join can replace it"
                )
        return Staging(self, slots, max_bytes_per_s)

    def _load_slot(
        self, only: Sequence[int], before: int, num_bytes: int, on_progress: Callable[[int], None]
    ) -> None:
        """Loads one slot's expert in all layers, so many bytes behind those loaded before."""
        of_models = num_bytes / len(self._models)
        try:
            for number, (model, loader) in enumerate(self._models):
                begin = before + int(number * of_models)

                def on_tensor(done: int, of: int, begin: int = begin) -> None:
                    on_progress(begin + int(of_models * done / of))

                loader.fill(model.missing_groups(only), on_progress=on_tensor)
        except (OSError, CheckpointError) as error:
            raise LoadFailed(f"experts were not loaded: {error}") from error


class _Cancelled(Exception):
    """Nobody wants these experts any more."""


class Staging:
    """Loading of experts ahead of a Join.

    Attributes:
        bytes_done: Loaded so far.
        bytes_total: To load in all.
    """

    def __init__(self, experts: ElasticExperts, slots: Sequence[int], max_bytes_per_s: int) -> None:
        self._experts = experts
        self._slots = slots
        self._max_bytes_per_s = max_bytes_per_s
        self._is_cancelled = Event()
        self.bytes_done, self.bytes_total = 0, experts.missing_bytes(slots)

    def run(self) -> None:
        """Loads them. Returns when they are there, or soon after `cancel`.

        Raises:
            LoadFailed: They cannot be read.
        """
        self._start_s = time.monotonic()
        try:
            self._note(0)
            self._experts.load(self._slots, self._note)
        except _Cancelled:
            pass
        else:
            self.bytes_done = self.bytes_total

    def cancel(self) -> None:
        """Has it end; any thread may. Experts that were loaded stay."""
        self._is_cancelled.set()

    def _note(self, num_bytes: int) -> None:
        self.bytes_done = num_bytes
        due_s = self._start_s
        if self._max_bytes_per_s:
            due_s += num_bytes / self._max_bytes_per_s
        if self._is_cancelled.wait(max(0.0, due_s - time.monotonic())):
            raise _Cancelled
