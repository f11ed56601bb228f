# SPDX-License-Identifier: Apache-2.0
import itertools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import testing
from tf_ops._library import library
from tf_ops._ops.cross_entropy import sparse_softmax_cross_entropy
from tf_ops.testing import check_rejected, in_mode

OPTIONS = {
    "ignore_class": -100,
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "logits_soft_cap": 2.0,
}


def reference(labels, logits, ignore_class=None, label_smoothing=0.0, z_loss=0.0,
              logits_soft_cap=None, reduction="none"):  # fmt: skip
    """The formula in stock TensorFlow, in the dtype of the logits but at least float32."""
    x = logits if logits.dtype.size >= 4 else tf.cast(logits, tf.float32)
    kept = tf.ones_like(labels, tf.bool) if ignore_class is None else labels != ignore_class
    labels = tf.where(kept, labels, 0)
    if logits_soft_cap:
        x = logits_soft_cap * tf.tanh(x / logits_soft_cap)
    lse = tf.reduce_logsumexp(x, -1)
    loss = lse - (1 - label_smoothing) * tf.gather(x, labels, batch_dims=labels.shape.rank)
    if label_smoothing:
        loss -= label_smoothing * tf.reduce_mean(x, -1)
    if z_loss:
        loss += z_loss * lse**2
    loss = tf.where(kept, loss, 0)
    if reduction == "none":
        return loss
    count = tf.reduce_sum(tf.cast(kept, loss.dtype)) if reduction == "mean" else 1
    return tf.math.divide_no_nan(tf.reduce_sum(loss), count)


def draw(tokens, classes, dtype, labels_dtype=tf.int32, ignore_class=None, seed=0):
    """Labels, a third of them ignored if some are, and logits of about -3 to 3."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, tokens)
    if ignore_class is not None:
        labels = np.where(rng.random(tokens) < 0.3, ignore_class, labels)
    logits = tf.cast(rng.standard_normal([*tokens, classes]), dtype)
    return tf.constant(labels, labels_dtype), logits


def check(labels, logits, mode, second_order=False, **options):
    """The error rule, with random cotangents of each token."""
    testing.check(
        lambda labels, logits: sparse_softmax_cross_entropy(labels, logits, **options),
        lambda labels, logits: reference(labels, logits, **options),
        [labels, logits],
        logits.dtype,
        mode,
        seed=1,
        second_order=second_order,
    )


def loss_and_gradient(labels, logits, dloss=None, **options):
    logits = tf.convert_to_tensor(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = sparse_softmax_cross_entropy(labels, logits, **options)
    return loss, tape.gradient(loss, logits, dloss)


# One class, tails around the vectors of both devices, and each number of threads per row.
@pytest.mark.parametrize("classes", [1, 2, 7, 16, 31, 33, 64, 127, 1000, 2049, 4096])
def test_sizes(classes, dtype):
    for tokens in (0, 1, 3, 199):
        labels, logits = draw([tokens], classes, dtype, ignore_class=-100)
        check(labels, logits, "eager", ignore_class=-100)
        check(labels, logits, "eager", **OPTIONS)


# A few rows are shared out; many are not, and of thousands a warp takes each. Liger#1252: beyond
# 65536 classes a broken path ran.
@pytest.mark.parametrize(
    "tokens, classes", [(3, 32000), (40, 32001), (300, 32771), (2, 131073), (5000, 2051)]
)
def test_many_classes(tokens, classes):
    labels, logits = draw([tokens], classes, tf.bfloat16, ignore_class=-100)
    check(labels, logits, "eager", **OPTIONS)


def test_a_million_classes():
    labels, logits = draw([1], 1_000_003, tf.float32)
    check(labels, logits, "eager", label_smoothing=0.1)


# A scalar label, several leading dimensions, no token.
@pytest.mark.parametrize("tokens", [(), (3,), (2, 0), (2, 3, 5)], ids=str)
def test_ranks(tokens, dtype, mode):
    labels, logits = draw(tokens, 33, dtype, tf.int64, ignore_class=-100)
    check(labels, logits, mode, **OPTIONS)


# Each option alone and any of them together (Liger#198: smoothing and ignored labels did not).
@pytest.mark.parametrize("labels_dtype", [tf.int32, tf.int64], ids=lambda d: d.name)
def test_options(labels_dtype, dtype):
    for chosen in itertools.product([False, True], repeat=len(OPTIONS)):
        options = dict(itertools.compress(OPTIONS.items(), chosen))
        labels, logits = draw([5], 37, dtype, labels_dtype, options.get("ignore_class"))
        check(labels, logits, "eager", **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_class", [None, -1, 3])
def test_reductions(reduction, ignore_class, mode):
    labels, logits = draw([4, 6], 10, tf.float32, ignore_class=ignore_class)
    check(labels, logits, mode, reduction=reduction, ignore_class=ignore_class)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_second_order(options, dtype, mode):
    labels, logits = draw([2, 3], 7, dtype, ignore_class=options.get("ignore_class"))
    check(labels, logits, mode, second_order=True, **options)


def test_second_order_of_a_mean():
    labels, logits = draw([6], 7, tf.float32, ignore_class=-100)
    check(labels, logits, "eager", second_order=True, reduction="mean", **OPTIONS)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_all_ignored_gives_zero_not_nan(reduction, dtype, mode):
    """Liger#177: division by zero when no label is left. Even NaN logits do not matter."""
    labels, logits = tf.fill([5], -1), tf.constant(np.nan, dtype, [5, 9])
    options = {**OPTIONS, "ignore_class": -1, "reduction": reduction}
    fn = lambda labels, logits: loss_and_gradient(labels, logits, **options)
    for result in in_mode(fn, mode, [labels, logits])(labels, logits):
        np.testing.assert_array_equal(result, tf.zeros_like(result))


def test_mean_of_no_token_is_zero(mode):
    fn = lambda labels, logits: loss_and_gradient(labels, logits, reduction="mean")
    inputs = [tf.zeros([0], tf.int32), tf.zeros([0, 5])]
    loss, gradient = in_mode(fn, mode, inputs)(*inputs)
    assert loss == 0 and gradient.shape == [0, 5]


def test_gradient_is_scaled_by_each_tokens_own_cotangent(dtype):
    """Liger#968, TransformerEngine#1879: all were scaled by the first, which may be 0."""
    labels, logits = draw([7], 40, dtype)
    dloss = tf.constant([0.0, 1, -2, 4, 0, 8, -0.5])
    _, gradient = loss_and_gradient(labels, logits, dloss)
    _, of_ones = loss_and_gradient(labels, logits)
    np.testing.assert_array_equal(gradient, tf.cast(dloss[:, None], dtype) * of_ones)


def test_mean_does_not_count_ignored_tokens():
    """TransformerEngine#2476: the sum was divided by all tokens."""
    logits = tf.random.normal([4, 5])
    some = sparse_softmax_cross_entropy([1, -1, 2, -1], logits, ignore_class=-1, reduction="mean")
    kept = sparse_softmax_cross_entropy([1, 2], logits[::2], reduction="mean")
    np.testing.assert_allclose(some, kept, rtol=1e-6)


@pytest.mark.parametrize("classes", [37, 515, 4100, 32000])
@pytest.mark.parametrize("soft_cap, shift", [(30.0, -100.0), (1.0, 0.0)])
def test_padding_lanes_get_no_mass_from_the_soft_cap(classes, soft_cap, shift, dtype):
    """unsloth#10616: cap(-inf) = -c of lanes beyond the row entered the sum."""
    labels, logits = draw([3], classes, dtype)
    check(labels, logits + tf.cast(shift, dtype), "eager", logits_soft_cap=soft_cap)


def test_minus_infinity_is_capped_like_any_logit():
    labels, logits = tf.constant([0]), tf.constant([[1.0, -np.inf, 0.5]])
    check(labels, tf.where(logits < 0, -1e30, logits), "eager", logits_soft_cap=2.0)
    a = loss_and_gradient(labels, logits, logits_soft_cap=2.0)
    b = loss_and_gradient(labels, tf.where(logits < 0, -1e30, logits), logits_soft_cap=2.0)
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])


def test_smoothing_spreads_over_all_classes():
    """Liger#1260: two formulas are in use; stock's spreads e / classes."""
    labels, logits = draw([5], 11, tf.float32)
    target = 0.9 * tf.one_hot(labels, 11) + 0.1 / 11
    stock = tf.nn.softmax_cross_entropy_with_logits(target, logits)
    ours = sparse_softmax_cross_entropy(labels, logits, label_smoothing=0.1)
    np.testing.assert_allclose(ours, stock, rtol=1e-6)


def test_gradient_of_a_sure_right_class_is_not_lost(dtype):
    """Liger#1329: p - 1 in 16 bits is 0 for p = 0.999."""
    labels, logits = draw([64], 128, dtype)
    largest = tf.reduce_max(logits, -1, keepdims=True)
    logits = tf.where(tf.one_hot(labels, 128) > 0, largest + 10, logits)
    check(labels, logits, "eager")
    _, gradient = loss_and_gradient(labels, logits)
    assert (tf.gather(gradient, labels, batch_dims=1).numpy() < 0).all()


def test_loss_is_float32_and_summed_in_float32(dtype):
    """tt-metal#53386: a sum of ones in bfloat16 sticks at 256."""
    loss = sparse_softmax_cross_entropy([3, 5], tf.ones([2, 70_000], dtype))
    assert loss.dtype == tf.float32
    np.testing.assert_allclose(loss, np.log([7e4, 7e4]), rtol=1e-6)


@pytest.mark.parametrize("classes", [3, 100])
def test_every_row_is_written(classes):
    """Liger#1361: the last rows of a block were not. Rows do not depend on their number."""
    labels, logits = draw([65], classes, tf.float32)
    expected = loss_and_gradient(labels, logits)
    for tokens in range(1, 65):
        actual = loss_and_gradient(labels[:tokens], logits[:tokens])
        for a, e in zip(actual, expected):
            np.testing.assert_array_equal(a, e[:tokens])


@pytest.mark.parametrize("classes", [13, 127, 4097])
def test_unaligned_rows(classes, dtype):
    labels, logits = draw([6], classes, dtype)
    for first in range(1, 4):
        check(labels[first:], logits[first:], "eager")


def test_large_logits(dtype, mode):
    rng = np.random.default_rng(0)
    scale = 6e4 if dtype == tf.float16 else 1e4
    logits = tf.cast(scale * rng.uniform(-1, 1, [16, 50]), dtype)
    labels = tf.concat([tf.argmax(logits, -1)[:8], tf.argmin(logits, -1)[8:]], 0)
    check(labels, logits, mode)
    # Close together and far from 0: p must not suffer from the rounding of lse.
    near = tf.cast(scale + rng.standard_normal([16, 50]), dtype)
    check(labels, near, mode)
    check(labels, -near, mode)


def test_largest_and_equal_logits(dtype):
    for value in (0.0, 1.0, dtype.max, dtype.min):
        logits = tf.fill([2, 9], tf.cast(value, dtype))
        loss, gradient = loss_and_gradient([0, 8], logits)
        np.testing.assert_allclose(loss, np.log([9, 9]), rtol=1e-6)
        expected = np.full(9, 1 / 9) - np.eye(9)[[0, 8]]
        tolerance = float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
        np.testing.assert_allclose(tf.cast(gradient, tf.float32), expected, atol=tolerance)


# Also where a whole vector, block or row is -inf.
@pytest.mark.parametrize("classes", [5, 33, 3000])
def test_infinities_and_nan_as_stock(classes, dtype, mode):
    inf, nan = np.inf, np.nan
    rows = np.zeros([8, classes])
    rows[:, : classes - 1] = -inf  # row 0: one class is left, the label
    rows[1, 1] = 1.0  # row 1: another class beside it
    rows[2] = np.arange(classes) % 3
    rows[2, 0] = -inf  # row 2: the label has probability 0
    rows[3] = -inf  # row 3: nothing is left
    rows[4, 0] = nan
    rows[5, 0] = inf
    rows[6] = -inf
    rows[6, 0] = nan
    rows[7] = 0.0
    labels = np.full(8, classes - 1)
    labels[2] = 0
    labels, logits = tf.constant(labels), tf.constant(rows, dtype)
    stock = lambda labels, logits: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        expected = stock(labels, tf.cast(logits, tf.float32))
    gradient = tape.gradient(expected, logits)
    actual = in_mode(loss_and_gradient, mode, [labels, logits])(labels, logits)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-6, atol=1e-6)
    tolerance = 2 * float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
    np.testing.assert_allclose(
        *(tf.cast(x, tf.float32) for x in (actual[1], gradient)), tolerance, tolerance
    )


def test_smoothing_over_an_impossible_class_is_infinite():
    loss, gradient = loss_and_gradient([0], [[1.0, 2.0, -np.inf]], label_smoothing=0.3)
    np.testing.assert_array_equal(loss, [np.inf])
    np.testing.assert_allclose(gradient, [[0.2689414 - 0.8, 0.7310586 - 0.1, -0.1]], rtol=1e-5)


@pytest.mark.parametrize("label", [5, -1, 2**31 - 1, -(2**31)])
def test_label_out_of_range(label, mode, device):
    labels, logits = tf.constant([1, label, 2]), tf.reshape(tf.range(15.0), [3, 5])
    run = in_mode(loss_and_gradient, mode, [labels, logits])
    if "CPU" in device:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"label {label} of token 1"):
            run(labels, logits)
        return
    expected = loss_and_gradient([1, 0, 2], logits)
    for actual, e in zip(run(labels, logits), expected):
        assert np.isnan(actual[1]).all()
        np.testing.assert_array_equal(actual[::2], e[::2])


def test_label_out_of_range_beyond_32_bits(device):
    labels, logits = tf.constant([2**32 + 1], tf.int64), tf.zeros([1, 5])
    if "CPU" in device:
        with pytest.raises(tf.errors.InvalidArgumentError, match="label 4294967297"):
            loss_and_gradient(labels, logits)
    else:
        assert np.isnan(loss_and_gradient(labels, logits)[1]).all()


def test_raw_gradient_checks_its_labels(device):
    grad = lambda labels: library.tf_ops_sparse_softmax_cross_entropy_grad(
        dloss=[1.0], labels=labels, logits=tf.zeros([1, 5]), max=[0.0], log_sum=[np.log(5.0)]
    )
    np.testing.assert_allclose(grad([1]), [[0.2, -0.8, 0.2, 0.2, 0.2]], rtol=1e-6)
    if "CPU" in device:
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside"):
            grad([5])
    else:
        assert np.isnan(grad([5])).all()


def test_same_call_gives_the_same_bits(dtype, mode):
    labels, logits = draw([40], 33_000, dtype)
    fn = in_mode(lambda *x: loss_and_gradient(*x, **OPTIONS), mode, [labels, logits])
    for a, b in zip(fn(labels, logits), fn(labels, logits)):
        np.testing.assert_array_equal(a, b)


def test_inputs_are_not_written(dtype, mode):
    """apex#1430: the gradient was written over a tensor that others read."""
    labels, logits = draw([5], 37, dtype)
    before = tf.identity(logits).numpy()

    def fn(labels, logits):
        copy = 2 * logits
        return *loss_and_gradient(labels, copy), copy

    *_, copy = in_mode(fn, mode, [labels, logits])(labels, logits)
    np.testing.assert_array_equal(copy, 2 * before)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("classes", [9, 700, 5001])
def test_gradient_in_the_memory_of_the_logits(classes, dtype):
    """Nobody else reads these logits, so that TensorFlow hands over their buffer."""
    labels, logits = draw([70], classes, dtype, ignore_class=-100)
    fn = lambda labels, logits: loss_and_gradient(labels, 2 * logits, **OPTIONS)
    expected = fn(labels, logits)
    for a, e in zip(in_mode(fn, "graph", [labels, logits])(labels, logits), expected):
        np.testing.assert_array_equal(a, e)


def test_gradient_can_be_taken_twice():
    labels, logits = draw([5], 37, tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        loss = sparse_softmax_cross_entropy(labels, logits)
    np.testing.assert_array_equal(tape.gradient(loss, logits), tape.gradient(loss, logits))


def test_more_than_2_to_the_31_logits(device):
    """Liger#803: 32-bit offsets."""
    if "CPU" in device:
        pytest.skip("needs a GPU's memory")
    logits = tf.random.normal([8200, 262_144], dtype=tf.bfloat16)
    labels = tf.range(8200) * 31
    loss, gradient = loss_and_gradient(labels, logits)
    for rows in (slice(0, 4), slice(-4, None)):
        expected = loss_and_gradient(labels[rows], logits[rows])
        np.testing.assert_allclose(loss[rows], expected[0], rtol=1e-6)
        a, b = (tf.cast(x, tf.float32) for x in (gradient[rows], expected[1]))
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-12)


def test_takes_arrays_lists_and_variables():
    logits = np.float32([[1, 2, 3], [4, 5, 7]])
    expected = sparse_softmax_cross_entropy([0, 2], logits)
    for labels in (np.array([0, 2]), tf.Variable([0, 2])):
        actual = sparse_softmax_cross_entropy(labels, tf.Variable(logits))
        np.testing.assert_array_equal(actual, expected)


def test_vectorized_map():
    labels, logits = draw([3, 4], 5, tf.float32)
    fn = lambda args: sparse_softmax_cross_entropy(*args)
    np.testing.assert_array_equal(tf.vectorized_map(fn, (labels, logits)), fn((labels, logits)))


@pytest.mark.parametrize(
    "match, arguments",
    {
        "labels must be int32 or int64; they are float32": {"labels": [1.0, 2.0]},
        "labels must be int32 or int64; they are uint8": {"labels": np.uint8([1, 2])},
        "logits must be float32, float16 or bfloat16; they are float64": {
            "logits": np.zeros([2, 3])
        },
        "labels must be of the shape of logits without classes": {"labels": [[1], [2]]},
        "at least one class; they are \\(2, 0\\)": {"logits": tf.zeros([2, 0])},
        "at least one class; they are \\(\\)": {"logits": 1.0},
        'reduction must be "none", "mean" or "sum"': {"reduction": "average"},
        "label_smoothing must be .* it is 1.5": {"label_smoothing": 1.5},
        "label_smoothing must be .* it is None": {"label_smoothing": None},
        "z_loss must be .* it is -1": {"z_loss": -1},
        "z_loss must be .* it is nan": {"z_loss": np.nan},
        "logits_soft_cap must be .* it is 0": {"logits_soft_cap": 0},
        "logits_soft_cap must be .* it is inf": {"logits_soft_cap": np.inf},
        "ignore_class must be .* it is 1.0": {"ignore_class": 1.0},
        "ignore_class must be .* it is 9223372036854775808": {"ignore_class": 2**63},
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_that_are_seen_at_once(match, arguments):
    with pytest.raises(ValueError, match=match):
        sparse_softmax_cross_entropy(**{"labels": [1, 2], "logits": tf.zeros([2, 3]), **arguments})


def test_rejected(mode):
    fn, labels = sparse_softmax_cross_entropy, tf.zeros([2], tf.int32)
    if mode != "eager":  # where these are ValueErrors
        check_rejected(fn, [labels, tf.zeros([3, 5])], "must be equal", mode)
        check_rejected(fn, [labels, tf.zeros([2, 0])], "at least one class", mode)
        check_rejected(fn, [labels, tf.constant(1.0)], "rank", mode)
    check_rejected(
        fn, [tf.zeros([1] * 9, tf.int32), tf.zeros([1] * 10)], "is above the limit of 8", mode
    )
