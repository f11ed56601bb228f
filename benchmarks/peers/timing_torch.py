# SPDX-License-Identifier: Apache-2.0
"""Times on PyTorch's device, and torch.compile as the benchmarks here take it."""

import statistics
import time

import torch

GPU = torch.cuda.is_available()


def compiled(fn):
    """fn by torch.compile for the shapes that it is called with; its gradient can be repeated."""
    from torch._functorch import config

    config.donated_buffer = False
    torch._dynamo.reset()  # after eight shapes of a function the ninth would not be compiled
    return torch.compile(fn, dynamic=False)


def milliseconds(fn):
    """The median by CUDA events, the second-level cache flushed in between."""
    if GPU:
        from triton.testing import do_bench

        return do_bench(fn, warmup=20, rep=80, return_mode="median")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def once(fn):
    """In place of a time: runs what is to be measured, which compiles it."""
    fn()
    return 1.0


def await_turn():
    """Waits for a line of standard input, so that processes compile at once and measure alone."""
    if GPU:
        torch.cuda.empty_cache()
    print("ready", flush=True)
    input()
