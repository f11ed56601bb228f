# SPDX-License-Identifier: Apache-2.0
"""Continues a text with a SavedModel of generate.py, in a process that knows no model code.

python examples/continue_text.py build/generate/saved_model "def main(" --count 200
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf

import tf_ops  # noqa: F401  registers the ops


def write(prefill, step, prompt, count, temperature=0.0, seed=0):
    """Writes `count` tokens after each row of a prompt.

    Args:
        prefill: function of `tokens`, int32 [batch, seq], and their first `positions`, int32
            [batch], that returns the `logits` [batch, classes] of what follows, in a dict, and
            remembers the tokens.
        step: likewise, of one token [batch].
        prompt: int32 [batch, seq].
        count: int.
        temperature: float by which logits are divided, and sampled from; 0: the best token.
        seed: int, of the sampling.

    Returns:
        Tokens, int32 [batch, count], and the logits they were chosen by, [batch, count, classes].
    """
    random = np.random.default_rng(seed)
    batch, position = prompt.shape
    output = prefill(tokens=tf.constant(prompt), positions=tf.zeros([batch], tf.int32))
    tokens, logits = [], []
    while True:
        logits.append(output["logits"].numpy())
        # The best of logits with Gumbel noise is a sample of their softmax.
        noise = random.gumbel(size=logits[-1].shape) if temperature else 0
        tokens.append((logits[-1] + temperature * noise).argmax(-1).astype("int32"))
        if len(tokens) == count:
            return np.stack(tokens, 1), np.stack(logits, 1)
        output = step(tokens=tf.constant(tokens[-1]), positions=tf.fill([batch], position))
        position += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("saved_model", type=pathlib.Path)
    parser.add_argument("prompt")
    parser.add_argument("--count", type=int, default=200, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the best byte always")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    args = parser.parse_args()
    signatures = tf.saved_model.load(args.saved_model).signatures
    prefill, step = signatures["prefill"], signatures["serving_default"]
    prompt = np.frombuffer(os.fsencode(args.prompt), np.uint8).astype("int32")
    tokens, _ = write(prefill, step, prompt[None], args.count, args.temperature, args.seed)
    sys.stdout.buffer.write(tokens.astype("uint8").tobytes())


if __name__ == "__main__":
    main()
