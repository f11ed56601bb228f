# SPDX-License-Identifier: Apache-2.0
"""Attention's memory grows with the sequence, not with its square."""

import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import sys, tensorflow as tf, tf_ops

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def step(seq):
    x = [tf.random.normal([1, seq, 1, 64]) for _ in range(4)]
    with tf.GradientTape() as tape:
        tape.watch(x[:3])
        y = tf_ops.dot_product_attention(*x[:3], is_causal=True)
    return tape.gradient(y, x[:3], x[3])

with tf.device("CPU"):
    step(64)
    before = status("VmRSS")
    step(int(sys.argv[1]))
    print(status("VmHWM") - before)
"""


@pytest.fixture(autouse=True)
def device():
    """Each size has a process of its own, on the CPU, whose peak the system knows."""


def peak(seq):
    command = [sys.executable, "-c", PROGRAM, str(seq)]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_peak_is_linear():
    small, large = peak(8192), peak(32768)
    assert large < 6 * small
    # Scores of one head in float32 would be 4096 MiB; the eight tensors here are 64 MiB.
    assert large < 400
