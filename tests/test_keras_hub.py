# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models on the kernels, against themselves without."""

import pathlib
import zipfile

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tf_ops.testing import error

keras_hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is not installed: pip install keras-hub"
)
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
NAMES = ("llama", "gemma", "mistral", "qwen", "bert", "vit", "sd3")
POLICIES = ["float32", "mixed_bfloat16"]
ATTENTIONS = {"sd3": 3}  # a block of it attends twice; the others: 2


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import architectures

    return architectures


@pytest.fixture(autouse=True)
def counted():
    tf_ops.coverage(reset=True)


def where_it_counts(a, y):
    # A token that is padding sees no key where we give 0 and stock a mean.
    valid = tf.constant(True) if a.valid is None else tf.constant(a.valid)[..., None]
    return tf.where(valid, y, tf.zeros([], y.dtype))


def results(model, a, cotangent):
    """The output where it counts, and the gradients by the weights."""
    weights = [w.value for w in model.trainable_variables]
    with tf.GradientTape() as tape:
        y = where_it_counts(a, model(a.inputs, training=False))
        loss = tf.reduce_sum(tf.cast(y, cotangent.dtype) * cotangent)
    gradients = tape.gradient(loss, weights)
    return [y], [tf.convert_to_tensor(g) for g in gradients if g is not None]


def same_weights(*models):
    """Gives random values to the weights of all, those that begin as zeros and ones included."""
    rng = np.random.default_rng(0)
    # Products keep their initial size, so that the logits do.
    values = [
        w.numpy() + 0.1 * rng.standard_normal(w.shape) * (w.shape.rank < 2 or 0.1)
        for w in (tf.convert_to_tensor(v) for v in models[0].get_weights())
    ]
    for model in models:
        model.set_weights(values)


def check(actual, stock, exact):
    for order, (ratio, ulps) in enumerate([(2, 4), (3, 8)]):
        for i, (a, s, e) in enumerate(zip(actual[order], stock[order], exact[order], strict=True)):
            assert a.dtype == s.dtype and a.shape == s.shape
            ulp = float(ml_dtypes.finfo(a.dtype.as_numpy_dtype).eps)
            if order:
                ulp = float(ml_dtypes.finfo(actual[0][0].dtype.as_numpy_dtype).eps)
            # Gradients of queries and keys are what remains of terms that cancel.
            largest = max(np.abs(x).max(initial=0) * (1 if x is e else 0.05) for x in exact[order])
            allowed = ratio * error(s, e) + ulps * ulp * largest
            off = error(a, e)
            assert off <= allowed, f"order {order}, number {i}: off by {off}, not {allowed}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_coverage(architectures, name, policy, device):
    a, exact = architectures.build(name, dtype=policy), architectures.build(name, dtype="float64")
    same_weights(a.model, exact.model)
    cotangent = np.random.default_rng(1).standard_normal(a.model(a.inputs).shape)
    run = lambda model: results(model, a, tf.constant(cotangent, tf.float64))
    stock, reference = run(a.model), run(exact.model)
    assert tf_ops.coverage() == {}

    report = tf_ops.accelerate(a.model)
    check(run(a.model), stock, reference)
    assert report.kept == []
    assert served(name)
    report.undo()
    undone = run(a.model)
    check(undone, stock, reference)
    if device == "CPU:0":  # On a GPU stock differs from itself from run to run.
        for x, y in zip(tf.nest.flatten(undone), tf.nest.flatten(stock)):
            np.testing.assert_array_equal(x, y)
    assert tf_ops.coverage() == {}

    with tf_ops.enable():
        check(run(a.model), stock, reference)
    assert served(name)


def served(name):
    """Whether each call of attention and normalization was."""
    coverage = tf_ops.coverage(reset=True)
    norm = "layer_normalization" if name in ("bert", "vit", "sd3") else "rms_normalization"
    print(coverage)
    return (
        coverage.share == 1.0
        and coverage["dot_product_attention"]["served"] == ATTENTIONS.get(name, 2)
        and coverage[norm]["served"] >= 2
    )


def quadratic_shapes(model, inputs, seq):
    """The outputs of the operations of a training step that have the sequence twice."""

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(inputs, training=True), tf.float32))
        return tape.gradient(loss, [w.value for w in model.trainable_variables])

    graphs = [step.get_concrete_function().graph]
    shapes = [y.shape for graph in graphs for op in graph.get_operations() for y in op.outputs]
    return [shape for shape in shapes if shape.rank and list(shape).count(seq) > 1]


@pytest.mark.parametrize("way", ["enable", "accelerate"])
@pytest.mark.parametrize("name", ["llama", "gemma", "mistral", "qwen", "bert"])
def test_no_mask_of_the_sequence_squared(architectures, name, way):
    seq = 43
    a = architectures.build(name, seq=seq)
    if name == "gemma":  # that a gradient asks for its output
        a.model.backbone.trainable = True
    assert quadratic_shapes(a.model, a.inputs, seq)
    if way == "accelerate":
        tf_ops.accelerate(a.model)
        assert not quadratic_shapes(a.model, a.inputs, seq)
    else:
        with tf_ops.enable():
            assert not quadratic_shapes(a.model, a.inputs, seq)


def fitted(a, jit_compile):
    a.model.compile(keras.optimizers.SGD(0.1), a.loss, jit_compile=jit_compile)
    data = tf.data.Dataset.from_tensors((a.inputs, a.targets)).repeat(4)
    return a.model.fit(data, verbose=0, epochs=3).history["loss"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_fit(architectures, name, policy):
    keras.utils.set_random_seed(0)
    dtypes = [policy, policy, "float32"]
    a, stock, exact = built = [architectures.build(name, dtype=dtype) for dtype in dtypes]
    for layer in (layer for x in built for layer in x.model._flatten_layers()):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # theirs and ours drop other weights
        if isinstance(layer, keras.layers.MultiHeadAttention):
            layer._dropout = 0.0
    same_weights(*(x.model for x in built))
    tf_ops.accelerate(a.model)
    # XLA, which is the default on a GPU only, once for each kind of model.
    jit_compile = True if name in ("gemma", "vit") and policy == "float32" else "auto"
    ours, stock, exact = fitted(a, jit_compile), fitted(stock, "auto"), fitted(exact, "auto")
    assert tf_ops.coverage().share == 1.0
    assert ours[-1] < ours[0]
    if policy == "float32":
        np.testing.assert_allclose(ours, stock, rtol=1e-4)
    else:  # Training lets roundings grow, sd3's to 11 % of stock's loss.
        off = lambda losses: np.abs(np.divide(losses, exact) - 1).max()
        assert off(ours) <= 2 * off(stock) + 2.0**-7


def test_fit_with_dropout_in_the_kernel(architectures):
    a = architectures.build("bert")
    tf_ops.accelerate(a.model)
    losses = fitted(a, "auto")
    assert tf_ops.coverage().share == 1.0
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["gemma", "sd3"])
def test_saves_as_the_stock_model(architectures, name, tmp_path):
    a = architectures.build(name)
    model = getattr(a.model, "backbone", a.model)
    same_weights(model)
    expected = model(a.inputs)
    tf_ops.accelerate(model)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert b"tf_ops" not in file.read("config.json")
    tf_ops.coverage(reset=True)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(a.inputs), expected, rtol=1e-4, atol=1e-4)
    assert tf_ops.coverage() == {}
    assert str(tf_ops.accelerate(loaded)) == str(
        tf_ops.accelerate(type(model)(**model.get_config()))
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_exports(architectures, name, policy, tmp_path):
    a, exact = architectures.build(name, dtype=policy), architectures.build(name, dtype="float64")
    same_weights(a.model, exact.model)
    stock, reference = a.model(a.inputs), exact.model(a.inputs)
    tf_ops.accelerate(a.model)
    a.model.export(tmp_path / "saved", verbose=False)
    assert tf_ops.coverage().share == 1.0
    loaded = tf.saved_model.load(tmp_path / "saved")
    outputs = [where_it_counts(a, y) for y in (loaded.serve(a.inputs), stock, reference)]
    check(*[([y], []) for y in outputs])
    graph = loaded.signatures["serving_default"].graph.as_graph_def()
    operations = [node.op for function in graph.library.function for node in function.node_def]
    assert operations.count("TfOps>DotProductAttention") == ATTENTIONS.get(name, 2)


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral", "qwen"])
def test_generates_the_same_tokens_with_a_cache(architectures, name):
    a = architectures.build(name)
    same_weights(a.model)
    a.model.preprocessor = None
    prompt = {"token_ids": a.inputs["token_ids"], "padding_mask": a.inputs["padding_mask"].copy()}
    prompt["padding_mask"][:, 12:] = 0
    generate = lambda: a.model.generate(prompt, stop_token_ids=None)["token_ids"]
    a.model.compile(sampler="greedy", jit_compile=False)
    expected = generate()
    tf_ops.accelerate(a.model)
    np.testing.assert_array_equal(generate(), expected)
    coverage = tf_ops.coverage()
    assert coverage.share == 1.0 and coverage["dot_product_attention"]["served"] >= 2


@pytest.mark.parametrize("way", ["enable", "accelerate"])
def test_gemma_gives_0_where_padding_comes_first(architectures, way):
    a = architectures.build("gemma")
    same_weights(a.model)
    a.inputs["padding_mask"][:, :5] = 0
    expected = a.model(a.inputs)
    if way == "accelerate":
        tf_ops.accelerate(a.model)
    with tf_ops.enable() if way == "enable" else tf_ops.disable():
        actual = a.model(a.inputs)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


DECODER = {"vocabulary_size": 61, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
GROUPED = {**DECODER, "num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "top_k": 1}
MORE = {
    "GPT2": {**DECODER, "num_heads": 4, "dropout": 0.0, "max_sequence_length": 64},
    "GPTNeoX": {**DECODER, "num_heads": 4},
    "Gemma3": {**GROUPED, "head_dim": 8, "image_size": None, "sliding_window_size": 9},
    "GptOss": {**GROUPED, **EXPERTS, "head_dim": 8, "sliding_window": 9},
    "Mixtral": {**GROUPED, **EXPERTS, "sliding_window": 9},
    "Phi3": GROUPED,
    "Qwen": {**GROUPED, "use_sliding_window_attention": True, "sliding_window_size": 9},
    "Qwen3": {**GROUPED, "head_dim": 8, "sliding_window_size": 9},
    "Qwen3Moe": {**GROUPED, **EXPERTS, "moe_intermediate_dim": 16, "sliding_window_size": 9},
    "QwenMoe": {
        **{**GROUPED, **EXPERTS, "moe_intermediate_dim": 16},
        **{"shared_expert_intermediate_dim": 16, "use_sliding_window_attention": True},
        "sliding_window_size": 9,
    },
    "SmolLM3": {
        **{**DECODER, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
        **{"rope_layer_enabled_list": [True, False], "layer_types": ["full_attention"] * 2},
        **{"layer_norm_epsilon": 1e-6, "max_position_embeddings": 64, "rope_theta": 10000.0},
        "partial_rotary_factor": 1.0,
    },
}


@pytest.mark.filterwarnings("ignore:You are using a softmax")
@pytest.mark.parametrize("way", ["enable", "accelerate"])
@pytest.mark.parametrize("name", MORE)
def test_more_families(name, way):
    keras.utils.set_random_seed(0)
    extra = {"vision_encoder": None} if name == "Gemma3" else {}
    backbone = getattr(keras_hub.models, f"{name}Backbone")(**MORE[name], **extra)
    same_weights(backbone)
    rng = np.random.default_rng(0)
    inputs = {"token_ids": rng.integers(0, 61, (2, 43)), "padding_mask": np.ones((2, 43), "int32")}
    inputs["padding_mask"][1, 30:] = 0
    expected = backbone(inputs)
    if way == "accelerate":
        assert tf_ops.accelerate(backbone).kept == []
    with tf_ops.enable() if way == "enable" else tf_ops.disable():
        np.testing.assert_allclose(backbone(inputs), expected, rtol=1e-3, atol=1e-4)
        coverage = tf_ops.coverage()
        assert coverage.share == 1.0 and coverage["dot_product_attention"]["served"] == 2
        # The loss of the routers of experts wants a dense mask.
        assert "Moe" in name or not quadratic_shapes(backbone, inputs, 43)


@pytest.mark.parametrize("policy", POLICIES)
def test_normalization_of_t5(policy):
    from keras_hub.src.models.t5.t5_layer_norm import T5LayerNorm

    layer = T5LayerNorm(dtype=policy)
    x = tf.random.stateless_normal([2, 5, 33], [1, 2])
    layer(x)
    same_weights(layer)
    expected = layer(x)
    tf_ops.accelerate(layer)
    tolerance = 1e-5 if policy == "float32" else 0.02
    assert layer(x).dtype == expected.dtype
    np.testing.assert_allclose(
        tf.cast(layer(x), tf.float32), tf.cast(expected, tf.float32), rtol=tolerance, atol=tolerance
    )
    assert tf_ops.coverage()["rms_normalization"]["served"] == 2


def test_other_dtypes_are_left_to_stock(architectures):
    a = architectures.build("gemma", dtype="float64")
    same_weights(a.model)
    expected = a.model(a.inputs)
    report = tf_ops.accelerate(a.model)
    assert {reason for *_, reason in report.kept} == {"it computes in float64"}
    with tf_ops.enable():
        actual = a.model(a.inputs)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert tf_ops.coverage()["dot_product_attention"] == {
        "served": 0,
        "fell_through": {"computes in float64": 2},
    }


def test_a_class_that_differs_is_left_out_with_a_warning(architectures, monkeypatch):
    from keras_hub.src.models.llama.llama_attention import LlamaAttention

    def other(self, query, key, value, attention_mask=None, something_new=None):
        raise AssertionError

    monkeypatch.setattr(LlamaAttention, "_compute_attention", other)
    with pytest.warns(UserWarning, match="LlamaAttention._compute_attention takes .*something_new"):
        with tf_ops.enable():
            assert LlamaAttention._compute_attention is other
    report = tf_ops.accelerate(architectures.build("llama").model)
    assert "LlamaAttention" not in str(report.replaced)
    assert [name for _, name, reason in report.kept if "something_new" in reason] == [
        "LlamaAttention"
    ] * 2
