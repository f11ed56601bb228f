# SPDX-License-Identifier: Apache-2.0
"""Generates text with keys and values kept in a cache, beside recomputing them for each token.

The model is that of train_and_serve.py, with the weights it left in build/demo or, if there are
none, trained for a minute. What is written with the cache must be, token for token, what full
recomputation writes; then one step is exported as a SavedModel and writes in a fresh process.

    python examples/generate.py
    python examples/generate.py --out my_demo --count 400 --temperature 0.7
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import train_and_serve as demo  # first: it sets TensorFlow's environment

# isort: split
import numpy as np
import tensorflow as tf
from continue_text import write


class Cached(tf.Module):
    """A model of `make_model` that runs each token once: its keys and values are variables.

    Args:
        model: the model, made of tf_ops.
        batch, max_seq: ints, the size of the cache.
        jit_compile: whether XLA compiles it.
    """

    def __init__(self, model, batch, max_seq, jit_compile):
        super().__init__()
        _, self.embedding, *self.blocks, self.normalization, self.projection = model.layers

        def variable(block):
            shape = [batch, max_seq, block.num_key_value_heads, block.head_dim]
            return tf.Variable(tf.zeros(shape, block.compute_dtype), trainable=False)

        self.caches = [(variable(block), variable(block)) for block in self.blocks]
        positions = tf.TensorSpec([batch], tf.int32, "positions")
        prompt = tf.TensorSpec([batch, None], tf.int32, "tokens")
        token = tf.TensorSpec([batch], tf.int32, "tokens")
        self.prefill = tf.function(self.run, [prompt, positions], jit_compile=jit_compile)
        self.step = tf.function(self.run_one, [token, positions], jit_compile=jit_compile)

    def run(self, tokens, positions):
        """The logits [batch, 256] of what follows tokens [batch, seq], which are at positions."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, self.caches):
            x = block(x, cache=cache, positions=positions)
        return {"logits": self.projection(self.normalization(x[:, -1:]))[:, 0]}

    def run_one(self, tokens, positions):
        return self.run(tokens[:, None], positions)


class Recomputing:
    """The same from any model, by running it over the whole text each time.

    XLA compiles for one shape, so that it gets the text padded to `max_seq`.
    """

    def __init__(self, model, batch, max_seq, jit_compile):
        self.text = np.zeros([batch, max_seq], "int32")
        self.has_one_shape = jit_compile
        signature = [tf.TensorSpec([batch, None], tf.int32), tf.TensorSpec([], tf.int32)]
        self.run = tf.function(
            lambda text, last: {"logits": tf.gather(model(text), last, axis=1)},
            signature,
            jit_compile=jit_compile,
        )
        self.prefill = self.step = self.extend

    def extend(self, tokens, positions):
        tokens, start = np.reshape(tokens, [len(self.text), -1]), int(positions[0])
        end = start + tokens.shape[1]
        self.text[:, start:end] = tokens
        return self.run(self.text if self.has_one_shape else self.text[:, :end], end - 1)


def check_tokens(what, tokens, expected, logits, args):
    """Exits unless tokens [batch, count] are the expected ones, or part at a tie.

    Args:
        what: whose tokens they are.
        tokens: from logits that other arithmetic made.
        expected: from `logits` [batch, count, 256].
    """
    parted = np.argwhere(tokens != expected)
    if not parted.size:
        return
    row, i = parted[parted[:, 1].argmin()]
    runner_up, best = np.sort(logits[row, i])[-2:]
    # As check_logits of train_and_serve.py has it.
    exact = 1e-3 if args.gpu else 1e-4
    limit = 2 * np.abs(logits).max() * (exact if args.policy == "float32" else 3e-2)
    if not best - runner_up <= limit:
        sys.exit(f"{what}: a DIFFERENT token, number {i}, by {best - runner_up:.2g} in its logit")
    print(f"  {what}: the same up to a tie at token {i}")


def measure(models, prompt, args):
    """Tokens/s of all ways to write, by name; checks that they write the same."""
    batch, size = prompt.shape[0], prompt.shape[1] + args.count
    ways = {
        f"{kind}, {what}, {'XLA' if jit_compile else 'graph'}": (way, models[kind], jit_compile)
        for kind, what, way in (
            (demo.STOCK, "recomputing", Recomputing),
            (demo.OURS, "recomputing", Recomputing),
            (demo.OURS, "with cache", Cached),
        )
        for jit_compile in (False, True)
    }
    expected, rates = None, {}
    print(f"\n{args.count} bytes after {prompt.shape[1]}{'':16}bytes/s")
    for name, (way, *arguments) in ways.items():
        writer = way(arguments[0], batch, size, arguments[1])
        write(writer.prefill, writer.step, prompt, 2)
        start = time.perf_counter()
        tokens, logits = write(writer.prefill, writer.step, prompt, args.count)
        rates[name] = round(args.count / (time.perf_counter() - start), 1)
        print(f"  {name:34}{rates[name]:8.0f}", flush=True)
        expected = (tokens, logits) if expected is None else expected
        check_tokens(name, tokens, *expected, args)
    print("All wrote the same.")
    return rates


def export(cached, prompt, args):
    """Writes a SavedModel, which must write in a fresh process what is written here."""
    folder = args.out / "generator"
    signatures = {"serving_default": cached.step, "prefill": cached.prefill}
    tf.saved_model.save(cached, folder, signatures)
    options = {"count": args.count, "temperature": args.temperature, "seed": args.seed}
    tokens, _ = write(cached.prefill, cached.step, prompt, **options)
    script = Path(__file__).with_name("continue_text.py")
    flags = [f"--{name}={value}" for name, value in options.items()]
    prompt, tokens = (x.astype("uint8").tobytes() for x in (prompt, tokens))
    command = [sys.executable, script, *flags, folder, b"--", prompt]
    done = subprocess.run(command, capture_output=True)
    if done.stdout != tokens:
        sys.exit(
            f"The SavedModel writes DIFFERENT text:\n{done.stdout.decode(errors='replace')}\n"
            + done.stderr.decode(errors="replace")
        )
    print(f"\nThe SavedModel {folder} wrote the same in a fresh process, after\n{demo.LINE}")
    print(prompt[-160:].decode(errors="replace"))
    print(f"{demo.LINE}\n{tokens.decode(errors='replace')}\n{demo.LINE}")


def main():
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--count", type=int, default=256, help="bytes to write")
    flags.add_argument("--temperature", type=float, default=0.7, help="of the text that is shown")
    flags.add_argument("--json", type=Path, help="where to keep the rates")
    args = demo.parse_arguments(__doc__.split("\n")[0], [flags], steps=100)
    text = demo.read_text(args.text, args.seq)
    models = {kind: demo.make_model(kind, args) for kind in demo.PARTS}
    weights = args.out / f"{demo.OURS}.weights.h5"
    if not weights.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        print(f"Training for {args.steps} steps; {weights} does not exist", flush=True)
        demo.compile_model(models[demo.OURS], demo.OURS, args)
        models[demo.OURS].fit(demo.make_batches(text, args), verbose=2)
        models[demo.OURS].save_weights(weights)
    for model in models.values():
        model.load_weights(weights)

    prompt = text[None, len(text) // 2 :][:, : args.seq // 2].astype("int32")
    rates = measure(models, prompt, args)
    if args.json:
        report = {"tensorflow": tf.__version__, "policy": args.policy, "written": args.count}
        report |= {"prompt": prompt.shape[1], "bytes_per_second": rates}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    size = prompt.shape[1] + args.count
    export(Cached(models[demo.OURS], 1, size, jit_compile=False), prompt, args)


if __name__ == "__main__":
    main()
