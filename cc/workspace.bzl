# SPDX-License-Identifier: Apache-2.0
"""@tf: an installed TensorFlow as Bazel sees it. Nothing is fetched from a network."""

_PROBE = """
import importlib.metadata as m, importlib.util as u, sys
print(u.find_spec("tensorflow").submodule_search_locations[0], sys.executable,
      m.version(m.packages_distributions()["tensorflow"][0]), sep="\\n")
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])
exports_files(["python", "nvcc"])
cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h", "include/**/*.inc", "include/Eigen/**", "include/unsupported/**"],
                exclude = ["include/external/llvm-project/**"]),
    includes = ["include", "include/external/highwayhash", "include/external/farmhash_archive/src"],
    defines = ["_GLIBCXX_USE_CXX11_ABI=1", "EIGEN_MAX_ALIGN_BYTES=64"],
)
cc_library(name = "version", defines = ['TF_OPS_TENSORFLOW_VERSION=\\\\"{version}\\\\"'])
cc_library(
    name = "tf",
    linkopts = ["-L{tf}", "-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2"],
)
cc_import(name = "cudart", static_library = "libcudart_static.a")
"""

def _tf_configure(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or str(ctx.which("python3"))
    probe = ctx.execute([python, "-c", _PROBE])
    if probe.return_code:
        fail("PYTHON_BIN_PATH (%s) has no TensorFlow: %s" % (python, probe.stderr))
    tf, python, version = probe.stdout.strip().split("\n")
    ctx.symlink(tf + "/include", "include")
    ctx.file("python", '#!/bin/sh\nexec %s "$@"\n' % python, executable = True)

    # nvcc is used with --define cuda=1 only.
    home = ctx.os.environ.get("CUDA_HOME")
    nvcc = home + "/bin/nvcc" if home else str(ctx.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    ctx.file("nvcc", '#!/bin/sh\nexec %s "$@"\n' % nvcc, executable = True)
    top = ctx.execute(["sh", "-c", nvcc + " --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#$ TOP=//p'"])
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        archive = ctx.path(top.stdout.strip() + "/" + folder + "/libcudart_static.a")
        if top.stdout.strip() and archive.exists:
            ctx.symlink(archive, "libcudart_static.a")
            break
    ctx.file("BUILD", _BUILD.format(tf = tf, version = version))

tf_configure = repository_rule(
    implementation = _tf_configure,
    environ = ["PYTHON_BIN_PATH", "CUDA_HOME", "PATH"],
    local = True,
)

def _stand_in(ctx):
    ctx.file("BUILD", "".join([
        'filegroup(name = "%s", visibility = ["//visibility:public"])\n' % name
        for name in ctx.attr.files
    ]))
    if ctx.attr.rules:
        ctx.file(ctx.attr.language + "/BUILD")
        ctx.file(ctx.attr.language + "/defs.bzl", "".join([
            "{0}_{1} = native.{0}_{1}\n".format(ctx.attr.language, rule)
            for rule in ctx.attr.rules
        ]))

stand_in = repository_rule(
    implementation = _stand_in,
    attrs = {
        "files": attr.string_list(),
        "language": attr.string(),
        "rules": attr.string_list(),
    },
)

def tf_ops_workspace():
    """Declares @tf, and what Bazel 4 would fetch for a C++ build if it were not declared."""
    tf_configure(name = "tf")
    stand_in(name = "remote_coverage_tools", files = ["coverage_report_generator", "lcov_merger"])
    stand_in(name = "rules_cc", language = "cc", rules = [
        "binary", "import", "library", "test", "toolchain", "toolchain_suite",
    ])
    stand_in(name = "rules_java", language = "java", rules = [
        "binary", "import", "library", "package_configuration", "plugin", "runtime", "test",
        "toolchain",
    ])
