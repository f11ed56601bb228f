# SPDX-License-Identifier: Apache-2.0
"""Cross entropy's launchers beside PyTorch and Liger, without TensorFlow.

    python3 benchmarks/peers/cross_entropy_torch.py --check           # against float64
    python3 benchmarks/peers/cross_entropy_torch.py --bench OUT.json  # on a GPU

Calls build/libtf_ops_kernels.so on PyTorch's tensors. Without a GPU --check runs the CPU
launchers. With --wait everything is called once, and measured when a line of standard input comes.
"""

import argparse
import ctypes
import itertools
import json
import math
import pathlib
import subprocess
import sys

import torch
import torch.nn.functional as F
from timing_torch import await_turn, compiled, milliseconds, once

LIBRARY = pathlib.Path(__file__).parents[2] / "build/libtf_ops_kernels.so"
FORWARD = b"TfOps>SparseSoftmaxCrossEntropy"
GRADIENT = FORWARD + b"Grad"
DTYPES = {  # tf_ops::DType
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MARGIN = 64  # elements beside each output, to see what is written there
EVERYTHING = {"ignore": -100, "smoothing": 0.1, "z_loss": 0.01, "soft_cap": 2.0}
OPTIONS = [{}, EVERYTHING, *({key: value} for key, value in EVERYTHING.items())]


class TensorView(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("dims", ctypes.c_int64 * 8),
    ]


def launcher(library, op, inputs, outputs, ignore=None, smoothing=0.0, z_loss=0.0, soft_cap=0.0):
    """A function that launches `op` on the current stream."""
    values = [ignore is not None and 1 or 0, ignore or 0, smoothing, z_loss, soft_cap]
    attributes = (ctypes.c_char_p * 5)(*(repr(value).encode() for value in values))
    tensors = [*inputs, *outputs]
    views = (TensorView * len(tensors))(
        *(TensorView(t.data_ptr(), DTYPES[t.dtype], t.ndim, tuple(t.shape)) for t in tensors)
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if ON_GPU else 0)

    def launch(keep_alive=tensors):
        error = library.tf_ops_run(op, views, len(views), len(inputs), attributes, ON_GPU, stream)
        if error:
            raise RuntimeError(error.decode())

    return launch


def formula(labels, logits, ignore=None, smoothing=0.0, z_loss=0.0, soft_cap=0.0):
    x = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    kept = labels != ignore if ignore is not None else torch.ones_like(labels, dtype=torch.bool)
    lse = torch.logsumexp(x, -1)
    at_label = x.gather(-1, torch.where(kept, labels, 0).long()[..., None])[..., 0]
    loss = lse - (1 - smoothing) * at_label
    if smoothing:
        loss = loss - smoothing * x.mean(-1)
    if z_loss:
        loss = loss + z_loss * lse**2
    return torch.where(kept, loss, 0)


def by_formula(labels, logits, dloss, dtype, **options):
    leaf = logits.to(dtype).requires_grad_()
    loss = formula(labels, leaf, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, dloss.to(dtype))[0]


def guarded(shape, dtype, offset, fill=math.nan):
    """A tensor off by `offset` elements from alignment, and the buffer that it is in."""
    size = math.prod(shape)
    buffer = torch.full((size + 2 * MARGIN,), fill, dtype=dtype, device=DEVICE)
    return buffer[MARGIN + offset :][:size].view(shape), buffer


def ours(library, labels, logits, dloss, offset=0, in_place=False, **options):
    """Loss and gradient; raises when something beside them was written."""
    (loss, a), (largest, b), (log_sum, c) = (
        guarded(labels.shape, torch.float32, 0) for _ in range(3)
    )
    launcher(library, FORWARD, [labels, logits], [loss, largest, log_sum], **options)()
    dlogits, d = guarded(logits.shape, logits.dtype, offset)
    if in_place:
        logits = dlogits.copy_(logits)
    inputs = [dloss, labels, logits, largest, log_sum]
    launcher(library, GRADIENT, inputs, [dlogits], **options)()
    for buffer, tensor in ((a, loss), (b, largest), (c, log_sum), (d, dlogits)):
        if int((~buffer.isnan()).sum()) > int((~tensor.isnan()).sum()):
            raise AssertionError("written beside an output")
    return loss, dlogits


def problem(name, labels, logits, dloss, actual, options):
    """What breaks the error rule: twice, thrice for gradients, the error of float32, and ulps."""
    wide = by_formula(labels, logits, dloss, torch.float64, **options)
    stock = by_formula(labels, logits, dloss, torch.float32, **options)
    text = ""
    for what, ratio, ulps, a, s, e in zip(
        ("loss", "gradient"), (2, 3), (4, 8), actual, stock, wide
    ):
        s = s.to(a.dtype).double()
        largest = float(e.abs().max()) if e.numel() else 0.0
        allowed = ratio * float((s - e).abs().max()) if e.numel() else 0.0
        allowed += ulps * torch.finfo(a.dtype).eps * largest
        error = float((a.double() - e).abs().max()) if e.numel() else 0.0
        if not error <= allowed:
            text += f"{name}: {what} off by {error:.2e}, {allowed:.2e} allowed\n"
    return text


def draw(tokens, classes, dtype, ignore=None, seed=0, offset=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (tokens,), generator=generator)
    if ignore is not None:
        labels[torch.rand(tokens, generator=generator) < 0.3] = ignore
    logits = guarded((tokens, classes), dtype, offset, 0)[0]
    logits.copy_(torch.randn(tokens, classes, generator=generator))
    return labels.to(DEVICE), logits, torch.randn(tokens, generator=generator).to(DEVICE)


def check(library):
    failures, count = "", 0
    sizes = [1, 2, 7, 16, 17, 31, 64, 100, 127, 1000, 2048, 2049, 4096, 4099]
    cases = list(itertools.product([1, 3, 70], sizes))
    cases += [(0, 5), (5, 32000), (3, 32769), (300, 32771), (2, 131073), (1, 1_000_003)]
    cases += [(5000, 2051), (5000, 8192)] * ON_GPU
    for dtype, (tokens, classes) in itertools.product((torch.float32, *HALVES), cases):
        for options in OPTIONS if classes < 5000 else OPTIONS[:2]:
            labels, logits, dloss = draw(tokens, classes, dtype, options.get("ignore"))
            name = f"{dtype} {tokens}x{classes} {options}"
            result = ours(library, labels, logits, dloss, **options)
            failures += problem(name, labels, logits, dloss, result, options)
            for other in (
                ours(library, labels, logits, dloss, **options),
                ours(library, labels.int(), logits, dloss, in_place=True, **options),
            ):
                if not all(torch.equal(a, b) for a, b in zip(result, other)):
                    failures += f"{name}: not the same bits, repeated or in place\n"
            count += 1
    # Unaligned: logits and gradient by the same and by different numbers of elements.
    for dtype, a, b in itertools.product((torch.float32, *HALVES), (1, 3), (0, 1, 3)):
        for classes in (5, 999, 5001):
            labels, logits, dloss = draw(6, classes, dtype, offset=a)
            result = ours(library, labels, logits, dloss, offset=b)
            failures += problem(f"unaligned {dtype} {classes}", labels, logits, dloss, result, {})
            count += 1
    failures += check_special(library)
    if ON_GPU:
        failures += check_out_of_range(library) + check_long(library)
    print(failures + f"{count} cases, {failures.count(chr(10))} failures")
    return bool(failures)


def check_special(library):
    """Infinities, NaN and large logits as PyTorch has them; ignored NaN rows as 0."""
    failures = ""
    inf, nan = math.inf, math.nan
    for dtype, classes in itertools.product((torch.float32, *HALVES), (5, 33, 3000, 40000)):
        x = torch.zeros(9, classes)
        x[0:2, :-1] = -inf
        x[1, 1] = 1
        x[2, 0] = -inf
        x[3] = -inf
        x[4, 0] = nan
        x[5, 0] = inf
        x[6] = -inf
        x[6, 0] = nan
        x[7] = torch.linspace(-1e4, 1e4, classes)
        x[8] = nan
        labels = torch.full((9,), classes - 1)
        labels[2] = 0
        labels[8] = -1
        x, labels = x.to(DEVICE, dtype), labels.to(DEVICE)
        leaf = x.float().requires_grad_()
        expected = F.cross_entropy(leaf, labels, reduction="none", ignore_index=-1)
        gradient = torch.autograd.grad(expected, leaf, torch.ones_like(expected))[0]
        gradient[8] = 0  # ignored; PyTorch has 0 * NaN
        actual = ours(library, labels, x, torch.ones(9, device=DEVICE), ignore=-1)
        for what, a, e in zip(("loss", "gradient"), actual, (expected.detach(), gradient)):
            if not torch.allclose(a.float(), e, 1e-5, 2 * torch.finfo(a.dtype).eps, True):
                failures += f"special {dtype} {classes}: {what}\n"
    return failures


def check_out_of_range(library):
    """On the GPU such a token is NaN, and no other."""
    failures = ""
    for classes, bad in itertools.product((5, 100, 5000), (-1, "classes", 2**40)):
        labels, logits, dloss = draw(6, classes, torch.bfloat16)
        good = ours(library, labels, logits, dloss)
        labels[3] = classes if bad == "classes" else bad
        for a, e in zip(ours(library, labels, logits, dloss), good):
            e = e.clone()
            e[3] = math.nan
            if not torch.equal(a.isnan(), e.isnan()) or not torch.equal(
                a.nan_to_num(), e.nan_to_num()
            ):
                failures += f"label {bad} of {classes}\n"
    return failures


def check_long(library):
    """More than 2^31 logits: the last rows are as if they were alone."""
    tokens, classes = 8200, 262_144
    logits = torch.randn(tokens, classes, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, classes, (tokens,), device=DEVICE)
    dloss = torch.randn(tokens, device=DEVICE)
    whole = ours(library, labels, logits, dloss)
    part = ours(library, labels[-300:], logits[-300:], dloss[-300:])
    same = all(torch.equal(w[-300:], p) for w, p in zip(whole, part))
    return "" if same else "more than 2^31 logits\n"


def contenders(library, tokens, classes):
    """Functions by name, as forward, gradient and both; the data exceeds the caches."""
    labels, logits = (
        torch.randint(0, classes, (tokens,), device=DEVICE),
        torch.randn(tokens, classes, device=DEVICE, dtype=torch.bfloat16),
    )
    dloss = torch.rand(tokens, device=DEVICE) + 0.5
    loss, largest, log_sum = (torch.empty(tokens, device=DEVICE) for _ in range(3))
    dlogits = torch.empty_like(logits)
    forward = launcher(library, FORWARD, [labels, logits], [loss, largest, log_sum])
    gradient = launcher(library, GRADIENT, [dloss, labels, logits, largest, log_sum], [dlogits])
    yield "ours", forward, gradient, lambda: (forward(), gradient())

    stock = lambda x: F.cross_entropy(x, labels, reduction="none")
    leaf = logits.detach().requires_grad_()
    for name, fn in (("torch", stock), ("torch.compile", compiled(stock))):

        def run_forward(fn=fn):
            with torch.no_grad():
                fn(leaf)

        def both(fn=fn):
            y = fn(leaf)
            torch.autograd.grad(y, leaf, dloss.to(y.dtype))

        try:
            y = fn(leaf)
            only = lambda y=y: torch.autograd.grad(y, leaf, dloss.to(y.dtype), retain_graph=True)
            yield name, run_forward, only, both
            del y, only
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Liger
    except ImportError:
        return

    # Liger has the gradient of a mean computed in its forward, in the memory of the logits:
    # one call is the comparison that is fairest to it.
    def liger():
        Liger.apply(
            logits.detach().requires_grad_(), labels, None, -100, 0.0, 0.0, "mean", None, False
        )

    yield "liger (mean)", None, None, liger


def measurements(library, measure):
    """Yields tokens, classes, contender, what, passes over the logits, milliseconds."""
    for tokens, classes in ((8192, 4096), (8192, 32768), (4096, 131072)):
        for name, *functions in contenders(library, tokens, classes):
            for what, passes, fn in zip(("forward", "gradient", "both"), (1, 2, 3), functions):
                if fn is not None:
                    yield tokens, classes, name, what, passes, measure(fn)
        torch.cuda.empty_cache()


def bench(library, path, wait):
    if wait:
        for _ in measurements(library, once):
            pass
        await_turn()
    from_to = torch.empty(2, 2**30, dtype=torch.uint8, device=DEVICE)
    copy = from_to.numel() / milliseconds(lambda: from_to[1].copy_(from_to[0])) / 1e9  # TB/s
    rows = []
    for tokens, classes, name, what, passes, ms in measurements(library, milliseconds):
        size = 2 * tokens * classes
        floor = passes * size / copy / 1e9
        rows.append({"tokens": tokens, "classes": classes, "contender": name, "what": what})
        rows[-1].update(ms=ms, TBps=passes * size / ms / 1e9, share_of_floor=floor / ms)
        print(f"{tokens}x{classes} {name:14} {what:9} {ms:7.3f} ms {floor / ms:6.1%}", flush=True)
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw"
    report = {
        "benchmark": "cross_entropy, bfloat16, against PyTorch",
        "gpu": subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_TBps": copy,
        "rows": rows,
    }
    pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n")


HALVES = (torch.float16, torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--bench", metavar="OUT.json")
    parser.add_argument("--wait", action="store_true", help="compile, then wait for a line")
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(arguments.library))
    library.tf_ops_run.restype = ctypes.c_char_p
    failed = arguments.check and check(library)
    if arguments.bench:
        bench(library, arguments.bench, arguments.wait)
    return failed


if __name__ == "__main__":
    sys.exit(main())
