"""The flow-matching loss. t = 1 is noise, t = 0 is data; the velocity target is noise − actions.

Source: openpi models/pi0.py (compute_loss)
"""

from jaxtyping import Float
from torch import Tensor

from piston.batch import Observation
from piston.model.pi0 import Pi0, Tap


def flow_loss(
    model: Pi0,
    observation: Observation,
    actions: Float[Tensor, "B A D"],
    noise: Float[Tensor, "B A D"],
    time: Float[Tensor, "B"],
    tap: Tap = None,
    time_posemb: Tensor | None = None,
) -> Float[Tensor, "B A"]:
    """Squared velocity error, averaged over all action dimensions, padded ones included. Its mean is the loss."""
    t = time[:, None, None]
    x_t = t * noise + (1 - t) * actions
    u_t = noise - actions
    v_t = model(observation, x_t, time, tap, time_posemb)
    error_BAD = (v_t - u_t).square()
    loss_BA = error_BAD.mean(-1)
    if tap is not None:
        tap.update(
            {"x_t": x_t, "u_t": u_t, "loss_per_element": error_BAD, "loss_chunk": loss_BA, "loss": loss_BA.mean()}
        )
    return loss_BA
