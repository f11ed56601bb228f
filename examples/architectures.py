# SPDX-License-Identifier: Apache-2.0
"""Models of KerasHub with random weights, in three sizes, and data for them."""

import dataclasses

import keras
import keras_hub
import numpy as np

# tiny for tests, cpu for a look on a few cores, h200 for a GPU: as wide and deep as GPT-2 and BERT
# of the smaller size, 86 to 257 million parameters.
_DECODERS = {
    "tiny": {"vocab": 61, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 64},
    "cpu": {"vocab": 512, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp": 512},
    "h200": {"vocab": 32000, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "mlp": 3072},
}
_ENCODERS = {
    "tiny": {"vocab": 61, "layers": 2, "heads": 4, "head_dim": 8, "mlp": 64},
    "cpu": {"vocab": 512, "layers": 2, "heads": 8, "head_dim": 32, "mlp": 512},
    "h200": {"vocab": 30522, "layers": 12, "heads": 12, "head_dim": 64, "mlp": 3072},
}
_WINDOW = {"tiny": 9, "cpu": 256, "h200": 1024}
# Batch and length of the sequence; an image has so many patches.
_SHAPES = {
    "tiny": {None: (2, 37), "vit": (2, 16), "sd3": (2, 16)},
    "cpu": {None: (1, 1024), "vit": (1, 1024), "sd3": (1, 1024)},
    "h200": {None: (2, 4096), "bert": (8, 2048), "vit": (8, 2304), "sd3": (2, 4096)},
}


@dataclasses.dataclass
class Architecture:
    """A model, a batch of inputs for it, the targets and the loss."""

    model: keras.Model
    inputs: dict
    targets: np.ndarray
    loss: keras.losses.Loss
    # Where the output counts: tokens that are no padding, or None.
    valid: np.ndarray | None = None


def build(name, size="tiny", dtype=None, batch=None, seq=None):
    """Returns the `Architecture` of one of `NAMES`; the weights depend on the random seed alone.

    Args:
        name: str.
        size: "tiny", "cpu" or "h200".
        dtype: dtype policy; None: the global one.
        batch: int; None: that of the size.
        seq: int, tokens or patches of a sequence; None: those of the size.
    """
    batch, seq = batch or shape(name, size)[0], seq or shape(name, size)[1]
    dtype = dtype or keras.config.dtype_policy()
    return _BUILDERS[name](size, dtype, batch, seq)


def shape(name, size):
    """Batch and length of the sequence of one of `NAMES`."""
    return _SHAPES[size].get(name, _SHAPES[size][None])


def _decoder(backbone, task, size, dtype, batch, seq, **options):
    """A causal language model; its last sequence is padded at the end."""
    c = _DECODERS[size]
    model = backbone(
        vocabulary_size=c["vocab"],
        num_layers=c["layers"],
        num_query_heads=c["heads"],
        num_key_value_heads=c["kv_heads"],
        hidden_dim=c["heads"] * c["head_dim"],
        intermediate_dim=c["mlp"],
        dtype=dtype,
        **options,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, c["vocab"], (batch, seq + 1))
    valid = np.ones((batch, seq), bool)
    if batch > 1:
        valid[-1, seq - seq // 8 :] = False
    inputs = {"token_ids": tokens[:, :-1].astype("int32"), "padding_mask": valid.astype("int32")}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Architecture(task(backbone=model), inputs, tokens[:, 1:].astype("int32"), loss, valid)


def _llama(*args):
    models = keras_hub.models
    return _decoder(models.LlamaBackbone, models.LlamaCausalLM, *args)


def _mistral(size, *args):
    models = keras_hub.models
    backbone, task = models.MistralBackbone, models.MistralCausalLM
    return _decoder(backbone, task, size, *args, sliding_window=_WINDOW[size])


def _qwen(*args):
    models = keras_hub.models
    return _decoder(models.QwenBackbone, models.QwenCausalLM, *args)


def _gemma(size, *args):
    """Gemma 2: a soft cap on attention's logits, a window in every other layer, 1 + scale."""
    models = keras_hub.models
    return _decoder(
        models.GemmaBackbone,
        models.GemmaCausalLM,
        size,
        *args,
        head_dim=_DECODERS[size]["head_dim"],
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=_WINDOW[size],
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
    )


def _bert(size, dtype, batch, seq):
    c = _ENCODERS[size]
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=c["vocab"],
        num_layers=c["layers"],
        num_heads=c["heads"],
        hidden_dim=c["heads"] * c["head_dim"],
        intermediate_dim=c["mlp"],
        max_sequence_length=seq,
        dtype=dtype,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=10, dtype=dtype)
    rng = np.random.default_rng(0)
    padding_mask = np.ones((batch, seq), "int32")
    padding_mask[-1, seq - seq // 8 :] = 0
    inputs = {
        "token_ids": rng.integers(0, c["vocab"], (batch, seq)).astype("int32"),
        "padding_mask": padding_mask,
        "segment_ids": np.zeros((batch, seq), "int32"),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Architecture(model, inputs, rng.integers(0, 10, batch), loss)


def _vit(size, dtype, batch, seq):
    c, side = _ENCODERS[size], 8 * round(seq**0.5)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(side, side, 3),
        patch_size=8,
        num_layers=c["layers"],
        num_heads=c["heads"],
        hidden_dim=c["heads"] * c["head_dim"],
        mlp_dim=c["mlp"],
        dtype=dtype,
    )
    model = keras_hub.models.ViTImageClassifier(backbone, num_classes=10, dtype=dtype)
    rng = np.random.default_rng(0)
    images = rng.random((batch, side, side, 3)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Architecture(model, images, rng.integers(0, 10, batch), loss)


def _sd3(size, dtype, batch, seq):
    """The transformer of Stable Diffusion 3: text and image attend to each other."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    c, side = _ENCODERS[size], 2 * round(seq**0.5)
    text = {"tiny": 7, "cpu": 77, "h200": 154}[size]
    model = MMDiT(
        patch_size=2,
        hidden_dim=c["heads"] * c["head_dim"],
        num_layers=c["layers"],
        num_heads=c["heads"],
        position_size=side // 2,
        latent_shape=(side, side, 4),
        context_shape=(None, 64),
        pooled_projection_shape=(32,),
        qk_norm="rms_norm",
        dual_attention_indices=(0,),
        dtype=dtype,
    )
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((batch, *shape)).astype("float32")
    inputs = {
        "latent": draw(side, side, 4),
        "context": draw(text, 64),
        "pooled_projection": draw(32),
        "timestep": 1000 * rng.random((batch, 1)).astype("float32"),
    }
    return Architecture(model, inputs, draw(side, side, 4), keras.losses.MeanSquaredError())


_BUILDERS = {
    "llama": _llama,
    "gemma": _gemma,
    "mistral": _mistral,
    "qwen": _qwen,
    "bert": _bert,
    "vit": _vit,
    "sd3": _sd3,
}
NAMES = tuple(_BUILDERS)
