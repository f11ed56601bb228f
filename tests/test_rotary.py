# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import rotary_embedding
from tf_ops._library import library
from tf_ops.testing import check, check_rejected, in_mode

ROOT = pathlib.Path(__file__).parents[1]


def wide(dtype):
    return tf.float64 if dtype == tf.float64 else tf.float32


def rotated(x, cos, sin, interleaved):
    """x with the pairs of its first entries rotated; cos and sin broadcast to [..., 1, pairs]."""
    pairs = cos.shape[-1]
    cos, sin = tf.cast(cos, x.dtype), tf.cast(sin, x.dtype)
    if interleaved:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    a, b = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = tf.reshape(tf.stack([a, b], -1), tf.concat([tf.shape(a)[:-1], [2 * pairs]], 0))
    else:
        turned = tf.concat([a, b], -1)
    return tf.concat([turned, x[..., 2 * pairs :]], -1)


def reference(
    x, positions=None, theta=10000.0, rotary_dim=None, interleaved=False, scaling_factor=1.0
):
    dtype, pairs = wide(x.dtype), (rotary_dim or x.shape[-1]) // 2
    positions = tf.range(tf.shape(x)[1]) if positions is None else positions
    frequency = tf.cast(theta, dtype) ** (-tf.range(pairs, dtype=dtype) / pairs)
    angle = tf.cast(positions, dtype)[..., None, None] / scaling_factor * frequency
    return rotated(x, tf.cos(angle), tf.sin(angle), interleaved)


def normal(shape, dtype=tf.float32, seed=0):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def drawn_positions(shape, largest=2000, seed=0):
    return tf.constant(np.random.default_rng(seed).integers(0, largest, shape), tf.int32)


def exact_within(actual, expected, ulps):
    ulp = float(ml_dtypes.finfo(actual.dtype.as_numpy_dtype).eps)
    off = np.abs(tf.cast(actual, tf.float64) - tf.cast(expected, tf.float64)).max(initial=0)
    assert off <= ulps * ulp * np.abs(expected).max(initial=0), off


# Whole vectors, rests, and heads too small for one; heads in one group and in several.
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary_embedding(interleaved, dtype):
    for heads, head_dim in itertools.product([1, 3, 9], [2, 6, 8, 16, 64, 66, 128, 256]):
        shape = (2, 5, heads, head_dim)
        run = lambda x: rotary_embedding(x, interleaved=interleaved)
        check(run, lambda x: reference(x, interleaved=interleaved), [shape], dtype, "eager")


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim, head_dim", [(2, 3), (8, 20), (32, 80), (20, 64), (16, 72)])
def test_partial(rotary_dim, head_dim, interleaved, dtype):
    options = dict(rotary_dim=rotary_dim, interleaved=interleaved)
    x = normal([2, 7, 5, head_dim], dtype)
    check(
        lambda x: rotary_embedding(x, **options),
        lambda x: reference(x, **options),
        [x],
        dtype,
        "eager",
    )
    # What is not rotated is the same bit for bit.
    y = tf.cast(rotary_embedding(x, **options), tf.float32)
    rest = tf.cast(x, tf.float32)[..., rotary_dim:]
    np.testing.assert_array_equal(y[..., rotary_dim:], rest)


# Others took them to be 0, 1, 2, ..., or those of the first row for all.
@pytest.mark.parametrize("shape", [(7,), (3, 7), (1, 7)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_positions_are_not_ignored(shape, interleaved, dtype):
    positions = drawn_positions(shape)
    options = dict(theta=500000.0, scaling_factor=4.0, interleaved=interleaved)
    check(
        lambda x, positions: rotary_embedding(x, positions, **options),
        lambda x, positions: reference(x, positions, **options),
        [(3, 7, 2, 16), positions],
        dtype,
        "eager",
    )


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_modes(interleaved, dtype, mode):
    options = dict(theta=100.0, rotary_dim=8, interleaved=interleaved)
    check(
        lambda q, k, positions: rotary_embedding((q, k), positions, **options),
        lambda q, k, positions: tuple(reference(x, positions, **options) for x in (q, k)),
        [(2, 3, 4, 12), (2, 3, 2, 12), drawn_positions((2, 3))],
        dtype,
        mode,
        second_order=True,
    )


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (5, 1), (1, 3), (7, 5)])
def test_query_and_key_are_those_of_two_calls(heads, kv_heads, dtype):
    query, key = normal([2, 6, heads, 24], dtype), normal([2, 6, kv_heads, 24], dtype, 1)
    positions = drawn_positions((2, 6))
    both = rotary_embedding((query, key), positions)
    assert isinstance(both, tuple)
    for y, x in zip(both, (query, key)):
        alone = rotary_embedding(x, positions)
        np.testing.assert_array_equal(tf.cast(y, tf.float32), tf.cast(alone, tf.float32))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_query_and_key_alone_has_a_gradient(used, mode):
    inputs = [normal([2, 3, 4, 8]), normal([2, 3, 2, 8], seed=1)]
    dy = normal(inputs[used].shape, seed=2)

    def run(query, key):
        with tf.GradientTape() as tape:
            tape.watch([query, key])
            y = rotary_embedding((query, key))[used]
        return tape.gradient(y, [query, key], dy, unconnected_gradients="zero")

    gradients = in_mode(run, mode, inputs)(*inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs[used])
        y = reference(inputs[used])
    expected = tape.gradient(y, inputs[used], dy)
    np.testing.assert_allclose(gradients[used], expected, atol=1e-5)
    np.testing.assert_array_equal(gradients[1 - used], tf.zeros_like(inputs[1 - used]))


# A float32 product of position and frequency is off by 0.06 there.
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_positions_of_a_million_are_exact(interleaved, dtype):
    positions = tf.constant([0, 1, 4095, 131071, 999_983, 2**20, 2**24 + 1, -1, -70000], tf.int32)
    x = normal([1, 9, 2, 64], dtype)
    for theta in [10000.0, 1e6]:
        y = rotary_embedding(x, positions, theta=theta, interleaved=interleaved)
        e = reference(tf.cast(x, tf.float64), positions, theta, interleaved=interleaved)
        exact_within(y, e, 2)
    # Of any 32 bits: whole turns are lost in no other way.
    y = rotary_embedding(x[:, :2], tf.constant([2**31 - 1, -(2**31)]))
    e = reference(tf.cast(x[:, :2], tf.float64), tf.constant([2**31 - 1, -(2**31)]))
    np.testing.assert_allclose(
        tf.cast(y, tf.float64), e, atol=0.02 if dtype != tf.float32 else 1e-5
    )


def test_angles_above_a_turn():
    options = dict(theta=2**-10, scaling_factor=2**-7)
    x, positions = normal([1, 5, 1, 8]), tf.constant([0, 1, 2, 500, 1000])
    e = reference(tf.cast(x, tf.float64), positions, **options)
    exact_within(rotary_embedding(x, positions, **options), e, 2)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_norms_and_relative_positions(interleaved):
    x = normal([2, 9, 3, 64])
    y = rotary_embedding(x, interleaved=interleaved)
    np.testing.assert_allclose(tf.norm(y, axis=-1), tf.norm(x, axis=-1), rtol=1e-6)
    with tf.GradientTape() as tape:  # the gradient turns back
        tape.watch(x)
        z = rotary_embedding(x, interleaved=interleaved)
    np.testing.assert_allclose(tape.gradient(z, x, y), x, atol=1e-6)
    # Scores depend on distances alone.
    score = lambda first: tf.einsum(
        "bqhd,bkhd->bhqk",
        *rotary_embedding((x, x[:, ::-1]), tf.range(9) + first, interleaved=interleaved),
    )
    np.testing.assert_allclose(score(0), score(100_000), atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("table", [(11, 6), (3, 5, 6), (1, 5, 6), (5, 8)], ids=str)
def test_given_tables(table, interleaved, dtype, mode):
    angles = 10 * np.random.default_rng(0).random(table)
    cos, sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))
    positions = drawn_positions((3, 5), table[0]) if table[0] == 11 else None

    def stock(x):
        gathered = [t if len(table) == 3 else t[:5] for t in (cos, sin)]
        if positions is not None:
            gathered = [tf.gather(t, positions) for t in (cos, sin)]
        return rotated(x, *(t[..., None, :] for t in gathered), interleaved)

    check(
        lambda x: rotary_embedding(x, positions, interleaved=interleaved, cos=cos, sin=sin),
        stock,
        [(3, 5, 2, 16)],
        dtype,
        mode,
    )


def test_tables_of_many_pairs_and_of_16_bits():
    angles = np.random.default_rng(0).random([4, 300])
    x = normal([1, 4, 2, 600])
    cos, sin = tf.cast(np.cos(angles), tf.bfloat16), tf.cast(np.sin(angles), tf.bfloat16)
    y = rotary_embedding(x, cos=cos, sin=sin)
    cos, sin = (tf.cast(t, tf.float32)[:, None, :] for t in (cos, sin))
    np.testing.assert_allclose(y, rotated(x, cos, sin, False), atol=1e-5)


def test_position_outside_a_table(device, mode):
    x, table = normal([1, 3, 1, 4]), tf.ones([5, 2])
    for bad in [5, -1]:
        positions = tf.constant([4, bad, 0])
        run = lambda x, p: rotary_embedding(x, p, cos=table, sin=table)
        run = in_mode(run, mode, [x, positions])
        if "GPU" in device:
            finite = np.isfinite(run(x, positions))
            assert finite[0, 0].all() and finite[0, 2].all() and not finite[0, 1].any()
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"position {bad} is outside"):
                run(x, positions)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 0)], ids=str)
def test_empty(shape, mode):
    check(rotary_embedding, lambda x: tf.identity(x), [shape], tf.float32, mode)
    query, key = rotary_embedding((tf.zeros(shape), tf.ones([*shape[:2], 3, shape[3]])))
    assert query.shape == shape and key.shape == (*shape[:2], 3, shape[3])


def test_inf_and_nan_as_stock(dtype):
    x = normal([1, 4, 3, 8], dtype).numpy()
    x[0, 1, 0, 2], x[0, 2, 1, 5], x[0, 3, 2, 7] = np.inf, -np.inf, np.nan
    for interleaved in [False, True]:
        y = rotary_embedding(x, interleaved=interleaved)
        e = reference(tf.constant(x), interleaved=interleaved)
        y, e = (tf.cast(t, tf.float32).numpy() for t in (y, e))
        np.testing.assert_array_equal(y[~np.isfinite(e)], e[~np.isfinite(e)])
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(e))


def test_inputs_and_upstream_gradient_are_not_written():
    tensors = [normal([2, 3, 4, 8]), normal([2, 3, 2, 8], seed=1)]
    dy = [normal([2, 3, 4, 8], seed=2), normal([2, 3, 2, 8], seed=3)]
    before = [x.numpy().copy() for x in (*tensors, *dy)]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        y = rotary_embedding(tuple(tensors))
    first = [g.numpy().copy() for g in tape.gradient(y, tensors, dy)]
    for a, b in zip(first, tape.gradient(y, tensors, dy)):  # a second pass sees the same
        np.testing.assert_array_equal(a, b)
    for x, b in zip((*tensors, *dy), before):
        np.testing.assert_array_equal(x, b)


# Temporaries die with the op, whose results may take their memory.
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("head_dim", [64, 66])
def test_results_in_the_memory_of_temporaries(head_dim, interleaved, mode):
    x = normal([2, 50, 3, head_dim])

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = rotary_embedding(2 * x, rotary_dim=32, interleaved=interleaved)
        return y, tape.gradient(y, x, 3 * x)

    y, dx = in_mode(run, mode, [x])(x)
    options = dict(rotary_dim=32, interleaved=interleaved)
    np.testing.assert_allclose(y, reference(2 * x, **options), atol=1e-4)
    with tf.GradientTape() as tape:
        tape.watch(x)
        stock = reference(2 * x, **options)
    np.testing.assert_allclose(dx, tape.gradient(stock, x, 3 * x), atol=1e-4)


def test_one_tensor_as_query_and_key(mode):
    run = lambda x: rotary_embedding((x, x))
    check(run, lambda x: (reference(x), reference(x)), [(2, 3, 2, 8)], tf.float32, mode)


def test_bitwise_repeat(dtype, mode):
    x = normal([3, 70, 5, 64], dtype)
    run = in_mode(lambda x: rotary_embedding(x), mode, [x])
    for a, b in zip(run(x), run(x)):
        np.testing.assert_array_equal(tf.bitcast(a, tf.uint16), tf.bitcast(b, tf.uint16))


def test_numpy_variables_and_other_integers():
    x = np.random.default_rng(0).standard_normal([2, 3, 2, 8]).astype(np.float32)
    positions = np.array([[5, 0, 2], [1, 1, 9]])
    expected = reference(tf.constant(x), positions)
    for value in (x, tf.Variable(x), tf.constant(x)):
        for p in (positions, positions.tolist(), tf.constant(positions, tf.int32)):
            np.testing.assert_allclose(rotary_embedding(value, p), expected, atol=1e-5)


def test_vectorized_map():
    x = normal([3, 2, 5, 2, 8])
    y = tf.vectorized_map(rotary_embedding, x)
    np.testing.assert_allclose(y[1], rotary_embedding(x[1]), rtol=1e-6)


def test_saved_model(tmp_path):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, None, 2, 8])])
        def __call__(self, x):
            return rotary_embedding((x, x), tf.range(tf.shape(x)[1]) + 5)[1]

    x = normal([2, 3, 2, 8])
    tf.saved_model.save(Model(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded(x)
    np.testing.assert_allclose(y, reference(x, tf.range(3) + 5), atol=1e-5)
    np.testing.assert_allclose(tape.gradient(y, x, y), x, atol=1e-5)


def test_unknown_rank():
    run = tf.function(rotary_embedding, input_signature=[tf.TensorSpec(None)] * 1)
    x = normal([2, 3, 2, 8])
    np.testing.assert_allclose(run(x), reference(x), atol=1e-5)


def test_more_than_2_31_elements(device):
    if "GPU" not in device:
        pytest.skip("8 GB of the GPU")
    tail = normal([1, 2**10, 8, 128], tf.bfloat16)
    x = tf.concat([tf.zeros([2**11, 2**10, 8, 128], tf.bfloat16), tail], 0)
    y = tf.cast(rotary_embedding(x)[-1:], tf.float32)
    np.testing.assert_array_equal(y, tf.cast(rotary_embedding(tail), tf.float32))


ONES = tf.ones([2, 3, 4, 8])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(x=tf.cast(ONES, tf.int32)), "x is int32; it must be float32, float16 or bfloat16"),
        (dict(x=tf.cast(ONES, tf.float64)), "x is float64"),
        (dict(x=ONES[0]), r"x is \(3, 4, 8\); it must be \[batch, seq, heads, head_dim\]"),
        (dict(x=(ONES,)), "x holds 1 tensors"),
        (dict(x=(ONES, ONES[:, :2])), r"key is float32 \(2, 2, 4, 8\).*only its heads"),
        (dict(x=(ONES, tf.cast(ONES, tf.float16))), "key is float16"),
        (dict(x=(ONES, ONES[..., :4])), "only its heads"),
        (dict(x=ONES[..., :7]), "rotary_dim is 7; it must be even"),
        (dict(positions=tf.ones([3])), "positions are float32; they must be int32"),
        (dict(positions=tf.range(4)), r"positions are \(4,\).*\[seq\] or \[batch, seq\]"),
        (dict(positions=tf.ones([3, 3], tf.int32)), "positions are"),
        (dict(positions=3), r"positions are \(\)"),
        (dict(rotary_dim=10), "rotary_dim is 10; it must be even and at most head_dim, 8"),
        (dict(rotary_dim=3), "rotary_dim is 3"),
        (dict(rotary_dim=0), "rotary_dim is 0"),
        (dict(rotary_dim=4.0), "rotary_dim is 4.0"),
        (dict(x=tf.ones([1, 1, 1, 514])), "rotary_dim is 514; without cos and sin it is 512"),
        (dict(theta=0), "theta must be a positive number; it is 0"),
        (dict(theta="x"), "theta must be"),
        (dict(scaling_factor=-1), "scaling_factor must be"),
        (dict(cos=tf.ones([3, 4])), "both cos and sin, or neither"),
        (dict(cos=tf.ones([3, 4]), sin=tf.ones([3, 3])), "they must be of one shape"),
        (dict(cos=tf.ones([3, 5]), sin=tf.ones([3, 5])), "rotary_dim is 10"),
        (dict(cos=tf.ones([3, 2]), sin=tf.ones([3, 2]), rotary_dim=8), "half of rotary_dim 8"),
        (dict(cos=tf.ones([4]), sin=tf.ones([4])), "it must be floats"),
    ],
    ids=str,
)
def test_static_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        rotary_embedding(**{"x": ONES, **arguments})


def test_mistakes_at_run_time(mode):
    x, table = normal([2, 3, 4, 8]), tf.ones([2, 4])
    absent = tf.zeros([0])
    for x, key, positions, cos, attributes, message in [
        (x, x[:1], [], absent, {}, "key is.*only its heads"),
        (x, tf.ones([1]), [], absent, {}, "key is"),
        (x, absent, [0, 1], absent, {}, r"positions are \[2\]"),
        (x, absent, [[0, 1, 2]] * 3, absent, {}, r"positions are \[3, 3\]"),
        (x, absent, [], table, {}, "cos has 2 rows for 3 positions"),
        (x, absent, [0, 1, 1], tf.ones([2, 3, 4]), {}, "positions choose rows"),
        (x, absent, [], tf.ones([2, 2, 4]), {}, "a batch of 2 and a seq of 3"),
        (x, absent, [], tf.ones([3, 4]), dict(rotary_dim=4), "beside a rotary_dim of 4"),
        (x, absent, [], tf.ones([3, 5]), {}, "rotary_dim must be even"),
        (x, absent, [], tf.ones([4]), {}, "cos is"),
        (x, absent, [], absent, dict(rotary_dim=3), "rotary_dim must be even.*it is 3"),
        (x, absent, [], absent, dict(rotary_dim=-2), "rotary_dim must be even"),
        (x, absent, [], absent, dict(rotary_dim=10), "at most head_dim 8; it is 10"),
        (x[..., :7], absent, [], absent, {}, "rotary_dim must be even"),
        (tf.ones([1, 1, 1, 600]), absent, [], absent, {}, "it is 512 at most"),
        (x, absent, [], absent, dict(theta=0.0), "theta must be positive"),
        (x, absent, [], absent, dict(scaling_factor=float("nan")), "scaling_factor must be"),
        (x[0], absent, [], absent, {}, "x must be|rank 4"),
    ]:
        run = lambda x, key, positions, cos, attributes=attributes: library.tf_ops_rotary_embedding(
            x=x, key=key, positions=positions, cos=cos, sin=cos, **attributes
        )
        check_rejected(run, [x, key, tf.constant(positions, tf.int32), cos], message, mode)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_each_instruction_set_on_unaligned_memory(isa, device):
    if "GPU" in device:
        pytest.skip("of the CPU")
    result = subprocess.run(
        [sys.executable, "-m", "tests.rotary_rows"],
        cwd=ROOT,
        env=os.environ | {"TF_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
