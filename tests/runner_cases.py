# SPDX-License-Identifier: Apache-2.0
"""The cases of runner.py: every kernel, tails and odd features, small enough for racecheck."""

import itertools

import ml_dtypes
import numpy as np

ABSENT = np.zeros(0, np.float32)
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def compare(kernels, gpu, repeat, op, inputs, attributes, outputs):
    """Runs `op` on both devices; returns the CPU's outputs and what is wrong with the GPU's."""
    make = lambda: [np.empty(shape, dtype) for shape, dtype in outputs]
    expected = make()
    kernels(op, inputs, attributes, expected)
    problem = ""
    for i, array in enumerate(expected):
        if np.isnan(array.astype(np.float32)).any():
            problem += f" CPU output {i} has NaN"
    if gpu is None:
        return expected, problem
    actual = make()
    kernels(op, inputs, attributes, actual, gpu, repeat)
    for i, (a, e) in enumerate(zip(actual, expected)):
        a, e = a.astype(np.float64), e.astype(np.float64)
        infinite = ~np.isfinite(e)
        if not np.array_equal(a[infinite], e[infinite]):
            problem += f" output {i} is not finite where the CPU's is, or the reverse"
        finite = ~infinite
        scale = np.abs(e[finite]).max(initial=1.0)  # inputs are of that size
        error = np.abs(a[finite] - e[finite]).max(initial=0) / scale
        # A wrong kernel is off by far more; the test-suite holds the exact rule.
        bits = expected[i].dtype == np.uint8
        allowed = 0.0 if bits else 4 * float(ml_dtypes.finfo(expected[i].dtype).eps)
        allowed = max(allowed, 1e-4 if outputs[0][1] == np.float32 else 3e-2)
        if not error <= allowed:
            problem += f" output {i} is off by {error:.1e} of its largest entry, or of 1"
    return expected, problem


def attention_case(
    dtype,
    batch=2,
    seq_q=70,
    seq_k=90,
    heads=4,
    kv_heads=2,
    head_dim=64,
    value_dim=None,
    bias=None,
    mask=None,
    lengths=False,
    soft_cap=0.0,
    is_causal=False,
    bottom_right=False,
    window=(-1, -1),
    sink=False,
    dropout_rate=0.0,
    lse_gradient=False,
):
    """Forward and gradients of one attention; bias and mask are shapes."""
    value_dim = head_dim if value_dim is None else value_dim

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        query = normal(batch, seq_q, heads, head_dim)
        key = normal(batch, seq_k, kv_heads, head_dim)
        value = normal(batch, seq_k, kv_heads, value_dim)
        output, lse = (batch, seq_q, heads, value_dim), (batch, heads, seq_q)
        absent = ABSENT.astype(dtype)
        options = [
            normal(*bias) if bias else absent,
            rng.random(mask) < 0.7 if mask else ABSENT.astype(bool),
            rng.integers(0, seq_q + 1, batch, np.int32) if lengths else ABSENT.astype(np.int32),
            rng.integers(0, seq_k + 1, batch, np.int32) if lengths else ABSENT.astype(np.int32),
            rng.standard_normal(heads).astype(np.float32) if sink else ABSENT,
            np.int64([3, -(2**40)]) if dropout_rate else ABSENT.astype(np.int64),
        ]
        attributes = [max(head_dim, 1) ** -0.5, soft_cap, is_causal, bottom_right]
        attributes += [*window, dropout_rate]
        inputs = [query, key, value, *options]
        outputs = [(output, dtype), (lse, np.float32)]
        results, problem = compare(
            kernels, gpu, repeat, "TfOps>DotProductAttention", inputs, attributes, outputs
        )
        dlse = rng.standard_normal(lse).astype(np.float32) if lse_gradient else ABSENT
        inputs = [normal(*output), dlse, *inputs, *results]
        outputs = [(x.shape, dtype) for x in (query, key, value)] + [(options[4].shape, np.float32)]
        problem += compare(
            kernels, gpu, repeat, "TfOps>DotProductAttentionGrad", inputs, attributes, outputs
        )[1]
        if bias:
            problem += compare(
                kernels,
                gpu,
                repeat,
                "TfOps>DotProductAttentionBiasGrad",
                inputs,
                attributes,
                [(bias, dtype)],
            )[1]
        return problem

    return run


def attention_cases():
    everything = dict(
        bias=(2, 1, 70, 90),
        mask=(1, 4, 70, 90),
        lengths=True,
        soft_cap=5.0,
        is_causal=True,
        bottom_right=True,
        window=(40, -1),
        sink=True,
        dropout_rate=0.3,
        lse_gradient=True,
    )
    for (name, dtype), dim in itertools.product(FLOATS.items(), (64, 128, 256, 40, 59)):
        yield f"attention/{name}/d{dim}", attention_case(dtype, head_dim=dim)
        yield (
            f"attention/{name}/d{dim}/causal",
            attention_case(dtype, seq_q=130, seq_k=130, head_dim=dim, is_causal=True),
        )
        yield (
            f"attention/{name}/d{dim}/everything",
            attention_case(dtype, head_dim=dim, **everything),
        )
        if dim % 64:
            continue
        at = f"attention/{name}/d{dim}"
        no_dropout = everything | {"dropout_rate": 0.0}
        yield f"{at}/no_dropout", attention_case(dtype, head_dim=dim, **no_dropout)
        yield f"{at}/dropout", attention_case(dtype, head_dim=dim, dropout_rate=0.4)
        # Tiles that the window hides on both sides.
        window = {"seq_q": 300, "seq_k": 330, "window": (50, 9), "sink": True}
        yield f"{at}/window", attention_case(dtype, batch=1, head_dim=dim, **window)
        # ... and queries and keys that see, or are seen by, nothing.
        window |= {"seq_q": 400, "seq_k": 140, "window": (100, 0), "lengths": True}
        yield f"{at}/window/tall", attention_case(dtype, head_dim=dim, bottom_right=True, **window)
        window |= {"window": (20, 30)}
        yield f"{at}/window/top_left", attention_case(dtype, head_dim=dim, **window)
        # A mask of the keys alone, as of padding but with holes.
        mask = {"seq_q": 200, "seq_k": 230, "mask": (2, 1, 1, 230), "is_causal": True}
        yield f"{at}/key_mask", attention_case(dtype, head_dim=dim, **mask)
        mask |= {"window": (60, 0), "lengths": True, "bottom_right": True, "sink": True}
        yield f"{at}/key_mask/window", attention_case(dtype, head_dim=dim, **mask)
    for name, dtype in FLOATS.items():
        yield f"attention/{name}/values_wider", attention_case(dtype, head_dim=33, value_dim=72)
        yield (
            f"attention/{name}/one",
            attention_case(dtype, batch=1, seq_q=1, seq_k=1, heads=1, kv_heads=1, head_dim=1),
        )
        yield f"attention/{name}/no_key", attention_case(dtype, seq_k=0)
        yield f"attention/{name}/no_query", attention_case(dtype, seq_q=0)
        yield f"attention/{name}/tall", attention_case(dtype, seq_q=239, seq_k=1, is_causal=True)
        yield (
            f"attention/{name}/long",
            attention_case(dtype, seq_q=1, seq_k=239, is_causal=True, bottom_right=True),
        )
        # Of few queries, keys are split.
        few = {"seq_k": 600, "lengths": True, "is_causal": True, "bottom_right": True}
        for seq_q, window in itertools.product((1, 4), ((-1, -1), (300, -1))):
            yield (
                f"attention/{name}/few{seq_q}{'/window' * (window[0] > 0)}",
                attention_case(dtype, seq_q=seq_q, window=window, sink=window[0] > 0, **few),
            )
        for shape in ((1, 1, 1, 1), (2, 1, 1, 90), (1, 4, 70, 1), (2, 4, 70, 90)):
            yield (
                f"attention/{name}/bias{list(shape)}",
                attention_case(dtype, bias=shape, is_causal=True),
            )


def paged_attention_case(
    dtype,
    lengths=(0, 1, 90, 333),
    page_size=16,
    seq_q=1,
    heads=4,
    kv_heads=2,
    head_dim=64,
    value_dim=None,
    window=-1,
    soft_cap=0.0,
    sink=False,
):
    """Forward of one attention to pages; entries of the table that are not used name none."""
    value_dim = head_dim if value_dim is None else value_dim

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        batch, per_row = len(lengths), -(-max(lengths) // page_size) + 1
        table = rng.permutation(batch * per_row).reshape(batch, per_row).astype(np.int32)
        for row, length in zip(table, lengths):
            row[-(-length // page_size) :] = -1
        inputs = [
            normal(batch, seq_q, heads, head_dim),
            normal(batch * per_row, page_size, kv_heads, head_dim),
            normal(batch * per_row, page_size, kv_heads, value_dim),
            table,
            np.int32(lengths),
            rng.standard_normal(heads).astype(np.float32) if sink else ABSENT,
        ]
        attributes = [max(head_dim, 1) ** -0.5, soft_cap, window]
        outputs = [((batch, seq_q, heads, value_dim), dtype)]
        return compare(kernels, gpu, repeat, "TfOps>PagedAttention", inputs, attributes, outputs)[1]

    return run


def paged_attention_cases():
    everything = dict(seq_q=3, window=40, soft_cap=5.0, sink=True)
    for name, dtype in FLOATS.items():
        at = f"paged_attention/{name}"
        for page_size in (1, 16, 17, 128):
            yield f"{at}/page{page_size}", paged_attention_case(dtype, page_size=page_size)
        for dim in (64, 128, 256, 40, 59):
            yield f"{at}/d{dim}", paged_attention_case(dtype, head_dim=dim, seq_q=2)
            yield f"{at}/d{dim}/everything", paged_attention_case(dtype, head_dim=dim, **everything)
        for group in (1, 3, 17):
            yield f"{at}/group{group}", paged_attention_case(dtype, heads=2 * group, seq_q=2)
        yield f"{at}/values_wider", paged_attention_case(dtype, head_dim=33, value_dim=72)
        # Whole batch rows to a block, and none.
        many = tuple(range(150))
        yield f"{at}/many", paged_attention_case(dtype, lengths=many, heads=2)
        yield f"{at}/no_query", paged_attention_case(dtype, seq_q=0)


def cross_entropy_case(
    dtype,
    tokens,
    classes,
    labels_dtype=np.int32,
    ignore_class=None,
    label_smoothing=0.0,
    z_loss=0.0,
    soft_cap=0.0,
):
    """Forward and gradient of one cross entropy."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        labels = rng.integers(0, classes, tokens)
        if ignore_class is not None:
            labels = np.where(rng.random(tokens) < 0.3, ignore_class, labels)
        inputs = [labels.astype(labels_dtype), rng.standard_normal((tokens, classes)).astype(dtype)]
        has_ignore_class = ignore_class is not None
        attributes = [has_ignore_class, ignore_class or 0, label_smoothing, z_loss, soft_cap]
        results, problem = compare(
            kernels,
            gpu,
            repeat,
            "TfOps>SparseSoftmaxCrossEntropy",
            inputs,
            attributes,
            [((tokens,), np.float32)] * 3,
        )
        inputs = [rng.standard_normal(tokens).astype(np.float32), *inputs, *results[1:]]
        problem += compare(
            kernels,
            gpu,
            repeat,
            "TfOps>SparseSoftmaxCrossEntropyGrad",
            inputs,
            attributes,
            [((tokens, classes), dtype)],
        )[1]
        return problem

    return run


def cross_entropy_cases():
    everything = dict(
        labels_dtype=np.int64, ignore_class=-100, label_smoothing=0.1, z_loss=0.01, soft_cap=2.0
    )
    # Each number of threads per row, vectors with and without ends beside them.
    sizes = [(70, 3), (9, 100), (9, 127), (5, 2048), (3, 4097), (2, 32771)]
    for (name, dtype), (tokens, classes) in itertools.product(FLOATS.items(), sizes):
        at = f"cross_entropy/{name}/{tokens}x{classes}"
        yield at, cross_entropy_case(dtype, tokens, classes)
        yield f"{at}/everything", cross_entropy_case(dtype, tokens, classes, **everything)
    yield "cross_entropy/no_token", cross_entropy_case(np.float32, 0, 5)


def linear_cross_entropy_case(dtype, tokens, classes, first, whole_dtype=np.float32, **options):
    """The steps of a block of classes, of which there are 3 * classes in all."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        smoothing, z_loss, cap = (
            options.get(x, 0.0) for x in ("label_smoothing", "z_loss", "soft_cap")
        )
        ignored = [bool(options), -100]
        labels = rng.integers(0, 3 * classes, tokens, np.int64 if options else np.int32)
        labels = np.where(rng.random(tokens) < 0.3 * bool(options), labels.dtype.type(-100), labels)
        logits = normal(tokens, classes).astype(dtype)
        span = np.array([first, 3 * classes], np.int64)
        sums = np.abs(normal(tokens, 4))
        _, problem = compare(
            kernels,
            gpu,
            repeat,
            "TfOps>LinearCrossEntropy",
            [labels, logits, span, sums],
            [*ignored, smoothing, cap],
            [(sums.shape, np.float32)],
        )
        problem += compare(
            kernels,
            gpu,
            repeat,
            "TfOps>LinearCrossEntropyGrad",
            [normal(tokens), labels, logits, span, 3 + sums[:, 0], sums[:, 1]],
            [*ignored, smoothing, z_loss, cap],
            [(logits.shape, dtype)],
        )[1]
        problem += compare(
            kernels,
            gpu,
            repeat,
            "TfOps>LinearCrossEntropyHiddenGrad",
            [normal(tokens, classes), np.zeros(0, np.uint8), logits],
            [],
            [(logits.shape, np.float32), ((0,), np.uint8)],
        )[1]
        rest = rng.integers(0, 256, (tokens, classes, 2), np.uint8)
        problem += compare(
            kernels,
            gpu,
            repeat,
            "TfOps>LinearCrossEntropyHiddenGrad",
            [normal(tokens, classes).astype(FLOATS["bf16"]), rest, logits],
            [],
            [(logits.shape, FLOATS["bf16"]), (rest.shape, np.uint8)],
        )[1]
        for transposed in (False, True):
            shape = (3 * classes, tokens) if transposed else (tokens, 3 * classes)
            problem += compare(
                kernels,
                gpu,
                repeat,
                "TfOps>LinearCrossEntropyKernelGrad",
                [
                    normal(*shape).astype(whole_dtype),
                    logits.T.copy() if transposed else logits,
                    span,
                ],
                [transposed],
                [(shape, whole_dtype)],
            )[1]
        return problem

    return run


def linear_cross_entropy_cases():
    everything = dict(label_smoothing=0.1, z_loss=0.01, soft_cap=2.0)
    sizes = [(70, 3, 3), (9, 128, 128), (9, 127, 0), (5, 2048, 1001), (3, 4097, 4097)]
    for (name, dtype), (tokens, classes, first) in itertools.product(FLOATS.items(), sizes):
        at = f"linear_cross_entropy/{name}/{tokens}x{classes}"
        yield at, linear_cross_entropy_case(dtype, tokens, classes, first)
        yield (
            f"{at}/everything",
            linear_cross_entropy_case(dtype, tokens, classes, first, dtype, **everything),
        )
    yield "linear_cross_entropy/no_token", linear_cross_entropy_case(np.float32, 0, 5, 5)


def normalization_case(dtype, shape, weight, layer, plain=False, weight_dtype=None):
    """Forward and gradient of one rms or layer normalization over the last axis.

    `plain`: without weights and residual.
    """

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda shape, dtype=dtype: rng.standard_normal(shape).astype(dtype)
        x, dy, ds, residual = (normal(shape) for _ in range(4))
        weights = [normal(weight, weight_dtype or dtype) for _ in range(1 + layer)]
        if plain:
            ds, residual = ABSENT.astype(dtype), ABSENT.astype(dtype)
            weights = [ABSENT.astype(dtype)] * len(weights)
        name = "TfOps>LayerNormalization" if layer else "TfOps>RmsNormalization"
        attributes = [1e-3] if layer else [1e-3, 1.0]
        stats = [(shape[:-1], np.float32)] * (1 + layer)
        outputs = [(shape, dtype), (residual.shape, dtype), *stats]
        inputs = [x, residual, *weights]
        results, problem = compare(
            kernels, gpu, repeat, name, inputs, [*attributes, 1, True], outputs
        )
        dstats = [normal(s, np.float32) for s, _ in stats]
        s = x if plain else results[1]
        inputs = [dy, ds, *dstats, s, *weights, *results[2:]]
        outputs = [(shape, dtype), *((w.shape, w.dtype) for w in weights)]
        problem += compare(kernels, gpu, repeat, name + "Grad", inputs, [*attributes, 1], outputs)[
            1
        ]
        return problem

    return run


def normalization_cases():
    # Each number of threads to a row, with and without whole vectors, and rows of any width.
    widths = (8, 64, 128, 200, 256, 1000, 1024, 4096, 7, 31, 129, 1023, 2049)
    wide = (16384, 40000, 9001)
    for (name, dtype), layer in itertools.product(FLOATS.items(), (False, True)):
        family = f"normalization/{'layer' if layer else 'rms'}/{name}"
        for cols in widths + wide:
            rows = 3 if cols in wide else 37
            yield f"{family}/{cols}", normalization_case(dtype, (rows, cols), (cols,), layer)
        for cols in (64, 33, 4096):
            case = (dtype, (5, 6, cols), (6, cols), layer)
            yield f"{family}/heads/{cols}", normalization_case(*case)
            yield f"{family}/plain/{cols}", normalization_case(*case, plain=True)
            yield (
                f"{family}/float32_weights/{cols}",
                normalization_case(*case, weight_dtype=np.float32),
            )
        yield f"{family}/no_row", normalization_case(dtype, (0, 40), (40,), layer)


def gated_linear_unit_case(dtype, shape, activation, packed):
    """Forward and gradient of one gated linear unit; shape is that of its result."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        gate = normal(*shape[:-1], shape[-1] * (1 + packed))
        inputs = [gate, ABSENT.astype(dtype) if packed else normal(*shape)]
        attributes = [activation, packed]
        op, outputs = "TfOps>GatedLinearUnit", [(shape, dtype)]
        _, problem = compare(kernels, gpu, repeat, op, inputs, attributes, outputs)
        inputs, outputs = [normal(*shape), *inputs], [(x.shape, dtype) for x in inputs]
        return problem + compare(kernels, gpu, repeat, op + "Grad", inputs, attributes, outputs)[1]

    return run


def gated_linear_unit_cases():
    # Vectors with and without a rest, and rows of a packed gate without whole vectors.
    shapes = [(0, 8), (1, 1), (3, 7), (37, 64), (5, 1000), (3, 4099)]
    for (name, dtype), packed in itertools.product(FLOATS.items(), (False, True)):
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid"):
            for shape in shapes if activation == "silu" else shapes[-2:]:
                yield (
                    f"glu/{activation}/{name}/{'packed/' * packed}{shape[0]}x{shape[1]}",
                    gated_linear_unit_case(dtype, shape, activation, packed),
                )


def rotary_embedding_case(
    dtype, shape, kv_heads=0, rotary_dim=0, interleaved=False, positions=None, table=None
):
    """One rotation and its inverse; `positions` and `table` are shapes."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
        batch, seq, _, head_dim = shape
        absent = ABSENT.astype(dtype)
        inputs = [normal(*shape), normal(batch, seq, kv_heads, head_dim) if kv_heads else absent]
        largest = table[0] if table and len(table) == 2 else 10**6
        inputs.append(rng.integers(0, largest, positions or 0).astype(np.int32))
        inputs += [np.float32(rng.standard_normal(table or 0)) for _ in range(2)]
        outputs = [(x.shape, dtype) for x in inputs[:2]]
        problem = ""
        for inverse in (False, True):
            attributes = [10000.0, 1.5, rotary_dim, interleaved, inverse]
            problem += compare(
                kernels, gpu, repeat, "TfOps>RotaryEmbedding", inputs, attributes, outputs
            )[1]
        return problem

    return run


def softmax_case(dtype, shape, mask):
    """Forward and gradient of one masked softmax; mask is a shape, or None."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        hidden = ABSENT.astype(bool) if mask is None else rng.random(mask) < 0.7
        outputs = [(shape, dtype)]
        results, problem = compare(
            kernels, gpu, repeat, "TfOps>MaskedSoftmax", [x, hidden], [0.7], outputs
        )
        problem += compare(
            kernels, gpu, repeat, "TfOps>MaskedSoftmaxGrad", [dy, *results], [0.7], outputs
        )[1]
        return problem

    return run


def rotary_embedding_cases():
    for (name, dtype), interleaved in itertools.product(FLOATS.items(), (False, True)):
        at = f"rotary/{name}/{'interleaved' if interleaved else 'halves'}"
        for dim, rotary_dim in [(2, 0), (64, 0), (128, 0), (80, 32), (72, 16), (33, 20), (34, 34)]:
            yield (
                f"{at}/{dim}/{rotary_dim}",
                rotary_embedding_case(dtype, (2, 7, 5, dim), 2, rotary_dim, interleaved),
            )
        shape, more = (2, 7, 9, 64), dict(interleaved=interleaved)
        yield f"{at}/positions", rotary_embedding_case(dtype, shape, positions=(2, 7), **more)
        yield f"{at}/shared", rotary_embedding_case(dtype, shape, positions=(7,), **more)
        for table in [(8, 32), (1, 7, 32), (2, 7, 16)]:
            given = (2, 7) if len(table) == 2 else None
            yield (
                f"{at}/table{list(table)}",
                rotary_embedding_case(dtype, shape, positions=given, table=table, **more),
            )
        yield f"{at}/no_token", rotary_embedding_case(dtype, (2, 0, 3, 8), **more)


def softmax_cases():
    # Each number of threads to a row, with and without whole vectors, and rows of any width.
    widths = (8, 64, 128, 200, 1000, 1024, 4096, 7, 129, 1023, 2049, 16384, 40000, 9001)
    for (name, dtype), cols in itertools.product(FLOATS.items(), widths):
        rows = 3 if cols > 4096 else 37
        for mask in (None, (rows, cols), (rows, 1), (1, cols)):
            yield f"softmax/{name}/{cols}/{mask}", softmax_case(dtype, (rows, cols), mask)
    yield "softmax/heads", softmax_case(np.float32, (2, 3, 5, 7), (2, 1, 5, 7))
    yield "softmax/no_row", softmax_case(np.float32, (0, 7), None)


def group_normalization_case(dtype, shape, groups, weight_dtype=None, plain=False):
    """Forward and gradient of one group normalization."""

    def run(kernels, gpu, repeat):
        rng = np.random.default_rng(0)
        normal = lambda shape, dtype=dtype: rng.standard_normal(shape).astype(dtype)
        x, dy = normal(shape), normal(shape)
        weights = [normal(0 if plain else shape[2], weight_dtype or dtype) for _ in range(2)]
        stats = [((shape[0], groups), np.float32)] * 2
        outputs = [(shape, dtype), *stats]
        inputs = [x, *weights]
        results, problem = compare(
            kernels, gpu, repeat, "TfOps>GroupNormalization", inputs, [groups, 1e-3], outputs
        )
        outputs = [(shape, dtype), *((w.shape, w.dtype) for w in weights)]
        inputs = [dy, x, *weights, *results[1:]]
        problem += compare(
            kernels, gpu, repeat, "TfOps>GroupNormalizationGrad", inputs, [groups, 1e-3], outputs
        )[1]
        return problem

    return run


def group_normalization_cases():
    shapes = [((2, 50, 64, 1), 8), ((2, 7, 12, 1), 3), ((1, 3, 4096, 1), 1), ((2, 90, 5, 1), 5)]
    shapes += [((2, 1, 12, 64), 3), ((2, 1, 6, 49), 2), ((2, 3, 6, 8), 2), ((1, 1, 2, 3000), 1)]
    for (name, dtype), (shape, groups) in itertools.product(FLOATS.items(), shapes):
        at = f"group_normalization/{name}/{shape}"
        yield at, group_normalization_case(dtype, shape, groups)
        yield f"{at}/plain", group_normalization_case(dtype, shape, groups, plain=True)
        yield f"{at}/float32_weights", group_normalization_case(dtype, shape, groups, np.float32)
    yield "group_normalization/no_sample", group_normalization_case(np.float32, (0, 2, 4, 1), 2)


def cases():
    yield from attention_cases()
    yield from normalization_cases()
    yield from cross_entropy_cases()
    yield from gated_linear_unit_cases()
    yield from group_normalization_cases()
    yield from linear_cross_entropy_cases()
    yield from rotary_embedding_cases()
    yield from softmax_cases()
    yield from paged_attention_cases()
