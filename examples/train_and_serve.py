# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  TensorFlow reads its environment when it is imported.
"""Trains a language model on tf_ops and on stock Keras, then serves it without Python.

The model is a byte-level decoder-only Transformer: RMS normalization, rotary position embedding,
grouped-query attention, a gated MLP. Both models start from the same weights and see the same
batches; they differ in what PARTS says.

    python examples/train_and_serve.py                # on the Python standard library's sources
    python examples/train_and_serve.py --text my.txt --steps 400 --policy mixed_bfloat16
"""

import argparse
import json
import multiprocessing.connection
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # two processes share the GPU
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import keras
import numpy as np
import tensorflow as tf
from report import report
from tensorflow.core.protobuf import saved_model_pb2

import tf_ops

PRESETS = {
    "cpu": {"policy": "float32", "layers": 4, "d_model": 128, "heads": 4, "kv_heads": 2,
            "seq": 512, "batch": 8, "steps": 200, "learning_rate": 3e-3},
    "gpu": {"policy": "mixed_bfloat16", "layers": 8, "d_model": 1024, "heads": 16, "kv_heads": 4,
            "seq": 2048, "batch": 8, "steps": 200, "learning_rate": 1e-3},
}  # fmt: skip
LINE = "-" * 80
TURNS = 10  # the two trainings take turns, so that a busy machine slows both alike


# ---- Data ----------------------------------------------------------------------------------------


def read_text(path, seq):
    """The bytes of a file, or of the Python sources under a folder; uint8 [length]."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    files = [f for f in files if not {"site-packages", "dist-packages", "test"} & set(f.parts)]
    try:
        text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    except OSError as error:
        sys.exit(f"--text {path}: {error.strerror}")
    if len(text) < 10 * seq:
        sys.exit(f"--text {path}: {len(text)} bytes of text; {10 * seq} are needed")
    return text


def make_batches(text, args):
    """A dataset of `steps` pairs (bytes, next bytes), int32 [batch, seq], drawn with the seed."""
    random = np.random.default_rng(args.seed)
    starts = random.integers(len(text) - args.seq, size=(args.steps, args.batch, 1))
    windows = text[starts + np.arange(args.seq + 1)].astype("int32")
    return tf.data.Dataset.from_tensor_slices((windows[..., :-1], windows[..., 1:])).prefetch(2)


# ---- Model ---------------------------------------------------------------------------------------


def rotate(x):
    """Rotary position embedding of x [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequency = tf.constant(10000.0 ** (-np.arange(half) / half), tf.float32)
    angle = tf.range(tf.shape(x)[1], dtype=tf.float32)[:, None, None] * frequency
    cos, sin = tf.cast(tf.cos(angle), x.dtype), tf.cast(tf.sin(angle), x.dtype)
    a, b = tf.split(x, 2, axis=-1)
    return tf.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)


class TransformerDecoderBlock(keras.layers.Layer):
    """tf_ops.layers.TransformerDecoderBlock in stock Keras, with the same weights."""

    def __init__(self, head_dim, num_query_heads, num_key_value_heads, intermediate_dim, **kwargs):
        super().__init__(**kwargs)

        def dense(units, activation=None):
            return keras.layers.Dense(units, activation, use_bias=False)

        self.head_dim, d_model = head_dim, num_query_heads * head_dim
        self.attention_norm, self.mlp_norm = (keras.layers.RMSNormalization() for _ in range(2))
        self.query = dense(d_model)
        self.key, self.value = (dense(num_key_value_heads * head_dim) for _ in range(2))
        self.output_projection = dense(d_model)
        self.gate, self.up = dense(intermediate_dim, "silu"), dense(intermediate_dim)
        self.down = dense(d_model)

    def call(self, x):
        batch, seq = tf.shape(x)[0], tf.shape(x)[1]
        y = self.attention_norm(x)
        query, key, value = (
            tf.reshape(dense(y), [batch, seq, dense.units // self.head_dim, self.head_dim])
            for dense in (self.query, self.key, self.value)
        )
        y = keras.ops.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x += self.output_projection(tf.reshape(y, [batch, seq, self.query.units]))
        y = self.mlp_norm(x)
        return x + self.down(self.gate(y) * self.up(y))


OURS, STOCK = "tf_ops", "stock Keras"
PARTS = {
    OURS: {
        "block": tf_ops.layers.TransformerDecoderBlock,
        "normalization": tf_ops.layers.RMSNormalization,
        "loss": tf_ops.losses.SparseSoftmaxCrossEntropy(),
    },
    STOCK: {
        "block": TransformerDecoderBlock,
        "normalization": keras.layers.RMSNormalization,
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
}


def make_model(kind, args):
    """The model: bytes [batch, seq] to logits [batch, seq, 256]."""
    parts = PARTS[kind]
    keras.config.set_dtype_policy(args.policy)
    inputs = keras.Input([None], dtype="int32", name="bytes")
    x = keras.layers.Embedding(256, args.d_model, keras.initializers.RandomNormal(stddev=1))(inputs)
    head_dim = args.d_model // args.heads
    for _ in range(args.layers):
        x = parts["block"](head_dim, args.heads, args.kv_heads, 3 * args.d_model)(x)
    logits = keras.layers.Dense(256, use_bias=False, dtype="float32")(parts["normalization"]()(x))
    return keras.Model(inputs, logits)


# ---- Train ---------------------------------------------------------------------------------------


class Turns(keras.callbacks.Callback):
    """Trains an epoch when it is our turn; keeps the loss and the time of every step."""

    def __init__(self, kind, mine, theirs):
        super().__init__()
        self.kind, self.mine, self.theirs = kind, mine, theirs
        self.losses, self.seconds = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.mine.acquire()
        print(f"{self.kind}, from step {len(self.losses) + 1}", flush=True)
        verbose = 1 if sys.stdout.isatty() else 2
        self.bar = keras.utils.Progbar(self.params["steps"], 30, verbose, stateful_metrics=["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.theirs.release()

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()  # or Keras reports the mean loss of the epoch so far
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.seconds.append(time.perf_counter() - self.start)
        self.bar.update(batch + 1, [("loss", self.losses[-1])])


def memory(field):
    """VmRSS, the resident set of this process, or VmHWM, its peak so far; bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(field + ":")[1].split()[0])


def compile_model(model, kind, args):
    """Gives the model its loss, and Adam with a rate that rises for a tenth of the steps."""
    warmup = args.steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps - warmup, alpha=0.1, warmup_target=args.learning_rate, warmup_steps=warmup
    )
    optimizer = keras.optimizers.Adam(rate, beta_2=0.95, clipnorm=1.0)
    model.compile(optimizer, PARTS[kind]["loss"])


def train(kind, args, mine, theirs):
    """Trains one model in this process; leaves its weights and what was measured in --out."""
    before = memory("VmRSS")
    model = make_model(kind, args)
    model.load_weights(args.out / "initial.weights.h5")
    compile_model(model, kind, args)
    turns = Turns(kind, mine, theirs)
    batches = make_batches(read_text(args.text, args.seq), args)
    steps = args.steps // TURNS
    model.fit(batches, epochs=TURNS, steps_per_epoch=steps, callbacks=[turns],
              verbose=0, shuffle=False)  # fmt: skip
    model.save_weights(args.out / f"{kind}.weights.h5")
    peak = memory("VmHWM") - before
    if args.gpu:
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    result = {"losses": turns.losses, "seconds": turns.seconds, "peak_bytes": peak}
    (args.out / f"{kind}.json").write_text(json.dumps(result | {"jit": model.jit_compile}))


def train_in_turns(args):
    """Trains both models, each in a process of its own, so that its peak of memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    first, second = spawn.Semaphore(1), spawn.Semaphore(0)
    processes = [
        spawn.Process(target=train, args=(OURS, args, first, second), daemon=True),
        spawn.Process(target=train, args=(STOCK, args, second, first), daemon=True),
    ]
    for process in processes:
        process.start()
    while running := [process.sentinel for process in processes if process.is_alive()]:
        multiprocessing.connection.wait(running)
        if any(process.exitcode for process in processes):
            sys.exit("A training process failed; see above.")
    return {kind: json.loads((args.out / f"{kind}.json").read_text()) for kind in PARTS}


# ---- Serve ---------------------------------------------------------------------------------------

PYTHON_SERVER = """
import sys, numpy as np, tensorflow as tf, tf_ops
model = tf.saved_model.load(sys.argv[1])
prompt = np.fromfile(sys.argv[2], np.uint8).astype("int32")
model.serve(prompt[None]).numpy().tofile(sys.argv[3])
"""


def run(what, *command):
    """The output of a command; exits with its errors if it fails."""
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr.decode(errors='replace')}")
    return done.stdout.decode(errors="replace")


def compile_server(compiler, out):
    """Builds serve.c against the C API in the TensorFlow wheel."""
    folder = os.path.dirname(tf.__file__)
    libraries = [f"-l:libtensorflow_{name}.so.2" for name in ("cc", "framework")]
    source = pathlib.Path(__file__).with_name("serve.c")
    run("Compiling serve.c", compiler, "-O2", source, "-o", out / "serve", f"-I{folder}/include",
        f"-L{folder}", *libraries, "-lm", f"-Wl,-rpath,{folder}")  # fmt: skip
    return out / "serve"


def tensor_names(saved_model):
    """Input and output of the serving signature, as the C API names them."""
    proto = saved_model_pb2.SavedModel.FromString((saved_model / "saved_model.pb").read_bytes())
    signature = proto.meta_graphs[0].signature_def["serving_default"]
    return [info.name for side in (signature.inputs, signature.outputs) for info in side.values()]


def check_logits(what, logits, expected, args):
    """Exits unless the logits [..., 256] are the expected ones, and their argmax too."""
    scale, difference = np.abs(expected).max(), np.abs(logits - expected).max()
    exact = 1e-3 if args.gpu else 1e-4  # on a GPU TensorFlow multiplies float32 as TF32
    limit = scale * (exact if args.policy == "float32" else 3e-2)
    runner_up, best = np.moveaxis(np.sort(expected)[..., -2:], -1, 0)
    agree = logits.argmax(-1) == expected.argmax(-1)
    if not (difference <= limit and agree[best - runner_up > 2 * limit].all()):  # or it is a tie
        sys.exit(
            f"{what}: DIFFERENT logits, by {difference:.2g} of {scale:.3g} (limit {limit:.2g})"
        )
    print(f"{what}: same logits (largest difference {difference:.2g} of {scale:.3g})")


def serve(model, text, compiler, args):
    """Exports the model; runs it in a fresh Python and in C; prints what it writes."""
    saved_model, prompt, logits = (args.out / name for name in ("saved_model", "prompt", "logits"))
    print("\nThe SavedModel runs elsewhere:")
    model.export(saved_model, verbose=False)
    start = text[len(text) // 2 :][: args.seq // 2]
    start.tofile(prompt)
    expected = model(start[None].astype("int32")).numpy()

    def check(what, *command):
        logits.unlink(missing_ok=True)
        written = run(what, *command)
        check_logits(what, np.fromfile(logits, "float32").reshape(expected.shape), expected, args)
        return written

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    check(
        "A fresh Python process", sys.executable, "-c", PYTHON_SERVER, saved_model, prompt, logits
    )
    if compiler:
        library = pathlib.Path(tf_ops.__file__).with_name("_tf_ops.so")
        written = check(
            "The C server, without Python", compile_server(compiler, args.out), library,
            saved_model, *tensor_names(saved_model), prompt, logits, str(min(args.seq // 2, 400)),
        )  # fmt: skip
        start = start[-160:].tobytes().decode(errors="replace")
        print(f"\nThe C server was given (its end)\n{LINE}\n{start}\n{LINE}\nand wrote\n{LINE}")
        print(f"{written}\n{LINE}")


# ---- Main ----------------------------------------------------------------------------------------


def parse_arguments(description=__doc__.split("\n")[0], parents=(), **defaults):
    """The flags; their defaults are the preset's, and the preset follows the hardware."""
    gpu = bool(tf.config.list_physical_devices("GPU"))
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="gpu" if gpu else "cpu")
    parser = argparse.ArgumentParser(
        description=description,
        parents=[first, *parents],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=pathlib.Path, default=sysconfig.get_path("stdlib"),
        help="a file, or a folder of Python sources, to train on")  # fmt: skip
    add("--out", type=pathlib.Path, default="build/demo", help="folder of results")
    add("--seed", type=int, default=0, help="of weights and batches")
    for name, value in PRESETS[first.parse_known_args()[0].preset].items():
        add("--" + name.replace("_", "-"), type=type(value), default=value, help="of the preset")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.steps < TURNS or args.steps % TURNS:
        parser.error(f"--steps {args.steps}: takes a multiple of {TURNS}")
    if args.d_model % (2 * args.heads) or args.heads % args.kv_heads:
        parser.error("--d-model takes an even multiple of --heads, --heads one of --kv-heads")
    args.gpu = gpu
    return args


def main():
    args = parse_arguments()
    text = read_text(args.text, args.seq)
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "g++"))), None
    )
    if not compiler:
        print("There is no C compiler, so no C server. For one: sudo apt-get install gcc")
    args.out.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(args.seed)
    models = {kind: make_model(kind, args) for kind in PARTS}
    models[STOCK].save_weights(args.out / "initial.weights.h5")
    print(
        f"{len(text) / 1e6:.1f} MB of text; {models[STOCK].count_params() / 1e6:.1f} M parameters;"
        f" {args.batch} x {args.seq} bytes a step; {args.policy}"
    )
    results = train_in_turns(args)

    sample = text[None, : args.seq].astype("int32")
    print("\nWeights files load both ways:")
    for kind, other in (STOCK, OURS), (OURS, STOCK):
        for model in models.values():
            model.load_weights(args.out / f"{kind}.weights.h5")
        logits, expected = models[other](sample).numpy(), models[kind](sample).numpy()
        check_logits(f"{kind}'s weights in the model of {other}", logits, expected, args)
    serve(models[OURS], text, compiler, args)
    report(results, args.steps // TURNS, args)


if __name__ == "__main__":
    main()
