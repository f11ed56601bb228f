# SPDX-License-Identifier: Apache-2.0
"""The cache of keys and values of generation."""

import tensorflow as tf


def update_cache(key_cache, value_cache, key, value, positions):
    """Writes new keys and values into their caches, in place.

    Key i of batch row b becomes row positions[b] + i of `key_cache[b]`, and so do values. Nothing
    but these rows is written or copied, nor does a later read of the cache copy it, unless
    somebody still holds what was read before. It has no gradient.

    Args:
        key_cache: tf.Variable [batch, max_seq, kv_heads, head_dim] of float32, float16 or
            bfloat16.
        value_cache: tf.Variable [batch, max_seq, kv_heads, value_dim].
        key: [batch, seq, kv_heads, head_dim] of the dtype of `key_cache`.
        value: [batch, seq, kv_heads, value_dim] of the dtype of `value_cache`.
        positions: int32 or int64 [batch].

    Raises:
        ValueError: what is known before it runs does not fit.
        tf.errors.InvalidArgumentError: shapes do not fit; or a position is not in
            [0, max_seq - seq], and then nothing is written. XLA cannot raise: there rows that are
            not in the cache are dropped.
    """
    key, value = tf.convert_to_tensor(key), tf.convert_to_tensor(value)
    positions = tf.convert_to_tensor(positions)
    caches = {"key": (key_cache, key), "value": (value_cache, value)}
    for name, (cache, x) in caches.items():
        if not isinstance(cache, tf.Variable):
            raise _error(f"{name}_cache is {type(cache).__name__}; it must be a tf.Variable")
        if x.dtype != cache.dtype:
            raise _error(f"{name} is {x.dtype.name}, {name}_cache {cache.dtype.name}")
        batch, _, *rest = cache.shape
        wanted = [batch, key.shape[1] if key.shape.rank == 4 else None, *rest]
        if not x.shape.is_compatible_with(wanted):
            raise _error(
                f"{name} is {x.shape}; beside {name}_cache {cache.shape} it must be {wanted}"
            )
    if positions.dtype not in (tf.int32, tf.int64):
        raise _error(f"positions is {positions.dtype.name}; it must be int32 or int64")
    if not positions.shape.is_compatible_with(key.shape[:1]):
        raise _error(f"positions is {positions.shape}; it must be {key.shape[:1]}, the batch")

    integer = positions.dtype
    batch, seq = tf.unstack(tf.shape(key, integer)[:2])
    for name, (cache, _) in caches.items():
        last = tf.shape(cache, integer)[1] - seq
        fits = tf.reduce_all((positions >= 0) & (positions <= last))
        message = f"update_cache: positions must be in [0, max_seq - seq] of {name}_cache; they are"
        check = tf.debugging.Assert(fits, [message, positions, "and max_seq - seq is", last])
        caches[name] += (check,)
    rows = positions[:, None] + tf.range(seq)
    rows = tf.stack([tf.broadcast_to(tf.range(batch)[:, None], tf.shape(rows)), rows], 2)
    # An eager assertion is None.
    with tf.control_dependencies([check for *_, check in caches.values() if check is not None]):
        for cache, x, _ in caches.values():
            cache.scatter_nd_update(rows, x)
            # Else each read of the whole would be a copy from now on.
            tf.raw_ops.DisableCopyOnRead(resource=cache.handle)


def _error(message):
    return ValueError(f"update_cache: {message}")
