"""The experts of a rank as two stacked tensors. Dimensions as in ``layer.py``."""

import torch


def check_stacked(name: str, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Checks that the projections into an expert and out of it fit one another.

    Args:
        name: What the runner calls the first: ``w13``, or ``w31`` where up comes before gate.
        w13: [L, 2F, D], gate and up projections of each expert.
        w2: [L, D, F], down projections.

    Raises:
        ValueError: They do not. Says both shapes.
    """
    num_local, hidden_size, intermediate_size = w2.shape
    if w13.shape != (num_local, 2 * intermediate_size, hidden_size):
        raise ValueError(
            f"{name} is {list(w13.shape)} and w2 {list(w2.shape)}: "
            f"need [L, 2F, D] and [L, D, F] with the same L, F and D"
        )
