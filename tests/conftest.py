"""Set before jax is imported: CPU, eight devices for the tests of sharding, one compilation cache."""

import gc
import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "memrl_jax" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes millions of short-lived objects: at Python's threshold of 700 a tenth of the time is its collector's.
gc.set_threshold(20_000)

_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 25_000  # Linux gives a process 65,530; a compiled program takes several, and beyond that it crashes


@pytest.fixture(autouse=True, scope="module")
def few_programs():
  """Lets compiled programs go between two files once there are many."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def uncached():
  """Compiles anew: programs with collectives that come from the compilation cache hang and abort."""
  from jax._src import compilation_cache

  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


def pytest_configure(config):
  config.addinivalue_line("markers", "slow: takes over 20 seconds; `make test-slow` runs these")
