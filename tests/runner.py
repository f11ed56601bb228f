# SPDX-License-Identifier: Apache-2.0
"""Runs the launchers without TensorFlow, for sanitizers and profilers.

    python tests/runner.py --device gpu [--list] [--repeat N] [PART_OF_A_CASE_NAME ...]

Every buffer is an allocation of its own of exactly the right size, so that compute-sanitizer
sees an access beside it; within a workspace guards do (TF_OPS_DEBUG_MEMORY=0 turns them off).
Outputs and workspace start as NaN. On a GPU the outputs are
compared with those of the CPU launchers. --plant runs a faulty kernel instead, which shows that
the sanitizer in use catches that fault.
"""

import argparse
import ctypes
import os
import pathlib
import sys
import time

import ml_dtypes  # noqa: F401  gives NumPy bfloat16
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# tf_ops::DType
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5, "bool": 6, "uint8": 7}


class TensorView(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("dims", ctypes.c_int64 * 8),
    ]


def view(array, address=None):
    """The TensorView of an array, or of its copy at `address`."""
    address = array.ctypes.data if address is None else address
    return TensorView(address, DTYPES[array.dtype.name], array.ndim, array.shape)


class Kernels:
    """The ops of libtf_ops_kernels.so by name, on the CPU or on the first GPU."""

    def __init__(self):
        path = os.environ.get("TF_OPS_KERNELS", str(ROOT / "build" / "libtf_ops_kernels.so"))
        self.library = ctypes.CDLL(path)
        self.library.tf_ops_run.restype = ctypes.c_char_p
        self.library.tf_ops_workspace_bytes.restype = ctypes.c_int64

    def __call__(self, op, inputs, attributes, outputs, gpu=None, repeat=1):
        """Runs `op`; `outputs` are arrays that are written to. `gpu`: None for the CPU."""
        name, on_gpu = op.encode(), int(gpu is not None)
        text = (ctypes.c_char_p * max(1, len(attributes)))(
            *(str(int(a) if isinstance(a, bool) else a).encode() for a in attributes)
        )
        views = (TensorView * len(inputs))(*map(view, inputs))
        size = self.library.tf_ops_workspace_bytes(name, views, len(inputs), text, on_gpu)
        tensors = [*inputs, *outputs] + [np.empty(max(size, 0), np.uint8)] * (size >= 0)
        for tensor in tensors[len(inputs) :]:
            ctypes.memset(tensor.ctypes.data, 0xFF, tensor.nbytes)
        addresses = [gpu.copy_of(t) for t in tensors] if gpu else [None] * len(tensors)
        views = (TensorView * len(tensors))(*map(view, tensors, addresses))
        try:
            for _ in range(repeat):
                error = self.library.tf_ops_run(
                    name, views, len(tensors), len(inputs), text, on_gpu, None
                )
                if error:
                    raise RuntimeError(f"{op}: {error.decode()}")
            if gpu:
                gpu.synchronize()
                for array, address in zip(outputs, addresses[len(inputs) :]):
                    gpu.copy_back(array, address)
        finally:
            if gpu:
                gpu.free(addresses)


class FirstGpu:
    """Memory of the first GPU, by the driver's own calls."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def check(self, error):
        if error:
            raise RuntimeError(f"CUDA driver error {error}")

    def copy_of(self, array):
        if array.nbytes == 0:
            return 0
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes)))
        data = ctypes.c_void_p(array.ctypes.data)
        self.check(self.cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(array.nbytes)))
        return address.value

    def copy_back(self, array, address):
        if array.nbytes:
            data, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
            self.check(self.cuda.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), size))

    def synchronize(self):
        self.check(self.cuda.cuCtxSynchronize())

    def free(self, addresses):
        for address in filter(None, addresses):
            self.cuda.cuMemFree_v2(ctypes.c_uint64(address))


def plant(fault, gpu):
    """Runs the kernel of planted_faults.cu that has this fault."""
    library = ctypes.CDLL(str(ROOT / "build" / "tests" / "planted_faults.so"))
    array = np.zeros(256, np.float32)
    address = gpu.copy_of(array)
    library[fault](ctypes.c_uint64(address), ctypes.c_int(array.size))
    gpu.synchronize()


def main():
    from tests.runner_cases import cases

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--list", action="store_true", help="print the cases' names only")
    parser.add_argument("--repeat", type=int, default=1, help="launches per case")
    parser.add_argument("--plant", choices=["out_of_bounds", "race", "uninitialized", "barrier"])
    parser.add_argument("names", nargs="*", help="run the cases whose names contain one of these")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_OPS_DEBUG_MEMORY", "1")
    gpu = FirstGpu() if arguments.device == "gpu" else None
    if arguments.plant:
        return plant(arguments.plant, gpu)
    kernels, failures, start, count = Kernels(), 0, time.time(), 0
    for name, run in cases():
        if arguments.names and not any(part in name for part in arguments.names):
            continue
        count += 1
        if arguments.list:
            print(name)
            continue
        problem = run(kernels, gpu, arguments.repeat)
        failures += bool(problem)
        print(f"{'FAILED' if problem else 'ok':7}{name} {problem or ''}", flush=True)
    if count == 0:
        parser.error("no case has such a name; --list prints them")
    print(f"{count} cases, {failures} failures, {time.time() - start:.0f} s")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
