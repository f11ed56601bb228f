# SPDX-License-Identifier: Apache-2.0
import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import paged_attention
from tf_ops._library import library
from tf_ops.testing import check_rejected, error, in_mode

EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 129, 300)


def normal(rng, *shape, dtype=tf.float32):
    return tf.cast(rng.standard_normal(shape), dtype)


def make_inputs(
    dtype=tf.float32,
    lengths=(5, 40),
    page_size=16,
    seq_q=1,
    heads=4,
    kv_heads=2,
    head_dim=32,
    value_dim=32,
    seed=0,
):
    """Query, pages, table and lengths. What no row has is NaN, and beyond the range of pages."""
    rng = np.random.default_rng(seed)
    per_row = -(-max(*lengths, 1) // page_size) + 1
    pages = len(lengths) * per_row + 2
    order = rng.permutation(pages).reshape(-1)[: len(lengths) * per_row].reshape(-1, per_row)
    table = np.full(order.shape, 2**31 - 1, np.int32)
    used = np.zeros([pages, page_size], bool)
    for b, length in enumerate(lengths):
        full = -(-max(length, 0) // page_size)
        table[b, :full] = order[b, :full]
        for j in range(length):
            used[order[b, j // page_size], j % page_size] = True
    caches = [
        tf.where(
            used[..., None, None], normal(rng, *used.shape, kv_heads, dim, dtype=dtype), np.nan
        )
        for dim in (head_dim, value_dim)
    ]
    query = normal(rng, len(lengths), seq_q, heads, head_dim, dtype=dtype)
    return [query, *caches, tf.constant(table), tf.constant(lengths, tf.int32)]


def reference(dtype, query, key_pages, value_pages, table, lengths, **options):
    """The formula in `dtype`, a batch row at a time, from its dense keys and values."""
    window, sink = options.get("local_window_size"), options.get("sink")
    scale, cap = options.get("scale"), options.get("attn_logits_soft_cap")
    window = window[0] if isinstance(window, tuple) else window
    page_size, outputs = key_pages.shape[1], []
    for b, length in enumerate(lengths.numpy().clip(0)):
        q = tf.cast(query[b], dtype)
        seq_q, heads = q.shape[:2]
        at = np.arange(seq_q)[:, None] + length - seq_q
        j = np.arange(length)
        seen = (j <= at) & (j >= (0 if window is None else at - window))
        first = np.flatnonzero(seen.any(0)).min(initial=length)  # what is before may be missing
        seen, j = seen[:, first:], j[first:]
        slots = np.stack([table.numpy()[b, j // page_size], j % page_size], 1).astype(np.int32)
        k, v = (tf.cast(tf.gather_nd(x, slots), dtype) for x in (key_pages, value_pages))
        k, v = (tf.repeat(x, heads // max(x.shape[1], 1), 1) for x in (k, v))
        x = tf.einsum("ihd,jhd->hij", q, k)
        x *= tf.cast(q.shape[2] ** -0.5 if scale is None else scale, dtype)
        if cap is not None:
            x = cap * tf.tanh(x / cap)
        x = tf.where(seen, x, -math.inf)
        if sink is not None:
            s = tf.cast(sink, dtype)[:, None, None]
            x = tf.concat([x, tf.broadcast_to(s, [heads, seq_q, 1])], 2)
        p = tf.where(seen, tf.nn.softmax(x)[..., : len(j)], 0)
        outputs.append(tf.einsum("hij,jhd->ihd", p, v))
    return tf.stack(outputs)


def check(inputs, mode="eager", **options):
    run = lambda *args: paged_attention(*args, **options)
    dtype = inputs[0].dtype
    actual = in_mode(run, mode, inputs)(*inputs)
    stock, expected = (reference(d, *inputs, **options) for d in (dtype, tf.float64))
    assert actual.dtype == dtype and actual.shape == expected.shape
    ulp = float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
    largest = np.abs(expected.numpy()).max(initial=0)
    allowed = 2 * error(stock, expected) + 4 * ulp * largest
    off = error(actual, expected)
    assert off <= allowed, f"{off} > {allowed}: {options}"
    return actual


@pytest.mark.parametrize("page_size", [1, 16, 17, 128])
@pytest.mark.parametrize("seq_q", [1, 3])
def test_lengths_about_the_edges_of_pages(page_size, seq_q, dtype):
    check(make_inputs(dtype, EDGES, page_size, seq_q))


@pytest.mark.parametrize("group", [1, 3, 8, 17])
def test_heads_share_keys(group, dtype):
    for seq_q in (1, 3):
        check(make_inputs(dtype, (1, 70), seq_q=seq_q, heads=2 * group, kv_heads=2))


@pytest.mark.parametrize(
    "head_dim, value_dim", [(1, 1), (64, 64), (128, 128), (256, 256), (40, 200), (59, 33)]
)
def test_dimensions(head_dim, value_dim, dtype):
    check(make_inputs(dtype, (3, 100), head_dim=head_dim, value_dim=value_dim))


OPTIONS = [
    dict(local_window_size=0),
    dict(local_window_size=(20, 5)),
    dict(local_window_size=1000),
    dict(attn_logits_soft_cap=0.5),
    dict(scale=-0.3),
    dict(sink=tf.constant([0.5, -100.0, 100.0, -math.inf])),
    dict(sink=tf.constant([0.5, 1.0, 2.0, 3.0]), local_window_size=9, attn_logits_soft_cap=2.0),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_options(options, dtype):
    for seq_q in (1, 3):
        check(make_inputs(dtype, (0, 2, 41, 90), seq_q=seq_q), **options)


def test_modes(dtype, mode):
    check(make_inputs(dtype, (0, 2, 41), seq_q=2), mode)
    check(make_inputs(dtype, (0, 2, 41), seq_q=2), mode, **OPTIONS[-1])


# A row's keys are split among threads, whose parts are combined.
def test_long_and_short_rows_together(dtype):
    check(make_inputs(dtype, (5000, 3), heads=4, kv_heads=1))


def test_query_without_a_key_is_zero():
    inputs = make_inputs(lengths=(-3, 0, 2), seq_q=3)
    for sink in (None, tf.ones([4])):
        y = paged_attention(*inputs, sink=sink).numpy()
        assert not y[:2].any() and not y[2, 0].any() and y[2, 1:].all()


def test_lengths_beyond_the_table_are_clamped():
    inputs = make_inputs(lengths=(16, 16), page_size=16)
    table = inputs[3][:, :1]
    y = paged_attention(*inputs[:3], table, tf.constant([2**31 - 1, 16]))
    np.testing.assert_array_equal(y, paged_attention(*inputs[:3], table, inputs[4]))
    y = paged_attention(*inputs[:3], table, tf.constant([2**40, -(2**40)], tf.int64))
    np.testing.assert_array_equal(y[0], paged_attention(*inputs[:3], table, inputs[4])[0])
    assert not y[1].numpy().any()


# NaN lies in all unused slots anyway; here also in keys that are hidden from some queries only.
def test_hidden_nan_and_inf_do_not_leak(dtype):
    inputs = make_inputs(dtype, (41, 90), seq_q=3, heads=4, kv_heads=2)
    run = lambda: paged_attention(*inputs, local_window_size=37)
    clean = run()
    query, keys, values, table, lengths = inputs
    slots = [
        [(int(table[b, j // 16]), j % 16) for j in (n - 40, n - 1)] for b, n in ((0, 41), (1, 90))
    ]
    first, last = zip(*slots)
    fill = lambda x, where, what: tf.tensor_scatter_nd_update(
        x, where, tf.fill([2, *x.shape[2:]], tf.cast(what, dtype))
    )
    # The first query sees the 40th key from the end, the last one the last key.
    inputs[1] = fill(keys, first, np.nan)
    inputs[2] = fill(fill(values, first, np.nan), last, np.inf)
    y = tf.cast(run(), tf.float32).numpy()
    assert np.isnan(y[:, 0]).all() and (y[:, 2] == np.inf).all()
    np.testing.assert_array_equal(y[:, 1], tf.cast(clean[:, 1], tf.float32))


def test_rows_share_pages(dtype):
    query, keys, values, table, _ = make_inputs(dtype, (70, 70))
    table = tf.stack([table[0], table[0]])
    check([query, keys, values, table, tf.constant([70, 33])])
    y = paged_attention(tf.stack([query[0]] * 2), keys, values, table, tf.constant([70, 70]))
    np.testing.assert_array_equal(*tf.unstack(tf.cast(y, tf.float32)))


@pytest.mark.parametrize("entry", [-1, 2**31 - 1, -(2**31), "pages"])
def test_entry_that_names_no_page(entry, mode, device, dtype):
    inputs = make_inputs(dtype, (70, 70, 70))
    clean = tf.cast(paged_attention(*inputs), tf.float32)
    entry = inputs[1].shape[0] if entry == "pages" else entry
    inputs[3] = tf.tensor_scatter_nd_update(inputs[3], [[1, 2]], [entry])
    run = in_mode(paged_attention, mode, inputs)
    if "CPU" in device:
        message = rf"page_table\[1, 2\] is {entry}; there are {inputs[1].shape[0]} pages"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            run(*inputs)
        return
    y = tf.cast(run(*inputs), tf.float32).numpy()
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[::2], clean[::2])


def test_entries_that_no_query_needs_are_not_looked_at():
    inputs = make_inputs(lengths=(70, 70))
    window = dict(local_window_size=20)
    clean = paged_attention(*inputs, **window)
    # The last query sees keys 49 to 69, on pages 3 and 4.
    inputs[3] = tf.where(tf.range(6) < 3, -1, inputs[3])
    np.testing.assert_array_equal(paged_attention(*inputs, **window), clean)


def test_empty():
    for changed in (dict(seq_q=0), dict(heads=0), dict(value_dim=0), dict(head_dim=0)):
        sizes = dict(seq_q=2, heads=4, kv_heads=2, value_dim=32) | changed
        y = paged_attention(*make_inputs(**changed | dict(seq_q=sizes["seq_q"])))
        assert y.shape == [2, sizes["seq_q"], sizes["heads"], sizes["value_dim"]]
    query, keys, values, table, lengths = make_inputs()
    no_row = paged_attention(query[:0], keys, values, table[:0], lengths[:0])
    assert no_row.shape == [0, 1, 4, 32]
    for no_page in (
        paged_attention(query, keys[:0], values[:0], table[:, :0], lengths),
        paged_attention(query, keys[:0], values[:0], table, tf.zeros_like(lengths)),
    ):
        assert no_page.shape == query.shape and not no_page.numpy().any()


def test_bitwise_repeat_and_inputs_unchanged(dtype, mode):
    inputs = make_inputs(dtype, (5000, 3), heads=4, kv_heads=1)
    bits = lambda x: tf.bitcast(x, tf.uint16) if x.dtype.is_floating else x
    before = [bits(x).numpy().copy() for x in inputs]
    run = in_mode(paged_attention, mode, inputs)
    np.testing.assert_array_equal(bits(run(*inputs)), bits(run(*inputs)))
    for x, b in zip(inputs, before):
        np.testing.assert_array_equal(bits(x), b)


def test_unaligned_pages(dtype):
    query, keys, values, *rest = make_inputs(dtype, (1, 70), head_dim=59, value_dim=33)
    y = paged_attention(query, keys, values, *rest)
    shifted = [tf.concat([x[:1], x], 0)[1:] for x in (keys, values)]
    one = paged_attention(query[1:], *shifted, rest[0][1:], rest[1][1:])
    np.testing.assert_array_equal(tf.cast(one, tf.float32), tf.cast(y[1:], tf.float32))


def test_numpy_lists_and_variables():
    inputs = make_inputs()
    expected = paged_attention(*inputs)
    for convert in (lambda x: x.numpy(), tf.Variable):
        np.testing.assert_array_equal(paged_attention(*map(convert, inputs)), expected)
    query, keys, values, table, lengths = inputs
    lists = table.numpy().tolist(), lengths.numpy().tolist()
    np.testing.assert_array_equal(paged_attention(query, keys, values, *lists), expected)


def test_saved_model(tmp_path):
    inputs = make_inputs(tf.bfloat16)

    class Model(tf.Module):
        @tf.function(
            input_signature=[tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in inputs]
        )
        def __call__(self, *args):
            return paged_attention(*args, **OPTIONS[-1])

    tf.saved_model.save(Model(), str(tmp_path))
    y = tf.saved_model.load(str(tmp_path))(*inputs)
    expected = paged_attention(*inputs, **OPTIONS[-1])
    np.testing.assert_array_equal(tf.cast(y, tf.float32), tf.cast(expected, tf.float32))


def test_it_has_no_gradient():
    inputs = make_inputs()
    with tf.GradientTape() as tape:
        tape.watch(inputs[0])
        y = paged_attention(*inputs)
    assert tape.gradient(y, inputs[0]) is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(query=tf.ones([2, 1, 4, 32], tf.float16)), "key_pages is float32, query float16"),
        (dict(value_pages=tf.ones([9, 16, 2, 32], tf.float16)), "value_pages is float16"),
        (dict(page_table=tf.zeros([2, 4], tf.int64)), "page_table is int64; it must be int32"),
        (dict(key_value_seq_lengths=[1.0, 2.0]), "key_value_seq_lengths is float32"),
        (dict(scale=math.inf), "scale is inf"),
        (dict(scale=tf.constant(1.0)), "scale is .*; it must be None or a finite float"),
        (dict(attn_logits_soft_cap=0.0), "attn_logits_soft_cap is 0.0"),
        (dict(attn_logits_soft_cap=-math.inf), "attn_logits_soft_cap is -inf"),
        (dict(local_window_size=-1), "local_window_size is -1"),
        (dict(local_window_size=(1, 2, 3)), r"local_window_size is \(1, 2, 3\)"),
        (dict(local_window_size=1.5), "local_window_size is 1.5"),
        (dict(sink=tf.ones([0])), r"sink is \(0,\); it must be \(4,\), the heads of query"),
        (dict(sink=tf.ones([2])), r"sink is \(2,\)"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else "",
)
def test_static_mistakes(arguments, message):
    names = ["query", "key_pages", "value_pages", "page_table", "key_value_seq_lengths"]
    with pytest.raises(ValueError, match=message):
        paged_attention(**dict(zip(names, make_inputs())) | arguments)


def test_float64_is_refused():
    inputs = [tf.cast(x, tf.float64) if x.dtype.is_floating else x for x in make_inputs()]
    with pytest.raises(ValueError, match="query is float64"):
        paged_attention(*inputs)


def test_mistakes_at_run_time(mode):
    good = make_inputs()
    query, keys, values, table, lengths = good
    for i, bad, message in [
        (0, query[:, :, :3], "query has 3 heads"),
        (0, query[..., :31], "head_dim of query"),
        (0, query[0], "rank 4"),
        (1, keys[:1], "must agree"),
        (2, values[:, :3], "must agree"),
        (3, table[:1], "page_table must be"),
        (3, table[0], "page_table must be|rank 2"),
        (4, lengths[:1], "key_value_seq_lengths must be"),
        (4, lengths[:0], "key_value_seq_lengths must be"),
    ]:
        inputs = [*good[:i], bad, *good[i + 1 :]]
        raw = lambda q, k, v, t, n: library.tf_ops_paged_attention(
            query=q,
            key_pages=k,
            value_pages=v,
            page_table=t,
            key_value_seq_lengths=n,
            sink=tf.zeros([0]),
            scale=math.nan,
        )
        check_rejected(raw, inputs, message, mode)
    no_row = [query, keys[:, :0], values[:, :0], table, lengths]
    check_rejected(paged_attention, no_row, "a page must hold a key", mode)


def test_empty_sink_of_unknown_shape_does_not_pass_for_none():
    inputs = make_inputs()
    run = lambda sink: paged_attention(*inputs, sink=sink)
    run = tf.function(run, input_signature=[tf.TensorSpec([None])], autograph=False)
    run(tf.zeros([4]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(tf.zeros([0]))
