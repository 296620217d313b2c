"""Every test runs under strict dtypes and ranks, on two CPU devices, with warnings as errors (see pyproject.toml)."""

import atexit
import doctest
import fnmatch
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JFCL_CACHE_DIR", "")  # nothing is kept between runs of the tests
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # but programs are, for processes that tests start
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jfcl-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes of tests load what the first of them has compiled
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")  # they are a twentieth of the tests' time

# With full optimisation, three quarters of the tests' time is XLA compiling programs that run for milliseconds: here it
# optimises less. The slow tests run what users run (make test-slow sets XLA_FLAGS to nothing). An unknown flag would
# end every process.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    client = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    if subprocess.run([sys.executable, "-c", client], capture_output=True).returncode != 0:
        os.environ["XLA_FLAGS"] = ""

import hypothesis
import jax
import matplotlib.figure
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

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


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of official data files, or a skip that says how to provide one."""
    folder = os.environ.get("JFCL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set JFCL_DATA_DIR to a folder with the official data files to run this test")
    return Path(folder).resolve()


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A platform: models, losses and training compute in its form, here on the CPU."""

    def of_platform(*args, cpu, accelerator, tpu=None):
        return {"cpu": cpu, "gpu": accelerator, "tpu": tpu or accelerator}[request.param](*args)

    for module in ("jfcl.core.parameters", "jfcl.models.conv", "jfcl.models.tasks", "jfcl.training.losses"):
        monkeypatch.setattr(sys.modules[module], "by_platform", of_platform)
    return request.param


SLOW = doctest.register_optionflag("SLOW")
COMPILING = tuple(f"jfcl.{folder}." for folder in ("kernels", "methods", "models", "robust", "training"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow the cases that `slow_cases` names, and docstrings' examples in `COMPILING` or `# doctest: +SLOW`.

    Each of them compiles much, and guards what a quicker case of the same test, or a quicker test, guards too.
    """
    patterns, matched = set(), set()
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            compiles = item.dtest.name.startswith(COMPILING)
            if compiles or any(SLOW in example.options for example in item.dtest.examples):
                item.add_marker("slow")
        case = item.nodeid.partition("[")[2].removesuffix("]")
        for pattern in [pattern for mark in item.iter_markers("slow_cases") for pattern in mark.args]:
            patterns.add((item.function, pattern))
            if fnmatch.fnmatchcase(case, pattern.replace("[", "[[]")):
                matched.add((item.function, pattern))
                item.add_marker("slow")
    if not any("[" in argument for argument in sys.argv):  # of a single case nothing follows
        unmatched = sorted(f"{function.__name__}: {pattern}" for function, pattern in patterns - matched)
        assert not unmatched, f"slow_cases names cases that do not exist: {unmatched}"


def pytest_collection_finish() -> None:
    """Leaves what has been imported and collected out of later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drops compiled programs between files of tests, when there are many.

    Each holds tens of memory maps, of which Linux grants a process 65,530; XLA crashes the worker when they run out.
    """
    if len(_programs) > 2000 and (nextitem is None or nextitem.path != item.path):
        jax.clear_caches()
        _programs.clear()
