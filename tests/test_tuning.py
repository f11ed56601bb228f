# SPDX-License-Identifier: Apache-2.0
"""What is measured is right, kept, shared and used."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_ops
import tf_ops.__main__
from tf_ops import tuning
from tf_ops.benchmarking import with_gradients

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of choices for each test, of which nothing stays."""
    monkeypatch.setenv("TF_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TF_OPS_AUTOTUNE", raising=False)
    monkeypatch.setattr(tuning, "_SECONDS", 1e-4)
    monkeypatch.setattr(tuning, "_COLD_BYTES", 1 << 20)
    tuning.load()
    yield tmp_path
    monkeypatch.undo()
    tuning.load()


def normalization():
    x = tf.random.stateless_normal([2, 32, 64], [1, 2])
    fn = lambda x, scale: tf_ops.group_normalization(x, scale, groups=16)
    return with_gradients(fn), [x, tf.ones([64]), tf.random.stateless_normal(x.shape, [3, 4])]


def decode():
    q, k, v = (
        tf.random.stateless_normal([2, *s, 64], [5, i])
        for i, s in enumerate([(1, 4), (2048, 2), (2048, 2)])
    )
    pages = [tf.reshape(x, [64, 64, 2, 64]) for x in (k, v)]
    table, lengths = tf.reshape(tf.range(64), [2, 32]), tf.constant([2048, 2000])
    return tf_ops.paged_attention, [q, *pages, table, lengths]


CALLS = {"group_normalization": normalization, "attention": decode}


def rows():
    x = tf.random.stateless_normal([4096, 512], [1, 2])
    return with_gradients(tf_ops.rms_normalization), [x, tf.ones([512]), x]


def classes():
    labels = tf.random.stateless_uniform([512], [1, 2], 0, 4096, tf.int32)
    fn = lambda x: tf_ops.sparse_softmax_cross_entropy(labels, x)
    return with_gradients(fn), [tf.random.stateless_normal([512, 4096], [3, 4]), tf.ones([512])]


GPU_CALLS = {"normalization": rows, "cross_entropy": classes, "attention": decode}


def calls(device):
    return CALLS if device.startswith("CPU") else GPU_CALLS


def only(path):
    (file,) = path.glob("*.json")
    return json.loads(file.read_text())["choices"]


def test_every_value_is_right(device):
    """Whatever is chosen, the results are the heuristic's but for the order of sums."""
    for family, call in calls(device).items():
        fn, inputs = call()
        reference = fn(*inputs)
        asked = tuning._asked(lambda: fn(*inputs))
        assert any(key.startswith(family) and len(v) > 1 for key, v in asked.items()), asked
        for key, values in asked.items():
            for value in values:
                tuning._stored.use(**{key: value})
                assert tuning._agree(fn(*inputs), reference), (key, value)
        tuning._stored.use()


def test_chosen_values_reach_the_kernel():
    """Sums in another number of parts have another rounding somewhere."""
    with tf.device("CPU"):
        fn, inputs = decode()
        ((key, values),) = tuning._asked(lambda: fn(*inputs)).items()
        results = set()
        for value in values:
            tuning._stored.use(**{key: value})
            results.add(fn(*inputs).numpy().tobytes())
    tuning._stored.use()
    assert len(results) > 1


def test_values_that_are_not_legal_are_not_used(device):
    for call in calls(device).values():
        fn, inputs = call()
        reference = [x.numpy() for x in tf.nest.flatten(fn(*inputs))]
        keys = tuning._asked(lambda: fn(*inputs))
        for value in (0, -1, 7777, 1 << 40):
            tuning._stored.use(**dict.fromkeys(keys, value))
            for x, y in zip(tf.nest.flatten(fn(*inputs)), reference, strict=True):
                np.testing.assert_array_equal(x, y)


def test_tune_keeps_and_reuses(device, cache, monkeypatch, capsys):
    fn, inputs = next(iter(calls(device).values()))()
    results = tf_ops.tune(fn, *inputs, verbose=True)
    assert results == only(cache) and "heuristic" in capsys.readouterr().out
    for key, choice in results.items():
        assert choice["value"] == int(min(choice["us"], key=choice["us"].get)) or (
            choice["value"] == choice["heuristic"]
        )
    tuning._stored.choices = {}
    tuning.load()
    assert tuning._stored.choices == results
    monkeypatch.setattr(tuning, "_seconds", lambda *_: pytest.fail("measured again"))
    assert tf_ops.tune(fn, *inputs) == results


def test_force_measures_again_and_off_does_not(monkeypatch):
    with tf.device("CPU"):
        fn, inputs = normalization()
        tf_ops.tune(fn, *inputs)
        times, seconds = [], tuning._seconds
        monkeypatch.setattr(tuning, "_seconds", lambda *a: times.append(a) or seconds(*a))
        monkeypatch.setenv("TF_OPS_AUTOTUNE", "off")
        tuning.load()
        assert tf_ops.tune(fn, *inputs) == {} and not tuning._stored.choices and not times
        monkeypatch.setenv("TF_OPS_AUTOTUNE", "cached")
        tuning.load()
        known = tf_ops.tune(fn, *inputs)
        assert known and not times
        monkeypatch.setenv("TF_OPS_AUTOTUNE", "force")
        assert tf_ops.tune(fn, *inputs).keys() == known.keys() and times
        monkeypatch.setenv("TF_OPS_AUTOTUNE", "always")
        with pytest.raises(ValueError, match="always"):
            tf_ops.tune(fn, *inputs)


def test_a_wrong_kernel_never_wins(monkeypatch):
    """A value with a wrong result, however quick, is left out."""
    with tf.device("CPU"):
        fn, inputs = decode()
        ((key, values),) = tuning._asked(lambda: fn(*inputs)).items()
        wrong = values[1]
        use, chosen = tuning._stored.use, {}

        def planted_use(**trial):
            chosen.clear()
            chosen.update(trial)
            use(**trial)

        def planted(*args):
            y = tf.numpy_function(
                lambda y: y * np.float32(1 + 1e-3 * (chosen.get(key) == wrong)),
                [fn(*args)],
                tf.float32,
            )
            return y

        monkeypatch.setattr(tuning._stored, "use", planted_use)
        monkeypatch.setattr(
            tuning, "_seconds", lambda *_: 1e-6 if chosen.get(key) == wrong else 1e-3
        )
        results = tf_ops.tune(planted, *inputs)
    assert str(wrong) not in results[key]["us"] and results[key]["value"] != wrong
    assert str(values[2]) in results[key]["us"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choices": {"a": 1}}', '{"choices": []}'])
def test_corrupt_file_is_reported_and_ignored(cache, text):
    path = cache / tuning._file_name(tuning._device_name("CPU"))
    path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored"):
        tuning.load()
    assert not tuning._stored.choices
    with tf.device("CPU"), pytest.warns(UserWarning, match="is ignored"):
        results = tf_ops.tune(*[normalization()[0], *normalization()[1]])
    assert only(cache) == results


def test_choices_of_other_sources_are_not_used(cache):
    with tf.device("CPU"):
        fn, inputs = normalization()
        tf_ops.tune(fn, *inputs)
    (path,) = cache.glob("*.json")
    stored = json.loads(path.read_text())
    for choice in stored["choices"].values():
        choice["sources"] = "of another kernel"
    path.write_text(json.dumps(stored))
    tuning.load()
    assert not tuning._stored.choices


def test_folder_that_cannot_be_written_gives_a_notice(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("TF_OPS_CACHE_DIR", str(cache / "file"))
    with tf.device("CPU"), pytest.warns(UserWarning, match="this process only"):
        fn, inputs = normalization()
        results = tf_ops.tune(fn, *inputs)
    assert results and tuning._stored.choices.keys() >= results.keys()


PROGRAM = """
import sys
import tensorflow as tf
import tf_ops
from tf_ops import tuning
tuning._SECONDS, tuning._COLD_BYTES = 1e-4, 1 << 20
if sys.argv[2] == "known":
    tuning._seconds = None
with tf.device("CPU"):
    for channels in map(int, sys.argv[1].split(",")):
        x = tf.random.normal([1, 8, channels])
        assert tf_ops.tune(lambda x: tf_ops.group_normalization(x, groups=channels // 4), x)
"""


def start(channels, known=""):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, channels, known], cwd=ROOT)


def test_two_processes_leave_a_valid_file(cache):
    both = [start("64,256,1024"), start("128,512,2048")]
    assert [process.wait() for process in both] == [0, 0]
    assert len(only(cache)) == 6
    assert not [name for name in os.listdir(cache) if name.startswith("tmp")]
    # A later process knows them all, and measures nothing.
    assert start("64,128,256,512,1024,2048", "known").wait() == 0


def test_another_library_keeps_what_this_process_tuned(cache, monkeypatch):
    with tf.device("CPU"):
        fn, inputs = normalization()
        tf_ops.tune(fn, *inputs)
        (path,) = cache.glob("*.json")
        path.unlink()
        tf_ops.extend.load(ROOT / "build" / "tests" / "binding.so")
        monkeypatch.setattr(tuning, "_seconds", lambda *_: pytest.fail("measured again"))
        assert tf_ops.tune(fn, *inputs)


def test_off_leaves_the_heuristics(cache, monkeypatch):
    with tf.device("CPU"):
        fn, inputs = decode()
        expected = fn(*inputs).numpy()
        ((key, values),) = tuning._asked(lambda: fn(*inputs)).items()
        tuning._stored.use(**{key: values[-1]})
        monkeypatch.setenv("TF_OPS_AUTOTUNE", "off")
        tuning.load()
        np.testing.assert_array_equal(fn(*inputs), expected)


def command(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["tf_ops", "tune", *arguments.split()])
    tf_ops.__main__.main()


def test_command(monkeypatch, capsys, cache):
    shape = "--shape samples=1,pixels=8,channels=64,groups=16"
    with tf.device("CPU"):
        command(monkeypatch, f"group_normalization --dtype float32 {shape}")
    assert "heuristic" in capsys.readouterr().out and only(cache)


@pytest.mark.parametrize("shape", ["nothing", "rows=x", "lines=3"])
def test_command_says_what_a_shape_is(shape, monkeypatch):
    with pytest.raises(SystemExit, match="of the form rows=16384,cols=4096"):
        command(monkeypatch, f"normalization --shape {shape}")


def test_not_inside_a_graph():
    with pytest.raises(RuntimeError, match="eager"):
        tf.function(lambda x: tf_ops.tune(tf.identity, x) and x)(tf.ones([2]))
