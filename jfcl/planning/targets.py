"""Accelerators that this machine does not have: their published figures, and devices to compile for.

The compilers of XLA for TPUs (`libtpu`) and for GPUs (the CUDA plugin of JAX) need no device. `mesh("v5e:2x2")` is a
mesh of four chips that cannot run anything, and for which everything compiles as for real ones.
"""

import contextlib
import importlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jfcl.core import check_choice, platform
from jfcl.core.texts import first_line


class Chip(NamedTuple):
    """Figures of a chip, as its maker publishes them.

    Attributes:
      name: in full.
      memory: bytes.
      bandwidth: of the memory, bytes a second.
      bfloat16, tf32, float32: operations a second of dense matrix products; of a TPU, products in float32 are six
        in bfloat16.
      link: bytes a second that a chip sends to others, over all its links, in one direction.
      clock: cycles a second.
      slices: of a TPU, the shapes that can be rented; of a GPU, the numbers that one machine has.
    """

    name: str
    memory: float
    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float
    link: float
    clock: float
    slices: tuple[str, ...]

    @property
    def is_tpu(self) -> bool:
        return self.name.startswith("TPU")


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_FOURS = [(4 * a, 4 * b, 4 * c) for a in range(1, 5) for b in range(a, 5) for c in range(b, 7)]
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_CUBES = (*_SMALL_CUBES, *(f"{a}x{b}x{c}" for a, b, c in _FOURS if a * b * c <= 6144))
_CUBES_OF_V4 = (*_SMALL_CUBES, *(f"{a}x{b}x{c}" for a, b, c in _FOURS if a * b * c <= 4096))
_ONE_MACHINE = ("1", "2", "4", "8")

# Cloud TPU's pages of v4, v5e, v6e and v5p, and NVIDIA's data sheets (SXM; without sparsity), as of November 2026.
CHIPS = {
    "v5e": Chip("TPU v5e", 16e9, 819e9, 197e12, 197e12 / 3, 197e12 / 6, 100e9, 1.5e9, _FLAT),
    "v6e": Chip("TPU v6e", 32e9, 1640e9, 918e12, 918e12 / 3, 918e12 / 6, 224e9, 1.75e9, _FLAT),
    "v4": Chip("TPU v4", 32e9, 1228e9, 275e12, 275e12 / 3, 275e12 / 6, 150e9, 1.05e9, _CUBES_OF_V4),
    "v5p": Chip("TPU v5p", 95e9, 2765e9, 459e12, 459e12 / 3, 459e12 / 6, 300e9, 1.75e9, _CUBES),
    "a100": Chip("NVIDIA A100 80GB", 80e9, 2039e9, 312e12, 156e12, 19.5e12, 300e9, 1.41e9, _ONE_MACHINE),
    "h100": Chip("NVIDIA H100 80GB", 80e9, 3350e9, 989e12, 494e12, 67e12, 450e9, 1.98e9, _ONE_MACHINE),
    "h200": Chip("NVIDIA H200 141GB", 141e9, 4800e9, 989e12, 494e12, 67e12, 450e9, 1.98e9, _ONE_MACHINE),
    "b200": Chip("NVIDIA B200 180GB", 180e9, 7700e9, 2250e12, 1125e12, 75e12, 900e9, 1.965e9, _ONE_MACHINE),
}
# Cloud TPU's accelerator types, such as v5litepod-8 and v4-8, count chips, or the two cores of each chip.
_CORES = {"v4": 2, "v5p": 2}
# What the CUDA compiler wants to know of a GPU: its compute capability, multiprocessors, lanes of each, bytes of
# shared memory of a multiprocessor, and of the L2 cache.
_GPUS = {
    "a100": (8, 0, 108, 64, 164 * 1024, 40 * 2**20),
    "h100": (9, 0, 132, 128, 228 * 1024, 50 * 2**20),
    "h200": (9, 0, 132, 128, 228 * 1024, 50 * 2**20),
    "b200": (10, 0, 148, 128, 228 * 1024, 126 * 2**20),
}
# What libtpu would otherwise ask the network when it is loaded. Another process may hold it, as nothing runs on a TPU.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of CUDA's libraries, which a compilation does without
}
INSTALL = {
    "tpu": "pip install 'jfcl[plan-tpu]' jax=={0}",
    "cuda": "pip install 'jfcl[plan-gpu]' jax-cuda12-plugin=={0}",
}


class Target(NamedTuple):
    """A slice of chips to compile for: its name, such as `"v5e:2x4"`, the chip, and their number."""

    name: str
    chip: Chip
    count: int


def target(name: str) -> Target:
    """Returns the target of a name: `CHIP:SLICE` for TPUs, `CHIP` or `CHIP:NUMBER` for GPUs.

    TPUs also have the names of Cloud TPU's accelerator types, with a number: `"v5e-8"`, `"v5litepod-8"` and `"v6e-8"`
    have 8 chips, but `"v4-8"` and `"v5p-8"` have 4, since these types count the two cores of a chip. Raises
    `ValueError` for an unknown chip and for a slice that cannot be rented.

    Example:
      >>> target("v5e:2x4").count, target("h100").count, target("h100").chip.memory
      (8, 1, 80000000000.0)
      >>> target("v5e-8").name, target("v5p-8").name
      ('v5e:2x4', 'v5p:2x2x1')
    """
    kind, _, shape = str(name).strip().lower().partition(":")
    typed = None if shape else re.fullmatch(r"(?:tpu[-_ ]?)?(\w+)-(\d{1,6})", kind)
    kind = re.sub(r"^v5lite(pod)?$", "v5e", typed[1]) if typed else kind
    check_choice("target", kind, CHIPS)
    chip = CHIPS[kind]
    counts = {size: math.prod(map(int, size.split("x"))) for size in chip.slices}
    if typed:
        number = str(int(typed[2]))
        compact = sorted(counts, key=lambda size: max(map(int, size.split("x"))))
        slices = {str(_CORES.get(kind, 1) * counts[size]): size for size in reversed(compact)}
        what = "cores (two in each chip)" if kind in _CORES else "chips"
        check_choice(f"number of {what} of {kind}", number, sorted(slices, key=int))
        shape = slices[number]
    shape = shape or ("" if chip.is_tpu else "1")
    check_choice(f"slice of {kind}, such as {kind}:{chip.slices[1]},", shape, chip.slices)
    return Target(kind if shape == "1" else f"{kind}:{shape}", chip, counts[shape])


def mesh(name: str | Target) -> Mesh:
    """Returns a mesh with one axis, `"clients"`, of the devices of a target, for `jfcl.sharded`.

    Programs are compiled for it, and cannot run. On a machine without a TPU, environment variables that `libtpu` reads
    are set. Raises `ValueError` for an unknown target, and for a compiler that is missing or of another version of JAX.
    """
    chosen = target(name) if isinstance(name, str) else name
    if platform() != "tpu":
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    return Mesh(np.array(_devices(chosen)), ("clients",), axis_types=(AxisType.Auto,))


def _devices(chosen: Target) -> list:
    """Returns the devices of a target, which its compiler describes; `ValueError` without the right compiler."""
    if chosen.chip.is_tpu:
        kind, package = "tpu", "libtpu"
        described = {"topology_name": chosen.name} | ({"chips_per_host_bounds": [1, 1, 1]} if chosen.count == 1 else {})
        if chosen.name.startswith("v4:"):  # whose two cores are one device where JAX runs, as on later chips
            described["chip_config_name"] = "megacore"
    else:
        package = "jax-cuda13-plugin" if _version("jax-cuda13-plugin") else "jax-cuda12-plugin"
        kind, described = "cuda", {"target_config": _description(chosen), "topology": f"1x1x{chosen.count}"}
    of_jax, version = _version("jax"), _version(package)
    install = INSTALL[kind].format(of_jax)
    if version is None:
        raise ValueError(f"target {chosen.name!r} needs the {kind.upper()} compiler: {install}")
    try:
        return _described(kind, package, described)
    except (RuntimeError, AttributeError, ImportError) as error:
        failed = f"its compiler failed ({package} {version}, jax {of_jax}: {first_line(error)})"
        raise ValueError(f"target {chosen.name!r}: {failed}; install that of this jax: {install}") from None


def _described(kind: str, package: str, description: dict[str, Any]) -> list:
    """Returns the devices of a description from JAX, also after JAX has looked for a GPU and found none."""
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=kind, **description).devices
    except NotImplementedError:
        if kind != "cuda":
            raise
        importlib.import_module(f"jax_plugins.xla_{package.split('-')[1]}").initialize()  # which JAX has left out
        return topologies.get_topology_desc(platform=kind, **description).devices


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _description(chosen: Target) -> str:
    """Returns the description of a GPU that the CUDA compiler reads."""
    chip = chosen.chip
    major, minor, cores, lanes, shared, cache = _GPUS[chosen.name.partition(":")[0]]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: {48 * 1024} shared_memory_per_block_optin: {shared - 1024}
          shared_memory_per_core: {shared} core_count: {cores} fpus_per_core: {lanes}
          block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
          memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {cache} clock_rate_ghz: {chip.clock / 1e9}
          device_memory_size: {int(chip.memory)} registers_per_core_limit: {2**16} registers_per_block_limit: {2**16}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{chip.name}"
    """


@contextlib.contextmanager
def not_cached() -> Iterator[None]:
    """Keeps programs for targets out of JAX's cache on disk: without the target they cannot be read back."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def only_compile() -> None:
    """Keeps JAX, before it is first used, from starting accelerators: an installed TPU compiler is taken for a TPU."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
