# SPDX-License-Identifier: Apache-2.0
"""Who calls attention, and how: graphs, XLA, saved models, wrong arguments; what serves them."""

import concurrent.futures
import math

import numpy as np
import pytest
import tensorflow as tf

import tf_ops
import tf_ops.__main__
from tests.attention_reference import draw, gradients_of, reference
from tf_ops import _library, dot_product_attention
from tf_ops._library import library
from tf_ops._ops import attention
from tf_ops.testing import check_rejected

# Callers.


def test_bias_gradient_is_left_out_when_nobody_wants_it(monkeypatch):
    calls = []
    grad = library.tf_ops_dot_product_attention_bias_grad
    record = lambda *args, **kwargs: calls.append(1) or grad(*args, **kwargs)
    monkeypatch.setattr(attention.library, "tf_ops_dot_product_attention_bias_grad", record)
    query, bias = draw((1, 3, 1, 4), (1, 1, 3, 3))
    for wanted, by in ((0, [query]), (1, [query, bias])):
        with tf.GradientTape() as tape:
            tape.watch(by)
            y = dot_product_attention(query, query, query, bias)
        tape.gradient(y, by)
        assert len(calls) == wanted


def test_gradient_of_an_unused_lse_costs_nothing_in_a_graph():
    @tf.function
    def run(query):
        with tf.GradientTape() as tape:
            tape.watch(query)
            y = dot_product_attention(query, query, query)
        return tape.gradient(y, query)

    (query,) = draw((1, 3, 1, 4))
    ops = run.get_concrete_function(query).graph.get_operations()
    (grad,) = [op for op in ops if op.type == "TfOps>DotProductAttentionGrad"]
    assert grad.inputs[1].shape == [0]


def test_xla_calls_the_kernel_between_transposes():
    """Nobody can tell whether the fused kernel is used; strided inputs give garbage."""
    inputs = draw((2, 2, 33, 16), (2, 2, 17, 16), (2, 2, 17, 16))  # [batch, heads, seq, dim]
    swap = lambda x: tf.transpose(x, [0, 2, 1, 3])

    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = swap(dot_product_attention(*map(swap, inputs)))
            # The gradient arrives transposed, and broadcast from a scalar.
            loss = tf.reduce_sum(tf.transpose(y)) + tf.reduce_sum(y * y)
        return y, tape.gradient(loss, inputs)

    compiled = tf.function(run, jit_compile=True)
    hlo = compiled.experimental_get_compiler_ir(*inputs)(stage="hlo")
    assert hlo.count("custom-call") >= 2
    for a, b in zip(tf.nest.flatten(compiled(*inputs)), tf.nest.flatten(run(*inputs))):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_xla_with_sequences_of_any_length():
    attend = tf.function(dot_product_attention, jit_compile=True, reduce_retracing=True)
    for seq in (3, 8, 21):
        query, key = draw((1, seq, 2, 8), (1, seq + 1, 1, 8), seed=seq)
        actual = attend(query, key, key, is_causal=True)
        np.testing.assert_allclose(actual, reference(query, key, key, is_causal=True), 1e-5, 1e-5)


def test_unknown_ranks():
    inputs = draw((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (4, 1, 7))
    inputs += [tf.constant([True] * 6 + [False]), tf.constant(0.7), tf.constant([3, 7])]
    run = lambda q, k, v, bias, mask, scale, lengths: dot_product_attention(
        q, k, v, bias, mask, scale, key_value_seq_lengths=lengths
    )
    unknown = tf.function(run, input_signature=[tf.TensorSpec(None, x.dtype) for x in inputs])
    np.testing.assert_allclose(unknown(*inputs), run(*inputs), 1e-5, 1e-5)


def test_saved_model(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec([None] * 4)
    module.attend = tf.function(
        lambda q, k, v: dot_product_attention(q, k, v, is_causal=True),
        input_signature=[spec] * 3,
    )
    tf.saved_model.save(module, str(tmp_path))
    inputs = draw((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    loaded = tf.saved_model.load(str(tmp_path)).attend
    for a, b in zip(gradients_of(loaded, inputs)[1], gradients_of(module.attend, inputs)[1]):
        np.testing.assert_array_equal(a, b)


def test_vectorized_map():
    query, key, value = draw((3, 2, 5, 2, 8), (3, 2, 7, 2, 8), (3, 2, 7, 2, 8))
    attend = lambda x: dot_product_attention(*x)
    mapped = tf.vectorized_map(attend, (query, key, value))
    for i in range(3):
        expected = dot_product_attention(query[i], key[i], value[i])
        np.testing.assert_allclose(mapped[i], expected, 1e-6, 1e-6)


def test_eight_threads(device):
    inputs = [draw(*[(2, 40 + i, 2, 16)] * 3, seed=i) for i in range(8)]
    attend = lambda *x: dot_product_attention(*x, is_causal=True)

    def run(i):
        with tf.device(device):  # A device scope belongs to its thread.
            return [gradients_of(attend, inputs[i]) for _ in range(5)]

    expected = [gradients_of(attend, x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, results in enumerate(pool.map(run, range(8))):
            for result in results:
                for a, b in zip(tf.nest.flatten(result), tf.nest.flatten(expected[i])):
                    np.testing.assert_array_equal(a, b)


# Errors.

GOOD = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 6)}


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"query": (2, 5, 8, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 8)}, "8 heads, key.* 3"),
        ({"query": (2, 5, 4, 257), "key": (2, 7, 2, 257)}, "head_dim is 257.*256"),
        ({"value": (2, 7, 2, 300)}, "value_dim is 300.*256"),
        ({"query": (5, 4, 8)}, r"query is \(5, 4, 8\).*rank 4"),
        ({"key": (3, 7, 2, 8)}, r"key is \(3, 7, 2, 8\).*batch of query, 2"),
        ({"key": (2, 7, 2, 9)}, r"key is \(2, 7, 2, 9\).*head_dim of query, 8"),
        ({"value": (2, 6, 2, 6)}, r"value is \(2, 6, 2, 6\).*seq_k of key, 7"),
        ({"value": (2, 7, 4, 6)}, r"value is \(2, 7, 4, 6\).*kv_heads of key, 2"),
        ({"bias": (1, 1, 1, 5, 7)}, r"bias is \(1, 1, 1, 5, 7\).*broadcast"),
        ({"mask": tf.ones([5, 7])}, "mask is float32.*bool"),
        ({"scale": math.nan}, "scale is nan.*finite"),
        ({"scale": tf.ones([4])}, r"scale is \(4,\).*scalar"),
        ({"query_seq_lengths": tf.constant([5])}, r"query_seq_lengths is \(1,\).*\[2\]"),
        ({"key_value_seq_lengths": tf.ones([2])}, "key_value_seq_lengths is float32.*int32"),
        ({"key_value_seq_lengths": tf.zeros([0], tf.int32)}, "key_value_seq_lengths is"),
        ({"causal_alignment": "left"}, "causal_alignment is 'left'.*'bottom_right'"),
        ({"attn_logits_soft_cap": -1.0}, "attn_logits_soft_cap is -1.0.*positive"),
        ({"local_window_size": -1}, "local_window_size is -1.*left, right"),
        ({"local_window_size": [1, 2, 3]}, r"local_window_size is \[1, 2, 3\].*left, right"),
        ({"local_window_size": 1.5}, "local_window_size is 1.5.*int"),
        ({"sink": tf.zeros([3])}, r"sink is \(3,\).*\[4\], the heads"),
        ({"sink": tf.zeros([0])}, r"sink is \(0,\).*\[4\]"),
        ({"sink": tf.zeros([4], tf.int32)}, "sink is int32.*floating"),
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1 and seed is None"),
        ({"dropout_rate": 1.0, "seed": [1, 2]}, r"dropout_rate is 1.0.*\[0, 1\)"),
        ({"dropout_rate": -0.1, "seed": [1, 2]}, "dropout_rate is -0.1"),
        ({"dropout_rate": math.nan, "seed": [1, 2]}, "dropout_rate is nan"),
        ({"dropout_rate": 0.1, "seed": [1, 2, 3]}, r"seed is \(3,\).*\[2\]"),
        ({"dropout_rate": 0.1, "seed": [1.0, 2.0]}, "seed is float32.*int64"),
    ],
    ids=str,
)
def test_value_errors(changes, match):
    arguments = {
        name: tf.zeros(x) if isinstance(x, tuple) else x for name, x in (GOOD | changes).items()
    }
    with pytest.raises(ValueError, match=match):
        dot_product_attention(**arguments)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [tf.float64, tf.int32], ids=lambda d: d.name)
def test_other_dtypes(name, bad):
    arguments = {n: tf.zeros(shape) for n, shape in GOOD.items()}
    arguments[name] = tf.cast(arguments[name], bad)
    with pytest.raises(ValueError, match=f"{name} is {bad.name}.*float32, float16 or bfloat16"):
        dot_product_attention(**arguments)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"key": (2, 7, 3, 8), "value": (2, 7, 3, 6)}, "4 heads, key and value 3"),
        ({"query": (2, 5, 4, 257), "key": (2, 7, 2, 257)}, "head_dim is 257"),
        ({"key": (3, 7, 2, 8)}, r"key is \[3, 7, 2, 8\]"),
        ({"value": (2, 6, 2, 6)}, r"value is \[2, 6, 2, 6\]"),
        ({"query": (5, 4, 8)}, "rank 4"),
        ({"bias": (2, 3, 5, 7)}, r"bias is \[2, 3, 5, 7\].*\[2, 4, 5, 7\]"),
        ({"bias": (1, 1, 1, 5, 7)}, r"bias is \[1, 1, 1, 5, 7\].*broadcast"),
    ],
    ids=str,
)
def test_errors_known_at_run_time(changes, match, mode):
    arguments = GOOD | {"bias": (5, 7)} | changes
    named = lambda *args: dot_product_attention(**dict(zip(arguments, args)))
    check_rejected(named, [tf.zeros(x) for x in arguments.values()], match, mode)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("size", [0, 3])
def test_lengths_of_another_batch_at_run_time(size, mode):
    """An empty tensor is not taken for "no lengths"."""
    inputs = [tf.zeros(x) for x in GOOD.values()] + [tf.ones([size], tf.int32)]
    attend = lambda q, k, v, lengths: dot_product_attention(q, k, v, query_seq_lengths=lengths)
    check_rejected(attend, inputs, "query_seq_lengths", mode)


@pytest.mark.parametrize("size", [0, 3])
def test_sink_of_other_heads_at_run_time(size, mode):
    """An empty tensor is not taken for "no sink"."""
    if mode == "eager":
        return  # A ValueError: test_value_errors.
    inputs = [tf.zeros(x) for x in GOOD.values()] + [tf.ones([size])]
    attend = lambda q, k, v, sink: dot_product_attention(q, k, v, sink=sink)
    check_rejected(attend, inputs, "sink", mode)


def test_raw_op_checks_its_inputs():
    query, value = tf.zeros([2, 5, 4, 8]), tf.zeros([2, 7, 2, 6])
    none, no_mask, no_lengths = (tf.constant([], t) for t in (tf.float32, tf.bool, tf.int32))
    run = lambda lengths, sink=none, **options: library.tf_ops_dot_product_attention(
        query=query,
        key=tf.zeros([2, 7, 2, 8]),
        value=value,
        bias=none,
        mask=no_mask,
        query_seq_lengths=lengths,
        key_value_seq_lengths=no_lengths,
        sink=sink,
        seed=tf.constant([], tf.int64),
        scale=1.0,
        **options,
    )
    assert run(no_lengths).output.shape == [2, 5, 4, 6]
    with pytest.raises(tf.errors.InvalidArgumentError, match="query_seq_lengths is"):
        run(tf.ones([3], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sink is \[3\].*float32 \[4\]"):
        run(no_lengths, tf.zeros([3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="dropout_rate wants a seed"):
        run(no_lengths, dropout_rate=0.5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"dropout_rate is 1.*\[0, 1\)"):
        run(no_lengths, dropout_rate=1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="window is \\(-2, 3\\)"):
        run(no_lengths, window_left=-2, window_right=3)
    query = query[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"query is \[5,4,8\].*rank 4"):
        run(no_lengths)


@pytest.mark.parametrize(
    "changes, kernels, why",
    [
        ({}, "sm_90", ""),
        ({"gradient": True}, "sm_90", ""),
        ({"gradient": True, "head_dim": 256}, "sm_90", ""),
        ({"seq_q": 1}, "decode", ""),
        ({"seq_q": 1, "gradient": True}, "sm_90", ""),
        ({"dtype": "float32"}, "simt", "float32"),
        ({"capability": 120}, "sm_80", "9.0"),
        ({"head_dim": 44}, "sm_80", "multiple of 8"),
        ({"bias": True}, "sm_80", "bias"),
        ({"mask": True}, "sm_80", "mask"),
        ({"key_mask": True}, "sm_90", ""),
        ({"key_mask": True, "gradient": True}, "sm_90", ""),
        ({"soft_cap": True}, "sm_80", "soft cap"),
        ({"dropout": True}, "sm_80", "dropout"),
    ],
    ids=str,
)
def test_which_kernels_serve(changes, kernels, why):
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "seq_q": 500, "seq_k": 500, "head_dim": 64}
    sizes["value_dim"] = 64
    of_call = {"dtype": "bfloat16", "gradient": False, "capability": 90}
    features = dict.fromkeys(["bias", "mask", "soft_cap", "dropout", "key_mask"], False)
    for part in (sizes, of_call, features):
        part.update((k, v) for k, v in changes.items() if k in part)
    result = _library.attention_kernels(**of_call, sizes=sizes.values(), features=features.values())
    assert result[0] == kernels
    assert why in result[1] and bool(why) == bool(result[1])


def test_info_attention(monkeypatch, capsys):
    arguments = "info attention --sm 90 --head-dim 128 --seq 4096 --dropout"
    monkeypatch.setattr("sys.argv", ["tf_ops", *arguments.split()])
    tf_ops.__main__.main()
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [f"{name:9} sm_80: there is dropout" for name in ("forward", "gradient")]


@pytest.mark.parametrize(
    "arguments, message",
    [("--sm 70", "8.0"), ("--head-dim 257", "256"), ("--heads 3 --kv-heads 2", "multiple")],
)
def test_info_attention_of_calls_that_cannot_be(arguments, message, monkeypatch):
    monkeypatch.setattr("sys.argv", f"tf_ops info attention --sm 90 {arguments}".split())
    with pytest.raises(SystemExit, match=message):
        tf_ops.__main__.main()


def test_list_ops():
    for suffix in ("", "Grad", "BiasGrad"):
        assert f"TfOps>DotProductAttention{suffix}" in tf_ops.list_ops()
