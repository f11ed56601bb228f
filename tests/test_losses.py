# SPDX-License-Identifier: Apache-2.0
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_ops.losses import SparseSoftmaxCrossEntropy
from tf_ops.testing import in_mode

CLASSES = 7


def stock_loss(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def draw(shape, ignore_class=None):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, shape)
    if ignore_class is not None:
        labels = np.where(rng.random(shape) < 0.4, ignore_class, labels)
    logits = rng.standard_normal([*shape, CLASSES]).astype(np.float32)
    return tf.constant(labels), tf.constant(logits), tf.constant(rng.random(shape), tf.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ignore_class", [None, -1, 3])
def test_same_numbers_as_keras(ignore_class, masked, weighted):
    reductions = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none", None]
    for shape in [(5,), (3, 4)]:
        labels, logits, weight = draw(shape, ignore_class)
        if masked:
            logits._keras_mask = weight > 0.3
        for reduction in reductions:
            arguments = {"reduction": reduction, "ignore_class": ignore_class}
            ours, stock = SparseSoftmaxCrossEntropy(**arguments), stock_loss(**arguments)
            sample_weight = weight if weighted else None
            actual, expected = (loss(labels, logits, sample_weight) for loss in (ours, stock))
            assert actual.dtype == expected.dtype
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (2, 3), (2, 3, 1)], ids=str)
def test_forms_of_labels(shape, dtype):
    shape = np.array(shape)
    tokens = shape[:-1] if shape[-1] == 1 else shape
    labels, logits, _ = draw(tokens)
    labels = tf.cast(tf.reshape(labels, shape), dtype)
    ours, stock = (loss(labels, logits) for loss in (SparseSoftmaxCrossEntropy(), stock_loss()))
    np.testing.assert_allclose(ours, stock, rtol=1e-6)


@pytest.mark.parametrize("labels_dtype", ["int32", "int64", "float32"])
def test_class_301_is_not_class_300_in_bfloat16(labels_dtype, mode):
    """Keras casts labels to the dtype of the loss; 301 is no bfloat16."""
    logits = tf.cast(20 * tf.one_hot([301, 301], 1000), tf.bfloat16)
    loss = SparseSoftmaxCrossEntropy(dtype="bfloat16", reduction=None)
    labels = tf.cast([301, 300], labels_dtype)
    losses = in_mode(loss, mode, [labels, logits])(labels, logits)
    assert losses.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(losses, tf.float32), [0, 20], atol=0.1)


def test_16_bit_logits_are_summed_in_float32():
    """A bfloat16 loss is rounded once, at the end."""
    logits = tf.random.normal([4096, 10], dtype=tf.bfloat16)
    labels = tf.zeros([4096], tf.int32)
    exact = stock_loss()(labels, tf.cast(logits, tf.float32))
    np.testing.assert_allclose(SparseSoftmaxCrossEntropy()(labels, logits), exact, rtol=1e-5)
    loss = SparseSoftmaxCrossEntropy(dtype="bfloat16")(labels, logits)
    assert loss == tf.cast(exact, tf.bfloat16)


def test_float64_logits_become_float32():
    labels, logits, _ = draw((5,))
    loss = SparseSoftmaxCrossEntropy()
    np.testing.assert_array_equal(loss(labels, tf.cast(logits, tf.float64)), loss(labels, logits))
    np.testing.assert_array_equal(loss(labels.numpy(), logits.numpy()), loss(labels, logits))


def test_all_ignored_is_zero():
    loss = SparseSoftmaxCrossEntropy(ignore_class=-1)
    assert loss(tf.constant([-1, -1]), tf.random.normal([2, 5])) == 0


def test_options_reach_the_kernel():
    labels, logits, _ = draw((5,))
    x = 2 * tf.tanh(logits / 2)
    lse = tf.reduce_logsumexp(x, -1)
    at_label = tf.gather(x, labels, batch_dims=1)
    expected = lse - 0.9 * at_label - 0.1 * tf.reduce_mean(x, -1) + 0.01 * lse**2
    loss = SparseSoftmaxCrossEntropy(label_smoothing=0.1, z_loss=0.01, logits_soft_cap=2.0)
    np.testing.assert_allclose(loss(labels, logits), tf.reduce_mean(expected), rtol=1e-5)


def test_config():
    loss = SparseSoftmaxCrossEntropy(
        ignore_class=-1, label_smoothing=0.1, z_loss=0.01, logits_soft_cap=2.0, reduction="sum",
        name="mine", dtype="bfloat16"
    )  # fmt: skip
    serialized = keras.saving.serialize_keras_object(loss)
    assert serialized["registered_name"] == "tf_ops>SparseSoftmaxCrossEntropy"
    copy = keras.saving.deserialize_keras_object(serialized)
    assert type(copy) is SparseSoftmaxCrossEntropy
    assert copy.get_config() == loss.get_config() and copy.dtype == "bfloat16"


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_fit(policy, jit_compile, tmp_path):
    """A model with masks and weights learns as it does with Keras's loss, and is saved with it."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, [64, 6])
    labels = np.where(rng.random(tokens.shape) < 0.2, -1, (tokens * 3 + 1) % CLASSES)
    weights = rng.random(tokens.shape).astype(np.float32)

    def fit(loss):
        keras.utils.set_random_seed(1)
        embedding = keras.layers.Embedding(5, 8, mask_zero=True)
        model = keras.Sequential([embedding, keras.layers.Dense(CLASSES, dtype=policy)])
        model.compile("adam", loss, jit_compile=jit_compile, weighted_metrics=[])
        history = model.fit(
            tokens, labels, sample_weight=weights, batch_size=16, epochs=3, verbose=0,
            shuffle=False
        )  # fmt: skip
        return model, history.history["loss"]

    model, actual = fit(SparseSoftmaxCrossEntropy(ignore_class=-1))
    _, expected = fit(stock_loss(ignore_class=-1))
    np.testing.assert_allclose(actual, expected, rtol=1e-5 if policy == "float32" else 3e-3)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.loss.get_config() == model.loss.get_config()
