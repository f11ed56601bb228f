# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy beside PyTorch and Liger: a part of rowwise_torch.py.

Ours are the steps of tf_ops/_ops/linear_cross_entropy.py, with PyTorch's matrix products in
place of TensorFlow's.
"""

import itertools

import torch
import torch.nn.functional as F
from timing_torch import compiled

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


class Ours:
    """Forward and gradients of the cross entropy of hidden @ kernel, by blocks of classes."""

    def __init__(self, library, labels, hidden, kernel, dloss, width, ignore=None, cap=0.0):
        (tokens, features), classes = hidden.shape, kernel.shape[1]
        empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=DEVICE)
        self.labels, self.hidden, self.kernel, self.ignore = labels, hidden, kernel, ignore
        self.sums, self.loss = empty(tokens, 4), empty(tokens)
        self.max, self.log_sum = empty(tokens), empty(tokens)
        # Of bfloat16, the sum of the hidden states' gradient is in two parts.
        self.split = hidden.dtype == torch.bfloat16
        self.sum = empty(tokens, features, dtype=hidden.dtype if self.split else torch.float32)
        self.rest = empty(*([tokens, features, 2] if self.split else [0]), dtype=torch.uint8)
        self.dkernel, self.halves = torch.empty_like(kernel), []
        for part in torch.arange(tokens).chunk(2):
            self.halves.append(slice(part[0].item(), part[-1].item() + 1))
        product = torch.empty_like(hidden[self.halves[0]])
        ignored = [int(ignore is not None), ignore or 0]
        self.blocks = []
        for first in range(0, classes, width):
            if first + width <= classes and self.blocks:
                logits, dblock = self.blocks[0][1], self.blocks[0][4]  # one memory for all
            else:
                logits = empty(tokens, min(width, classes - first), dtype=hidden.dtype)
                dblock = empty(features, logits.shape[1], dtype=hidden.dtype)
            span = torch.tensor([first, classes], device=DEVICE)
            name = "TfOps>LinearCrossEntropy"
            inputs = [labels, logits, span, self.sums]
            add = library.prepare(name, inputs, [*ignored, 0.0, cap], [self.sums])
            inputs = [dloss, labels, logits, span, self.max, self.log_sum]
            attributes = [*ignored, 0.0, 0.0, cap]
            grad = library.prepare(name + "Grad", inputs, attributes, [logits])
            inputs = [self.dkernel, dblock, span]
            put = library.prepare(name + "KernelGrad", inputs, [0], [self.dkernel])
            self.blocks.append(
                (slice(first, first + logits.shape[1]), logits, add, grad, dblock, put)
            )
        self.products = []
        for half in self.halves:
            total, rest = self.sum[half], self.rest[half] if self.split else self.rest
            addend = product[: len(total)]
            inputs = [total, rest, addend]
            add = library.prepare(name + "HiddenGrad", inputs, [], [total, rest])
            self.products.append((half, addend, add))

    def forward(self):
        start = [-torch.inf, 0.0, 0.0, torch.nan]
        self.sums.copy_(torch.tensor(start).to(DEVICE).expand_as(self.sums))
        for part, logits, add, *_ in self.blocks:
            torch.mm(self.hidden, self.kernel[:, part], out=logits)
            add()
        largest, total, _, at_label = self.sums.unbind(-1)
        self.max.copy_(largest), self.log_sum.copy_(total.log())
        self.loss.copy_(largest - at_label + total.log())
        if self.ignore is not None:
            for x in (self.loss, self.max, self.log_sum):
                x.masked_fill_(self.labels == self.ignore, 0)

    def backward(self):
        self.sum.zero_(), self.rest.zero_()
        for part, logits, _, grad, dblock, put in self.blocks:
            torch.mm(self.hidden, self.kernel[:, part], out=logits)
            grad()
            for half, product, add in self.products:
                torch.mm(logits[half], self.kernel[:, part].T, out=product)
                add()
            torch.mm(self.hidden.T, logits, out=dblock)
            put()
        return self.sum.to(self.hidden.dtype), self.dkernel

    def both(self):
        self.forward()
        self.backward()


def draw(tokens, features, classes, dtype, ignore=None):
    torch.manual_seed(0)
    labels = torch.randint(0, classes, (tokens,), device=DEVICE)
    if ignore is not None:
        labels[torch.rand(tokens, device=DEVICE) < 0.3] = ignore
    hidden = torch.randn(tokens, features, device=DEVICE).to(dtype)
    kernel = (torch.randn(features, classes, device=DEVICE) / features**0.5).to(dtype)
    return labels, hidden, kernel, torch.rand(tokens, device=DEVICE) + 0.5


def reference(labels, hidden, kernel, dloss, ignore, cap, dtype):
    hidden, kernel = (x.to(dtype).requires_grad_() for x in (hidden, kernel))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = (hidden @ kernel).to(wide)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    ignored = -100 if ignore is None else ignore
    loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored)
    return loss.detach(), *torch.autograd.grad(loss, [hidden, kernel], dloss.to(wide))


def check_linear_cross_entropy(library):
    failures = count = 0
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    shapes = [(1, 8, 7, 3), (33, 24, 100, 16), (70, 64, 5000, 1024), (199, 128, 2048, 512)]
    for dtype, (tokens, features, classes, width) in itertools.product(dtypes, shapes):
        for ignore, cap in ((None, 0.0), (-1, 2.0)):
            data = draw(tokens, features, classes, dtype, ignore)
            ours = Ours(library, *data, width, ignore, cap)
            ours.forward()
            actual = ours.loss.clone(), *(x.clone() for x in ours.backward())
            ours.forward()
            again = ours.loss, *ours.backward()
            stock = reference(*data, ignore, cap, dtype)
            problems = ""
            exact = reference(*data, ignore, cap, torch.float64)
            names = ("loss", "dhidden", "dkernel")
            for what, a, b, s, e in zip(names, actual, again, stock, exact):
                if not torch.equal(a, b):
                    problems += f" {what} differs from one run to the next"
                off, stock_off = ((v.double() - e).abs().max().item() for v in (a, s))
                largest = e.abs().max().item()
                if not off <= 3 * stock_off + 8 * torch.finfo(a.dtype).eps * largest:
                    problems += f" {what} is off by {off:.1e} of {largest:.1e}"
            count += 1
            failures += bool(problems)
            if problems:
                print(
                    f"FAILED linear_cross_entropy {dtype} {tokens}x{features}x{classes}:{problems}"
                )
    print(f"linear_cross_entropy: {count} cases, {failures} failures", flush=True)
    return failures


def extra_bytes(fn, outputs):
    """Device memory that fn() takes at its peak beside its `outputs` bytes."""
    if not GPU:
        fn()
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    return torch.cuda.max_memory_allocated() - before - outputs


def bench_linear_cross_entropy(library, measure):
    """Yields rows: what, contender, milliseconds, operations of three products, more."""
    shapes = [(8192, 4096, 131072), (8192, 4096, 32768)] if GPU else [(64, 32, 4096)]
    for tokens, features, classes in shapes:
        labels, hidden, kernel, dloss = draw(tokens, features, classes, torch.bfloat16)
        at, operations = f"{tokens}x{features}x{classes}", 6 * tokens * features * classes
        outputs = 2 * (hidden.numel() + kernel.numel()) + 4 * tokens
        logits = torch.empty(tokens, classes, dtype=hidden.dtype, device=DEVICE)
        dhidden, dkernel = torch.empty_like(hidden), torch.empty_like(kernel)

        def products(logits=logits, dhidden=dhidden, dkernel=dkernel):
            torch.mm(hidden, kernel, out=logits)
            torch.mm(logits, kernel.T, out=dhidden)
            torch.mm(hidden.T, logits, out=dkernel)

        yield at, "three products", measure(products), operations, {}
        del logits, dhidden, dkernel, products

        def row(contender, fn, once):
            extra = extra_bytes(once, outputs)
            share = extra and extra / (2 * tokens * classes)
            more = dict(extra_bytes=extra, share_of_logits=share)
            return at, contender, measure(fn), operations, more

        default = max(1024, classes // 32)
        for width in dict.fromkeys([default, 1024, max(1024, classes // 16)]):
            made = []  # the tensors of all blocks are made beforehand

            def once(width=width, made=made):
                made.append(Ours(library, labels, hidden, kernel, dloss, width))
                made[0].both()

            name = "ours" if width == default else f"ours by {width}"
            yield row(name, lambda made=made: made[0].both(), once)
            made.clear()
        leaves = [x.detach().requires_grad_() for x in (hidden, kernel)]
        plain = lambda h, k: F.cross_entropy((h @ k).float(), labels, reduction="none")
        peers = {"torch": lambda: torch.autograd.grad(plain(*leaves), leaves, dloss)}
        if GPU:
            whole = compiled(plain)
            peers["torch.compile"] = lambda: torch.autograd.grad(whole(*leaves), leaves, dloss)
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            by_class = kernel.T.contiguous().requires_grad_()
            liger = LigerFusedLinearCrossEntropyLoss()
            inputs = [leaves[0], by_class]
            peers["liger (mean)"] = lambda: torch.autograd.grad(
                liger(by_class, leaves[0], labels), inputs
            )
        except ImportError:
            pass
        for contender, fn in peers.items():
            try:
                yield row(contender, fn, fn)
            except RuntimeError as error:
                print(f"{contender}: {error}")
            if GPU:
                torch.cuda.empty_cache()
