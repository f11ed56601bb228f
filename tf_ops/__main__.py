# SPDX-License-Identifier: Apache-2.0
"""python -m tf_ops: info, what is loaded and serves what; bench; tune; new, an op of your own."""

import argparse
import importlib
import pathlib
import re
import sys

import tensorflow as tf
from tensorflow.python.framework import kernels, ops

import tf_ops
from tf_ops import _bench, _library, _scaffold, _tune


def kernels_of(op):
    """The device types that `op` has kernels for; those of XLA show once XLA was used."""
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}


def describe_gpus(cuda):
    """A line per GPU, and one that says what keeps the GPUs from being used."""
    gpus = tf.config.list_physical_devices("GPU")
    lines = []
    for gpu in gpus:
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        lines.append(f"{details.get('device_name', gpu.name)}, compute capability {capability}")
    version = pathlib.Path("/proc/driver/nvidia/version")
    driver = re.search(r"\s(\d+)\.\d\S*", version.read_text()) if version.exists() else None
    if driver:
        lines.append(f"driver {driver[0].strip()}")
    if driver and cuda.startswith("13.") and int(driver[1]) < 580:
        lines.append(f"the driver is too old for CUDA {cuda}: update it to 580 or later")
    if gpus and not cuda:
        lines.append("this build has no GPU kernels: install nvcc and run make")
    return lines or ["none"]


def info(_):
    """Prints versions, devices, and for each op what serves it."""
    built = _library.build_info()
    print(f"tf_ops      {tf_ops.__version__}, {_library.PATH}")
    print(f"TensorFlow  {tf.__version__}, built for {built['tensorflow']}")
    print(f"CPU         {_library.instruction_set()}")
    cuda = f"{built['cuda']} for {built['archs']}" if built["cuda"] else "not in this build"
    print(f"CUDA        {cuda}")
    for i, line in enumerate(describe_gpus(built["cuda"])):
        print(f"{'' if i else 'GPU':12}{line}")

    tf.function(lambda x: x + 1, jit_compile=True)(0.0)
    # A TensorFlow for the CPU only knows no XLA for GPUs.
    devices = [d for d in ["CPU", "GPU", "XLA_CPU_JIT", "XLA_GPU_JIT"] if d in kernels_of("AddV2")]
    print(f"\n{'op':42}", *(f"{column:12}" for column in [*devices, "gradient"]))
    for op in tf_ops.list_ops():
        served = [device in kernels_of(op) for device in devices]
        served.append(op in ops.gradient_registry.list())
        print(f"{op:42}", *(f"{'yes' if yes else '-':12}" for yes in served))


def scaffold(arguments):
    """Writes an op that works, to be changed into another; with a test and a benchmark."""
    name, folder = arguments.name, arguments.package
    try:
        files = _scaffold.write_op(name, folder)
    except ValueError as error:
        raise SystemExit(f"python -m tf_ops new: {error}") from error
    print(*(f"  {folder / file}" for file in files), sep="\n")
    print(f"\n{name} computes scale * x * x so far. To build and test it:\n")
    checkout = _library.PATH.parents[1]
    path = f"PYTHONPATH={checkout} " if (checkout / "cc").is_dir() else ""
    print(f"  {path}make -C {folder} test OP={name} PYTHON={sys.executable}")


def bench(arguments):
    """Measures ops beside stock TensorFlow, as a graph and under XLA."""
    there = {path.stem[6:] for path in pathlib.Path("benchmarks").glob("bench_*.py")}
    if not there:
        raise SystemExit("no benchmarks/bench_*.py here: call this in a checkout or a package")
    names, json = arguments.names or sorted(there), arguments.json
    unknown = set(names) - there
    if unknown:
        raise SystemExit(f"no {', '.join(unknown)} among {', '.join(sorted(there))}")
    if json and not json.is_dir() and len(names) > 1:
        raise SystemExit(f"--json {json} must be a folder, for there are several benchmarks")
    for name in names:
        cases = importlib.import_module(f"benchmarks.bench_{name}").cases()
        _bench.run(name, cases, arguments)


def tune(arguments):
    """Measures the configurations of an op's kernels at a shape, and keeps the quickest."""
    _tune.run(arguments)


def compute_capability():
    """That of the first GPU, 90 for 9.0, or None."""
    for gpu in tf.config.list_physical_devices("GPU"):
        major, minor = tf.config.experimental.get_device_details(gpu)["compute_capability"]
        return 10 * major + minor
    return None


def info_attention(arguments):
    """Prints which GPU kernels serve dot_product_attention, and why not those for Hopper."""
    a = arguments
    capability = compute_capability() if a.sm is None else a.sm
    if capability is None:
        sys.exit("There is no GPU here. Name a compute capability: --sm 90")
    archs = _library.build_info()["archs"]
    if capability == 90 and "90a" not in archs:
        print(f"This build is for {archs or 'the CPU only'}. One for 90a would use:")
    seq_k, kv_heads = a.seq_k or a.seq, a.kv_heads or a.heads
    if capability < 80:
        sys.exit("The kernels want a compute capability of 8.0 or later.")
    if max(a.head_dim, a.value_dim or 0) > 256:
        sys.exit("head_dim and value_dim are at most 256.")
    if a.heads % kv_heads:
        sys.exit(f"{a.heads} heads are no multiple of {kv_heads} key heads.")
    sizes = [a.batch, a.heads, kv_heads, a.seq, seq_k, a.head_dim, a.value_dim or a.head_dim]
    features = [a.bias, a.mask, a.soft_cap, a.dropout, a.padding_mask]
    for name, gradient in (("forward", False), ("gradient", True)):
        kernels, why = _library.attention_kernels(a.dtype, gradient, capability, sizes, features)
        print(f"{name:9} {kernels}{': ' * bool(why)}{why}")


def main():
    parser = argparse.ArgumentParser(prog="python -m tf_ops")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("info", help=info.__doc__)
    command.set_defaults(run=info)
    command = command.add_subparsers().add_parser(
        "attention",
        help=info_attention.__doc__,
        epilog="Causal masks, windows, lengths and sinks change nothing.",
    )
    command.set_defaults(run=info_attention)
    dtypes = ["bfloat16", "float16", "float32"]
    command.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    for name, default, text in (
        ("batch", 1, None),
        ("heads", 8, "of the query"),
        ("kv-heads", None, "default: as the query"),
        ("seq", 4096, "length of the query"),
        ("seq-k", None, "default: as the query"),
        ("head-dim", 128, None),
        ("value-dim", None, "default: head_dim"),
        ("sm", None, "compute capability, such as 90; default: this GPU's"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, help=text)
    for name, text in (
        ("bias", None),
        ("mask", "that differs between heads or queries"),
        ("padding-mask", "the same for all heads and queries"),
        ("soft-cap", None),
        ("dropout", None),
    ):
        command.add_argument(f"--{name}", action="store_true", help=text)
    command = commands.add_parser("bench", help=bench.__doc__)
    command.set_defaults(run=bench)
    command.add_argument("names", nargs="*", metavar="OP", help="a family; all by default")
    _bench.add_options(command)
    command = commands.add_parser("tune", help=tune.__doc__)
    command.set_defaults(run=tune)
    command.add_argument("op", choices=sorted(_tune.SIZES))
    command.add_argument("--shape", default="", help="such as tokens=4096,classes=32768")
    command.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    command = commands.add_parser("new", help=scaffold.__doc__)
    command.set_defaults(run=scaffold)
    command.add_argument("name", help="of the op and its function, such as scaled_square")
    command.add_argument(
        "--package",
        type=pathlib.Path,
        default=pathlib.Path(),
        metavar="FOLDER",
        help="of your package, made if need be; by default this one, or a checkout of tf_ops",
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
