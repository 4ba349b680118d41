"""Makes the dispatcher that the settings ask for. The only place that knows all of them.

moe_a2a      decode steps       steps in which any rank extends
none         all-gather         all-gather
torch        all-to-all         all-gather, or all-to-all with moe_a2a_extend=all-to-all
flashinfer   FlashInfer's       all-gather
"""

import torch

from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.dispatch_all_to_all import TorchAllToAllDispatcher
from executor.model.moe.dispatch_by_phase import PhaseDispatcher
from executor.model.moe.layer import Dispatcher
from executor.parallel.dp_communicator import DpCommunicator


def new_dispatcher(
    moe_a2a: str = "none",
    moe_a2a_extend: str = "all-gather",
    *,
    communicator: DpCommunicator,
    num_experts: int,
    hidden_size: int,
    dtype: torch.dtype,
    top_k: int,
    device: torch.device,
    flashinfer: Dispatcher | None = None,
) -> Dispatcher:
    """Makes the one dispatcher of a model; all its layers share it.

    Args:
        moe_a2a: As in ExecutorConfig, which checks it. Without peers nothing moves, whatever it
            says.
        moe_a2a_extend: Likewise.
        communicator: Joins the ranks.
        num_experts: E.
        hidden_size: D.
        dtype: Type of the hidden states.
        top_k: K.
        device: Where the tensors live.
        flashinfer: FlashInfer's dispatcher; None where it does not run.

    Raises:
        ValueError: FlashInfer's was asked for, and does not run here.
    """
    topology = communicator.topology
    all_gather = AllGatherDispatcher(communicator, topology.local_experts(num_experts))
    if moe_a2a == "none" or topology.world_size == 1:
        return all_gather
    if moe_a2a == "torch":
        all_to_all = TorchAllToAllDispatcher(
            communicator,
            num_experts=num_experts,
            hidden_size=hidden_size,
            dtype=dtype,
            top_k=top_k,
            device=device,
        )
        if moe_a2a_extend == "all-to-all":
            return all_to_all
        return PhaseDispatcher(decode=all_to_all, extend=all_gather)
    if flashinfer is None:
        raise ValueError(
            f"moe_a2a=flashinfer needs a CUDA device and FlashInfer, and this executor runs on "
            f"{device} or without the library; use moe_a2a=torch or none"
        )
    return PhaseDispatcher(decode=flashinfer, extend=all_gather)


def require_capturable(
    dispatcher: Dispatcher, *, has_decode_graphs: bool, has_prefill_graphs: bool
) -> None:
    """Refuses CUDA graphs over a dispatcher that no graph can record.

    Args:
        dispatcher: From ``new_dispatcher``.
        has_decode_graphs: Whether decode steps are captured.
        has_prefill_graphs: Whether steps that extend are.

    Raises:
        ValueError: Says what to turn off.
    """
    decode = extend = dispatcher
    if isinstance(dispatcher, PhaseDispatcher):
        decode, extend = dispatcher.decode, dispatcher.extend
    for setting, is_captured, used in (
        ("decode_graphs", has_decode_graphs, decode),
        ("prefill_graphs", has_prefill_graphs, extend),
    ):
        if is_captured and not used.is_capturable:
            raise ValueError(
                f"moe_a2a=torch reads counts on the host, which no CUDA graph can record: set "
                f"{setting}=off, or moe_a2a to none or flashinfer"
            )
