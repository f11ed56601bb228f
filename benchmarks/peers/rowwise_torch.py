# SPDX-License-Identifier: Apache-2.0
"""The row-wise launchers beside PyTorch and Liger, without TensorFlow.

    python benchmarks/peers/rowwise_torch.py --check            values and gradients against float64
    python benchmarks/peers/rowwise_torch.py --bench OUT.json   milliseconds and TB/s on a GPU

Loads build/libtf_ops_kernels.so. Without a GPU --check runs the CPU launchers, and --bench a few
small shapes, as a rehearsal. With --wait everything is called once, and measured when a line of
standard input comes. A family adds its checks to CHECKS and its benchmarks to BENCHMARKS.
"""

import argparse
import ctypes
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from group_normalization_torch import bench_group_normalization, check_group_normalization
from linear_cross_entropy_torch import bench_linear_cross_entropy, check_linear_cross_entropy
from softmax_torch import bench_softmax, check_softmax
from timing_torch import await_turn, compiled, milliseconds, once

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "build" / "libtf_ops_kernels.so"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

# tf_ops::DType
DTYPES = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.bool: 6,
    torch.uint8: 7,
}


DTYPES_OF_KERNELS = [torch.bfloat16, torch.float16, torch.float32]


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("dims", ctypes.c_int64 * 8),
    ]


def views(tensors):
    assert all(t.is_contiguous() for t in tensors)
    return (View * len(tensors))(
        *(View(t.data_ptr(), DTYPES[t.dtype], t.dim(), tuple(t.shape)) for t in tensors)
    )


class Library:
    def __init__(self):
        self.c = ctypes.CDLL(str(LIBRARY))
        self.c.tf_ops_run.restype = ctypes.c_char_p
        self.c.tf_ops_workspace_bytes.restype = ctypes.c_int64

    def prepare(self, op, inputs, attributes, outputs):
        """A function without arguments that launches `op` on PyTorch's current stream."""
        op, on_gpu = op.encode(), int(GPU)
        text = (ctypes.c_char_p * len(attributes))(*(str(a).encode() for a in attributes))
        given = views(inputs)
        size = self.c.tf_ops_workspace_bytes(op, given, len(inputs), text, on_gpu)
        tensors = [*inputs, *outputs]
        if size >= 0:  # -1: the op takes no workspace
            tensors.append(torch.full([size], 255, dtype=torch.uint8, device=DEVICE))
        everything, count = views(tensors), (len(tensors), len(inputs))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if GPU else None)

        def run():
            error = self.c.tf_ops_run(op, everything, *count, text, on_gpu, stream)
            if error:
                raise RuntimeError(f"{op.decode()}: {error.decode()}")

        run.tensors = tensors  # keeps them alive
        return run


# Normalization


@dataclasses.dataclass
class Normalization:
    """One call of rms or layer normalization and of its gradient, outputs included."""

    layer: bool
    x: torch.Tensor
    weights: list  # scale, or gamma and beta
    residual: torch.Tensor
    dy: torch.Tensor
    ds: torch.Tensor
    epsilon: float = 1e-3
    offset: float = 0.0

    def __post_init__(self):
        empty = lambda t: torch.full_like(t, float("nan"))
        stat = torch.full(self.x.shape[:-1], float("nan"), device=DEVICE)
        self.y, self.s, self.dx = empty(self.x), empty(self.residual), empty(self.x)
        self.stats = [stat.clone() for _ in range(1 + self.layer)]
        self.dweights = [empty(w) for w in self.weights]

    def prepare(self, library):
        name = "TfOps>LayerNormalization" if self.layer else "TfOps>RmsNormalization"
        attributes = [self.epsilon] + [self.offset] * (not self.layer)
        absent = torch.empty(0, device=DEVICE)
        forward = library.prepare(
            name,
            [self.x, self.residual, *self.weights],
            [*attributes, 1, 1],
            [self.y, self.s, *self.stats],
        )
        s = self.s if self.residual.dim() > 1 else self.x
        inputs = [self.dy, self.ds, *[absent] * len(self.stats), s, *self.weights, *self.stats]
        backward = library.prepare(
            name + "Grad", inputs, [*attributes, 1], [self.dx, *self.dweights]
        )
        return forward, backward

    def outputs(self):
        return {"y": self.y, "s": self.s, "dx": self.dx} | {
            f"dweight{i}": w for i, w in enumerate(self.dweights)
        }

    def reference(self, dtype):
        """The outputs by PyTorch's arithmetic in `dtype`."""
        s = self.x + self.residual if self.residual.dim() > 1 else self.x
        x = s.to(dtype).requires_grad_()
        weights = [w.to(dtype).requires_grad_() for w in self.weights]
        centered = x - x.mean(-1, keepdim=True) if self.layer else x
        y = centered * torch.rsqrt((centered**2).mean(-1, keepdim=True) + self.epsilon)
        if weights[0].numel():
            y = y * (weights[0] + self.offset)
        if self.layer and weights[1].numel():
            y = y + weights[1]
        used = [x, *(w for w in weights if w.numel())]
        dx, *dw = torch.autograd.grad(y, used, self.dy.to(dtype))
        if self.ds.dim() > 1:
            dx = dx + self.ds.to(dtype)
        dw = iter(dw)
        dweights = {f"dweight{i}": next(dw) if w.numel() else w for i, w in enumerate(weights)}
        return {"y": y, "s": s if self.residual.dim() > 1 else self.s, "dx": dx} | dweights


def placed(tensor, unaligned):
    """A copy of the tensor, one element past an aligned address if `unaligned`."""
    if not unaligned:
        return tensor
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


def make_normalization(
    layer,
    shape,
    dtype,
    weight_shape=None,
    weight_dtype=None,
    residual=True,
    weights=True,
    offset=0.0,
    unaligned=False,
):
    torch.manual_seed(0)
    draw = lambda shape, dtype=dtype: placed(torch.randn(shape, device=DEVICE).to(dtype), unaligned)
    absent = torch.empty(0, dtype=dtype, device=DEVICE)
    weight_shape = weight_shape or shape[-1:]
    weight = lambda: draw(weight_shape, weight_dtype or dtype) if weights else absent
    n = Normalization(
        layer,
        draw(shape),
        [weight() for _ in range(1 + layer)],
        draw(shape) if residual else absent,
        draw(shape),
        draw(shape) if residual else absent,
        offset=0.0 if layer else offset,
    )
    if unaligned:
        n.y, n.s, n.dx = (placed(t, t.numel() > 0) for t in (n.y, n.s, n.dx))
    return n


def normalization_checks():
    """(name, arguments of make_normalization), every kernel among them."""
    widths = [1, 2, 7, 31, 33, 64, 127, 128, 200, 256, 760, 1000, 1024, 1025, 2048, 4096, 5000]
    widths += [8192, 9001] + [16384, 16392, 32768, 33000, 65537, 262144] * GPU
    for dtype, cols, layer in itertools.product(
        [torch.bfloat16, torch.float16, torch.float32], widths, [False, True]
    ):
        for rows in [1, 3, 199] + [1025] * (cols < 5000) + [40001] * (cols < 130 and GPU):
            if rows * cols > 2**24:
                continue
            yield dict(
                layer=layer, shape=(rows, cols), dtype=dtype, residual=rows % 2 == 1, offset=1.0
            )
        half = dict(layer=layer, shape=(37, cols), dtype=dtype)
        yield half | dict(unaligned=True)
        yield half | dict(weight_dtype=torch.float32, residual=False)
        yield half | dict(weights=False)
        yield half | dict(shape=(5, 6, cols), weight_shape=(6, cols))
        if cols < 300:
            yield half | dict(shape=(3, 700, cols), weight_shape=(700, cols), unaligned=cols == 64)


def check_normalization(library):
    failures = count = 0
    for arguments in normalization_checks():
        n = make_normalization(**arguments)
        forward, backward = n.prepare(library)
        forward(), backward()
        first = {k: v.clone() for k, v in n.outputs().items()}
        forward(), backward()
        problems = []
        stock = n.reference(torch.float32)
        for name, e in n.reference(torch.float64).items():
            a = n.outputs()[name]
            if not torch.equal(a, first[name]):
                problems.append(f"{name} differs from one run to the next")
            if a.numel() == 0:
                continue
            largest = e.abs().max().item()
            distance = lambda v: (v.double() - e.double()).abs().max().item()
            error, allowed = distance(a), 3 * distance(stock[name])
            if not error <= allowed + 8 * torch.finfo(a.dtype).eps * largest:
                problems.append(f"{name} is off by {error:.2e} of {largest:.2e}")
        count += 1
        failures += bool(problems)
        if problems:
            print("FAILED", arguments, problems, flush=True)
    print(f"normalization: {count} cases, {failures} failures", flush=True)
    return failures + (check_huge(library) if GPU else 0)


def check_huge(library):
    """More than 2^31 elements, and more rows than that: the last rows must be right."""
    failures = 0
    for rows, cols in [(2**31 // 4096 + 5, 4096), (2**31 // 33 + 7, 33)]:
        n = make_normalization(False, (1, cols), torch.bfloat16, residual=False)
        n.x = torch.randn(64, cols, device=DEVICE).bfloat16().repeat(rows // 64 + 1, 1)[:rows]
        n.dy = n.x
        n.__post_init__()
        for run in n.prepare(library):
            run()
        tail = dataclasses.replace(n, x=n.x[-64:].clone(), dy=n.dy[-64:].clone())
        for run in tail.prepare(library):
            run()
        good = torch.equal(n.y[-64:], tail.y) and torch.equal(n.dx[-64:], tail.dx)
        print(f"normalization: {rows} x {cols}: {'ok' if good else 'FAILED'}", flush=True)
        failures += not good
        del n, tail
        torch.cuda.empty_cache()
    return failures


def bench_normalization(library, measure):
    """Yields rows: what, contender, milliseconds, bytes that must move."""
    shapes = [(16384, 1024), (16384, 4096), (16384, 8192), (4096, 16384)]
    shapes = shapes if GPU else [(64, 1024)]
    dtype = torch.bfloat16
    for layer, shape in itertools.product([False, True], shapes):
        name = f"{'layer' if layer else 'rms'} {shape[0]}x{shape[1]}"
        n = make_normalization(layer, shape, dtype, residual=False)
        size = n.x.numel() * n.x.element_size()
        forward, backward = n.prepare(library)
        yield f"{name} forward", "ours", measure(forward), 2 * size
        yield f"{name} backward", "ours", measure(backward), 3 * size
        r = make_normalization(layer, shape, dtype, residual=True)
        forward, backward = r.prepare(library)
        yield f"{name} of a sum forward", "ours", measure(forward), 4 * size
        yield f"{name} of a sum backward", "ours", measure(backward), 4 * size
        for contender, fn in normalization_peers(layer, shape, n.epsilon).items():
            inputs = [t.detach().requires_grad_() for t in (n.x, *n.weights)]
            with torch.no_grad():
                yield f"{name} forward", contender, measure(lambda: fn(*inputs)), 2 * size
            y = fn(*inputs)
            grad = lambda: torch.autograd.grad(y, inputs, n.dy, retain_graph=True)
            yield f"{name} backward", contender, measure(grad), 3 * size
    # Heads of 128, as in QK-norm, with and without a scale for each head.
    for weight_shape in [(128,), (32, 128)] if GPU else []:
        n = make_normalization(False, (16384, 32, 128), dtype, weight_shape, residual=False)
        size = n.x.numel() * n.x.element_size()
        for what, run, moved in zip(("forward", "backward"), n.prepare(library), (2, 3)):
            yield f"rms heads scale {list(weight_shape)} {what}", "ours", measure(run), moved * size


def normalization_peers(layer, shape, epsilon):
    cols = shape[-1:]
    plain = {
        True: lambda x, w, b: F.layer_norm(x, cols, w, b, epsilon),
        False: lambda x, w: F.rms_norm(x, cols, w, epsilon),
    }[layer]
    peers = {"torch": plain}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        peers["liger"] = (
            (lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, epsilon))
            if layer
            else lambda x, w: LigerRMSNormFunction.apply(x, w, epsilon, 0.0, "gemma", False)
        )
    except ImportError:
        pass
    if GPU:
        peers["torch.compile"] = compiled(plain)
    return peers


def check_all(name, calls, library):
    """Runs each call twice; compares its outputs with PyTorch's in float64 and float32."""
    failures = count = 0
    for call in calls:
        launches = call.prepare(library)
        for run in launches:
            run()
        first = {k: v.clone() for k, v in call.outputs().items()}
        for run in launches:
            run()
        problems, stock = [], call.reference(torch.float32)
        for output, e in call.reference(torch.float64).items():
            a = call.outputs()[output]
            if not torch.equal(a, first[output]):
                problems.append(f"{output} differs from one run to the next")
            if a.numel() == 0:
                continue
            distance = lambda v: (v.double() - e).abs().max().item()
            error, largest = distance(a), e.abs().max().item()
            if not error <= 3 * distance(stock[output]) + 8 * torch.finfo(a.dtype).eps * largest:
                problems.append(f"{output} is off by {error:.2e} of {largest:.2e}")
        count += 1
        failures += bool(problems)
        if problems:
            print("FAILED", call, problems, flush=True)
    print(f"{name}: {count} cases, {failures} failures", flush=True)
    return failures


# Gated linear units

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


@dataclasses.dataclass
class GatedLinearUnit:
    """One call of a gated linear unit and of its gradient, outputs included."""

    activation: str
    shape: tuple
    dtype: torch.dtype
    packed: bool = False
    unaligned: bool = False

    def __post_init__(self):
        torch.manual_seed(0)
        draw = lambda: 2 * torch.randn(self.shape, device=DEVICE).to(self.dtype)
        self.dy, gate, up = draw(), draw(), draw()
        absent = torch.empty(0, dtype=self.dtype, device=DEVICE)
        inputs = [torch.cat([gate, up], -1), absent] if self.packed else [gate, up]
        self.dy, *self.inputs = (
            placed(x, self.unaligned and x.dim() > 1) for x in (self.dy, *inputs)
        )
        empty = lambda t: placed(torch.full_like(t, float("nan")), self.unaligned and t.dim() > 1)
        self.y, self.dgate, self.dup = empty(self.dy), empty(inputs[0]), empty(inputs[1])

    def prepare(self, library):
        name, attributes = "TfOps>GatedLinearUnit", [self.activation, int(self.packed)]
        inputs = [self.dy, *self.inputs]
        return (
            library.prepare(name, self.inputs, attributes, [self.y]),
            library.prepare(name + "Grad", inputs, attributes, [self.dgate, self.dup]),
        )

    def outputs(self):
        return {"y": self.y, "dgate": self.dgate} | ({} if self.packed else {"dup": self.dup})

    def formula(self, gate, up=None):
        gate, up = gate.chunk(2, -1) if self.packed else (gate, up)
        return ACTIVATIONS[self.activation](gate) * up

    def reference(self, dtype):
        """The outputs by PyTorch's arithmetic in `dtype`."""
        inputs = [x.to(dtype).requires_grad_() for x in self.inputs[: 2 - self.packed]]
        y = self.formula(*inputs)
        gradients = torch.autograd.grad(y, inputs, self.dy.to(dtype))
        return dict(zip(self.outputs(), [y, *gradients]))


def gated_linear_unit_checks():
    shapes = [(1, 1), (3, 7), (37, 64), (199, 65), (33, 1000), (5, 4099), (1025, 1024)]
    shapes += [(8192, 4096), (3, 2**20 + 3)] * GPU
    for dtype, activation, packed in itertools.product(
        DTYPES_OF_KERNELS, ACTIVATIONS, [False, True]
    ):
        for shape, unaligned in itertools.product(shapes, [False, True]):
            yield GatedLinearUnit(activation, shape, dtype, packed, unaligned)


def check_gated_linear_unit(library):
    failures = check_all("glu", gated_linear_unit_checks(), library)
    # More than 2^31 elements: the last rows must be right.
    for packed in [False, True] * GPU:
        huge = GatedLinearUnit("silu", (8, 4096), torch.bfloat16, packed)
        repeats = 2**31 // huge.dy.numel() + 1
        tall = lambda t: t.repeat(repeats, 1) if t.dim() > 1 else t
        huge.dy, *huge.inputs = (tall(t) for t in (huge.dy, *huge.inputs))
        expected = GatedLinearUnit("silu", (8, 4096), torch.bfloat16, packed)
        huge.y, huge.dgate, huge.dup = (tall(t) for t in (huge.y, huge.dgate, huge.dup))
        for run in (*huge.prepare(library), *expected.prepare(library)):
            run()
        good = all(torch.equal(huge.outputs()[k][-8:], v) for k, v in expected.outputs().items())
        print(f"glu: {tuple(huge.dy.shape)}, packed {packed}: {'ok' if good else 'FAILED'}")
        failures += not good
        del huge
        torch.cuda.empty_cache()
    return failures


def bench_gated_linear_unit(library, measure):
    """Yields rows: what, contender, milliseconds, bytes that must move."""
    shapes = [(16384, 1024), (16384, 4096), (16384, 8192), (4096, 16384)] if GPU else [(64, 1024)]
    for shape, activation in itertools.product(shapes, ["silu", "gelu", "gelu_tanh"]):
        if activation != "silu" and shape[1] != 4096 and GPU:
            continue
        for packed in [False, True]:
            g = GatedLinearUnit(activation, shape, torch.bfloat16, packed)
            size = g.dy.numel() * g.dy.element_size()
            name = f"{activation} {'packed ' * packed}{shape[0]}x{shape[1]}"
            for what, run, moved in zip(("forward", "backward"), g.prepare(library), (3, 5)):
                yield f"{name} {what}", "ours", measure(run), moved * size
            for contender, fn in gated_linear_unit_peers(g).items():
                inputs = [t.detach().requires_grad_() for t in g.inputs[: 2 - packed]]
                with torch.no_grad():
                    yield f"{name} forward", contender, measure(lambda: fn(*inputs)), 3 * size
                y = fn(*inputs)
                # Liger's gradient writes into what it saved, so each call may see other numbers.
                grad = lambda: torch.autograd.grad(y, inputs, g.dy, retain_graph=True)
                yield f"{name} backward", contender, measure(grad), 5 * size


def gated_linear_unit_peers(g):
    peers = {"torch": g.formula}
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        liger = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}
        if g.activation in liger and not g.packed and GPU:
            peers["liger"] = liger[g.activation].apply
    except ImportError:
        pass
    if GPU:
        peers["torch.compile"] = compiled(g.formula)
    return peers


# Rotary embedding


@dataclasses.dataclass
class RotaryEmbedding:
    """The rotation of a query and a key, and its gradient, outputs included."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 2
    seq: int = 37
    rotary_dim: int = 0  # all
    interleaved: bool = False
    positions: tuple = ()  # their shape; (): 0, 1, 2, ...
    table: tuple = ()  # shape of cos and sin; (): computed
    unaligned: bool = False

    def __post_init__(self):
        torch.manual_seed(0)
        move = lambda t: placed(t, self.unaligned and t.dim() == 4)
        shapes = [(self.batch, self.seq, h, self.head_dim) for h in (self.heads, self.kv_heads)]
        shapes = [shape if shape[2] else (0,) for shape in shapes]
        draw = lambda: [move(torch.randn(s, device=DEVICE).to(self.dtype)) for s in shapes]
        self.inputs, self.cotangents = draw(), draw()
        largest = self.table[0] if len(self.table) == 2 else 2**20
        self.p = torch.randint(largest, self.positions or (0,), device=DEVICE, dtype=torch.int32)
        self.tables = [torch.randn(self.table or (0,), device=DEVICE) for _ in range(2)]
        empty = lambda: [move(torch.full_like(t, float("nan"))) for t in self.inputs]
        self.results, self.gradients = empty(), empty()

    def prepare(self, library):
        attributes = [10000.0, 1.0, self.rotary_dim, int(self.interleaved)]
        name, more = "TfOps>RotaryEmbedding", [self.p, *self.tables]
        return (
            library.prepare(name, [*self.inputs, *more], [*attributes, 0], self.results),
            library.prepare(name, [*self.cotangents, *more], [*attributes, 1], self.gradients),
        )

    def outputs(self):
        names = ["query", "key", "dquery", "dkey"]
        return dict(zip(names, [*self.results, *self.gradients]))

    def angles(self, dtype):
        """cos and sin, [1 or batch, seq, 1, pairs], of float64 angles."""
        index = torch.arange(self.seq, device=DEVICE) if not self.positions else self.p.long()
        if self.table:
            tables = self.tables if len(self.table) == 3 else [t[index] for t in self.tables]
        else:
            pairs = (self.rotary_dim or self.head_dim) // 2
            exponent = torch.arange(pairs, dtype=torch.float64, device=DEVICE) / pairs
            angle = index.double()[..., None] * 10000.0**-exponent
            tables = [angle.cos(), angle.sin()]
        tables = [t.to(dtype)[..., None, :] for t in tables]
        return [t if t.dim() == 4 else t[None] for t in tables]

    def formula(self, x, cos, sin):
        n = 2 * cos.shape[-1]
        first = slice(0, n, 2) if self.interleaved else slice(0, n // 2)
        second = slice(1, n, 2) if self.interleaved else slice(n // 2, n)
        a, b = x[..., first], x[..., second]
        pair = [a * cos - b * sin, b * cos + a * sin]
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([turned, x[..., n:]], -1) if n < x.shape[-1] else turned

    def reference(self, dtype):
        """The outputs by PyTorch's arithmetic in `dtype`."""
        cos, sin = self.angles(dtype)
        turn = lambda x, sin: self.formula(x.to(dtype), cos, sin) if x.numel() else x.to(dtype)
        values = [turn(x, sin) for x in self.inputs] + [turn(x, -sin) for x in self.cotangents]
        return dict(zip(self.outputs(), values))


def rotary_embedding_checks():
    for dtype, interleaved in itertools.product(DTYPES_OF_KERNELS, [False, True]):
        case = lambda *args, **more: RotaryEmbedding(*args, dtype, interleaved=interleaved, **more)
        for head_dim, rotary_dim in [(2, 0), (34, 0), (64, 0), (128, 0), (256, 0), (80, 32)]:
            for heads, kv_heads in [(1, 0), (5, 1), (8, 8), (32, 8)]:
                for unaligned in [False, True]:
                    more = dict(rotary_dim=rotary_dim, unaligned=unaligned)
                    yield case(heads, kv_heads, head_dim, positions=(2, 37), **more)
        for rotary_dim in [2, 24, 66]:
            yield case(3, 2, 72, rotary_dim=rotary_dim, positions=(37,))
        for table, positions in [((50, 32), (2, 37)), ((1, 37, 32), ()), ((2, 37, 16), ())]:
            yield case(4, 2, 64, table=table, positions=positions)
        yield case(32, 8, 128, batch=1, seq=2049)


def check_rotary_embedding(library):
    failures = check_all("rotary", rotary_embedding_checks(), library)
    if not GPU:
        return failures
    # More than 2^31 elements: the last rows must be right.
    tail = RotaryEmbedding(16, 1, 128, torch.bfloat16, batch=1, seq=1024)
    huge = dataclasses.replace(tail)
    huge.batch = 2**31 // (1024 * 16 * 128) + 2
    tall = lambda tensors: [t.repeat(huge.batch, 1, 1, 1) for t in tensors]
    for name in ["inputs", "cotangents", "results", "gradients"]:
        setattr(huge, name, tall(getattr(tail, name)))
    for run in (*huge.prepare(library), *tail.prepare(library)):
        run()
    good = all(torch.equal(huge.outputs()[k][-1:], v) for k, v in tail.outputs().items())
    print(f"rotary: {huge.inputs[0].numel()} elements: {'ok' if good else 'FAILED'}", flush=True)
    return failures + (not good)


def bench_rotary_embedding(library, measure):
    """Yields rows: what, contender, milliseconds, bytes that must move."""
    shapes = [(8, 2), (32, 8), (64, 8), (32, 32), (1, 1)] if GPU else [(4, 2)]
    more = dict(batch=4, seq=4096) if GPU else {}
    for (heads, kv_heads), dim in itertools.product(shapes, [128, 64]):
        for kind in [{}, dict(interleaved=True), dict(rotary_dim=dim // 2)]:
            r = RotaryEmbedding(heads, kv_heads, dim, torch.bfloat16, **kind, **more)
            moved = 2 * sum(x.numel() * x.element_size() for x in r.inputs)
            name = f"{heads}+{kv_heads} heads of {dim} {' '.join(kind)}".strip()
            for what, run in zip(("forward", "backward"), r.prepare(library)):
                yield f"{name} {what}", "ours", measure(run), moved
            if dim == 64 or (kind and heads != 32):
                continue
            for contender, (forward, backward) in rotary_embedding_peers(r).items():
                yield f"{name} forward", contender, measure(forward), moved
                yield f"{name} backward", contender, measure(backward), moved
    # One token for each of some sequences, as when text is written.
    for batch in [1, 64] if GPU else [2]:
        r = RotaryEmbedding(32, 8, 128, torch.bfloat16, batch=batch, seq=1, positions=(batch, 1))
        moved = 2 * sum(x.numel() * x.element_size() for x in r.inputs)
        yield f"{batch} tokens forward", "ours", measure(r.prepare(library)[0]), moved


def rotary_embedding_peers(r):
    """Name: functions without arguments for forward and backward, cos and sin being given."""
    cos, sin = (t.to(r.dtype) for t in r.angles(torch.float32))
    both = lambda q, k: (r.formula(q, cos, sin), r.formula(k, cos, sin))

    def peer(fn):
        inputs = [x.detach().requires_grad_() for x in r.inputs]
        y = fn(*inputs)
        grad = lambda: torch.autograd.grad(y, inputs, r.cotangents, retain_graph=True)
        return lambda: fn(*inputs), grad

    peers = {"torch": peer(both)}
    try:
        from liger_kernel.ops.rope import LigerRopeFunction

        if GPU and not r.interleaved and not r.rotary_dim:
            # It takes [batch, heads, seq, head_dim] and writes into its inputs.
            wide = [torch.cat([t, t], -1)[:, :, 0].contiguous() for t in (cos, sin)]
            views = lambda tensors: [t.detach().clone().transpose(1, 2) for t in tensors]
            query, key = (t.requires_grad_() for t in views(r.inputs))
            forward = lambda: LigerRopeFunction.apply(query, key, *wide)
            y, dy = forward(), views(r.cotangents)
            grad = lambda: torch.autograd.grad(y, [query, key], dy, retain_graph=True)
            peers["liger"] = forward, grad
    except ImportError:
        pass
    if GPU:
        peers["torch.compile"] = peer(compiled(both))
    return peers


CHECKS = {
    "normalization": check_normalization,
    "glu": check_gated_linear_unit,
    "rotary": check_rotary_embedding,
    "softmax": check_softmax,
    "group_normalization": check_group_normalization,
    "linear_cross_entropy": check_linear_cross_entropy,
}
BENCHMARKS = {
    "normalization": bench_normalization,
    "glu": bench_gated_linear_unit,
    "rotary": bench_rotary_embedding,
    "softmax": bench_softmax,
    "group_normalization": bench_group_normalization,
    "linear_cross_entropy": bench_linear_cross_entropy,
}
START = time.time()


def copying(size):
    """A function that copies `size` bytes."""
    a = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return lambda: b.copy_(a)


def bench(path, families, wait):
    library, size = Library(), 2**30 if GPU else 2**24
    if wait:
        for name in families:
            for _ in BENCHMARKS[name](library, once):
                pass
        await_turn()
    copy = 2 * size / milliseconds(copying(size)) / 1e9
    print(f"copy: {copy:.2f} TB/s")
    rows, copies = [], {}
    for name in families:
        for what, contender, ms, moved, *more in BENCHMARKS[name](library, milliseconds):
            rate = moved / ms / 1e9
            row = dict(what=what, contender=contender, ms=ms)
            if name == "linear_cross_entropy":  # which counts operations, and memory
                rows.append(row | dict(TFLOPs=rate) | more[0])
                print(f"{what:45}{contender:15}{ms:9.4f} ms{rate:7.1f} TFLOP/s {more[0]}")
                continue
            # A short kernel's start and end count for a copy of as many bytes as well.
            if moved not in copies:
                copies[moved] = milliseconds(copying(moved // 2))
            shares = dict(share=rate / copy, share_of_same_copy=copies[moved] / ms)
            rows.append(row | dict(TBps=rate) | shares)
            shares = "".join(f"{share:7.1%}" for share in shares.values())
            print(f"{what:45}{contender:15}{ms:9.4f} ms{rate:7.2f} TB/s{shares}", flush=True)
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem"
    report = {
        "gpu": subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv") if GPU else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_TBps": copy,
        "rows": rows,
    }
    pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--bench", metavar="OUT.json")
    parser.add_argument("--wait", action="store_true", help="compile, then wait for a line")
    parser.add_argument("--only", choices=CHECKS, help="one family")
    arguments = parser.parse_args()
    families = [arguments.only] if arguments.only else list(CHECKS)
    failures = 0
    if arguments.check:
        failures = sum(CHECKS[name](Library()) for name in families)
    if arguments.bench:
        bench(arguments.bench, families, arguments.wait)
    print(f"{time.time() - START:.0f} s")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
