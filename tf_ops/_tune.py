# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_ops tune`: calls of the ops whose kernels have a choice."""

import tensorflow as tf

import tf_ops
from tf_ops.benchmarking import with_gradients

# By family: sizes, with their defaults.
SIZES = {
    "paged_attention": "batch=8,heads=32,kv_heads=8,seq_k=4096,head_dim=128",
    "attention": "batch=8,heads=32,kv_heads=8,seq_k=4096,head_dim=128",
    "cross_entropy": "tokens=4096,classes=32768",
    "group_normalization": "samples=8,pixels=1024,channels=256,groups=32",
    "linear_cross_entropy": "tokens=4096,features=1024,classes=32768",
    "normalization": "rows=16384,cols=4096",
}


def call(family, dtype, n):
    """What is measured: a function, with the gradient if there is one, and its arguments.

    Args:
        family: one of SIZES.
        dtype: of the floating-point arguments.
        n: the sizes, by name.
    """
    normal = lambda *shape: tf.cast(tf.random.normal(shape), dtype)
    if "attention" in family:
        query = normal(n["batch"], 1, n["heads"], n["head_dim"])
        if family == "attention":
            cache = [normal(n["batch"], n["seq_k"], n["kv_heads"], n["head_dim"]) for _ in "kv"]
            return tf_ops.dot_product_attention, [query, *cache]
        pages = -(-n["seq_k"] // 64)
        cache = [normal(n["batch"] * pages, 64, n["kv_heads"], n["head_dim"]) for _ in "kv"]
        table = tf.reshape(tf.range(n["batch"] * pages), [n["batch"], pages])
        lengths = tf.fill([n["batch"]], n["seq_k"])
        return tf_ops.paged_attention, [query, *cache, table, lengths]
    if family == "group_normalization":
        x = normal(n["samples"], n["pixels"], n["channels"])
        fn = lambda x, scale: tf_ops.group_normalization(x, scale, groups=n["groups"])
        return with_gradients(fn), [x, normal(n["channels"]), tf.identity(x)]
    if family == "normalization":
        x = normal(n["rows"], n["cols"])
        return with_gradients(tf_ops.rms_normalization), [x, normal(n["cols"]), tf.identity(x)]
    labels = tf.random.uniform([n["tokens"]], 0, n["classes"], tf.int32)
    upstream = tf.random.normal([n["tokens"]])
    if family == "cross_entropy":
        fn = lambda x: tf_ops.sparse_softmax_cross_entropy(labels, x)
        return with_gradients(fn), [normal(n["tokens"], n["classes"]), upstream]
    fn = lambda x, kernel: tf_ops.linear_cross_entropy(labels, x, kernel)
    x, kernel = normal(n["tokens"], n["features"]), normal(n["features"], n["classes"])
    return with_gradients(fn), [x, kernel, upstream]


def run(arguments):
    """The command: `arguments` are op, shape and dtype."""
    sizes = dict(item.split("=") for item in SIZES[arguments.op].split(","))
    form = f"--shape of {arguments.op} is of the form {SIZES[arguments.op]}"
    try:
        given = dict(item.split("=") for item in arguments.shape.split(",") if item)
        sizes = {name: int(given.pop(name, size)) for name, size in sizes.items()}
    except ValueError as error:
        raise SystemExit(form) from error
    if given:
        raise SystemExit(form)
    fn, inputs = call(arguments.op, arguments.dtype, sizes)
    if not tf_ops.tune(fn, *inputs, verbose=True):
        print("no kernel has a choice on this device at", sizes)
