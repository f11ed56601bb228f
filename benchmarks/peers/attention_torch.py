# SPDX-License-Identifier: Apache-2.0
"""Attention's GPU launchers beside PyTorch, without TensorFlow.

    python3 benchmarks/peers/attention_torch.py --check           # values and gradients
    python3 benchmarks/peers/attention_torch.py --bench OUT.json  # against SDPA's back ends

Calls build/libtf_ops_kernels.so on PyTorch's tensors. Without a GPU --check runs the CPU
launchers.
"""

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.philox import kept_pairs  # noqa: E402

LIBRARY = ROOT / "build/libtf_ops_kernels.so"
SEED = (12345, -(2**40) + 7)
DTYPES = {  # tf_ops::DType
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.bool: 6,
    torch.uint8: 7,
}
MARGIN = 64  # elements before and after each tensor, to see what is written there


class TensorView(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("dims", ctypes.c_int64 * 8),
    ]


def views(tensors):
    return (TensorView * len(tensors))(
        *(TensorView(t.data_ptr(), DTYPES[t.dtype], t.ndim, tuple(t.shape)) for t in tensors)
    )


class Library:
    """The launchers, on tensors of one device."""

    def __init__(self, path, device, on_gpu):
        self.library = ctypes.CDLL(str(path))
        self.library.tf_ops_run.restype = ctypes.c_char_p
        self.library.tf_ops_workspace_bytes.restype = ctypes.c_int64
        self.device = device
        self.on_gpu = on_gpu

    def workspace(self, op, inputs, attributes):
        text = (ctypes.c_char_p * len(attributes))(*attributes)
        size = self.library.tf_ops_workspace_bytes(
            op, views(inputs), len(inputs), text, self.on_gpu
        )
        return torch.full((size,), 255, dtype=torch.uint8, device=self.device)

    def call(self, op, inputs, attributes, outputs):
        """A function that launches; `outputs` ends with the workspace, if there is one."""
        text = (ctypes.c_char_p * len(attributes))(*attributes)
        alive = [*inputs, *outputs]
        tensors = views(alive)
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

        def launch():
            error = self.library.tf_ops_run(
                op, tensors, len(alive), len(inputs), text, self.on_gpu, ctypes.c_void_p(stream)
            )
            if error:
                raise RuntimeError(f"{op.decode()}: {error.decode()}")

        return launch


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem; bias and mask are the dimensions that they have, of "bhqk"."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    seq_q: int = 150
    seq_k: int = 150
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    causal: bool = False
    bottom_right: bool = False
    bias: str | None = None
    mask: str | None = None
    shown: tuple | None = None  # mask="bk" of these keys: (from, to) of each batch row
    soft_cap: float = 0.0
    query_lengths: tuple | None = None
    key_lengths: tuple | None = None
    window: tuple = (-1, -1)
    sink: bool = False
    dropout: float = 0.0
    scale: float | None = None
    dlse: bool = False
    unaligned: int = 0  # elements that each tensor is moved by
    magnitude: float = 1.0

    @property
    def attributes(self):
        scale = self.head_dim**-0.5 if self.scale is None and self.head_dim else self.scale or 0.0
        return [
            repr(scale).encode(),
            repr(self.soft_cap).encode(),
            b"%d" % self.causal,
            b"%d" % self.bottom_right,
            b"%d" % self.window[0],
            b"%d" % self.window[1],
            repr(self.dropout).encode(),
        ]

    @property
    def name(self):
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={value}")
        return " ".join(changed)


class Guarded:
    """Makes tensors with margins of a known byte, off by some elements from alignment."""

    def __init__(self, device, offset):
        self.device, self.offset, self.buffers = device, offset, []

    def __call__(self, shape, dtype):
        size = math.prod(shape)
        begin = MARGIN + self.offset
        buffer = torch.empty(begin + size + MARGIN, dtype=dtype, device=self.device)
        buffer.view(torch.uint8).fill_(255 if dtype.is_floating_point else 1)
        tensor = buffer[begin : begin + size].view(shape)
        self.buffers.append((buffer, begin, size))
        return tensor

    def like(self, tensor):
        result = self(tensor.shape, tensor.dtype)
        result.copy_(tensor)
        return result

    def intact(self):
        for buffer, begin, size in self.buffers:
            around = torch.cat([buffer[:begin], buffer[begin + size :]]).view(torch.uint8)
            if not bool((around == (255 if buffer.dtype.is_floating_point else 1)).all()):
                return False
        return True


def visibility(case, mask, query_lengths, key_lengths, device):
    """Bool [batch, heads, seq_q, seq_k]."""
    i = torch.arange(case.seq_q, device=device).view(1, 1, -1, 1)
    j = torch.arange(case.seq_k, device=device).view(1, 1, 1, -1)
    q_len = torch.full((case.batch,), case.seq_q, device=device)
    k_len = torch.full((case.batch,), case.seq_k, device=device)
    if query_lengths is not None:
        q_len = query_lengths.clamp(0, case.seq_q)
    if key_lengths is not None:
        k_len = key_lengths.clamp(0, case.seq_k)
    q_len, k_len = q_len.view(-1, 1, 1, 1), k_len.view(-1, 1, 1, 1)
    seen = (i < q_len) & (j < k_len)
    diagonal = i + (k_len - q_len if case.bottom_right else 0)
    left, right = case.window
    if case.causal:
        right = 0
    if left >= 0:
        seen = seen & (j >= diagonal - left)
    if right >= 0:
        seen = seen & (j <= diagonal + right)
    if mask is not None:
        seen = seen & mask
    return seen.expand(case.batch, case.heads, case.seq_q, case.seq_k)


def dropout_weights(case, device):
    """Float64 [batch, heads, seq_q, seq_k], or 1."""
    if not case.dropout:
        return 1
    kept = kept_pairs(SEED, case.dropout, (case.batch, case.heads, case.seq_q, case.seq_k))
    return torch.from_numpy(kept).to(device).double() / (1 - float(np.float32(case.dropout)))


def formula(case, q, k, v, bias, sink, seen, dtype):
    """Output and lse by the plain formula in `dtype`; q, k, v [batch, seq, heads, dim]."""
    group = case.heads // case.kv_heads if case.kv_heads else 1
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    x = torch.matmul(q, k.transpose(2, 3)) * float(case.attributes[0])
    if case.soft_cap:
        x = case.soft_cap * torch.tanh(x / case.soft_cap)
    if bias is not None:
        x = x + bias.to(dtype)
    # No sink is one of -inf.
    sink = x.new_full([1], -math.inf) if sink is None else sink
    sink = sink.view(1, -1, 1, 1)
    sink = sink.to(dtype)
    if case.seq_k == 0:
        return (torch.matmul(x, v)).transpose(1, 2), x.sum(3) + sink[..., 0]
    x = torch.where(seen, x, torch.finfo(dtype).min)
    some = seen.any(3, keepdim=True) | (sink > -math.inf)
    top = torch.maximum(x.amax(3, keepdim=True), sink).detach()
    e = torch.where(seen, torch.exp(x - top), 0)
    total = e.sum(3, keepdim=True) + torch.exp(sink - top)
    p = e / torch.where(some, total, 1) * dropout_weights(case, x.device)
    p = p.to(dtype)
    lse = torch.where(some, top + torch.log(torch.where(some, total, 1)), -math.inf)
    return torch.matmul(p, v).transpose(1, 2), lse.squeeze(3)


def gradients(case, inputs, seen, do, dlse, dtype):
    """[output, lse, dq, dk, dv, dsink, dbias] by autograd of the formula, without the absent."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
    q, k, v, sink, bias = leaves
    output, lse = formula(case, q, k, v, bias, sink, seen, dtype)
    leaves = [t for t in leaves if t is not None]
    loss = (output * do.to(dtype)).sum()
    if dlse is not None:
        loss = loss + torch.where(lse > -math.inf, lse * dlse.to(dtype), 0).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads)]
    return [output.detach(), lse.detach(), *grads]


class Check:
    def __init__(self, library):
        self.library, self.device = library, library.device
        self.failures, self.count = [], 0

    def expect(self, ok, case, what):
        self.count += 1
        if not bool(ok):
            self.failures.append(what)
            print(f"FAILED {what}: {case.name if isinstance(case, Case) else case}", flush=True)

    def run(self, case, tensors, make):
        """[output, lse, dq, dk, dv, dsink, dbias] of the launchers, without the absent."""
        launches, results = self.launches(case, tensors, make)
        for launch in launches:
            launch()
        return results

    def launches(self, case, tensors, make):
        """Functions to call in turn, the forward pass first, and what they write: as run()."""
        q, k, v, bias, mask, q_len, k_len, do, dlse, sink = tensors
        absent = torch.empty(0, dtype=case.dtype, device=self.device)

        def optional(tensor, dtype):
            return absent.to(dtype) if tensor is None else tensor

        attributes, library = case.attributes, self.library
        inputs = [q, k, v, optional(bias, case.dtype), optional(mask, torch.bool)]
        inputs += [optional(q_len, torch.int32), optional(k_len, torch.int32)]
        seed = torch.tensor(SEED, device=self.device) if case.dropout else None
        inputs += [optional(sink, torch.float32), optional(seed, torch.int64)]
        output = make((case.batch, case.seq_q, case.heads, case.value_dim), case.dtype)
        lse = make((case.batch, case.heads, case.seq_q), torch.float32)
        op = b"TfOps>DotProductAttention"
        workspace = library.workspace(op, inputs, attributes)
        launches = [library.call(op, inputs, attributes, [output, lse, workspace])]
        inputs = [do, optional(dlse, torch.float32), *inputs, output, lse]
        results = [output, lse]
        for op, like in (
            (b"TfOps>DotProductAttentionGrad", [q, k, v, optional(sink, torch.float32)]),
            (b"TfOps>DotProductAttentionBiasGrad", [bias] if bias is not None else []),
        ):
            if not like:
                continue
            outputs = [make(t.shape, t.dtype) for t in like]
            workspace = library.workspace(op, inputs, attributes)
            launches.append(library.call(op, inputs, attributes, [*outputs, workspace]))
            results += outputs
        return launches, [t for i, t in enumerate(results) if i != 5 or sink is not None]

    def tensors(self, case, make, seed=0):
        generator = torch.Generator("cpu").manual_seed(seed)

        def normal(shape, dtype, magnitude=1.0):
            x = torch.randn(shape, generator=generator) * magnitude
            return make.like(x.to(dtype).to(self.device))

        def dims(which):
            sizes = {"b": case.batch, "h": case.heads, "q": case.seq_q, "k": case.seq_k}
            return tuple(sizes[d] if d in which else 1 for d in "bhqk")

        def lengths(values):
            if values is None:
                return None
            return make.like(torch.tensor(values, dtype=torch.int32, device=self.device))

        shape_k = (case.batch, case.seq_k, case.kv_heads)
        shape_q = (case.batch, case.seq_q, case.heads)
        q = normal((*shape_q, case.head_dim), case.dtype, case.magnitude)
        k = normal((*shape_k, case.head_dim), case.dtype, case.magnitude)
        v = normal((*shape_k, case.value_dim), case.dtype)
        bias = mask = dlse = None
        if case.bias is not None:
            bias = normal(dims(case.bias), case.dtype)
        if case.mask is not None:
            shown = torch.rand(dims(case.mask), generator=generator) < 0.6
            if case.shown is not None:
                of_key = torch.arange(case.seq_k)
                shown = torch.stack([(a <= of_key) & (of_key < b) for a, b in case.shown])
                shown = shown[:, None, None]
            mask = make.like(shown.to(self.device))
        do = normal((*shape_q, case.value_dim), case.dtype)
        if case.dlse:
            dlse = normal((case.batch, case.heads, case.seq_q), torch.float32)
        sink = normal((case.heads,), torch.float32) if case.sink else None
        return [q, k, v, bias, mask, lengths(case.query_lengths), lengths(case.key_lengths)] + [
            do,
            dlse,
            sink,
        ]

    def check(self, case, poison=True):
        """Errors against float64, exact rules, repetition, untouched inputs and margins."""
        make = Guarded(self.device, case.unaligned)
        tensors = self.tensors(case, make)
        q, k, v, bias, mask, q_len, k_len, do, dlse, sink = tensors
        copies = [None if t is None else t.clone() for t in tensors]
        results = self.run(case, tensors, make)
        seen = visibility(case, mask, q_len, k_len, self.device)
        inputs = (q, k, v, sink, bias)
        wanted = gradients(case, inputs, seen, do, dlse, torch.float64)
        stock = gradients(case, inputs, seen, do, dlse, case.dtype)
        # Float32 rounding of do . v - delta, which is 0 where a row sees one key.
        size = [float(t.abs().amax()) if t.numel() else 0.0 for t in (q, k, v, do)]
        cancellation = 2**-22 * case.value_dim**0.5 * size[2] * size[3]
        cancellation *= max(size[:2]) * abs(float(case.attributes[0]))
        names = ["output", "lse", "dquery", "dkey", "dvalue", *["dsink"] * case.sink, "dbias"]
        for name, ours, ref, other in zip(names, results, wanted, stock):
            if ref.numel() == 0:
                continue
            finite = ref > -math.inf
            self.expect(
                ((ours == -math.inf) == ~finite).all() and ours[finite].isfinite().all(),
                case,
                f"{name} not finite",
            )
            ref, ours, other = (t[finite].double() for t in (ref, ours, other))
            if ref.numel() == 0:
                continue
            top = float(ref.abs().max())
            is_float = name in ("lse", "dsink")
            epsilon = torch.finfo(torch.float32 if is_float else case.dtype).eps
            ulp = epsilon * 2.0 ** math.floor(math.log2(top)) if top else 0.0
            factor, ulps = (2, 4) if name in ("output", "lse") else (3, 8)
            limit = factor * float((other - ref).abs().nan_to_num(0).max()) + ulps * ulp
            if name in ("dquery", "dkey"):
                limit += cancellation
            error = float((ours - ref).abs().max())
            self.expect(error <= limit, case, f"{name} error {error:.3g} > {limit:.3g}")
        empty = ~seen.any(3)  # [batch, heads, seq_q]
        self.expect((results[0].transpose(1, 2)[empty] == 0).all(), case, "masked rows not 0")
        of_empty = torch.full_like(results[1], -math.inf)
        if case.sink:
            of_empty = sink[:, None].expand_as(results[1])
        self.expect((results[1] == of_empty)[empty].all(), case, "masked rows' lse")
        self.expect((results[2].transpose(1, 2)[empty] == 0).all(), case, "masked rows' gradient")
        again = self.run(case, tensors, make)
        for name, a, b in zip(names, results, again):
            self.expect(torch.equal(a, b), case, f"{name} differs when repeated")
        for a, b in zip(tensors, copies):
            self.expect(a is None or torch.equal(a, b), case, "an input was changed")
        self.expect(make.intact(), case, "written outside a tensor")
        if poison and case.seq_q > 1 and case.seq_k > 1 and case.heads:
            self.check_poison(case, tensors, seen, results, make)

    def check_poison(self, case, tensors, seen, results, make):
        """NaN and Inf in some queries and keys change nothing that does not see them."""
        q, k, v, bias, mask, q_len, k_len, do, dlse, sink = tensors
        group = case.heads // case.kv_heads
        rows = torch.arange(case.seq_q, device=self.device)
        columns = torch.arange(case.seq_k, device=self.device)
        last = case.seq_k - 1
        bad_k = (columns == last) | (columns == last // 2) | (columns == last - 3)
        bad_q = (rows == 0) | (rows == case.seq_q // 2)
        if min(case.window) >= 0:  # so far apart that some see none of them
            apart = 4 * sum(case.window) + 5
            bad_k, bad_q = columns % apart == 3, rows % apart == 1
        q, k, v, do = (make.like(t) for t in (q, k, v, do))
        for t, bad in ((q, bad_q), (do, bad_q), (k, bad_k), (v, bad_k)):
            at = bad.nonzero().view(-1)
            t[:, at[1:]] = math.nan
            t[:, at[:1], :, ::2] = math.inf
        nan_k, nan_q = bad_k.clone(), bad_q.clone()
        for bad in (nan_k, nan_q):
            bad[bad.nonzero()[:1]] = False
        # Beyond the lengths everything is poison.
        for t, lengths in ((q, q_len), (do, q_len), (k, k_len), (v, k_len)):
            if lengths is not None:
                for b, length in enumerate(lengths.tolist()):
                    t[b, max(length, 0) :] = math.nan
        poisoned = self.run(case, [q, k, v, bias, mask, q_len, k_len, do, dlse, sink], make)
        touched_q = bad_q.view(1, 1, -1) | (seen & bad_k).any(3)  # [batch, heads, seq_q]
        touched_k = bad_k.view(1, 1, -1) | (seen & touched_q[..., None]).any(2)
        touched_k = touched_k.view(case.batch, case.kv_heads, group, case.seq_k).any(2)
        touched = [touched_q.transpose(1, 2)[..., None].expand_as(results[0]), touched_q]
        touched += [touched_q.transpose(1, 2)[..., None].expand_as(results[2])]
        for t in results[3:5]:
            touched.append(touched_k.transpose(1, 2)[..., None].expand_as(t))
        if case.sink:
            touched.append(touched_q.any(2).any(0))
        if bias is not None:
            pairs = (seen & touched_q[..., None]).float()
            touched.append(pairs.sum_to_size(bias.shape) > 0)
        names = ["output", "lse", "dquery", "dkey", "dvalue", *["dsink"] * case.sink, "dbias"]
        for name, a, b, t in zip(names, results, poisoned, touched):
            self.expect((a == b)[~t].all(), case, f"{name} changed by what it does not see")
        # What is seen is not dropped: a NaN key spoils the whole row, a NaN query the column.
        if case.head_dim and case.value_dim and case.scale != 0:
            if case.dropout:
                seen = seen & (dropout_weights(case, self.device) > 0)
            spoiled = (seen & nan_k).any(3).transpose(1, 2)
            self.expect(poisoned[0][spoiled].isnan().all(), case, "a visible NaN was dropped")
            if not case.dropout:
                self.expect(poisoned[2][spoiled].isnan().all(), case, "dquery dropped a NaN")
            spoiled = (seen & nan_q.view(1, 1, -1, 1)).any(2)
            spoiled = spoiled.view(case.batch, case.kv_heads, group, case.seq_k).any(2)
            spoiled = spoiled.transpose(1, 2)
            for n in (3, 4):
                self.expect(poisoned[n][spoiled].isnan().all(), case, f"{names[n]} dropped a NaN")

    def check_future_value(self, dtype, dim):
        """Inf in a value reaches those that see it, as Inf, and nobody else."""
        case = Case(dtype=dtype, seq_q=200, seq_k=200, causal=True, head_dim=dim, value_dim=dim)
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        clean = self.run(case, tensors, make)[0]
        tensors[2][:, 77, :, 3] = math.inf
        tensors[2][:, 177, :, 5] = -math.inf
        output = self.run(case, tensors, make)[0]
        self.expect((output[:, 77:, :, 3] == math.inf).all(), case, "visible inf")
        self.expect((output[:, 177:, :, 5] == -math.inf).all(), case, "visible -inf")
        clean[:, 77:, :, 3] = output[:, 77:, :, 3]
        clean[:, 177:, :, 5] = output[:, 177:, :, 5]
        self.expect(torch.equal(clean, output), case, "an inf changed other elements")

    def check_window_value(self, dtype, dim):
        """The same where a window passes by: several such values in a tile."""
        case = Case(dtype=dtype, seq_q=300, seq_k=300, window=(9, 5), head_dim=dim, value_dim=dim)
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        clean = self.run(case, tensors, make)[0]
        i = torch.arange(case.seq_q, device=self.device)
        expected = clean.clone()
        for key, sign in ((2, 1), (40, -1), (60, 1), (100, -1), (126, 1), (250, 1)):
            tensors[2][:, key, :, 3] = sign * math.inf
            expected[:, (i - 9 <= key) & (key <= i + 5), :, 3] = sign * math.inf
        output = self.run(case, tensors, make)[0]
        self.expect(torch.equal(output, expected), case, "inf in a window")

    def check_many_rows(self, batch):
        """One query and key each: the output is the value, dvalue is doutput."""
        case = Case(batch=batch, seq_q=1, seq_k=1, heads=16, kv_heads=16, head_dim=128)
        case = dataclasses.replace(case, value_dim=128)
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        results = self.run(case, tensors, make)
        self.expect(torch.equal(results[0], tensors[2]), case, "output is not value")
        self.expect(torch.equal(results[4], tensors[7]), case, "dvalue is not doutput")
        for t in results[2:4]:
            self.expect(t.abs().max() < 0.1, case, "dquery or dkey is not about 0")

    def check_long(self):
        """A query of more than 2^31 elements; rows near its end against themselves alone."""
        seq, tail = (1 << 20) + 4096 + 77, 4096 + 77
        case = Case(batch=1, seq_q=seq, seq_k=65, heads=16, kv_heads=16, head_dim=128)
        case = dataclasses.replace(case, value_dim=128)
        q, do = (
            torch.randn(1, seq, 16, 128, device=self.device, dtype=case.dtype) for _ in range(2)
        )
        k, v = (torch.randn(1, 65, 16, 128, device=self.device, dtype=case.dtype) for _ in range(2))
        rest = [None] * 4

        def make(shape, dtype):
            return torch.empty(shape, dtype=dtype, device=self.device)

        whole = self.run(case, [q, k, v, *rest, do, None, None], make)
        small = dataclasses.replace(case, seq_q=tail)
        part = self.run(small, [q[:, -tail:], k, v, *rest, do[:, -tail:], None, None], make)
        self.expect(torch.equal(whole[0][:, -tail:], part[0]), case, "output of a long query")
        self.expect(torch.equal(whole[2][:, -tail:], part[2]), case, "dquery of a long query")
        self.expect(whole[3].isfinite().all(), case, "dkey of a long query")


def cases():
    half, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    everything = {
        "seq_q": 173,
        "seq_k": 201,
        "heads": 4,
        "kv_heads": 2,
        "bias": "bhqk",
        "mask": "bhqk",
        "soft_cap": 5.0,
        "query_lengths": (170, 64),
        "key_lengths": (0, 190),
        "dlse": True,
    }
    for dtype in (bf16, half, f32):
        for dim in (64, 128, 256):
            base = Case(dtype=dtype, head_dim=dim, value_dim=dim)
            for causal, sq, sk in ((0, 257, 300), (1, 257, 257), (1, 100, 300), (1, 300, 100)):
                yield dataclasses.replace(
                    base, causal=bool(causal), bottom_right=sq < sk, seq_q=sq, seq_k=sk
                )
            yield dataclasses.replace(base, causal=True, bottom_right=True, seq_q=300, seq_k=70)
            yield dataclasses.replace(base, **everything)
            yield dataclasses.replace(base, **everything, causal=True, bottom_right=True)
            features = {"window": (90, 30), "sink": True, "dropout": 0.3}
            yield dataclasses.replace(base, **everything | features)
            features = {"window": (20, -1), "sink": True, "dropout": 0.3, "bottom_right": True}
            yield dataclasses.replace(base, **everything | features, causal=True)
            yield dataclasses.replace(base, **everything | features | {"dropout": 0.0})
            # Each alone, over several tiles with ends.
            long = {"seq_q": 459, "seq_k": 523, "heads": 4, "dlse": True}
            for window in ((100, 0), (0, 100), (70, 133), (0, 0), (129, -1), (-1, 3)):
                for bottom_right in (False, True):
                    yield dataclasses.replace(
                        base, **long, window=window, bottom_right=bottom_right
                    )
            yield dataclasses.replace(base, **long, window=(128, -1), causal=True, kv_heads=1)
            # Whole tiles that all see, tiles of no use on both sides, and rows that see nothing.
            wide = {"seq_q": 900, "seq_k": 1000, "heads": 2, "kv_heads": 1, "batch": 2}
            for window in ((299, 0), (200, 250), (9, 5), (0, 500)):
                for lengths in ({}, {"query_lengths": (700, 900), "key_lengths": (1000, 333)}):
                    yield dataclasses.replace(
                        base,
                        **wide,
                        **lengths,
                        window=window,
                        bottom_right=bool(lengths),
                        sink=window[0] == 299,
                        dlse=window[0] != 9,
                    )
            yield dataclasses.replace(base, seq_q=700, seq_k=130, window=(60, 0), sink=True)
            yield dataclasses.replace(
                base, seq_q=700, seq_k=130, window=(60, 20), bottom_right=True, value_dim=dim // 2
            )
            # Padding before, after and on both sides; holes; a batch row of padding alone.
            full = long["seq_k"]
            for shown in (((0, 300), (0, full)), ((130, full), (0, 0)), ((97, 390), (256, 384))):
                for causal, bottom_right, window in (
                    (False, False, (-1, -1)),
                    (True, False, (-1, -1)),
                    (True, True, (100, -1)),
                ):
                    changes = {"bottom_right": bottom_right, "window": window, "sink": causal}
                    yield dataclasses.replace(
                        base, **long, mask="bk", shown=shown, causal=causal, **changes
                    )
            padded = {"key_lengths": (500, 310), "query_lengths": (459, 200), "kv_heads": 2}
            for mask in ("bk", "k", "b", ""):
                yield dataclasses.replace(base, **long, mask=mask)
                yield dataclasses.replace(base, **long | padded, mask=mask, causal=True)
                yield dataclasses.replace(base, **long, mask=mask, window=(70, 133))
            yield dataclasses.replace(base, **long, sink=True)
            yield dataclasses.replace(base, **long, sink=True, causal=True, key_lengths=(0, 300))
            yield dataclasses.replace(base, **long, sink=True, query_lengths=(0, 300))
            yield dataclasses.replace(base, **long, dropout=0.1, kv_heads=1)
            yield dataclasses.replace(base, **long, dropout=0.5, causal=True, bottom_right=True)
        for head_dim, value_dim in ((40, 40), (59, 72), (111, 8), (8, 200), (1, 1), (203, 128)):
            yield Case(dtype=dtype, head_dim=head_dim, value_dim=value_dim, causal=True, seq_k=131)
        for bias in ("", "b", "h", "q", "k", "bk", "hqk", "qk", "bh", "bhqk"):
            yield Case(
                dtype=dtype, bias=bias, heads=3, kv_heads=1, seq_q=131, seq_k=77, causal=bias > "c"
            )
        for mask in ("", "bk", "qk", "h", "bhq"):
            yield Case(dtype=dtype, mask=mask, causal=mask == "qk", head_dim=72, value_dim=40)
        for unaligned in (1, 4):
            yield Case(dtype=dtype, unaligned=unaligned, causal=True, head_dim=128, bias="qk")
        for seq in (1, 2, 7, 16, 17, 63, 64, 65, 127, 128, 129):
            yield Case(dtype=dtype, batch=1, seq_q=seq, seq_k=seq, head_dim=32, causal=seq % 2 == 0)
        yield Case(dtype=dtype, query_lengths=(-3, 1000), key_lengths=(65, 149), causal=True)
        yield Case(dtype=dtype, query_lengths=(10, 100), key_lengths=(100, 10), bias="k")
        yield Case(dtype=dtype, scale=-0.3, causal=True)
        yield Case(dtype=dtype, scale=0.0, dlse=True)
        # Row sums below exp(-88.7) with padded keys: exp(0 - lse) would overflow.
        yield Case(dtype=dtype, seq_q=704, seq_k=704, magnitude=4.0, mask="bk", batch=1)
        yield Case(dtype=dtype, seq_q=127, seq_k=449, heads=8, kv_heads=1, causal=True, dlse=True)
        zero = {"batch": 0, "seq_q": 0, "seq_k": 0, "head_dim": 0, "value_dim": 0}
        for name in zero:
            yield dataclasses.replace(
                Case(dtype=dtype, seq_q=70, seq_k=70, bias="h", dlse=True), **{name: 0}
            )
        yield Case(dtype=dtype, heads=0, kv_heads=2, bias="k")
        yield Case(dtype=dtype, heads=0, kv_heads=0)


def run_checks(library, only=None):
    check = Check(library)
    start = time.time()
    for case in cases():
        if only and only not in case.name:
            continue
        try:
            check.check(case)
        except RuntimeError as error:
            check.expect(False, case, str(error).splitlines()[0])
    for dtype, dim in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 256)):
        check.check_future_value(dtype, dim)
        check.check_window_value(dtype, dim)
    check.check_many_rows(8300 if library.device == "cuda" else 3)
    if library.device == "cuda" and torch.cuda.mem_get_info()[0] > 60e9:
        check.check_long()
    print(f"{check.count} checks, {len(check.failures)} failures, {time.time() - start:.0f} s")
    return not check.failures


def contenders(library, batch, heads, seq, dim, causal):
    """{name: (forward, backward)} on the same sizes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = (normal(batch, seq, heads, dim) for _ in range(4))
    output = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq, device="cuda")
    grads = [torch.empty_like(q) for _ in range(3)]
    absent = [torch.empty(0, dtype=t, device="cuda") for t in (torch.bfloat16, torch.bool)]
    absent += [torch.empty(0, dtype=torch.int32, device="cuda") for _ in range(2)]
    absent += [torch.empty(0, dtype=t, device="cuda") for t in (torch.float32, torch.int64)]
    attributes = [repr(dim**-0.5).encode(), b"0", b"%d" % causal, b"0", b"-1", b"-1", b"0"]
    inputs = [q, k, v, *absent]
    op = b"TfOps>DotProductAttention"
    workspace = library.workspace(op, inputs, attributes)
    forward = library.call(op, inputs, attributes, [output, lse, workspace])
    forward()
    inputs = [do, torch.empty(0, device="cuda"), *inputs, output, lse]
    grads.append(absent[-2])  # that of the sink
    workspace = library.workspace(op + b"Grad", inputs, attributes)
    result = {
        "tf_ops": (forward, library.call(op + b"Grad", inputs, attributes, [*grads, workspace]))
    }
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        leaves = [normal(batch, heads, seq, dim).requires_grad_() for _ in range(3)]
        upstream = normal(batch, heads, seq, dim)

        def attend(leaves=leaves, backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)

        def infer(attend=attend):
            with torch.no_grad():
                attend()

        try:
            output = attend()
        except RuntimeError:
            continue  # The back end refuses this problem.

        def backward(output=output, leaves=leaves, upstream=upstream):
            torch.autograd.grad(output, leaves, upstream, retain_graph=True)

        result[name] = (infer, backward)
    return result


def milliseconds(functions, rounds=9):
    """Medians of CUDA events, the functions taking turns, with a cold cache."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    events = {name: [] for name in functions}
    for n in range(rounds + 2):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            function()
            end.record()
            if n >= 2:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {k: statistics.median(b.elapsed_time(e) for b, e in v) for k, v in events.items()}


def machine():
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    values = (
        subprocess.run(command, check=False, capture_output=True, text=True)
        .stdout.strip()
        .split(", ")
    )
    return {
        **dict(zip(query.split(","), values)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def feature_times(library):
    """What each feature costs; with a window, time should grow as the sequence does."""
    base = Case(batch=2, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=128)
    base = dataclasses.replace(base, value_dim=128, causal=True)
    long = {n: dict(batch=1, seq_q=n, seq_k=n, window=(1023, -1)) for n in (8192, 65536)}
    rows = []
    for changes in (
        {},
        {"bias": "hqk"},
        {"sink": True},
        {"dropout": 0.1},
        {"mask": "bk", "shown": ((0, 4096), (0, 3072))},
        {"mask": "bk"},
        {"window": (1023, -1)},
        {"window": (1023, -1), "sink": True, "dropout": 0.1, "soft_cap": 30.0},
        *long.values(),
    ):
        case = dataclasses.replace(base, **changes)
        make = Guarded(library.device, 0)
        check = Check(library)
        launches, _ = check.launches(case, check.tensors(case, make), make)
        names = ("forward", "backward", "dbias")
        ms = milliseconds(dict(zip(names, launches)))
        per_token = {k: 1e6 * t / (case.batch * case.seq_q) for k, t in ms.items()}
        rows.append({"changes": changes, "seq": case.seq_q, "ms": ms, "ns_per_token": per_token})
        print(changes, {k: round(t, 3) for k, t in ms.items()}, flush=True)
    return rows


def run_bench(library, path):
    rows = []
    print(f"{'S':>6} {'D':>4} causal   pass   {'tf_ops':>7} {'flash':>7} {'cudnn':>7}  TFLOP/s")
    shapes = [(1024, 64), (4096, 64), (16384, 64), (1024, 128), (2048, 128), (4096, 128)]
    shapes += [(8192, 128), (16384, 128), (4096, 256)]
    for (seq, dim), causal in itertools.product(shapes, (False, True)):
        batch, heads = max(1, 16384 // seq), 2048 // dim
        all_of = contenders(library, batch, heads, seq, dim, causal)
        for step, name in enumerate(("forward", "backward")):
            flops = 4 * batch * heads * seq * seq * dim * (0.5 if causal else 1) * (1, 2.5)[step]
            ms = milliseconds({k: f[step] for k, f in all_of.items()})
            tflops = {k: flops / t / 1e9 for k, t in ms.items()}
            ratio = {k: ms[k] / ms["tf_ops"] for k in ms if k != "tf_ops"}
            rows.append(
                {"seq": seq, "head_dim": dim, "batch": batch, "heads": heads, "causal": causal}
            )
            rows[-1].update({"pass": name, "ms": ms, "tflops": tflops, "speed_up_over": ratio})
            names = ("tf_ops", "flash", "cudnn")
            figures = " ".join(f"{tflops.get(k, math.nan):7.0f}" for k in names)
            print(f"{seq:6} {dim:4} {causal!s:6} {name:8} {figures}", flush=True)
    for _ in range(100):  # so that the clocks are those of work
        all_of["tf_ops"][0]()
    result = {"machine": machine(), "dtype": "bfloat16", "attention": rows}
    result["features"] = feature_times(library)
    pathlib.Path(path).write_text(json.dumps(result, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="checks whose description contains this")
    parser.add_argument("--bench", metavar="OUT.json")
    parser.add_argument("--library", default=LIBRARY)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    library = Library(arguments.library, "cuda" if cuda else "cpu", int(cuda))
    ok = True
    if arguments.check:
        ok = run_checks(library, arguments.only)
    if arguments.bench:
        run_bench(library, arguments.bench)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
