"""Every test runs under strict dtypes and ranks, on two CPU devices, and compiles what no earlier test has compiled."""

import gc
import hashlib
import os
import threading

import hypothesis
import jax
import matplotlib.figure
from jax._src import compiler
from jax._src.interpreters import mlir

from jfcl.mapping.jitted import has_many_programs

os.fsync = lambda descriptor: None  # a power cut would cost the results of tests only; processes of tests do wait
_savefig = matplotlib.figure.Figure.savefig
# A tight margin costs a second drawing, and pictures are a fifth of a small run.
matplotlib.figure.Figure.savefig = lambda *args, bbox_inches=None, **options: _savefig(*args, **options)
gc.set_threshold(200_000, 50, 100)  # tracing makes so many objects that Python's thresholds cost a tenth of the time

jax.config.update("jax_enable_compilation_cache", False)  # here, computing keys costs more than it saves
jax.config.update("jax_num_cpu_devices", 2)
jax.devices()  # from here on there are two, whatever a test of `--devices` asks for
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_compile = getattr(compiler, "backend_compile_and_load", None)
_programs = {}  # by what they were compiled from
_seen = 0  # of these, when they were last found to be few enough


def _compile_once(backend, module, devices, options, host_callbacks):
    """Returns the program that an earlier test has compiled from the same text, if there is one."""
    if host_callbacks:
        return _compile(backend, module, devices, options, host_callbacks)
    text = hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode())
    key = (id(backend), text.digest(), str(devices), options.SerializeAsString())
    if key not in _programs:
        _programs[key] = _compile(backend, module, devices, options, host_callbacks)
    return _programs[key]


if _compile is not None:  # it is not of JAX's public interface; without it, the tests take at least a fifth more time
    compiler.backend_compile_and_load = _compile_once

_make_context = getattr(mlir, "make_ir_context", None)
_contexts = threading.local()


def _context():
    """Returns a context of MLIR that up to 200 programs share: one takes as long as compiling a small program."""
    if getattr(_contexts, "left", 0) == 0:
        _contexts.context, _contexts.left = _make_context(), 200
    _contexts.left -= 1
    return _contexts.context


if _make_context is not None:
    mlir.make_ir_context = _context

# Derandomised, so that a red test is red again; compilation makes single examples slow, hence no deadline.
hypothesis.settings.register_profile("jfcl", deadline=None, max_examples=15, derandomize=True, database=None)
hypothesis.settings.load_profile("jfcl")


def pytest_collection_finish() -> None:
    """Leaves what has been imported and collected out of later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Drops compiled programs when there are many, which is looked at after every 20 of them."""
    global _seen
    if len(_programs) >= _seen + 20:
        _seen = len(_programs)
        if has_many_programs():
            jax.clear_caches()
            _programs.clear()
            gc.collect()
            _seen = 0
