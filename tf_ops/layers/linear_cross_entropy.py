# SPDX-License-Identifier: Apache-2.0
"""The output projection of a language model and its loss in one layer."""

import keras
import tensorflow as tf

from tf_ops._ops.linear_cross_entropy import linear_cross_entropy
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class LinearCrossEntropy(keras.layers.Layer):
    """Cross entropy of `hidden @ kernel + bias`, computed by `tf_ops.linear_cross_entropy`.

    The logits of all tokens are never in memory. The layer owns the kernel, [features, classes],
    or shares that of an embedding, [classes, features]:

        loss = LinearCrossEntropy(classes, ignore_class=-1)(hidden, labels)
        loss = LinearCrossEntropy(embedding=embedding)(hidden, labels)

    Args:
        classes: the number of classes, where the layer owns the kernel.
        embedding: a `keras.layers.Embedding` whose table is the kernel, in place of `classes`.
        use_bias: whether to add a bias, [classes].
        kernel_initializer, bias_initializer: of the weights that the layer owns.
        kernel_regularizer, bias_regularizer: likewise.
        ignore_class: a label, negative or not, whose tokens have loss 0 and no gradient.
        label_smoothing: share of the target, in [0, 1], that is spread over all classes.
        z_loss: weight of the squared log-sum-exp of the logits.
        logits_soft_cap: a positive c makes c tanh(logits / c) of the logits first.

    Call arguments:
        hidden: [..., features].
        labels: [...] of int32 or int64.

    Returns:
        The float32 loss of each token, [...].
    """

    def __init__(
        self,
        classes=None,
        embedding=None,
        use_bias=False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        ignore_class=None,
        label_smoothing=0.0,
        z_loss=0.0,
        logits_soft_cap=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if (classes is None) == (embedding is None):
            raise ValueError(
                "LinearCrossEntropy takes either classes or an embedding; they are "
                f"{classes!r} and {embedding!r}"
            )
        self.supports_masking = True
        self.classes = classes if embedding is None else embedding.input_dim
        self.embedding = embedding
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.ignore_class = ignore_class
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logits_soft_cap = logits_soft_cap

    def build(self, hidden_shape, labels_shape=None):
        if self.embedding is not None:
            if not self.embedding.built:
                self.embedding.build()
        else:
            # Cast block by block in the function: a whole copy would be as large as the kernel.
            self.kernel = self.add_weight(
                name="kernel",
                shape=(hidden_shape[-1], self.classes),
                initializer=self.kernel_initializer,
                regularizer=self.kernel_regularizer,
                autocast=False,
            )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.classes,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                autocast=False,
            )
        self.built = True

    def call(self, hidden, labels):
        served = [x if is_served(x.dtype) else tf.cast(x, tf.float32) for x in self._inputs(hidden)]
        return linear_cross_entropy(
            labels,
            *served,
            transpose_kernel=self.embedding is not None,
            ignore_class=self.ignore_class,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_soft_cap=self.logits_soft_cap,
        )

    def compute_output_spec(self, hidden, labels):
        return keras.KerasTensor(labels.shape, "float32")

    def logits(self, hidden):
        """The logits that the loss is of, soft cap included, [..., classes]; as for sampling."""
        hidden = tf.cast(hidden, self.compute_dtype)
        if not self.built:
            self.build(hidden.shape)
        hidden, kernel, *bias = (tf.cast(x, self.compute_dtype) for x in self._inputs(hidden))
        x = tf.tensordot(hidden, kernel, [[-1], [0 if self.embedding is None else 1]])
        x = x + bias[0] if bias else x
        cap = self.logits_soft_cap
        return x if cap is None else cap * tf.tanh(x / cap)

    def _inputs(self, hidden):
        """Hidden states, kernel and bias if there is one, as tensors."""
        kernel = self.kernel if self.embedding is None else self.embedding.embeddings
        weights = [kernel] if self.bias is None else [kernel, self.bias]
        return [tf.convert_to_tensor(x) for x in (hidden, *weights)]

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "classes": self.classes if self.embedding is None else None,
            "embedding": self.embedding and serialize(self.embedding),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "ignore_class": self.ignore_class,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "logits_soft_cap": self.logits_soft_cap,
        }

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**{**config, "embedding": embedding})
