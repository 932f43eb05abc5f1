"""The denoising steps of NextStep (https://arxiv.org/abs/2508.10711): Euler steps of stochastic differential equations
from noise, at time 0, to a token, at time 1."""

import functools
import math
from typing import Literal

from ...models.velocity import VelocitySteps


Sampler = Literal["em", "sde", "em-1.0"]
# The steps of the published calls.
STEPS: dict[str, int] = {"em": 28, "sde": 30, "em-1.0": 50}
# The share of the noise that "sde" adds, and the time of the last step of "em-1.0".
ETA, LAST = 0.8, 0.96


@functools.lru_cache(maxsize=256)
def flow_steps(sampler: Sampler, count: int, shift: float = 1.0) -> VelocitySteps:
    """The steps of a sampler: "em", the Euler-Maruyama steps of NextStep-1.1 on the Hub; "sde", those of its
    repository, which add less noise; "em-1.0", those of NextStep-1, the last of which adds none.

    Args:
        count: S.
        shift: k in t / (k - (k - 1) t), which moves the times of the steps towards the noise.
    """
    last = LAST if sampler == "em-1.0" else 1 - 1 / count
    times = [last * step / max(count - 1, 1) for step in range(count)]
    times = [time / (shift - (shift - 1) * time) for time in times]
    steps = []
    for time, after in zip(times, [*times[1:], None], strict=True):
        if after is None and sampler == "em-1.0":
            steps.append((time, 1.0, 1 - LAST, 0.0))
            continue
        interval = (1.0 if after is None else after) - time
        if sampler == "sde":
            # At time 0 that of the last step stands in.
            ratio = (1 - time) / time if time else 1 / (1 - times[-1])
            variance = ETA**2 * ratio * interval
            pulled = variance / (2 * (1 - time))
            steps.append((time, 1 - pulled, interval + pulled * time, math.sqrt(variance)))
        else:
            std = math.sqrt(2 * (1 - time) * interval)
            steps.append((time, 1 - interval, (1 + time) * interval, std))
    return VelocitySteps(*zip(*reversed(steps), strict=True))
