"""The weights of classes, where a less urgent class gets service while a more urgent one waits.

A class is a priority (`Terms.priority`). Queue and pool are shared out by these weights (`policies.fairness.shares`),
and the admission policy expects waits by them (`policies.state.waiting`).
"""

MOST_STEPS = 40
"""The distance from priority 0 beyond which a priority has the weight of this one. ASSUMPTION: nobody needs shares of
classes that are further away, and the largest ratio (1000) to this power is still a number.
"""


def class_weight(priority: int, class_ratio: float) -> float:
    """Returns how many times as much service a class gets as that of priority 0, while both wait, if a class gets
    `class_ratio` times as much as one whose priority is larger by 1.
    """
    steps: int = max(-MOST_STEPS, min(-priority, MOST_STEPS))
    weight: float = class_ratio**steps
    return weight
