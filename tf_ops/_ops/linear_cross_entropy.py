# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits that are never whole in memory."""

import functools

import numpy as np
import tensorflow as tf

from tf_ops._library import library
from tf_ops._operation import operation
from tf_ops._ops.cross_entropy import attributes, check_reduction, gradient_formula, reduced

_FLOATS = (tf.float32, tf.float16, tf.bfloat16)

# Logits exist for a block of classes at a time: a 32nd of them, so that the blocks need little
# memory, but enough to keep the matrix products efficient and the sums over the blocks short.
_BLOCKS, _MIN_WIDTH, _ALIGNMENT = 32, 1024, 128


@operation
def linear_cross_entropy(
    labels,
    hidden,
    kernel,
    bias=None,
    *,
    transpose_kernel=False,
    ignore_class=None,
    label_smoothing=0.0,
    z_loss=0.0,
    logits_soft_cap=None,
    reduction="none",
):
    """`sparse_softmax_cross_entropy` of the logits hidden @ kernel + bias, which it never holds.

    The logits are computed for a block of classes at a time, in the dtype of `hidden`, and once
    more for the gradients. Those are exact: nothing is left out. The memory needed beside inputs
    and outputs is about 1/32 of the logits and, for gradients, 1/32 of the kernel and 1.5 times the
    hidden states; with float16 2.5 times.

    Args:
        labels: [...] tensor of int32 or int64, the index of the right class of each token.
        hidden: [..., features] tensor of float32, float16 or bfloat16.
        kernel: [features, classes] tensor of one of these dtypes.
        bias: [classes] tensor of one of these dtypes, or None.
        transpose_kernel: whether `kernel` is [classes, features], as an embedding is.
        ignore_class: a label, negative or not, whose tokens have loss 0 and no gradient.
        label_smoothing: the share of the target, in [0, 1], that is spread over all classes.
        z_loss: a float of at least 0, the weight of the squared log-sum-exp.
        logits_soft_cap: a positive float c makes c tanh(x / c) of each logit x; None: x.
        reduction: "none"; "sum"; or "mean", over the tokens that are not ignored, and 0 with
            gradient 0 where none is left.

    Returns:
        The float32 loss, [...] for reduction "none", else a scalar.

    Raises:
        ValueError: a dtype, shape or option that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before, or, on the CPU, a
            label outside [0, classes) that is not ignore_class. On the GPU the loss of such a
            token is NaN, and so are the gradients that it takes part in.
    """
    labels, hidden, kernel = (tf.convert_to_tensor(x) for x in (labels, hidden, kernel))
    bias = None if bias is None else tf.convert_to_tensor(bias)
    _check(labels, hidden, kernel, bias, transpose_kernel)
    options = attributes(ignore_class, label_smoothing, z_loss, logits_soft_cap)
    check_reduction(reduction)

    checks = []
    if not (labels.shape.is_fully_defined() and hidden.shape.is_fully_defined()):
        checks = [
            tf.debugging.assert_equal(
                tf.shape(labels),
                tf.shape(hidden)[:-1],
                "linear_cross_entropy: labels must be of the shape of hidden without features",
            )
        ]
    with tf.control_dependencies([x for x in checks if x is not None]):
        tokens = [tf.size(labels) if x is None else x for x in [labels.shape.num_elements()]]
    flat = tf.reshape(hidden, tokens + _sizes(hidden)[-1:])
    loss = _losses(tf.reshape(labels, [-1]), flat, kernel, bias, transpose_kernel, options)
    return reduced(tf.reshape(loss, _sizes(labels)), labels, ignore_class, reduction)


def _check(labels, hidden, kernel, bias, transpose_kernel):
    if labels.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"labels must be int32 or int64; they are {labels.dtype.name}")
    for name, x in (("hidden", hidden), ("kernel", kernel), ("bias", bias)):
        if x is not None and x.dtype not in _FLOATS:
            raise ValueError(f"{name} must be float32, float16 or bfloat16; it is {x.dtype.name}")
    if not kernel.shape.rank == 2:
        raise ValueError(f"kernel must be of rank 2; it is {kernel.shape}")
    if hidden.shape.rank is None or hidden.shape.rank == 0:
        raise ValueError(f"hidden must be [..., features] of known rank; it is {hidden.shape}")
    features, classes = kernel.shape[::-1] if transpose_kernel else kernel.shape
    layout = "[classes, features]" if transpose_kernel else "[features, classes]"
    if None not in (features, hidden.shape[-1]) and features != hidden.shape[-1]:
        raise ValueError(
            f"kernel must be {layout} for the features of hidden; they are {kernel.shape} and "
            f"{hidden.shape}"
        )
    if classes == 0:
        raise ValueError(f"kernel must be {layout} with at least one class; it is {kernel.shape}")
    if bias is not None and not bias.shape.is_compatible_with([classes]):
        raise ValueError(f"bias must be [classes], which are {classes}; it is {bias.shape}")
    if not labels.shape.is_compatible_with(hidden.shape[:-1]):
        raise ValueError(
            f"labels must be of the shape of hidden without features, {hidden.shape[:-1]}; "
            f"they are {labels.shape}"
        )


def _sizes(x):
    """The dimensions of x, those that are known as ints."""
    if x.shape.is_fully_defined():
        return x.shape.as_list()
    shape = tf.shape(x)
    return [shape[i] if n is None else n for i, n in enumerate(x.shape)]


def _losses(labels, hidden, kernel, bias, transposed, options):
    """The loss of each token, [tokens], differentiable twice."""

    # The tensors that the computation sees do not belong to a tape, which would keep the logits.
    @tf.custom_gradient
    def losses(hidden, kernel, *bias):
        inputs = [tf.stop_gradient(x) for x in (hidden, kernel, *bias)]
        loss, largest, log_sum = _run(_forward, transposed, options, labels, *inputs)
        largest, log_sum = tf.stop_gradient(largest), tf.stop_gradient(log_sum)

        @tf.custom_gradient
        def gradients(dloss, hidden, kernel, *bias):
            inputs = [tf.stop_gradient(x) for x in (hidden, kernel, *bias)]
            dloss_only = tf.stop_gradient(dloss)
            results = _run(
                _backward, transposed, options, labels, dloss_only, largest, log_sum, *inputs
            )

            def second_order(*cotangents):
                by = [dloss, hidden, kernel, *bias]
                with tf.GradientTape() as tape:
                    tape.watch(by)
                    y = _gradients_formula(transposed, options, labels, *by)
                return tape.gradient(y, by, cotangents)

            return results, second_order

        return loss, lambda dloss: gradients(dloss, hidden, kernel, *bias)

    return losses(hidden, kernel, *([] if bias is None else [bias]))


def _run(function, transposed, options, *tensors):
    """function(...), as a graph: that writes blocks in place and frees them early."""
    if tf.executing_eagerly():
        function = _graph(function, len(tensors), transposed, tuple(options.items()))
        return function(*tensors)
    return function(transposed, options, *tensors)


@functools.cache
def _graph(function, _, transposed, options):
    """function(transposed, options, *tensors) as a graph of so many tensors."""
    function = functools.partial(function, transposed, dict(options))
    # A new number of tokens, or of anything else, makes a new graph once, and no more after it.
    return tf.function(function, autograph=False, reduce_retracing=True)


def _forward(transposed, options, labels, hidden, kernel, *bias):
    """The loss, and log-sum-exp in two parts, of each token."""
    smoothing, z_loss = options["label_smoothing"], options["z_loss"]
    options = {name: value for name, value in options.items() if name != "z_loss"}
    classes = _sizes(kernel)[0 if transposed else 1]

    def add_block(first, width, sums):
        span, _, logits = _block(first, width, transposed, hidden, kernel, *bias)
        return (
            library.tf_ops_linear_cross_entropy(
                labels=labels, logits=logits, span=span, sums=sums, **options
            ),
        )

    start = tf.tile([[-np.inf, 0.0, 0.0, np.nan]], [_sizes(labels)[0], 1])
    (sums,) = _for_each_block(classes, add_block, (start,))
    largest, total, sum_x, x_label = tf.unstack(sums, 4, -1)
    log_sum = tf.math.log(total)
    loss = (1 - smoothing) * (largest - x_label) + log_sum
    # Infinite terms are left out where their factor is 0.
    if smoothing:
        loss += smoothing * (largest - sum_x / tf.cast(classes, tf.float32))
    if z_loss:
        loss += z_loss * (largest + log_sum) ** 2
    if options.get("has_ignore_class"):
        kept = tf.not_equal(tf.cast(labels, tf.int64), options["ignore_class"])
        loss, largest, log_sum = (tf.where(kept, x, 0) for x in (loss, largest, log_sum))
    return loss, largest, log_sum


def _backward(transposed, options, labels, dloss, largest, log_sum, hidden, kernel, *bias):
    """The gradients of hidden, kernel and bias; dloss are those of the tokens' losses."""
    tokens, features = _sizes(hidden)
    ones = tf.ones([1, tokens], hidden.dtype)
    halves = [tokens // 2, tokens - tokens // 2]

    def add_block(first, width, *state):
        sums, rests, dkernel = [*state[:2]], [*state[2:4]], state[4]
        span, block, logits = _block(first, width, transposed, hidden, kernel, *bias)
        dlogits = library.tf_ops_linear_cross_entropy_grad(
            dloss=dloss,
            labels=labels,
            logits=logits,
            span=span,
            max=largest,
            log_sum=log_sum,
            **options,
        )
        # One product after the other, half of the tokens at a time: each is freed soon.
        done = []
        for i, part in enumerate(tf.split(dlogits, halves)):
            with tf.control_dependencies(done):
                product = tf.matmul(part, block, transpose_b=not transposed)
            add = library.tf_ops_linear_cross_entropy_hidden_grad
            sums[i], rests[i] = add(sum=sums[i], rest=rests[i], addend=product)
            done = [sums[i]]
        with tf.control_dependencies(done):
            a, b = (dlogits, hidden) if transposed else (hidden, dlogits)
            product = tf.matmul(a, b, transpose_a=True)
        put = library.tf_ops_linear_cross_entropy_kernel_grad
        dkernel = put(whole=dkernel, block=product, span=span, transpose_kernel=transposed)
        # A product sums in float32, and over all tokens.
        dbias = [put(whole=x, block=tf.matmul(ones, dlogits), span=span) for x in state[5:]]
        return *sums, *rests, dkernel, *dbias

    # Sums in float32; those of bfloat16 are in two parts, of which the first is the result.
    split = hidden.dtype == tf.bfloat16
    start = [tf.zeros([n, features], hidden.dtype if split else tf.float32) for n in halves]
    start += [tf.zeros([n, features, 2] if split else [0], tf.uint8) for n in halves]
    start += [tf.zeros(_sizes(kernel), kernel.dtype)]
    start += [tf.zeros([1, *_sizes(x)], x.dtype) for x in bias]
    classes = _sizes(kernel)[0 if transposed else 1]
    state = _for_each_block(classes, add_block, start)
    dhidden = tf.concat([tf.cast(x, hidden.dtype) for x in state[:2]], 0)
    return dhidden, state[4], *(tf.squeeze(x, 0) for x in state[5:])


def _for_each_block(classes, step, state):
    """step(first class, number of classes, *state) -> state, over blocks of classes in turn."""
    width = -(-classes // (_BLOCKS * _ALIGNMENT)) * _ALIGNMENT
    if isinstance(classes, int):
        width = max(width, _MIN_WIDTH)
        end = classes // width * width
    else:
        width = tf.maximum(width, _MIN_WIDTH)
        end = (classes - 1) // width * width  # something is left for after the loop
    if not isinstance(classes, int) or end > width:
        _, *state = tf.while_loop(
            lambda first, *_: first < end,
            lambda first, *state: (first + width, *step(first, width, *state)),
            [0, *state],
            parallel_iterations=1,
        )
    elif end == width:
        state = step(0, width, *state)
    if not isinstance(classes, int) or end < classes:
        state = step(end, classes - end, *state)
    return state


def _block(first, width, transposed, hidden, kernel, *bias):
    """Of a block of classes: the kernels' argument for it, its part of the kernel, its logits."""
    classes, features = _sizes(kernel) if transposed else _sizes(kernel)[::-1]
    if transposed:
        block = tf.slice(kernel, [first, 0], [width, features])
    else:
        block = tf.slice(kernel, [0, first], [features, width])
    block = tf.cast(block, hidden.dtype)
    logits = tf.matmul(hidden, block, transpose_b=transposed)
    for x in bias:
        logits += tf.cast(tf.slice(x, [first], [width]), hidden.dtype)
    span = tf.stack([tf.cast(first, tf.int64), tf.cast(classes, tf.int64)])
    return span, block, logits


def _gradients_formula(transposed, options, labels, dloss, hidden, kernel, *bias):
    """What _backward returns, in stock TensorFlow and with all logits."""
    wide, weights, *shift = (tf.cast(x, tf.float32) for x in (hidden, kernel, *bias))
    logits = tf.matmul(wide, weights, transpose_b=transposed)
    for x in shift:
        logits += x
    dlogits = gradient_formula(options, dloss, labels, logits)
    a, b = (dlogits, wide) if transposed else (wide, dlogits)
    results = [tf.matmul(dlogits, weights, transpose_b=not transposed)]
    results += [tf.matmul(a, b, transpose_a=True)]
    results += [tf.reduce_sum(dlogits, 0) for _ in bias]
    return [tf.cast(y, x.dtype) for x, y in zip((hidden, kernel, *bias), results)]


# The raw ops are steps of the above; gradients are those of the whole.
for _op in ("", "Grad", "HiddenGrad", "KernelGrad"):
    tf.no_gradient(f"TfOps>LinearCrossEntropy{_op}")
