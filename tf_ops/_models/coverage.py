# SPDX-License-Identifier: Apache-2.0
"""Counts which calls of Keras the kernels served, and why they did not serve the others."""

import collections
import threading

_lock = threading.Lock()
_counts = collections.defaultdict(collections.Counter)  # by operation: the reason, or None
_thread = threading.local()


class Coverage(dict):
    """For each operation, {"served": int, "fell_through": {reason: int}}."""

    @property
    def share(self):
        """The part of all calls that the kernels served, from 0 to 1; 1 where there were none."""
        served = sum(counts["served"] for counts in self.values())
        others = sum(sum(counts["fell_through"].values()) for counts in self.values())
        return served / (served + others) if served + others else 1.0

    def __str__(self):
        lines = [f"{100 * self.share:.1f} % of the calls served"]
        for operation, counts in sorted(self.items()):
            lines.append(f"  {operation}: {counts['served']} served")
            for reason, count in sorted(counts["fell_through"].items()):
                lines.append(f"    {count} not: {reason}")
        return "\n".join(lines)


def coverage(reset=False):
    """Returns how many calls the kernels served since the process began, and why not others.

    Counted are the calls of attention and normalization that come by way of `tf_ops.enable()`,
    `tf_ops.accelerate()` or `tf_ops.layers`. A call within a `tf.function`, `fit` included, is
    counted when it is traced, not each time it runs.

    Args:
        reset: bool; begin to count anew.

    Returns:
        dict that prints as a table: for each operation, such as "dot_product_attention", a dict
        {"served": int, "fell_through": {reason: int}}. Its `share` is the part that was served.
    """
    with _lock:
        result = Coverage()
        for operation, counts in _counts.items():
            others = {reason: count for reason, count in counts.items() if reason is not None}
            result[operation] = {"served": counts[None], "fell_through": others}
        if reset:
            _counts.clear()
    return result


def count(operation, reason=None):
    """Counts a call as served or, with a reason, as left to stock Keras."""
    if not getattr(_thread, "paused", False):
        with _lock:
            _counts[operation][reason] += 1


def left_to_stock(operation, reason, stock, *args, **kwargs):
    """Returns `stock(*args, **kwargs)`, counted once, whatever it is made of."""
    count(operation, reason)
    before, _thread.paused = getattr(_thread, "paused", False), True
    try:
        return stock(*args, **kwargs)
    finally:
        _thread.paused = before
