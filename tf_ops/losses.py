# SPDX-License-Identifier: Apache-2.0
"""Keras losses made of the kernels."""

import keras
import tensorflow as tf

from tf_ops._ops.cross_entropy import sparse_softmax_cross_entropy


class _Reduction(keras.losses.Loss):
    """Keras's weighting, masking and reduction of losses that are already computed."""

    def call(self, y_true, y_pred):
        return y_pred


@keras.saving.register_keras_serializable(package="tf_ops")
class SparseSoftmaxCrossEntropy(keras.losses.Loss):
    """keras.losses.SparseCategoricalCrossentropy(from_logits=True) in one pass over the logits.

    Labels stay integers and logits stay in their dtype (what is neither float32, float16 nor
    bfloat16 becomes float32), whatever the dtype of the loss; the arithmetic is in float32.

    Args:
        ignore_class: a label, negative or not, whose tokens have loss 0 and do not count.
        label_smoothing: share of the target, in [0, 1], that is spread over all classes.
        z_loss: weight of the squared log-sum-exp of the logits.
        logits_soft_cap: a positive c makes c tanh(logits / c) of the logits first.
        reduction: as in every Keras loss.
        name: name of the loss.
        dtype: dtype of the result; default keras.config.floatx().

    Call arguments:
        y_true: [...] or [..., 1], the labels.
        y_pred: [..., classes], the logits.
        sample_weight: optional, broadcasts to [...].
    """

    def __init__(
        self,
        ignore_class=None,
        label_smoothing=0.0,
        z_loss=0.0,
        logits_soft_cap=None,
        reduction="sum_over_batch_size",
        name="sparse_softmax_cross_entropy",
        dtype=None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_class = ignore_class
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logits_soft_cap = logits_soft_cap

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Not the base class's: it would cast the labels to the dtype of the loss, and in
        # bfloat16 class 301 is class 300.
        losses = self.call(y_true, y_pred)
        mask = getattr(y_pred, "_keras_mask", None)
        if self.ignore_class is not None:
            kept = tf.not_equal(_labels_of(y_true, y_pred), self.ignore_class)
            mask = kept if mask is None else tf.logical_and(mask, kept)
        losses._keras_mask = mask
        reduce = _Reduction(name=self.name, reduction=self.reduction, dtype="float32")
        return tf.cast(reduce(losses, losses, sample_weight), self.dtype)

    def call(self, y_true, y_pred):
        logits = keras.ops.convert_to_tensor(y_pred)
        if logits.dtype not in (tf.float32, tf.float16, tf.bfloat16):
            logits = tf.cast(logits, tf.float32)
        return sparse_softmax_cross_entropy(
            _labels_of(y_true, logits),
            logits,
            ignore_class=self.ignore_class,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_soft_cap=self.logits_soft_cap,
        )

    def get_config(self):
        return {
            "ignore_class": self.ignore_class,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "logits_soft_cap": self.logits_soft_cap,
            "dtype": self.dtype,
            **super().get_config(),
        }


def _labels_of(y_true, logits):
    """[...] int32 or int64 labels."""
    labels = tf.convert_to_tensor(y_true)
    if labels.dtype != tf.int32:
        labels = tf.cast(labels, tf.int64)
    if labels.shape.rank == len(logits.shape) and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    return labels
