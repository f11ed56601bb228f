# SPDX-License-Identifier: Apache-2.0
"""Attention against its formula in stock TensorFlow, and what must hold exactly."""

import concurrent.futures
import itertools
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
import tf_ops.__main__
from tests.philox import kept_pairs, philox
from tf_ops import _library, dot_product_attention
from tf_ops._library import library
from tf_ops._ops import attention
from tf_ops.testing import DTYPES, check, check_rejected

# Arguments that are no inputs of the functions compared.
STATIC = ("scale", "is_causal", "attn_logits_soft_cap", "causal_alignment", "return_lse")
STATIC += ("local_window_size", "dropout_rate")


def visible_pairs(query, key, mask, is_causal, alignment, window, query_lengths, key_lengths):
    """bool [batch, heads, seq_q, seq_k]."""
    batch, seq_q, heads = query.shape[:3]
    seq_k = key.shape[1]
    length = lambda x, seq: tf.fill([batch], seq) if x is None else tf.clip_by_value(x, 0, seq)
    num_q = length(query_lengths, seq_q)[:, None, None, None]
    num_k = length(key_lengths, seq_k)[:, None, None, None]
    i, j = tf.range(seq_q)[:, None], tf.range(seq_k)
    visible = tf.broadcast_to((i < num_q) & (j < num_k), [batch, heads, seq_q, seq_k])
    if mask is not None:
        visible &= mask
    diagonal = i + (num_k - num_q if alignment == "bottom_right" else 0)
    if is_causal:
        visible &= j <= diagonal
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        visible &= (j >= diagonal - min(left, 10**9)) & (j <= diagonal + min(right, 10**9))
    return visible


def reference(
    query,
    key,
    value,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    attn_logits_soft_cap=None,
    causal_alignment="top_left",
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    sink=None,
    local_window_size=None,
    dropout_rate=0.0,
    seed=None,
    return_lse=False,
):
    """What stock Keras computes and in its dtypes, with rows of no key at 0."""
    visible = visible_pairs(
        query,
        key,
        mask,
        is_causal,
        causal_alignment,
        local_window_size,
        query_seq_lengths,
        key_value_seq_lengths,
    )
    wide = tf.float64 if query.dtype == tf.float64 else tf.float32
    groups = query.shape[2] // max(key.shape[2], 1)
    key, value = tf.repeat(key, groups, axis=2), tf.repeat(value, groups, axis=2)
    x = tf.cast(tf.einsum("bihd,bjhd->bhij", query, key), wide)
    x *= 1.0 / math.sqrt(query.shape[3]) if scale is None else tf.cast(scale, wide)
    if attn_logits_soft_cap:
        x = attn_logits_soft_cap * tf.tanh(x / attn_logits_soft_cap)
    if bias is not None:
        x += tf.cast(bias, wide)
    sees = tf.reduce_any(visible, 3, keepdims=True)
    x = tf.where(visible, x, -1e30)
    seq_k = x.shape[3]
    if sink is not None:
        sinks = tf.broadcast_to(tf.cast(sink, wide)[:, None, None], [*x.shape[:3], 1])
        x, sees = tf.concat([x, sinks], 3), tf.ones_like(sees)
    probabilities = tf.where(visible, tf.nn.softmax(x)[..., :seq_k], 0)
    probabilities = tf.cast(probabilities, value.dtype)
    if dropout_rate:
        kept = kept_pairs(seed.numpy(), dropout_rate, probabilities.shape)
        dropped = probabilities / tf.cast(1 - np.float32(dropout_rate), value.dtype)
        probabilities = tf.where(kept, dropped, 0)
    output = tf.einsum("bhij,bjhd->bihd", probabilities, value)
    if not return_lse:
        return output
    lse = tf.reduce_logsumexp(tf.where(sees, x, 0), 3, keepdims=True)
    return output, tf.where(sees, lse, -math.inf)[..., 0]


def check_attention(arguments, dtype, mode, **options):
    """check() for arguments by name: shapes, tensors, or the values of STATIC."""
    static = {name: arguments[name] for name in STATIC if name in arguments}
    tensors = {name: x for name, x in arguments.items() if name not in STATIC and x is not None}
    named = lambda fn: lambda *args: fn(**dict(zip(tensors, args)), **static)
    shapes = list(tensors.values())
    check(named(dot_product_attention), named(reference), shapes, dtype, mode, **options)


def draw(*shapes, dtype=tf.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.cast(rng.standard_normal(shape), dtype) for shape in shapes]


def gradients_of(fn, inputs, seed=1):
    """Values of fn, and the gradients of random cotangents, as NumPy arrays."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = tf.nest.flatten(fn(*inputs))
    cotangents = draw(*[x.shape for x in y], seed=seed)
    cotangents = [tf.cast(c, x.dtype) for c, x in zip(cotangents, y)]
    gradients = tape.gradient(y, inputs, cotangents)
    return [x.numpy() for x in y], [x.numpy() for x in gradients]


# Values and gradients.


def pairwise(factors, seed=0):
    """Cases in which every two values of different factors meet."""
    rng = random.Random(seed)
    names = list(factors)
    pairs = lambda case: set(itertools.combinations([(n, case[n]) for n in names], 2))
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    cases = []
    while missing:
        first = min(missing, key=str)
        candidates = [{n: rng.choice(factors[n]) for n in names} | dict(first) for _ in range(50)]
        cases.append(max(candidates, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases


# B, N, T, S: batch, heads, seq_q, seq_k.
BROADCASTS = [None, "TS", "11TS", "B11S", "1N1S", "B1TS", "1NTS", "BNTS"]
FEATURES = pairwise(
    {
        "causal": ["full", "top_left", "bottom_right"],
        "heads": [(4, 4), (4, 2), (3, 1)],
        "mask": BROADCASTS + ["1NT1"],
        "bias": BROADCASTS,
        "cap": [None, 1.5],
        "lengths": ["none", "keys", "both"],
        "scale": [None, "float", "tensor"],
        "lse": [False, True],
        "window": [None, 3, (0, 5), (7, 0), (2**40, 2)],
        "sink": [False, True],
        "dropout": [0.0, 0.3],
        "dims": [(8, 8), (24, 40), (40, 24)],
        "seq": [(17, 33), (33, 17), (1, 31), (64, 65)],
        "dtype": DTYPES,
        "mode": ["eager", "eager", "graph", "xla"],
    }
)


def arguments_of(case, seed=0):
    """The arguments of dot_product_attention that a case of FEATURES stands for."""
    rng = np.random.default_rng(seed)
    batch = 2
    (heads, kv_heads), (seq_q, seq_k), (head_dim, value_dim) = (
        case["heads"],
        case["seq"],
        case["dims"],
    )
    size = {"1": 1, "B": batch, "N": heads, "T": seq_q, "S": seq_k}
    shape = lambda pattern: [size[letter] for letter in pattern]
    lengths = lambda seq: tf.constant([seq + 3, rng.integers(0, seq + 1)], tf.int32)
    arguments = {
        "query": (batch, seq_q, heads, head_dim),
        "key": (batch, seq_k, kv_heads, head_dim),
        "value": (batch, seq_k, kv_heads, value_dim),
        "is_causal": case["causal"] != "full",
        "attn_logits_soft_cap": case["cap"],
        "return_lse": case["lse"],
    }
    if case["causal"] == "bottom_right":
        arguments["causal_alignment"] = "bottom_right"
    if case["bias"]:
        arguments["bias"] = shape(case["bias"])
    if case["mask"]:
        arguments["mask"] = tf.constant(rng.random(shape(case["mask"])) < 0.7)
    if case["lengths"] != "none":
        arguments["key_value_seq_lengths"] = lengths(seq_k)
    if case["lengths"] == "both":
        arguments["query_seq_lengths"] = lengths(seq_q)
    if case.get("window") is not None:
        arguments["local_window_size"] = case["window"]
    if case.get("sink"):
        arguments["sink"] = (heads,)
    if case.get("dropout"):
        arguments |= {"dropout_rate": case["dropout"], "seed": tf.constant([7, 2**40 + 1])}
    if case["scale"] == "float":
        arguments["scale"] = 0.3
    if case["scale"] == "tensor":
        arguments["scale"] = tf.constant(0.3)
    return arguments


def name_of(case):
    return "-".join(str(getattr(x, "name", x)).replace(" ", "") for x in case.values())


@pytest.mark.parametrize("case", FEATURES, ids=name_of)
def test_features(case):
    check_attention(arguments_of(case), case["dtype"], case["mode"])


@pytest.mark.parametrize("second_order", [False, True])
def test_gradient_of_the_scale(second_order, dtype, mode):
    """Eight problems at once: the error of stock in a single number says little."""
    shapes = [(8, 1, 5, 2, 8), (8, 1, 9, 2, 8), (8, 1, 9, 2, 8), tf.linspace(0.1, 0.6, 8)]
    each = lambda fn: (
        lambda *args: tf.stack(
            [fn(q, k, v, scale=s) for q, k, v, s in zip(*(tf.unstack(x, 8) for x in args))]
        )
    )
    if second_order and mode == "xla":
        mode = "eager"  # XLA would compile for long.
    check(
        each(dot_product_attention), each(reference), shapes, dtype, mode, second_order=second_order
    )


HEAD_DIMS = [8, 16, 32, 40, 59, 64, 72, 96, 111, 128, 160, 192, 203, 256]


@pytest.mark.parametrize(
    "dims", list(zip(HEAD_DIMS, HEAD_DIMS[::-1])) + [(64, 64), (128, 128), (1, 1)], ids=str
)
def test_head_dims(dims, dtype):
    head_dim, value_dim = dims
    shapes = {"query": (1, 19, 2, head_dim), "key": (1, 35, 1, head_dim)}
    check_attention(shapes | {"value": (1, 35, 1, value_dim)}, dtype, "eager")


SEQUENCES = [
    (1, 1),
    (7, 7),
    (15, 16),
    (16, 15),
    (17, 17),
    (31, 33),
    (33, 31),
    (63, 64),
    (64, 63),
    (65, 65),
    (127, 128),
    (128, 127),
    (129, 129),
    (113, 203),  # Odd on both sides, as in the FlashAttention suite.
    (239, 1),
    (1, 239),
]


@pytest.mark.parametrize("alignment", ["full", "top_left", "bottom_right"])
@pytest.mark.parametrize("seq", SEQUENCES, ids=str)
def test_sequence_tails(seq, alignment, dtype):
    seq_q, seq_k = seq
    arguments = {"query": (1, seq_q, 2, 16), "key": (1, seq_k, 2, 16), "value": (1, seq_k, 2, 16)}
    if alignment != "full":
        arguments |= {"is_causal": True, "causal_alignment": alignment}
    check_attention(arguments | {"return_lse": True}, dtype, "eager")


def test_gradient_for_every_sequence_length(dtype):
    """Backward NaN for "undesirable" sequence lengths."""
    for seq in range(1, 131, 1 if dtype == tf.bfloat16 else 9):
        shapes = {name: (1, seq, 1, 8) for name in ("query", "key", "value")}
        check_attention(shapes, dtype, "eager", seed=seq)


@pytest.mark.parametrize("axis", ["batch", "seq_q", "seq_k", "heads", "head_dim", "value_dim"])
def test_empty(axis, mode):
    size = {"batch": 2, "seq_q": 3, "seq_k": 5, "heads": 2, "head_dim": 4, "value_dim": 6} | {
        axis: 0
    }
    arguments = {
        "query": (size["batch"], size["seq_q"], size["heads"], size["head_dim"]),
        "key": (size["batch"], size["seq_k"], size["heads"], size["head_dim"]),
        "value": (size["batch"], size["seq_k"], size["heads"], size["value_dim"]),
        "bias": (1, 1, 1, size["seq_k"]),
        "scale": 0.5,
    }
    check_attention(arguments, tf.float32, mode)


def test_one_element(dtype, mode):
    check_attention({name: (1, 1, 1, 1) for name in ("query", "key", "value")}, dtype, mode)


@pytest.mark.parametrize("seq", [1, 2, 5, 17, 128])
def test_large_logits_with_a_sequence_tail(seq, dtype):
    """Backward overflow where the sequence is no multiple of a tile."""
    query, key, value = draw(*[(1, seq, 2, 16)] * 3)
    cast = lambda x: tf.cast(x, dtype)
    arguments = {"query": cast(5 * query), "key": cast(3 * key), "value": cast(value)}
    check_attention(arguments, dtype, "eager")


def test_very_negative_lse_with_a_mask_and_half_a_tile(dtype):
    """NaN in dquery when the sequence ends in half a tile and lse < -88.7."""
    query, key, value = draw(*[(1, 704, 1, 64)] * 3)
    query, key = 4.0 + 0.1 * query, -4.0 + 0.1 * key  # Logits near -128.
    mask = tf.random.stateless_uniform([1, 1, 1, 704], [1, 2]) < 0.9
    inputs = [tf.cast(x, dtype) for x in (query, key, value)]
    attend = lambda *x: dot_product_attention(*x, mask=mask, return_lse=True)
    (_, lse), gradients = gradients_of(attend, inputs)
    assert lse.max() < -88.7
    assert all(np.isfinite(x.astype(np.float32)).all() for x in gradients)
    names = ("query", "key", "value")
    check_attention(dict(zip(names, inputs)) | {"mask": mask}, dtype, "eager")


def test_rows_whose_first_tiles_are_masked(dtype):
    """NaN for long sequences when a mask hides old tokens."""
    i = np.arange(600)
    mask = tf.constant((i[:, None] - i < 10) & (i[:, None] >= i))[None, None]
    shapes = {name: (1, 600, 1, 16) for name in ("query", "key", "value")}
    check_attention(shapes | {"mask": mask, "return_lse": True}, dtype, "eager")


def test_causal_with_bias_beyond_a_tile():
    """NaN or wrong gradients where the sequence is no multiple of 128, here 1025."""
    shapes = {name: (1, 1025, 1, 8) for name in ("query", "key", "value")}
    check_attention(shapes | {"bias": (1, 1, 1025, 1025), "is_causal": True}, tf.float32, "eager")


def test_float16_logits_beyond_its_range():
    """NaN where query · key overflows float16 before it is scaled."""
    query = tf.fill([1, 1, 1, 64], tf.constant(40.0, tf.float16))
    value = tf.ones([1, 1, 1, 64], tf.float16)
    np.testing.assert_array_equal(dot_product_attention(query, query, value), value)


def test_large_batch():
    """int32 overflow of row offsets at a batch of 8300."""
    query, key, value, doutput = draw(*[(8300, 1, 16, 128)] * 4)
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        output = dot_product_attention(query, key, value)
    dquery, dkey, dvalue = tape.gradient(output, [query, key, value], doutput)
    # A single key has the whole weight.
    np.testing.assert_array_equal(output, value)
    np.testing.assert_allclose(dvalue, doutput, 1e-5)
    for gradient in (dquery, dkey):
        assert np.abs(gradient).max() < 1e-4


def test_more_batch_and_heads_than_a_grid_dimension():
    shapes = {"query": (2200, 2, 32, 4), "key": (2200, 3, 32, 4), "value": (2200, 3, 32, 4)}
    assert 2200 * 32 > 65535
    check_attention(shapes | {"return_lse": True}, tf.float32, "eager")


@pytest.mark.parametrize("shape", [(2, 1, 9, 1), (1, 4, 1, 1)], ids=str)
def test_a_bias_that_is_the_same_for_all_keys(shape, dtype):
    """It changes nothing but lse, and its gradient is a sum of terms that cancel."""
    query, key, value = draw(*[(2, 9, 4, 8)] * 3, dtype=dtype)
    (bias,) = draw(shape, dtype=dtype)
    attend = lambda bias: dot_product_attention(query, key, value, bias)
    _, (dbias,) = gradients_of(attend, [bias])
    _, (terms,) = gradients_of(attend, [tf.broadcast_to(bias, [2, 4, 9, 9])])
    size = np.abs(terms.astype(np.float32)).sum() / dbias.size
    allowed = 8 * size * np.finfo(np.float32).eps if dtype == tf.float32 else 2e-2 * size
    assert np.abs(dbias.astype(np.float32)).max() <= allowed


def test_mixed_dtypes_become_float32():
    query, key, value = draw((2, 3, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    query, key = tf.cast(query, tf.bfloat16), tf.cast(key, tf.float16)
    (output,), gradients = gradients_of(dot_product_attention, [query, key, value])
    assert output.dtype == keras.ops.dot_product_attention(query, key, value).dtype == np.float32
    assert [x.dtype for x in gradients] == [x.dtype for x in (query, key, value)]
    wide = [tf.cast(x, tf.float32) for x in (query, key, value)]
    np.testing.assert_array_equal(output, dot_product_attention(*wide))


def test_float32_bias_beside_16_bit_inputs():
    """As in stock Keras the bias takes the dtype of the others; its gradient keeps its own."""
    query, key, value = draw(*[(2, 5, 2, 8)] * 3, dtype=tf.bfloat16)
    (bias,) = draw((1, 2, 5, 5))
    attend = lambda bias: dot_product_attention(query, key, value, bias)
    (output,), (dbias,) = gradients_of(attend, [bias])
    np.testing.assert_array_equal(output, attend(tf.cast(bias, tf.bfloat16)))
    assert dbias.dtype == np.float32 and np.abs(dbias).max() > 0


def test_numpy_variables_and_int64_lengths():
    query, key, value = draw(*[(2, 5, 2, 8)] * 3)
    expected = dot_product_attention(query, key, value, key_value_seq_lengths=[5, 2])
    for lengths in (np.int64([2**40, 2]), tf.constant([5, 2], tf.int64), np.int32([9, 2])):
        actual = dot_product_attention(
            query.numpy(),
            tf.Variable(key),
            keras.Variable(value),
            key_value_seq_lengths=lengths,
            flash_attention=True,
        )
        np.testing.assert_array_equal(actual, expected)


def test_same_as_stock_keras(dtype):
    query, key, value, bias = draw((2, 9, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4, 9, 7), dtype=dtype)
    mask = np.random.default_rng(0).random((2, 1, 9, 7)) < 0.7
    mask[..., 0] = True
    args = (query, key, value, bias, mask, 0.2, True, None)
    tolerance = 2e-6 if dtype == tf.float32 else 2e-2
    np.testing.assert_allclose(
        tf.cast(dot_product_attention(*args), tf.float32),
        tf.cast(keras.ops.dot_product_attention(*args), tf.float32),
        tolerance,
        tolerance,
    )


# Second order.

SECOND_ORDER = [
    {
        "causal": "full",
        "mask": None,
        "bias": None,
        "cap": None,
        "lengths": "none",
        "lse": False,
        "scale": None,
    },
    {
        "causal": "top_left",
        "mask": "BNTS",
        "bias": "1NTS",
        "cap": 1.5,
        "lengths": "none",
        "lse": True,
        "scale": None,
    },
    {
        "causal": "bottom_right",
        "mask": None,
        "bias": "B11S",
        "cap": None,
        "lengths": "both",
        "lse": True,
    }
    | {"scale": "tensor"},
    {
        "causal": "full",
        "mask": "B11S",
        "bias": None,
        "cap": 1.5,
        "lengths": "keys",
        "lse": False,
        "scale": "tensor",
    },
    {
        "causal": "bottom_right",
        "mask": "B1TS",
        "bias": "1N1S",
        "cap": 1.5,
        "lengths": "both",
        "lse": True,
        "scale": None,
        "window": (2, 1),
        "sink": True,
        "dropout": 0.3,
    },
]


@pytest.mark.parametrize("case", SECOND_ORDER, ids=name_of)
def test_second_order(case, mode):
    """Double backward is not implemented."""
    case = case | {"heads": (4, 2), "dims": (8, 6), "seq": (7, 5)}
    check_attention(arguments_of(case), tf.float32, mode, second_order=True)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_second_order_in_16_bits(dtype):
    case = SECOND_ORDER[1] | {"heads": (4, 2), "dims": (8, 6), "seq": (7, 5)}
    check_attention(arguments_of(case), dtype, "eager", second_order=True)


def test_second_order_ignores_padding_of_nan():
    query, key, value = draw(*[(2, 5, 2, 4)] * 3)
    padding = tf.constant([[False] * 3 + [True] * 2, [False] * 5])[..., None, None]
    key, value = tf.where(padding, math.nan, key), tf.where(padding, math.inf, value)
    with tf.GradientTape() as outer:
        outer.watch([query, key, value])
        with tf.GradientTape() as tape:
            tape.watch(query)
            y = dot_product_attention(query, key, value, key_value_seq_lengths=[3, 5])
        dquery = tape.gradient(y, query)
    for second in outer.gradient(dquery, [query, key, value]):
        assert np.isfinite(second).all()


# Exact rules.


def masked_rows():
    """Options under which rows see nothing, with those rows as bool [batch, heads, seq_q]."""
    rows = np.zeros((2, 2, 5), bool)
    mask = np.random.default_rng(0).random((2, 2, 5, 3)) < 0.8
    mask[0, 0, 1] = False  # A row,
    mask[1, 1] = False  # and a whole head.
    yield "mask", {"mask": mask}, ~mask.any(3)
    yield "key_lengths", {"key_value_seq_lengths": [0, 2]}, rows | [[[True]], [[False]]]
    num_q = np.int32([3, 0])[:, None, None]
    yield "query_lengths", {"query_seq_lengths": [3, 0]}, rows | (np.arange(5) >= num_q)
    # More queries than keys: the first see none.
    bottom_right = {"is_causal": True, "causal_alignment": "bottom_right"}
    yield "bottom_right", bottom_right, rows | (np.arange(5) < 2)


@pytest.mark.parametrize("options, rows", [pytest.param(*x[1:], id=x[0]) for x in masked_rows()])
def test_a_row_without_a_key_is_zero(options, rows, dtype, mode):
    """NaN, or the mean of the values, where a row sees no key."""
    inputs = draw((2, 5, 2, 8), (2, 3, 2, 8), (2, 3, 2, 6), (2, 2, 5, 3), dtype=dtype)

    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output, lse = dot_product_attention(*inputs, return_lse=True, **options)
        cotangents = [tf.ones_like(output), tf.where(tf.math.is_inf(lse), 3.0, 1.0)]
        return output, lse, tape.gradient([output, lse], inputs, cotangents)

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    output, lse, (dquery, dkey, dvalue, dbias) = run(*inputs)
    by_query = np.transpose(rows, [0, 2, 1])
    assert rows.any() and not rows.all()
    assert (tf.cast(output, tf.float32).numpy()[by_query] == 0).all()
    assert (tf.cast(dquery, tf.float32).numpy()[by_query] == 0).all()
    assert (tf.cast(dbias, tf.float32).numpy()[rows] == 0).all()
    np.testing.assert_array_equal(lse == -math.inf, rows)
    for x in (output, dquery, dkey, dvalue, dbias):
        assert np.isfinite(tf.cast(x, tf.float32)).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("by", ["key_lengths", "mask", "query_lengths", "window"])
def test_what_is_invisible_does_not_leak(by, poison, dtype):
    """NaN or Inf at a masked key or value reaches the output, or lengths are not respected."""
    query, key, value = draw(*[(2, 70, 2, 16)] * 3, dtype=dtype)
    hidden_keys = np.zeros((2, 70), bool)
    hidden_queries = np.zeros((2, 70), bool)
    options = {"is_causal": True, "return_lse": True}
    if by == "key_lengths":
        hidden_keys[0, 37:] = True
        options["key_value_seq_lengths"] = [37, 70]
    elif by == "mask":
        hidden_keys[:] = np.random.default_rng(0).random((2, 70)) < 0.5
        options["mask"] = ~hidden_keys[:, None, None]
    elif by == "window":
        hidden_keys[:, :50] = True  # Whole tiles of keys, then half of one.
        options["mask"] = ~hidden_keys[:, None, None]
    else:
        hidden_queries[1, 3:] = True
        options["query_seq_lengths"] = [70, 3]
    put = lambda x, where: tf.where(where[..., None, None], tf.cast(poison, dtype), x)
    attend = lambda *x: dot_product_attention(*x, **options)
    clean = gradients_of(attend, [query, key, value])
    dirty = [put(query, hidden_queries), put(key, hidden_keys), put(value, hidden_keys)]
    dirty = gradients_of(attend, dirty)
    for expected, actual in zip(tf.nest.flatten(clean), tf.nest.flatten(dirty), strict=True):
        np.testing.assert_array_equal(actual, expected)
    _, (dquery, dkey, dvalue) = dirty
    for gradient, hidden in ((dquery, hidden_queries), (dkey, hidden_keys), (dvalue, hidden_keys)):
        assert (gradient[hidden] == 0).all()


@pytest.mark.parametrize("seq", [(70, 70), (9, 140)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_future_tokens_change_nothing(seq, alignment, dtype):
    seq_q, seq_k = seq
    query, key, value = draw((1, seq_q, 2, 16), (1, seq_k, 1, 16), (1, seq_k, 1, 16), dtype=dtype)
    attend = lambda k, v: dot_product_attention(
        query, k, v, is_causal=True, causal_alignment=alignment, return_lse=True
    )
    offset = seq_k - seq_q if alignment == "bottom_right" else 0
    output, lse = attend(key, value)
    for row in (0, seq_q // 2, seq_q - 2):
        future = (np.arange(seq_k) > row + offset)[None, :, None, None]
        for other in (17.0, math.nan, math.inf):
            other = tf.cast(other, dtype)
            o, o_lse = attend(tf.where(future, other, key), tf.where(future, other, value))
            np.testing.assert_array_equal(o[:, : row + 1], output[:, : row + 1])
            np.testing.assert_array_equal(o_lse[:, :, : row + 1], lse[:, :, : row + 1])


def test_nan_in_the_future_does_not_reach_gradients_of_the_past(dtype):
    query, key, value = draw(*[(1, 70, 2, 16)] * 3, dtype=dtype)
    bad = (np.arange(70) >= 66)[None, :, None, None]
    poisoned = [tf.where(bad, tf.cast(math.nan, dtype), x) for x in (key, value)]
    with tf.GradientTape() as tape:
        tape.watch(query)
        y = dot_product_attention(query, *poisoned, is_causal=True)[:, :66]
    assert np.isfinite(tf.cast(tape.gradient(y, query)[:, :66], tf.float32)).all()


def test_alignments():
    """One query at the end of a cache of eight keys; five queries and two keys."""
    value = tf.reshape(tf.range(8.0), [1, 8, 1, 1])
    attend = lambda seq_q, seq_k, alignment: dot_product_attention(
        tf.zeros([1, seq_q, 1, 1]),
        tf.zeros([1, seq_k, 1, 1]),
        value[:, :seq_k],
        is_causal=True,
        causal_alignment=alignment,
    )[0, :, 0, 0]
    np.testing.assert_allclose(attend(1, 8, "top_left"), [0.0])
    np.testing.assert_allclose(attend(1, 8, "bottom_right"), [3.5])
    np.testing.assert_allclose(attend(2, 5, "top_left"), [0.0, 0.5])
    np.testing.assert_allclose(attend(2, 5, "bottom_right"), [1.5, 2.0])
    np.testing.assert_allclose(attend(5, 2, "top_left"), [0.0, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(attend(5, 2, "bottom_right"), [0.0, 0.0, 0.0, 0.0, 0.5])


def test_some_logits_of_minus_infinity(dtype):
    """A bias of -inf hides a key as a mask does."""
    query, key, value = draw(*[(1, 40, 2, 8)] * 3, dtype=dtype)
    mask = np.random.default_rng(0).random((1, 1, 40, 40)) < 0.5
    mask[..., 39] = True
    bias = tf.where(mask, tf.cast(0, dtype), tf.cast(-math.inf, dtype))
    by_mask = gradients_of(lambda *x: dot_product_attention(*x, mask=mask), [query, key, value])
    by_bias = gradients_of(lambda *x: dot_product_attention(*x, bias), [query, key, value])
    for a, b in zip(tf.nest.flatten(by_bias), tf.nest.flatten(by_mask), strict=True):
        a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, 1e-5, 1e-5 if dtype == tf.float32 else 1e-2)


def test_same_result_each_time_and_inputs_unchanged(dtype, mode):
    inputs = draw((2, 65, 4, 32), (2, 130, 2, 32), (2, 130, 2, 32), (1, 4, 65, 130), dtype=dtype)
    before = [x.numpy().copy() for x in inputs]

    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = dot_product_attention(*inputs, is_causal=True, return_lse=True)
        return y, tape.gradient(y, inputs)

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    first = tf.nest.flatten(run(*inputs))
    for _ in range(4):
        for a, b in zip(first, tf.nest.flatten(run(*inputs)), strict=True):
            np.testing.assert_array_equal(a, b)
    for x, old in zip(inputs, before):
        np.testing.assert_array_equal(x, old)


# Windows, sinks and dropout.


@pytest.mark.parametrize("window", [(40, 0), (0, 40), (3, 17), (0, 0), (64, 64), 130], ids=str)
def test_window_is_a_mask(window, dtype):
    """A window (L, 0) that is not causal sees the future; tails beside a tile are wrong."""
    arguments = {"query": (1, 203, 2, 16), "key": (1, 203, 1, 16), "value": (1, 203, 1, 16)}
    check_attention(arguments | {"local_window_size": window, "return_lse": True}, dtype, "eager")


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("seq", [(300, 70), (70, 300), (1, 300)], ids=str)
def test_window_over_tiles(seq, alignment, dtype):
    """Rows before or behind all keys see none."""
    seq_q, seq_k = seq
    arguments = {"query": (2, seq_q, 2, 16), "key": (2, seq_k, 2, 16), "value": (2, seq_k, 2, 16)}
    arguments |= {"local_window_size": (20, 9), "causal_alignment": alignment}
    arguments |= {"key_value_seq_lengths": tf.constant([seq_k, seq_k // 2], tf.int32)}
    check_attention(arguments | {"sink": (2,), "return_lse": True}, dtype, "eager")


def test_heads_beyond_64_mb():
    """On the CPU so many keys are packed at a time; the heads after them find theirs."""
    with tf.device("CPU:0"):
        query, key, value = draw((1, 64, 72, 8), (1, 32000, 18, 8), (1, 32000, 18, 8))
        output = dot_product_attention(query, key, value)
        last = dot_product_attention(query[:, :, 36:], key[:, :, 9:], value[:, :, 9:])
    np.testing.assert_array_equal(output[:, :, 36:], last)


def test_what_a_window_hides_does_not_leak(dtype):
    query, key, value = draw(*[(1, 200, 2, 16)] * 3, dtype=dtype)
    attend = lambda *x: dot_product_attention(*x, local_window_size=(30, 5), return_lse=True)
    clean, clean_gradients = gradients_of(attend, [query, key, value])
    bad = (np.arange(200) == 100)[None, :, None, None]
    put = lambda x, poison: tf.where(bad, tf.cast(poison, dtype), x)
    for poison in (math.nan, math.inf):
        dirty = [query, put(key, poison), put(value, poison)]
        (output, lse), gradients = gradients_of(attend, dirty)
        sees = (np.arange(200) >= 95) & (np.arange(200) <= 130)
        np.testing.assert_array_equal(output[:, ~sees], clean[0][:, ~sees])
        np.testing.assert_array_equal(lse[..., ~sees], clean[1][..., ~sees])
        np.testing.assert_array_equal(gradients[0][:, ~sees], clean_gradients[0][:, ~sees])
        seen = (np.arange(200) >= 65) & (np.arange(200) <= 135)  # by one that sees the bad key
        for a, b in zip(gradients[1:], clean_gradients[1:]):
            np.testing.assert_array_equal(a[:, ~seen], b[:, ~seen])


def test_a_window_between_two_infinities_of_a_tile_sees_neither(dtype):
    query, key, value = draw(*[(1, 150, 2, 16)] * 3, dtype=dtype)
    attend = lambda value: dot_product_attention(query, key, value, local_window_size=(9, 5))
    expected = attend(value).numpy().astype(np.float32)
    value, i = value.numpy(), np.arange(150)
    for j, sign in ((2, 1), (40, -1), (60, 1), (100, -1), (126, 1)):
        value[:, j, :, 3] = sign * math.inf
        expected[:, (i - 9 <= j) & (j <= i + 5), :, 3] = sign * math.inf
    np.testing.assert_array_equal(tf.cast(attend(tf.constant(value)), tf.float32), expected)


def test_sink_of_minus_infinity_is_none(dtype):
    query, key, value = draw(*[(2, 9, 2, 8)] * 3, dtype=dtype)
    options = {"key_value_seq_lengths": [0, 7], "return_lse": True}
    with_sink = dot_product_attention(query, key, value, sink=[-math.inf] * 2, **options)
    for a, b in zip(with_sink, dot_product_attention(query, key, value, **options)):
        np.testing.assert_array_equal(a, b)


def test_a_row_without_a_key_has_the_sink_as_lse(dtype, mode):
    """0 and the sink's logit, whose gradient is then that of lse; padded queries count as such."""
    query, key, value = draw((2, 70, 2, 16), (2, 40, 2, 16), (2, 40, 2, 16), dtype=dtype)
    sink = tf.constant([0.7, -90.0])
    value = tf.where((np.arange(40) == 39)[:, None, None], tf.cast(math.nan, dtype), value)

    def run(query, key, value, sink):
        with tf.GradientTape() as tape:
            tape.watch([query, sink])
            output, lse = dot_product_attention(
                query,
                key,
                value,
                sink=sink,
                key_value_seq_lengths=[0, 39],
                query_seq_lengths=[70, 30],
                return_lse=True,
            )
            loss = tf.reduce_sum(lse[0]) + tf.reduce_sum(lse[1, :, 30:])
        return output, lse, tape.gradient(loss, [query, sink])

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    output, lse, (dquery, dsink) = run(query, key, value, sink)
    assert (tf.cast(output[0], tf.float32).numpy() == 0).all()
    assert (tf.cast(output[1, 30:], tf.float32).numpy() == 0).all()
    assert np.isfinite(tf.cast(output, tf.float32)).all()
    np.testing.assert_array_equal(lse[0], tf.repeat(sink[:, None], 70, 1))
    np.testing.assert_array_equal(lse[1, :, 30:], tf.repeat(sink[:, None], 40, 1))
    assert (tf.cast(dquery, tf.float32).numpy() == 0).all()
    np.testing.assert_allclose(dsink, [110.0, 110.0], 1e-6)


def test_a_query_of_one_key_and_a_sink_has_a_gradient(dtype):
    for seq in (1, 2, 3):
        shapes = {name: (3, seq, 2, 16) for name in ("query", "key", "value")}
        check_attention(shapes | {"sink": (2,), "is_causal": True}, dtype, "eager", seed=seq)


def test_philox_is_that_of_the_paper():
    """The known answers of Random123."""
    ones = 2**32 - 1
    known = {
        (0, 0): [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        (ones, ones): [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
    }
    for (counter, key), words in known.items():
        assert [int(x) for x in philox([counter] * 4, [key] * 2)] == words


@pytest.mark.parametrize("seed", [[1, 2], [-5, 2**62 + 3]], ids=str)
def test_dropout_replays_in_every_gradient(seed, dtype):
    """Gradients whose mask is not that of the forward pass, or whose scale is another."""
    batch, seq_q, seq_k, rate = 2, 150, 202, 0.4
    kept = kept_pairs(seed, rate, (batch, 4, seq_q, seq_k))
    attend = lambda *x, **options: dot_product_attention(
        *x, dropout_rate=rate, seed=seed, **options
    )
    zeros = lambda *shape: tf.zeros([batch, *shape], dtype)
    ones = lambda *shape: tf.ones([batch, *shape], dtype)
    eye = lambda seq, heads: tf.tile(tf.eye(seq, dtype=dtype)[None, :, None], [batch, 1, heads, 1])
    eye_k, eye_q = eye(seq_k, 2), eye(seq_q, 4)  # [batch, seq, heads, seq]
    weights = lambda kept: kept / (1 - rate) / seq_k
    close = lambda actual, expected: np.testing.assert_allclose(
        tf.cast(actual, tf.float32), expected, 1e-5 if dtype == tf.float32 else 2e-2, 1e-4 / seq_k
    )

    # All scores are 0. Values, or upstream gradients, that are unit vectors show the weights.
    output = attend(zeros(seq_q, 4, 8), zeros(seq_k, 2, 8), eye_k)
    close(output, weights(kept).transpose(0, 2, 1, 3))

    value = zeros(seq_k, 2, seq_q)
    with tf.GradientTape() as tape:
        tape.watch(value)
        output = attend(zeros(seq_q, 4, 8), zeros(seq_k, 2, 8), value)
    dvalue = tape.gradient(output, value, eye_q)  # [batch, seq_k, 2, seq_q]
    close(dvalue, weights(kept).reshape(batch, 2, 2, seq_q, seq_k).sum(2).transpose(0, 3, 1, 2))

    # Where values are 1, ds is the weight minus the mean of all.
    ds = weights(kept) - weights(kept).mean(3, keepdims=True)
    value = ones(seq_k, 2, 1)
    bias = tf.zeros([batch, 4, seq_q, seq_k], dtype)
    query, key = zeros(seq_q, 4, seq_k), eye_k
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([query, bias])
        output = attend(query, key, value, bias, scale=1.0)
    dquery, dbias = tape.gradient(output, [query, bias])
    size = 1 if dtype == tf.float32 else 200
    far = lambda a, b: np.abs(tf.cast(a, tf.float32) - b).max()
    assert far(dbias, ds) < size * 1e-4 / seq_k
    assert far(dquery, ds.transpose(0, 2, 1, 3)) < size * 1e-4 / seq_k
    key = zeros(seq_k, 2, seq_q)
    with tf.GradientTape() as tape:
        tape.watch(key)
        output = attend(eye_q, key, value, scale=1.0)
    dkey = tape.gradient(output, key)  # [batch, seq_k, 2, seq_q]
    expected = ds.reshape(batch, 2, 2, seq_q, seq_k).sum(2).transpose(0, 3, 1, 2)
    assert far(dkey, expected) < 2 * size * 1e-4 / seq_k


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_dropout_keeps_the_share_that_it_should(rate, dtype):
    """The share kept, over all and by row and column; the mean over seeds is that without."""
    seq = 128
    query = tf.zeros([2, seq, 4, 8], dtype)
    value = tf.tile(tf.eye(seq, dtype=dtype)[None, :, None], [2, 1, 4, 1])
    attend = lambda seed: dot_product_attention(query, query, value, dropout_rate=rate, seed=seed)
    outputs = [tf.cast(attend([i, 0]), tf.float32).numpy() for i in range(8)]
    kept = np.stack(outputs) > 0
    assert abs(kept.mean() - (1 - rate)) < 0.01
    for axis in range(5):  # of 2^16 or more each
        axes = tuple(set(range(5)) - {axis})
        assert np.abs(kept.mean(axes) - (1 - rate)).max() < 0.03
    # Sums over the keys of one row are 1 on average.
    assert abs(np.stack(outputs).sum(4).mean() - 1) < 0.01
    # Neighbours are independent.
    for axis in range(1, 5):
        pairs = np.take(kept, range(kept.shape[axis] - 1), axis)
        pairs &= np.take(kept, range(1, kept.shape[axis]), axis)
        assert abs(pairs.mean() - (1 - rate) ** 2) < 0.01


def test_dropout_of_other_seeds_is_another():
    (x,) = draw((1, 64, 2, 16))
    attend = lambda seed: dot_product_attention(x, x, x, dropout_rate=0.5, seed=seed).numpy()
    seeds = [[0, 0], [1, 0], [0, 1], [2**32, 0], [0, 2**32], [-1, 0], [0, -1]]
    outputs = [attend(seed) for seed in seeds]
    for a, b in itertools.combinations(outputs, 2):
        assert np.abs(a - b).max() > 0.1
    np.testing.assert_array_equal(attend(tf.constant([1, 0], tf.int32)), outputs[1])
    np.testing.assert_array_equal(attend(np.int64([1, 0])), outputs[1])


def test_dropout_of_a_seed_that_a_graph_varies(mode):
    inputs = draw((2, 33, 4, 16), (2, 65, 2, 16), (2, 65, 2, 16))

    def run(seed, *inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = dot_product_attention(*inputs, dropout_rate=0.2, seed=seed)
        return y, tape.gradient(y, inputs)

    compiled = run
    if mode != "eager":
        compiled = tf.function(run, jit_compile=mode == "xla")
    for seed in ([1, 2], [3, 4], [1, 2]):
        seed = tf.constant(seed, tf.int64)
        results = zip(tf.nest.flatten(compiled(seed, *inputs)), tf.nest.flatten(run(seed, *inputs)))
        for a, b in results:
            np.testing.assert_array_equal(a, b)
    if mode != "eager":
        assert compiled.experimental_get_tracing_count() == 1


def test_no_dropout_rate_needs_no_seed():
    (x,) = draw((1, 9, 2, 8))
    expected = dot_product_attention(x, x, x)
    np.testing.assert_array_equal(dot_product_attention(x, x, x, dropout_rate=0.0), expected)
    np.testing.assert_array_equal(dot_product_attention(x, x, x, seed=[1, 2]), expected)


@pytest.mark.parametrize("head_dim", [16, 128])
def test_thirty_runs_are_the_same(head_dim, dtype):
    """Gradients that differ from run to run, with every feature at once."""
    query, key, value, bias = draw(
        (2, 70, 4, head_dim),
        (2, 90, 2, head_dim),
        (2, 90, 2, head_dim),
        (1, 4, 70, 90),
        dtype=dtype,
    )
    (sink,) = draw((4,))
    attend = lambda query, key, value, bias, sink: dot_product_attention(
        query,
        key,
        value,
        bias,
        is_causal=True,
        causal_alignment="bottom_right",
        attn_logits_soft_cap=3.0,
        local_window_size=40,
        key_value_seq_lengths=[90, 33],
        sink=sink,
        dropout_rate=0.3,
        seed=[1, 2],
        return_lse=True,
    )
    inputs = [query, key, value, bias, sink]
    first = tf.nest.flatten(gradients_of(attend, inputs))
    for _ in range(29):
        for a, b in zip(first, tf.nest.flatten(gradients_of(attend, inputs)), strict=True):
            np.testing.assert_array_equal(a, b)


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
        ({"soft_cap": True}, "sm_80", "soft cap"),
        ({"dropout": True}, "sm_80", "dropout"),
    ],
    ids=str,
)
def test_which_kernels_serve(changes, kernels, why):
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "seq_q": 500, "seq_k": 500, "head_dim": 64}
    sizes["value_dim"] = 64
    of_call = {"dtype": "bfloat16", "gradient": False, "capability": 90}
    features = dict.fromkeys(["bias", "mask", "soft_cap", "dropout"], False)
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


def test_list_ops():
    for suffix in ("", "Grad", "BiasGrad"):
        assert f"TfOps>DotProductAttention{suffix}" in tf_ops.list_ops()
