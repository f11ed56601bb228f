# SPDX-License-Identifier: Apache-2.0
"""Which GPU kernels serve the attention of whole models, as their graphs call it. Asks no GPU."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tf_ops import _library

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
HOPPER = 90
SEQ = 43  # more queries than the kernels for few take
# Stock layers that drop masks say so, and so do ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask")


def operations(graph):
    yield from graph.get_operations()
    for name in graph._functions:
        yield from operations(graph._functions[name].graph)


def kernels(function, *args):
    """What serves each attention in the graph of a function on compute capability 9.0.

    Returns:
        {"forward": {(kernels, what keeps it from sm_90)}, "gradient": the same}, which lacks
        what does not occur.
    """
    found = {}
    graph = tf.function(function, autograph=False).get_concrete_function(*args).graph
    for op in operations(graph):
        if not op.type.startswith("TfOps>DotProductAttention"):
            continue
        is_gradient = op.type.endswith("Grad")
        query, key, value, bias, mask = op.inputs[2 * is_gradient : 2 * is_gradient + 5]
        sizes = [*query.shape[:1], query.shape[2], key.shape[2], query.shape[1], key.shape[1]]
        assert mask.shape == [0] or mask.shape[3] == key.shape[1]
        of_keys = mask.shape.rank == 4 and mask.shape[1] == mask.shape[2] == 1
        features = [
            bias.shape != [0],
            mask.shape != [0] and not of_keys,
            op.get_attr("soft_cap") != 0.0,
            op.get_attr("dropout_rate") != 0.0,
            of_keys,
        ]
        sizes += [query.shape[3], value.shape[3]]
        served = _library.attention_kernels(query.dtype.name, is_gradient, HOPPER, sizes, features)
        found.setdefault("gradient" if is_gradient else "forward", set()).add(served)
    return found


def step(model, training=True):
    def gradients(*args, **kwargs):
        with tf.GradientTape() as tape:
            y = model(*args, training=training, **kwargs)
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return tape.gradient(loss, [w.value for w in model.trainable_variables])

    return gradients


def both(served, why=""):
    return {"forward": {(served, why)}, "gradient": {(served, why)}}


# What keeps a model from the kernels for Hopper is a part of its formula, never a mask.
ARCHITECTURES = {
    "llama": both("sm_90"),
    "mistral": both("sm_90"),
    "qwen": both("sm_90"),
    "vit": both("sm_90"),
    "sd3": both("sm_90"),
    "gemma": both("sm_80", "there is a soft cap"),
    "bert": both("sm_80", "there is dropout"),
}


@pytest.fixture
def architectures(monkeypatch):
    pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install keras-hub")
    monkeypatch.syspath_prepend(EXAMPLES)
    import architectures

    return architectures


@pytest.mark.parametrize("way", ["enable", "accelerate"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_steps_of_keras_hub(architectures, name, way):
    a = architectures.build(name, dtype="mixed_bfloat16")
    inputs = tf.nest.map_structure(tf.constant, a.inputs)
    if way == "accelerate":
        tf_ops.accelerate(a.model)
    with tf_ops.enable() if way == "enable" else tf_ops.disable():
        assert kernels(step(a.model), inputs) == ARCHITECTURES[name]


def test_bert_without_dropout_at_inference(architectures):
    a = architectures.build("bert", dtype="mixed_bfloat16")
    inputs = tf.nest.map_structure(tf.constant, a.inputs)
    tf_ops.accelerate(a.model)
    assert kernels(step(a.model, training=False), inputs) == both("sm_90")


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen", "gemma"])
def test_a_step_of_generation(architectures, name):
    a = architectures.build(name, dtype="mixed_bfloat16")
    tf_ops.accelerate(a.model)
    tokens = tf.ones([2, 300], tf.int32)
    _, cache = a.model._build_cache(tokens)
    call = lambda tokens, index: a.model.call_with_cache(tokens, cache, index)[0]
    assert kernels(call, tokens[:, :1], tf.constant(280)) == {"forward": {("decode", "")}}


LAYERS = {
    "MultiHeadAttention": lambda **options: keras.layers.MultiHeadAttention(2, 8, **options),
    "GroupQueryAttention": lambda **options: keras.layers.GroupQueryAttention(8, 4, 2, **options),
}


def layer_and_inputs(name):
    layer = LAYERS[name](dtype="mixed_bfloat16")
    embedding = keras.layers.Embedding(50, 16, mask_zero=True, dtype="mixed_bfloat16")
    tokens = np.random.default_rng(0).integers(1, 50, (2, SEQ))
    tokens[1, 30:] = 0
    layer(*[embedding(tokens)] * 2)
    tf_ops.accelerate(layer)

    def model(tokens, **options):
        x = embedding(tokens)
        if name == "GroupQueryAttention":  # takes no masks from its inputs
            mask = embedding.compute_mask(tokens)
            options.update(query_mask=mask, value_mask=mask)
        return layer(x, x, **options)

    model.trainable_variables = layer.trainable_variables
    return model, tf.constant(tokens)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_keras_with_padding(name, is_causal):
    model, tokens = layer_and_inputs(name)
    found = kernels(lambda tokens: step(model)(tokens, use_causal_mask=is_causal), tokens)
    assert found == both("sm_90")


@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_that_differs_between_queries_is_named(name):
    model, tokens = layer_and_inputs(name)
    mask = tf.ones([2, SEQ, SEQ], tf.bool)
    found = kernels(lambda tokens: step(model)(tokens, attention_mask=mask), tokens)
    assert found == both("sm_80", "the mask differs between heads or queries")
    # One of padding that comes as an attention mask does not.
    found = kernels(lambda tokens: step(model)(tokens, attention_mask=mask[:, :1]), tokens)
    assert found == both("sm_90")
