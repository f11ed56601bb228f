# SPDX-License-Identifier: Apache-2.0
"""Trains a language model on tf_ops and on stock Keras, then serves it without Python.

The model is a byte-level decoder-only Transformer: RMS normalization, rotary position embedding,
grouped-query attention, a gated MLP. Both halves run this file's code, start from the same weights
and see the same batches; they differ in attention function, normalization layer and loss.

    python examples/train_and_serve.py                # on the Python standard library's sources
    python examples/train_and_serve.py --text my.txt --steps 400 --policy mixed_bfloat16
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time

# TensorFlow reads these when it is imported. Two trainings share the GPU; no start-up chatter.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # from a checkout, whether tf_ops is installed or not

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tf_ops

# All that differs between the two models: normalization layer, attention function, loss.
OURS, STOCK = "tf_ops", "stock Keras"
PARTS = {
    OURS: (
        tf_ops.layers.RMSNormalization,
        tf_ops.dot_product_attention,
        tf_ops.losses.SparseSoftmaxCrossEntropy(),
    ),
    STOCK: (
        keras.layers.RMSNormalization,
        keras.ops.dot_product_attention,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
}
TURNS = 10  # the two trainings take turns, so that a busy machine slows both
PRESETS = {
    "cpu": {"policy": "float32", "layers": 4, "d_model": 128, "heads": 4, "kv_heads": 2,
            "seq": 512, "batch": 8, "steps": 200, "learning_rate": 6e-3},
    "gpu": {"policy": "mixed_bfloat16", "layers": 8, "d_model": 1024, "heads": 16, "kv_heads": 4,
            "seq": 2048, "batch": 8, "steps": 200, "learning_rate": 1e-3},
}  # fmt: skip


# ---- Data ----------------------------------------------------------------------------------------


def read_text(path, seq):
    """The bytes of a file, or of all Python sources under a folder; uint8 [length]."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    files = [file for file in files if not {"site-packages", "dist-packages"} & set(file.parts)]
    try:
        text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    except OSError as error:
        sys.exit(f"--text {path}: {error.strerror}")
    if len(text) < 10 * seq:
        sys.exit(f"--text {path}: {len(text)} bytes of text, {10 * seq} are needed")
    return text


def make_batches(text, args):
    """A dataset of `steps` pairs (bytes, next bytes), int32 [batch, seq], drawn with the seed."""
    shape = (args.steps, args.batch, 1)
    starts = np.random.default_rng(args.seed).integers(len(text) - args.seq, size=shape)
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


class DecoderBlock(keras.layers.Layer):
    """x += attention(norm(x)), then x += mlp(norm(x)).

    Args:
        d_model: width of x [batch, seq, d_model].
        heads, kv_heads: heads of the queries, and of the keys and values that they share.
        normalization: class of the normalization layers.
        attention: function like keras.ops.dot_product_attention.
    """

    def __init__(self, d_model, heads, kv_heads, normalization, attention, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.head_dim = attention, d_model // heads

        def dense(units, activation=None):
            return keras.layers.Dense(units, activation, use_bias=False)

        self.attention_norm, self.mlp_norm = normalization(), normalization()
        self.query = dense(heads * self.head_dim)
        self.key, self.value = dense(kv_heads * self.head_dim), dense(kv_heads * self.head_dim)
        self.out = dense(d_model)
        self.gate, self.up, self.down = dense(3 * d_model, "silu"), dense(3 * d_model), dense(d_model)

    def call(self, x):
        batch, seq = tf.shape(x)[0], tf.shape(x)[1]
        y = self.attention_norm(x)
        query, key, value = (
            tf.reshape(dense(y), [batch, seq, dense.units // self.head_dim, self.head_dim])
            for dense in (self.query, self.key, self.value)
        )
        y = self.attention(rotate(query), rotate(key), value, is_causal=True)
        x += self.out(tf.reshape(y, [batch, seq, self.query.units]))
        y = self.mlp_norm(x)
        return x + self.down(self.gate(y) * self.up(y))


def make_model(kind, args):
    """The model: bytes [batch, seq] to logits [batch, seq, 256]."""
    normalization, attention, _ = PARTS[kind]
    keras.config.set_dtype_policy(args.policy)
    inputs = keras.Input([None], dtype="int32", name="bytes")
    x = keras.layers.Embedding(256, args.d_model, keras.initializers.RandomNormal(stddev=1.0))(inputs)
    for _ in range(args.layers):
        x = DecoderBlock(args.d_model, args.heads, args.kv_heads, normalization, attention)(x)
    logits = keras.layers.Dense(256, use_bias=False, dtype="float32")(normalization()(x))
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
    kilobytes = pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]
    return 1024 * int(kilobytes)


def train(kind, args, mine, theirs):
    """Trains one model in this process; writes its weights and <kind>.json."""
    before = memory("VmRSS")
    model = make_model(kind, args)
    model.load_weights(args.out / "initial.weights.h5")
    warmup = args.steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps - warmup, alpha=0.1, warmup_target=args.learning_rate, warmup_steps=warmup
    )
    model.compile(keras.optimizers.Adam(rate, beta_2=0.95, clipnorm=1.0), loss=PARTS[kind][-1])
    batches = make_batches(read_text(args.text, args.seq), args)
    turns = Turns(kind, mine, theirs)
    model.fit(batches, epochs=TURNS, steps_per_epoch=args.steps // TURNS, callbacks=[turns],
              verbose=0, shuffle=False)  # fmt: skip
    model.save_weights(args.out / f"{kind}.weights.h5")
    if args.gpu:
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    else:
        peak = memory("VmHWM") - before
    result = {"losses": turns.losses, "seconds": turns.seconds, "peak_bytes": peak}
    result["jit_compile"] = model.jit_compile
    (args.out / f"{kind}.json").write_text(json.dumps(result))


def train_in_turns(args):
    """Trains both models, each in a process of its own: one's peak of memory is not the other's."""
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
    return {kind: json.loads((args.out / f"{kind}.json").read_text()) for kind in (OURS, STOCK)}


# ---- Serve ---------------------------------------------------------------------------------------

PYTHON_SERVER = """
import sys, numpy as np, tensorflow as tf, tf_ops
model = tf.saved_model.load(sys.argv[1])
prompt = np.fromfile(sys.argv[2], np.uint8).astype("int32")
model.serve(prompt[None]).numpy().tofile(sys.argv[3])
"""


def find_compiler():
    names = os.environ.get("CC", "cc"), "gcc", "clang", "g++"
    return next((path for path in map(shutil.which, names) if path), None)


def compile_server(compiler, server):
    """Builds serve.c against the C API in the TensorFlow wheel."""
    folder = os.path.dirname(tf.__file__)
    libraries = [f"-l:libtensorflow_{name}.so.2" for name in ("cc", "framework")]
    source = pathlib.Path(__file__).with_name("serve.c")
    subprocess.run([compiler, "-O2", source, "-o", server, f"-I{folder}/include", f"-L{folder}",
                    *libraries, "-lm", f"-Wl,-rpath,{folder}"], check=True)  # fmt: skip


def tensor_names(saved_model):
    """Input and output of the serving signature, as the C API names them."""
    proto = saved_model_pb2.SavedModel.FromString((saved_model / "saved_model.pb").read_bytes())
    signature = proto.meta_graphs[0].signature_def["serving_default"]
    return [info.name for side in (signature.inputs, signature.outputs) for info in side.values()]


def check_logits(what, logits, expected, args):
    """Exits unless the logits [..., 256] are the expected ones, and their argmax too."""
    scale, difference = np.abs(expected).max(), np.abs(logits - expected).max()
    limit = scale * (1e-4 if args.policy == "float32" else 3e-2)
    runner_up, best = np.moveaxis(np.sort(expected)[..., -2:], -1, 0)
    decided = best - runner_up > 2 * limit  # a tie may fall either way
    same_choice = logits.argmax(-1) == expected.argmax(-1)
    if not (difference <= limit and same_choice[decided].all()):
        sys.exit(f"{what}: DIFFERENT logits, by {difference:.3g} of {scale:.3g}; allowed {limit:.3g}")
    print(f"{what}: same logits (largest difference {difference:.2g} of {scale:.3g})")


def serve(model, text, compiler, args):
    """Exports the model; runs it in a fresh Python and in C; prints text sampled in C."""
    saved_model, prompt, logits = (args.out / x for x in ("saved_model", "prompt.txt", "logits.bin"))
    model.export(saved_model, verbose=False)
    text[-args.seq // 2 :].tofile(prompt)
    expected = model(np.fromfile(prompt, np.uint8)[None].astype("int32")).numpy()

    def run(what, *command):
        logits.unlink(missing_ok=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        check_logits(what, np.fromfile(logits, "float32").reshape(expected.shape), expected, args)
        return done.stdout.decode(errors="replace")

    os.environ["PYTHONPATH"] = str(ROOT)
    run("A fresh Python process", sys.executable, "-c", PYTHON_SERVER, saved_model, prompt, logits)
    if compiler:
        compile_server(compiler, args.out / "serve")
        library = pathlib.Path(tf_ops.__file__).with_name("_tf_ops.so")
        sample = run("The C server, without Python", args.out / "serve", library, saved_model,
                     *tensor_names(saved_model), prompt, logits, str(args.seq // 2))  # fmt: skip
        print(f"\nSampled by the C server:\n{'-' * 80}\n{sample}\n{'-' * 80}")


# ---- Report --------------------------------------------------------------------------------------


def report(results, args):
    """Prints the table, draws the picture; exits if the losses part."""
    ours, stock = results[OURS], results[STOCK]
    turn = args.steps // TURNS
    steps = [1, *(args.steps * i // 4 for i in (1, 2, 3, 4))]
    titles = [f"loss at {step}" for step in steps] + ["ms/step", "peak MB"]
    print(f"\n{'':12}" + "".join(f"{title:>13}" for title in titles))
    for kind, result in results.items():
        result["ms"] = 1e3 * float(np.median(result["seconds"][turn:]))
        cells = [f"{result['losses'][step - 1]:.4f}" for step in steps]
        cells += [f"{result['ms']:.1f}", f"{result['peak_bytes'] / 1e6:.0f}"]
        print(f"{kind:12}" + "".join(f"{cell:>13}" for cell in cells))
    print(f"""
Speed-up {stock["ms"] / ours["ms"]:.2f}x; peak memory {ours["peak_bytes"] / stock["peak_bytes"]:.2f}x.
  ms/step: median after the first {turn} steps; the two trained in turns of {turn} steps, {
    "compiled by XLA" if ours["jit_compile"] else "in graph mode"} (Keras's default here).
  Peak memory: {"the GPU allocator's" if args.gpu else "resident set beyond that before training"
    }, each model in a process of its own.""")
    draw(results, args)
    a, b = (np.array(result["losses"][9::10]) for result in (ours, stock))
    difference, limit = np.abs(a / b - 1).max(), 0.01 if args.policy == "float32" else 0.03
    print(f"  Losses at every tenth step differ by at most {difference:.2e} of stock's (limit {limit}).")
    if not difference <= limit:
        sys.exit("The losses DIFFER.")


def draw(results, args):
    """Writes report.png: loss by step and by time; time and memory of a step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"  No picture without Matplotlib: {sys.executable} -m pip install matplotlib")
        return
    colors = {STOCK: "#e8a33d", OURS: "#1b5e9e"}
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(4, 4, 1.4, 1.4))
    for kind, width in ((STOCK, 4), (OURS, 1.5)):
        result, style = results[kind], {"color": colors[kind], "lw": width}
        axes[0].plot(range(1, args.steps + 1), result["losses"], **style)
        axes[1].plot(np.cumsum(result["seconds"]) - result["seconds"][0], result["losses"], **style)
        axes[2].bar(kind, result["ms"], color=colors[kind])
        axes[3].bar(kind, result["peak_bytes"] / 1e6, color=colors[kind])
    figure.savefig(args.out / "report.png", dpi=150)
    print(f"  Picture: {args.out / 'report.png'}")


# ---- Main ----------------------------------------------------------------------------------------


def parse_arguments():
    """The flags; their defaults are the preset's, and the preset's the hardware's."""
    gpu = bool(tf.config.list_physical_devices("GPU"))
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="gpu" if gpu else "cpu")
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(None, None, __doc__.split("\n")[0], parents=[first],
                                     formatter_class=formatter)  # fmt: skip
    parser.add_argument("--text", type=pathlib.Path, default=sysconfig.get_path("stdlib"),
                        help="a file, or a folder of Python sources, to train on")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, default="build/demo", help="folder of results")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    for name, value in PRESETS[first.parse_known_args()[0].preset].items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=" ")
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
    compiler = find_compiler()
    if not compiler:
        print("There is no C compiler, so no C server. To have one: sudo apt install gcc")
    args.out.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(args.seed)
    models = {kind: make_model(kind, args) for kind in (STOCK, OURS)}
    models[STOCK].save_weights(args.out / "initial.weights.h5")
    print(f"{len(text) / 1e6:.1f} MB of text, {models[OURS].count_params() / 1e6:.1f} M parameters, "
          f"{args.batch} x {args.seq} bytes a step, {args.policy}")  # fmt: skip
    results = train_in_turns(args)

    # Weights files load both ways: stock's before training, ours after it.
    for kind in (OURS, STOCK):
        models[kind].load_weights(args.out / f"{OURS}.weights.h5")
    sample = text[None, : args.seq].astype("int32")
    logits = [model(sample).numpy() for model in (models[OURS], models[STOCK])]
    check_logits("\nOur trained weights in stock Keras's model", logits[1], logits[0], args)
    serve(models[OURS], text, compiler, args)
    report(results, args)


if __name__ == "__main__":
    main()
