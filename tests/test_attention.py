# SPDX-License-Identifier: Apache-2.0
"""Attention against its formula in stock TensorFlow, and what must hold exactly."""

import itertools
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.attention_reference import check_attention, draw, gradients_of, reference
from tf_ops import dot_product_attention
from tf_ops.testing import DTYPES, check

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


def test_heads_beyond_64_mb():
    """On the CPU so many keys are packed at a time; the heads after them find theirs."""
    with tf.device("CPU:0"):
        query, key, value = draw((1, 64, 72, 8), (1, 32000, 18, 8), (1, 32000, 18, 8))
        output = dot_product_attention(query, key, value)
        last = dot_product_attention(query[:, :, 36:], key[:, :, 9:], value[:, :, 9:])
    np.testing.assert_array_equal(output[:, :, 36:], last)


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
