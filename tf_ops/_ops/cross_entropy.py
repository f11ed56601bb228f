# SPDX-License-Identifier: Apache-2.0
"""Softmax cross entropy with integer labels."""

import math
import operator

import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation

_FLOATS = (tf.float32, tf.float16, tf.bfloat16)


@operation
def sparse_softmax_cross_entropy(
    labels,
    logits,
    *,
    ignore_class=None,
    label_smoothing=0.0,
    z_loss=0.0,
    logits_soft_cap=None,
    reduction="none",
):
    """loss = lse - (1 - e) x[label] - e mean(x) + z lse^2, lse = logsumexp(x), x the capped logits.

    Arithmetic and result are in float32, whatever the dtype of the logits.

    Args:
        labels: [...] tensor of int32 or int64, the index of the right class of each token.
        logits: [..., classes] tensor of float32, float16 or bfloat16.
        ignore_class: a label, negative or not, whose tokens have loss 0 and no gradient.
        label_smoothing: e, a float in [0, 1], the share of the target that is spread evenly
            over all classes, the right one included.
        z_loss: z, a float of at least 0, the weight of lse^2.
        logits_soft_cap: a positive float c makes x = c tanh(logits / c); None: x = logits.
        reduction: "none"; "sum"; or "mean", over the tokens that are not ignored, and 0 with
            gradient 0 where none is left.

    Returns:
        The float32 loss, [...] for reduction "none", else a scalar.

    Raises:
        ValueError: a dtype, shape or option that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before, or, on the CPU, a
            label outside [0, classes) that is not ignore_class. On the GPU the loss and the
            gradient of such a token are NaN.
    """
    labels = tf.convert_to_tensor(labels)
    logits = tf.convert_to_tensor(logits)
    _check_tensors(labels, logits)
    options = attributes(ignore_class, label_smoothing, z_loss, logits_soft_cap)
    check_reduction(reduction)
    loss = library.tf_ops_sparse_softmax_cross_entropy(labels=labels, logits=logits, **options)
    return reduced(loss.loss, labels, ignore_class, reduction)


def check_reduction(reduction):
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'reduction must be "none", "mean" or "sum"; it is {reduction!r}')


def reduced(loss, labels, ignore_class, reduction):
    """The losses of all tokens, their sum, or their mean over what is not ignored."""
    if reduction == "none":
        return loss
    total = tf.reduce_sum(loss)
    if reduction == "sum":
        return total
    if ignore_class is None:
        count = tf.size(labels, out_type=tf.int64)
    else:
        count = tf.math.count_nonzero(tf.not_equal(tf.cast(labels, tf.int64), ignore_class))
    return tf.math.divide_no_nan(total, tf.cast(count, tf.float32))


def _check_tensors(labels, logits):
    if labels.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"labels must be int32 or int64; they are {labels.dtype.name}")
    if logits.dtype not in _FLOATS:
        raise ValueError(
            f"logits must be float32, float16 or bfloat16; they are {logits.dtype.name}"
        )
    if logits.shape.rank is None:
        return
    if logits.shape.rank == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must be [..., classes] with at least one class; they are {logits.shape}"
        )
    if not labels.shape.is_compatible_with(logits.shape[:-1]):
        raise ValueError(
            f"labels must be of the shape of logits without classes, {logits.shape[:-1]}; "
            f"they are {labels.shape}"
        )


def attributes(ignore_class, label_smoothing, z_loss, logits_soft_cap):
    """The options as attributes of the op."""
    options = {
        "label_smoothing": _number("label_smoothing", label_smoothing, 0, 1),
        "z_loss": _number("z_loss", z_loss, 0, tf.float32.max),
    }
    if logits_soft_cap is not None:
        options["soft_cap"] = _number("logits_soft_cap", logits_soft_cap, 1e-30, 1e30)
    if ignore_class is not None:
        if not hasattr(ignore_class, "__index__") or not -(2**63) <= ignore_class < 2**63:
            raise ValueError(f"ignore_class must be None or an int64; it is {ignore_class!r}")
        options["ignore_class"] = operator.index(ignore_class)
        options["has_ignore_class"] = True
    return options


def _number(name, value, smallest, largest):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not smallest <= number <= largest:
        raise ValueError(f"{name} must be a number in [{smallest}, {largest}]; it is {value!r}")
    return number


_OPTIONS = ("has_ignore_class", "ignore_class", "label_smoothing", "z_loss", "soft_cap")


@tf.RegisterGradient("TfOps>SparseSoftmaxCrossEntropy")
def _gradient(op, dloss, *_):
    labels, logits = op.inputs
    _, largest, log_sum = op.outputs
    dlogits = library.tf_ops_sparse_softmax_cross_entropy_grad(
        dloss=dloss,
        labels=labels,
        logits=logits,
        max=largest,
        log_sum=log_sum,
        **{name: op.get_attr(name) for name in _OPTIONS},
    )
    return None, dlogits


def gradient_formula(options, dloss, labels, logits):
    """dlogits; max and log_sum are computed again, as functions of the logits."""
    ignore_class = options.get("ignore_class", 0) if options.get("has_ignore_class") else None
    smoothing, z_loss = options["label_smoothing"], options["z_loss"]
    soft_cap = options.get("soft_cap")
    dloss, label = dloss[..., tf.newaxis], labels[..., tf.newaxis]
    if ignore_class is not None:
        kept = tf.not_equal(tf.cast(label, tf.int64), ignore_class)
        logits = tf.where(kept, logits, 0)
    x = soft_cap * tf.tanh(logits / soft_cap) if soft_cap else logits
    lse = tf.reduce_logsumexp(x, -1, keepdims=True)
    classes = tf.shape(logits)[-1]
    target = (1 - smoothing) * tf.one_hot(labels, classes) + smoothing / tf.cast(classes, x.dtype)
    dlogits = dloss * (tf.nn.softmax(x) * (1 + 2 * z_loss * lse) - target)
    if soft_cap:
        dlogits *= 1 - (x / soft_cap) ** 2
    return dlogits if ignore_class is None else tf.where(kept, dlogits, 0)


register_second_order(
    "TfOps>SparseSoftmaxCrossEntropyGrad",
    lambda op, dloss, labels, logits, *_: gradient_formula(
        {name: op.get_attr(name) for name in _OPTIONS}, dloss, labels, logits
    ),
)
