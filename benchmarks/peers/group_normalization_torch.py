# SPDX-License-Identifier: Apache-2.0
"""group_normalization beside PyTorch: a part of rowwise_torch.py."""

import itertools

import torch
import torch.nn.functional as F
from timing_torch import compiled

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPSILON = 1e-3


def reference(x, weights, groups, dy, dtype):
    """y and the gradients by PyTorch's arithmetic; x is [samples, outer, channels, inner]."""
    leaves = [t.to(dtype).requires_grad_() for t in (x, *weights)]
    first = leaves[0].transpose(1, 2)  # channels second
    y = F.group_norm(first, groups, *leaves[1:], eps=EPSILON).transpose(1, 2)
    return y, *torch.autograd.grad(y, leaves, dy.to(dtype))


def prepare(library, x, weights, groups, dy):
    """The launches of forward and gradient, and what they write."""
    nan = lambda like: torch.full_like(like, torch.nan)
    y, dx, dweights = nan(x), nan(x), [nan(w) for w in weights]
    stats = [torch.empty(x.shape[0], groups, device=DEVICE) for _ in range(2)]
    name, attributes = "TfOps>GroupNormalization", [groups, EPSILON]
    forward = library.prepare(name, [x, *weights], attributes, [y, *stats])
    inputs = [dy, x, *weights, *stats]
    backward = library.prepare(name + "Grad", inputs, attributes, [dx, *dweights])
    return forward, backward, [y, dx, *dweights]


def check_group_normalization(library):
    shapes = [((2, 50, 64, 1), 8), ((2, 7, 12, 1), 3), ((1, 3, 4096, 1), 1), ((2, 90, 5, 1), 5)]
    shapes += [((2, 3, 2304, 1), 1), ((3, 500, 256, 1), 32), ((40, 30, 8, 1), 2)]
    shapes += [((2, 1, 12, 64), 3), ((2, 1, 6, 49), 2), ((2, 3, 6, 8), 2), ((1, 1, 2, 3000), 1)]
    shapes += [((3, 1, 64, 3136), 32), ((1, 1, 4, 70001), 2), ((2000, 1, 8, 2), 4)]
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    failures = count = 0
    for dtype, (shape, groups), wide in itertools.product(dtypes, shapes, (False, True)):
        torch.manual_seed(0)
        draw = lambda shape, dtype=dtype: torch.randn(shape, device=DEVICE).to(dtype)
        x, dy = draw(shape), draw(shape)
        weights = [draw(shape[2], torch.float32 if wide else dtype) for _ in range(2)]
        forward, backward, actual = prepare(library, x, weights, groups, dy)
        forward(), backward()
        first = [a.clone() for a in actual]
        forward(), backward()
        stock = reference(x, weights, groups, dy, torch.float32)
        problems = ""
        exact = reference(x, weights, groups, dy, torch.float64)
        for what, a, b, s, e in zip(("y", "dx", "dgamma", "dbeta"), actual, first, stock, exact):
            if not torch.equal(a, b):
                problems += f" {what} differs from one run to the next"
            off, stock_off = ((v.double() - e).abs().max().item() for v in (a, s))
            largest = e.abs().max().item()
            if not off <= 3 * stock_off + 8 * torch.finfo(a.dtype).eps * largest:
                problems += f" {what} is off by {off:.1e} of {largest:.1e}"
        count += 1
        failures += bool(problems)
        if problems:
            print(f"FAILED group_normalization {dtype} {shape} {groups}:{problems}")
    print(f"group_normalization: {count} cases, {failures} failures", flush=True)
    return failures


def bench_group_normalization(library, measure):
    """Yields rows: what, contender, milliseconds, bytes that must move."""
    shapes = [((64, 3136, 256, 1), 32), ((64, 1, 256, 3136), 32), ((16, 256, 1280, 1), 32)]
    for shape, groups in shapes if GPU else [((2, 49, 64, 1), 32)]:
        draw = lambda *shape: torch.randn(shape, device=DEVICE).bfloat16()
        x, dy, weights = draw(*shape), draw(*shape), [draw(shape[2]), draw(shape[2])]
        forward, backward, _ = prepare(library, x, weights, groups, dy)
        at, size = f"group norm {shape} in {groups}", 2 * x.numel()
        yield f"{at} forward", "ours", measure(forward), 2 * size
        yield f"{at} backward", "ours", measure(backward), 3 * size
        # Channels last are a matter of strides to PyTorch.
        x, dy = x.transpose(1, 2), dy.transpose(1, 2)
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        plain = lambda x, w, b: F.group_norm(x, groups, w, b, EPSILON)
        for contender, fn in {"torch": plain, "torch.compile": compiled(plain)}.items():
            if not GPU and contender != "torch":
                continue
            with torch.no_grad():
                yield f"{at} forward", contender, measure(lambda: fn(*leaves)), 2 * size
            y = fn(*leaves)
            grad = lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
            yield f"{at} backward", contender, measure(grad), 3 * size
