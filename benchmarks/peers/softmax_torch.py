# SPDX-License-Identifier: Apache-2.0
"""masked_softmax beside PyTorch: a part of rowwise_torch.py."""

import itertools

import torch
from timing_torch import compiled

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def reference(x, mask, scale, dy, dtype):
    """y and dx by PyTorch's arithmetic in `dtype`."""
    x = x.to(dtype).requires_grad_()
    s = scale * x if mask is None else (scale * x).masked_fill(~mask, -torch.inf)
    y = torch.nan_to_num(torch.softmax(s, -1)) if mask is not None else torch.softmax(s, -1)
    return y, torch.autograd.grad(y, x, dy.to(dtype))[0].nan_to_num()


def prepare(library, x, mask, scale, dy):
    """The launches of forward and gradient, and what they write."""
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    given = torch.zeros(0, dtype=torch.bool, device=DEVICE) if mask is None else mask
    forward = library.prepare("TfOps>MaskedSoftmax", [x, given], [scale], [y])
    backward = library.prepare("TfOps>MaskedSoftmaxGrad", [dy, y], [scale], [dx])
    return forward, backward, y, dx


def offset(tensor):
    """A copy that starts an element past an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


def check_softmax(library):
    widths = [1, 2, 7, 31, 33, 64, 127, 128, 200, 256, 1000, 1024, 2049, 4096, 8192, 9001]
    widths += [16384, 16385, 32768, 65537, 262144, 1_000_003] * GPU
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    failures = count = 0
    for dtype, cols, rows in itertools.product(dtypes, widths, (1, 3, 199)):
        if rows * cols > 2**24:
            continue
        masks = {"none": None, "full": (rows, cols), "row": (rows, 1), "column": (1, cols)}
        for (name, shape), unaligned in itertools.product(masks.items(), (False, True)):
            torch.manual_seed(0)
            x, dy = (torch.randn(rows, cols, device=DEVICE).to(dtype) for _ in range(2))
            mask = None if shape is None else torch.rand(shape, device=DEVICE) < 0.7
            clean = x
            if mask is not None and not unaligned:
                # What is hidden may be anything.
                x = x.masked_fill(~mask.expand(rows, cols), torch.nan)
                dy = dy.masked_fill(~mask.expand(rows, cols), torch.nan)
            if unaligned:
                x, dy = offset(x), offset(dy)
            forward, backward, *actual = prepare(library, x, mask, 0.7, dy)
            forward(), backward()
            first = [a.clone() for a in actual]
            forward(), backward()
            dy = dy.nan_to_num()
            stock = reference(clean, mask, 0.7, dy, torch.float32)
            problems = ""
            exact = reference(clean, mask, 0.7, dy, torch.float64)
            for what, a, b, s, e in zip(("y", "dx"), actual, first, stock, exact):
                if not torch.equal(a, b):
                    problems += f" {what} differs from one run to the next"
                off, stock_off = ((v.double() - e).abs().max().item() for v in (a, s))
                largest = e.abs().max().item()
                if not off <= 3 * stock_off + 8 * torch.finfo(dtype).eps * largest + 1e-30:
                    problems += f" {what} is off by {off:.1e} of {largest:.1e}"
            count += 1
            failures += bool(problems)
            if problems:
                print(f"FAILED softmax {dtype} {rows}x{cols} mask {name} {unaligned}:{problems}")
    print(f"softmax: {count} cases, {failures} failures", flush=True)
    return failures


def bench_softmax(library, measure):
    """Yields rows: what, contender, milliseconds, bytes that must move."""
    shapes = [(16384, 1024), (16384, 4096), (16384, 8192), (4096, 16384), (512, 131072)]
    for rows, cols in shapes if GPU else [(64, 1024)]:
        x, dy = (torch.randn(rows, cols, device=DEVICE).bfloat16() for _ in range(2))
        size = 2 * rows * cols
        masks = {"": None, "masked ": torch.rand(rows, cols, device=DEVICE) < 0.7}
        for name, mask in masks.items():
            at, extra = f"{name}softmax {rows}x{cols}", rows * cols * (mask is not None)
            forward, backward, *_ = prepare(library, x, mask, 1.0, dy)
            yield f"{at} forward", "ours", measure(forward), 2 * size + extra
            yield f"{at} backward", "ours", measure(backward), 3 * size
            plain = lambda x, mask=mask: torch.softmax(
                x if mask is None else x.masked_fill(~mask, -torch.inf), -1
            )
            for contender, fn in {"torch": plain, "torch.compile": compiled(plain)}.items():
                if not GPU and contender != "torch":
                    continue
                leaf = x.detach().requires_grad_()
                with torch.no_grad():
                    ms = measure(lambda: fn(leaf))
                    yield f"{at} forward", contender, ms, 2 * size + extra
                y = fn(leaf)
                ms = measure(lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True))
                yield f"{at} backward", contender, ms, 3 * size
