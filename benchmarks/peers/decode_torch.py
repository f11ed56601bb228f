# SPDX-License-Identifier: Apache-2.0
"""Attention of few queries to a long cache beside PyTorch, without TensorFlow.

    python3 benchmarks/peers/decode_torch.py --check           # values against float64
    python3 benchmarks/peers/decode_torch.py --bench OUT.json  # against SDPA, caches cold

Calls build/libtf_ops_kernels.so on PyTorch's tensors. Without a GPU --check runs the CPU
launchers.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
import time

import torch
from attention_torch import LIBRARY, Guarded, Library, machine

PAGED, CONTIGUOUS = b"TfOps>PagedAttention", b"TfOps>DotProductAttention"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem; page_size 0 is a contiguous cache."""

    dtype: torch.dtype = torch.bfloat16
    seq_q: int = 1
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    page_size: int = 16
    lengths: tuple = (0, 1, 17, 300)
    window: int = -1
    soft_cap: float = 0.0
    sink: bool = False
    scale: float | None = None
    unaligned: int = 0
    causal: bool = True  # of a contiguous cache
    bottom_right: bool = True

    @property
    def name(self):
        fields = dataclasses.fields(self)
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields]
        return " ".join(c for c, f in zip(changed, fields) if getattr(self, f.name) != f.default)


def formula(case, q, k, v, sink, length, dtype):
    """Output and lse of one batch row from its dense keys and values."""
    group = case.heads // case.kv_heads
    q, k, v = (t.to(dtype) for t in (q, k[:length], v[:length]))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    x = torch.einsum("ihd,jhd->hij", q, k) * scale
    if case.soft_cap:
        x = case.soft_cap * torch.tanh(x / case.soft_cap)
    i = torch.arange(case.seq_q, device=x.device)[:, None]
    j = torch.arange(length, device=x.device)
    at = i + (length - case.seq_q if case.bottom_right else 0)
    seen = (j <= at) if case.causal else torch.ones_like(j <= at)
    if case.window >= 0:
        seen = seen & (j >= at - case.window)
    x = torch.where(seen, x, -math.inf)
    if sink is not None:
        x = torch.cat([x, sink.to(dtype).view(-1, 1, 1).expand(-1, case.seq_q, 1)], 2)
    lse = torch.logsumexp(x, 2) if x.shape[2] else x.new_full(x.shape[:2], -math.inf)
    p = torch.exp(x - torch.where(lse == -math.inf, 0, lse)[..., None])[..., :length]
    # What is not seen may be NaN.
    v = torch.where(seen.any(0)[:, None, None], v, 0)
    return torch.einsum("hij,jhd->ihd", torch.where(seen, p, 0), v), lse


class Check:
    def __init__(self, library):
        self.library, self.device = library, library.device
        self.count = self.failures = 0

    def expect(self, ok, case, what):
        self.count += 1
        if not bool(ok):
            self.failures += 1
            print(f"FAILED {what}: {case.name}", flush=True)

    def tensors(self, case, make, poison=math.nan):
        """Query, keys, values, table, lengths, sink, and each row's dense keys and values."""
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape, dtype=case.dtype):
            return torch.randn(shape, generator=generator).to(dtype).to(self.device)

        batch, capacity = len(case.lengths), max(*case.lengths, 1) + 3
        size = case.page_size or capacity
        per_row = -(-capacity // size)
        query = make.like(normal(batch, case.seq_q, case.heads, case.head_dim))
        dense = [
            [normal(max(n, 0), case.kv_heads, d) for n in case.lengths]
            for d in (case.head_dim, case.value_dim)
        ]
        pages = batch * per_row + 2
        order = torch.randperm(pages, generator=generator).tolist()
        if not case.page_size:
            order, pages = list(range(batch)), batch
        caches = []
        for rows, dim in zip(dense, (case.head_dim, case.value_dim)):
            cache = make((pages, size, case.kv_heads, dim), case.dtype)
            cache.fill_(poison)
            for b, row in enumerate(rows):
                for j in range(0, len(row), size):
                    part = row[j : j + size]
                    cache[order[b * per_row + j // size], : len(part)] = part
            caches.append(cache)
        table = torch.full((batch, per_row), 2**31 - 1, dtype=torch.int32)
        for b, n in enumerate(case.lengths):
            for j in range(-(-max(n, 0) // size)):
                table[b, j] = order[b * per_row + j]
        table = make.like(table.to(self.device))
        lengths = make.like(torch.tensor(case.lengths, dtype=torch.int32, device=self.device))
        sink = make.like(normal(case.heads, dtype=torch.float32)) if case.sink else None
        return query, *caches, table, lengths, sink, dense

    def run(self, case, tensors, make):
        """[output] or, of a contiguous cache, [output, lse]."""
        query, keys, values, table, lengths, sink, _ = tensors
        absent = torch.empty(0, dtype=case.dtype, device=self.device)
        sink = absent.float() if sink is None else sink
        scale = repr(case.head_dim**-0.5 if case.scale is None else case.scale).encode()
        attributes = [scale, repr(case.soft_cap).encode()]
        batch = query.shape[0]
        outputs = [make((batch, case.seq_q, case.heads, case.value_dim), case.dtype)]
        if case.page_size:
            op, inputs = PAGED, [query, keys, values, table, lengths, sink]
            attributes += [b"%d" % case.window]
        else:
            op = CONTIGUOUS
            inputs = [query, keys, values, absent, absent.bool(), absent.int(), lengths, sink]
            inputs += [absent.long()]
            attributes += [b"%d" % case.causal, b"%d" % case.bottom_right]
            attributes += [b"%d" % case.window, b"-1", b"0"]
            outputs += [make((batch, case.heads, case.seq_q), torch.float32)]
        workspace = self.library.workspace(op, inputs, attributes)
        self.library.call(op, inputs, attributes, [*outputs, workspace])()
        return outputs

    def check(self, case):
        make = Guarded(self.device, case.unaligned)
        tensors = self.tensors(case, make)
        copies = [t.clone() for t in tensors[:5]]
        results = self.run(case, tensors, make)
        query, sink, (keys, values) = tensors[0], tensors[5], tensors[6]
        rows = list(zip(query, keys, values, [max(n, 0) for n in case.lengths]))
        stack = lambda dtype: [
            torch.stack(x)
            for x in zip(*(formula(case, q, k, v, sink, n, dtype) for q, k, v, n in rows))
        ]
        wanted, stock = stack(torch.float64), stack(case.dtype)
        for name, ours, ref, other in zip(("output", "lse"), results, wanted, stock):
            if ref.numel() == 0:
                continue
            finite = ref > -math.inf
            self.expect(((ours == -math.inf) == ~finite).all(), case, f"{name} infinite")
            ours, ref, other = (t[finite].double() for t in (ours, ref, other))
            if ref.numel() == 0:
                continue
            top = float(ref.abs().max())
            epsilon = torch.finfo(torch.float32 if name == "lse" else case.dtype).eps
            ulp = epsilon * 2.0 ** math.floor(math.log2(top)) if top else 0.0
            limit = 2 * float((other - ref).abs().nan_to_num(0).max()) + 4 * ulp
            error = float((ours - ref).abs().max())
            self.expect(error <= limit, case, f"{name} error {error:.3g} > {limit:.3g}")
        for b, n in enumerate(case.lengths):
            blind = max(0, case.seq_q - max(n, 0)) if case.causal and case.bottom_right else 0
            blind = case.seq_q if n <= 0 else blind
            self.expect((results[0][b, :blind] == 0).all(), case, "a blind query is not 0")
        for a, b in zip(results, self.run(case, tensors, make)):
            self.expect(torch.equal(a, b), case, "differs when repeated")
        for a, b in zip(tensors[:5], copies):
            same = torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if a.is_floating_point() else 0
            self.expect(same or torch.equal(a, b), case, "an input was changed")
        self.expect(make.intact(), case, "written outside a tensor")

    def check_hidden_values(self, dtype, page_size):
        """NaN and Inf reach the queries that see them, and no other."""
        case = Case(dtype=dtype, seq_q=3, heads=8, kv_heads=2, lengths=(41, 90), window=37)
        case = dataclasses.replace(case, page_size=page_size)
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        clean = self.run(case, tensors, make)[0]
        _, keys, values, table, _, _, _ = tensors

        def slot(b, j):
            return (int(table[b, j // page_size]), j % page_size) if page_size else (b, j)

        # The last query sees keys n - 38 to n - 1, the one before it those to n - 2.
        for b, n in enumerate(case.lengths):
            values[slot(b, n - 1)] = math.inf
            values[slot(b, n - 40)] = math.nan
            keys[slot(b, n - 40)] = math.nan
        output = self.run(case, tensors, make)[0]
        self.expect((output[:, 2] == math.inf).all(), case, "a visible inf")
        self.expect(output[:, 0].isnan().all(), case, "a visible NaN")
        self.expect(torch.equal(output[:, 1], clean[:, 1]), case, "what is hidden was seen")

    def check_bad_page(self, dtype, entry):
        """A used entry that is no page: NaN for that row, on the CPU an error."""
        case = Case(dtype=dtype, heads=8, kv_heads=2, lengths=(700, 700, 700))
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        clean = self.run(case, tensors, make)[0]
        tensors[3][1, 30] = entry
        try:
            output = self.run(case, tensors, make)[0]
        except RuntimeError as error:
            ok = self.device == "cpu" and f"page_table[1, 30] is {entry}" in str(error)
            self.expect(ok, case, f"error: {error}")
            return
        self.expect(self.device != "cpu", case, "no error for a bad page")
        self.expect(output[1].isnan().all(), case, "a bad page did not give NaN")
        self.expect(torch.equal(output[::2], clean[::2]), case, "a bad page in another row")

    def check_shared_page(self, dtype):
        """Rows that share all pages, and queries, agree."""
        case = Case(dtype=dtype, heads=8, kv_heads=2, lengths=(700, 700))
        make = Guarded(self.device, 0)
        tensors = self.tensors(case, make)
        tensors[0][1] = tensors[0][0]
        tensors[3][1] = tensors[3][0]
        output = self.run(case, tensors, make)[0]
        self.expect(torch.equal(output[0], output[1]), case, "rows that share pages differ")


def cases(contiguous):
    edges = (0, 1, 15, 16, 17, 63, 64, 65, 129, 1000)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        base = Case(dtype=dtype, lengths=edges)
        sizes = [1, 16, 17, 128, 4096] + [0] * contiguous
        for size, seq_q in itertools.product(sizes, (1, 3)):
            yield dataclasses.replace(base, page_size=size, seq_q=seq_q)
        for size in [16] + [0] * contiguous:
            sized = dataclasses.replace(base, page_size=size)
            for group, seq_q in itertools.product((1, 3, 4, 8, 71), (1, 2)):
                yield dataclasses.replace(
                    sized, heads=2 * group, kv_heads=2, seq_q=seq_q, head_dim=128, value_dim=128
                )
            dims = (64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (72, 40), (40, 200)
            for head_dim, value_dim in (*dims, (59, 59), (1, 1), (203, 111)):
                yield dataclasses.replace(sized, head_dim=head_dim, value_dim=value_dim, seq_q=2)
            for window, seq_q in itertools.product((0, 1, 20, 100), (1, 5)):
                yield dataclasses.replace(sized, window=window, seq_q=seq_q, kv_heads=2)
            yield dataclasses.replace(sized, soft_cap=2.0, sink=True)
            yield dataclasses.replace(sized, soft_cap=2.0, sink=True, window=30, seq_q=3)
            yield dataclasses.replace(sized, sink=True, seq_q=3)
            yield dataclasses.replace(sized, scale=-0.5)
            for unaligned in (1, 4):
                yield dataclasses.replace(sized, unaligned=unaligned, seq_q=2)
            yield dataclasses.replace(sized, lengths=(5000, 3, 70000))
            yield dataclasses.replace(sized, lengths=(-5, 40, 300), kv_heads=2)
            yield dataclasses.replace(sized, lengths=tuple(range(301)), heads=8, kv_heads=2)
        if contiguous:
            for causal, bottom_right in ((False, False), (True, False)):
                yield dataclasses.replace(
                    base, page_size=0, causal=causal, bottom_right=bottom_right, seq_q=4
                )


def run_checks(library, contiguous, only):
    check, start = Check(library), time.time()
    for case in cases(contiguous):
        if only and only not in case.name:
            continue
        try:
            check.check(case)
        except RuntimeError as error:
            check.expect(False, case, str(error).splitlines()[0])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for page_size in [1, 16] + [0] * contiguous:
            check.check_hidden_values(dtype, page_size)
        for entry in (-1, 2**31 - 1, -(2**31)):
            check.check_bad_page(dtype, entry)
        check.check_shared_page(dtype)
    print(f"{check.count} checks, {check.failures} failures, {time.time() - start:.0f} s")
    return not check.failures


def seconds(function, calls):
    """Per call, of `calls` in a row: function(0), function(1), ... on inputs of their own."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000 + 60_000 * calls)  # so that launches are there when it is over
    begin.record()
    for n in range(calls):
        function(n)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def contenders(library, sizes, contiguous):
    """{name: function of the number of the call}; the inputs exceed the cache many times."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, seq, heads, kv_heads, dim = sizes
    cache_bytes = 4 * batch * seq * kv_heads * dim
    copies = max(2, min(32, int(1e9 / cache_bytes)))

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    caches = [[normal(batch, seq, kv_heads, dim) for _ in range(2)] for _ in range(copies)]
    query, output = normal(batch, 1, heads, dim), normal(batch, 1, heads, dim)
    lengths = torch.full((batch,), seq, dtype=torch.int32, device="cuda")
    none = torch.empty(0, device="cuda")
    scale = repr(dim**-0.5).encode()
    result = {}

    def rotate(calls):
        return lambda n: calls[n % len(calls)]()

    for page_size in (16, 1, seq):
        pages = batch * seq // page_size
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
        calls = []
        for keys, values in caches:
            shape = pages, page_size, kv_heads, dim
            inputs = [query, keys.view(shape), values.view(shape), table, lengths, none]
            attributes = [scale, b"0", b"-1"]
            workspace = library.workspace(PAGED, inputs, attributes)
            calls.append(library.call(PAGED, inputs, attributes, [output, workspace]))
        result[f"paged {page_size}"] = rotate(calls)
    if contiguous:
        calls, lse = [], torch.empty(batch, heads, 1, device="cuda")
        for keys, values in caches:
            inputs = [query, keys, values, none.bfloat16(), none.bool(), none.int(), lengths, none]
            inputs += [none.long()]
            attributes = [scale, b"0", b"1", b"1", b"-1", b"-1", b"0"]
            workspace = library.workspace(CONTIGUOUS, inputs, attributes)
            calls.append(library.call(CONTIGUOUS, inputs, attributes, [output, lse, workspace]))
        result["contiguous"] = rotate(calls)
    heads_first = query.transpose(1, 2).contiguous()
    views = [[t.view(batch, kv_heads, seq, dim) for t in cache] for cache in caches]
    for name, backend in (
        ("sdpa", None),
        ("sdpa flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
    ):

        def attend(n, backend=backend):
            keys, values = views[n % copies]
            call = lambda: torch.nn.functional.scaled_dot_product_attention(
                heads_first, keys, values, enable_gqa=heads != kv_heads
            )
            if backend is None:
                return call()
            with sdpa_kernel(backend):
                return call()

        try:
            with torch.no_grad():
                attend(0)
        except RuntimeError as error:
            print(f"    {name}: {str(error).splitlines()[0]}")
            continue
        result[name] = attend
    return result, cache_bytes


def run_bench(library, path, contiguous):
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = max(2 * source.numel() / seconds(lambda _: target.copy_(source), 10) for _ in range(3))
    source = target = None
    print(f"copy {copy / 1e12:.2f} TB/s")
    rows = []
    shapes = [(16, 8192, 32, 8, 128), (1, 8192, 32, 8, 128), (64, 2048, 32, 8, 128)]
    shapes += [(1, 1024, 32, 8, 128), (1, 131072, 32, 8, 128), (20, 4096, 32, 8, 128)]
    shapes += [(16, 8192, 8, 8, 128), (16, 8192, 32, 8, 64), (16, 4096, 16, 4, 256)]
    shapes += [(16, 8192, 16, 1, 128), (8, 8192, 64, 8, 128)]
    for sizes in shapes:
        print("batch {} keys {} heads {}:{} dim {}".format(*sizes), flush=True)
        functions, cache_bytes = contenders(library, sizes, contiguous)
        times = {name: [] for name in functions}
        with torch.no_grad():
            for _ in range(9):
                for name, function in functions.items():
                    times[name].append(seconds(function, 64))
        for name, samples in times.items():
            t = statistics.median(samples)
            row = dict(zip(("batch", "keys", "heads", "kv_heads", "dim"), sizes))
            row |= {"contender": name, "us": t * 1e6, "TB/s": cache_bytes / t / 1e12}
            row["share_of_copy"] = cache_bytes / t / copy
            rows.append(row)
            figures = row["us"], row["TB/s"], row["share_of_copy"]
            print("  {:12} {:8.1f} us {:6.2f} TB/s {:6.2f} of copy".format(name, *figures))
        del functions
        torch.cuda.empty_cache()
    result = {"machine": machine(), "dtype": "bfloat16", "copy_TB/s": copy / 1e12, "decode": rows}
    pathlib.Path(path).write_text(json.dumps(result, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="checks whose description contains this")
    parser.add_argument("--paged-only", action="store_true", help="leave contiguous caches out")
    parser.add_argument("--bench", metavar="OUT.json")
    parser.add_argument("--library", default=LIBRARY)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    library = Library(arguments.library, "cuda" if cuda else "cpu", int(cuda))
    contiguous = not arguments.paged_only
    ok = not arguments.check or run_checks(library, contiguous, arguments.only)
    if arguments.bench:
        run_bench(library, arguments.bench, contiguous)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
