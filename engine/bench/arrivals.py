"""When requests are due: Poisson, gamma or all at once, as offsets from the start.

Knows distributions of gaps. Does not know what is sent, nor that a server may be slow: an open
loop never waits for answers.
"""

import math
import random
from collections.abc import Iterator

_NS = 1e9


def arrival_offsets_ns(request_rate: float, burstiness: float, *, seed: int) -> Iterator[int]:
    """Offsets of the requests from the start, in nanoseconds, without end.

    The gaps follow a gamma distribution of shape `burstiness` and mean `1 / request_rate`: 1 is
    a Poisson process, less comes in bursts, more is more regular (the gaps' coefficient of
    variation is `1 / sqrt(burstiness)`). An infinite rate puts every request at 0. The first
    request is a gap away from the start, as in any stationary process.

    Args:
        request_rate: requests per second, more than 0; `math.inf` for all at once.
        burstiness: shape of the distribution, more than 0.
        seed: the same seed gives the same offsets.
    """
    assert request_rate > 0, request_rate
    assert burstiness > 0, burstiness
    generator = random.Random(f"arrivals-{seed}")
    offset_s = 0.0
    while True:
        if not math.isinf(request_rate):
            offset_s += generator.gammavariate(burstiness, 1 / (request_rate * burstiness))
        yield round(offset_s * _NS)
