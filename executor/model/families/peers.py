"""What a model's layers need of the other executors, in one object.

              reaches                     for
dispatcher    the whole group             routed experts
communicator  the whole group             dense MLPs that are split over it
attn_tp       executors of the DP rank    attention heads, logits
"""

from dataclasses import dataclass

from executor.model.moe.layer import Dispatcher
from executor.parallel.attn_tp_communicator import AttnTpCommunicator
from executor.parallel.dp_communicator import DpCommunicator
from executor.parallel.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This executor's place, and its ways to the others. Groups come and go behind them.

    Attributes:
        topology: Which share of the model this executor has.
        communicator: Gathers and sums rows over the group.
        attn_tp: Gathers and sums rows over the executors of this DP rank.
        dispatcher: Takes rows to their experts; shared by all layers.
        moe_dense_tp_size: 1 runs dense MLPs whole on each executor; None splits them over the
            group.
    """

    topology: Topology
    communicator: DpCommunicator
    attn_tp: AttnTpCommunicator
    dispatcher: Dispatcher
    moe_dense_tp_size: int | None = None

    @property
    def splits_dense(self) -> bool:
        """Whether dense MLPs are split over the group."""
        return self.moe_dense_tp_size is None and self.topology.world_size > 1
