"""1F1B pass by pass: every stage has its list of passes and does the next when it may."""

from collections.abc import Sequence


def one_forward_one_backward_s(
    forward_s: Sequence[float], backward_s: Sequence[float], hop_s: Sequence[float], stages: int
) -> float:
    """Seconds until the last pass ends; a hop takes its time between neighbors, in both ways."""
    count = len(forward_s)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, count)
        order = [("F", one) for one in range(ahead)]
        for one in range(count):
            order.append(("B", one))
            if ahead + one < count:
                order.append(("F", ahead + one))
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    while any(at[stage] < 2 * count for stage in range(stages)):
        for stage in range(stages):
            if at[stage] == 2 * count:
                continue
            kind, one = orders[stage][at[stage]]
            if kind == "F":
                needs, ready = ("F", one, stage - 1), stage == 0
            else:
                needs, ready = ("B", one, stage + 1), stage == stages - 1
            if not ready and needs not in ends:
                continue
            start = max(free[stage], 0.0 if ready else ends[needs] + hop_s[one])
            free[stage] = start + (forward_s[one] if kind == "F" else backward_s[one])
            ends[kind, one, stage] = free[stage]
            at[stage] += 1
    return max(free)
