"""What all tests share: the environment, fixtures, which of them are slow, and warnings as errors (see pyproject.toml).

The processes that run tests set JAX up by `running.py`; the one that only hands them out starts without it.
"""

import atexit
import fcntl
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
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

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None) or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("running")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of official data files, or a skip that says how to provide one."""
    folder = os.environ.get("JFCL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set JFCL_DATA_DIR to a folder with the official data files to run this test")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, fill)` is a folder that `fill(folder)` fills for all processes, in the first that asks for it."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def filled(name, fill):
        with (base / f"{name}.lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_size == 0:  # now, not when the file was opened
                shutil.rmtree(base / name, ignore_errors=True)  # of one that failed
                fill(base / name)
                lock.write("filled")
        return base / name

    return filled


@pytest.fixture(scope="session")
def finished_runs(once) -> Path:
    """Finished runs of the command line, of IFCA with two seeds and of FedAvg, which no test changes."""
    quick = ["--clients", "8", "--clusters", "2", "--rounds", "4", "--local-steps", "2", "--model", "linear", "--quiet"]

    def fill(folder):
        from jfcl import cli

        for method in ("ifca", "fedavg"):
            assert cli.main(["run", method, *quick, "--seeds", "2", "--out", str(folder / method)]) == 0

    return once("runs", fill)


@pytest.fixture(scope="session")
def finished_run(once) -> Path:
    """A finished run of FedAvg with one seed, as small as can be, which no test changes."""

    def fill(folder):
        from jfcl.experiments import Config, run

        run(Config("fedavg", clients=4, clusters=2, rounds=2, model="linear", examples_per_client=8), out=folder)

    return once("run", fill)


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A platform: models, losses and training compute in its form, here on the CPU."""

    def of_platform(*args, cpu, accelerator, tpu=None):
        return {"cpu": cpu, "gpu": accelerator, "tpu": tpu or accelerator}[request.param](*args)

    for module in ("core.parameters", "models.conv", "models.tasks", "training.losses", "training.span"):
        monkeypatch.setattr(sys.modules[f"jfcl.{module}"], "by_platform", of_platform)
    return request.param


COMPILING = """
kernels. mapping. methods. models. robust. simulation. training. core.types.Algorithm analysis.metrics.auc
analysis.metrics.calibration_error experiments.comparison.compare experiments.report.report experiments.run.run
experiments.results.read_run experiments.serving.load_run experiments.shifts.shifts experiments.sweeps.run_sweep
"""
COMPILING = (*(f"jfcl.{name}" for name in COMPILING.split()), "benchmarks.papers.recipes.reproduce")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow the cases that `slow_cases` names, and docstrings' examples in `COMPILING`.

    Each of them compiles much, and guards what a quicker case of the same test, or a quicker test, guards too.
    """
    patterns, matched = set(), set()
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.dtest.name.startswith(COMPILING):
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
