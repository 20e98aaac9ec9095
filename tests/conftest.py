"""What every test runs under: strict JAX, checked shapes, one compilation cache.

Warnings are errors, and the markers have their names, in setup.cfg.
"""

import gc
import importlib.util
import os
import pathlib
import sys

import hypothesis
import jax
import jaxtyping
import pytest

from tests import typechecker

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent

# The environment may say otherwise, and commands that tests start inherit these. The
# tolerances are for the CPU; the gpu tests want JAX_PLATFORMS=cuda,cpu.
for _name, _value in {
    "jax_platforms": "cpu",
    "jax_compilation_cache_dir": str(_CHECKOUT / ".cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}.items():
    _chosen = os.environ.setdefault(_name.upper(), str(_value))
    jax.config.update(_name, type(_value)(_chosen))

# The models are tiny and each runs a few times: compiling is what costs. `make parity`
# runs with XLA's own settings.
_xla_flags = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if jax.__version_info__ < (0, 11):  # a later XLA ends the process over these
    _xla_flags += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
os.environ.setdefault("XLA_FLAGS", " ".join(_xla_flags))

# Compiled programs stay: to look through all of them for garbage at Python's own pace
# took a twentieth of the time.
gc.set_threshold(20_000, 10, 50)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Shapes in signatures are checked at every call. Only modules imported from here on are
# seen, and a hook that came too late would say nothing. Where no signature has a shape,
# such as in the formats of checkpoints, checks would cost more than the work.
CHECKED = tuple(
    f"shared.{name}"
    for name in ("cache", "context", "generation", "layers", "ops", "training")
)
if "shared" in sys.modules:
    raise ImportError("shared was imported before tests/conftest.py could check it.")
jaxtyping.install_import_hook(
    CHECKED, f"{typechecker.__name__}.{typechecker.check.__name__}"
)

# No deadline: the first example of a test compiles. --hypothesis-profile overrides.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update",
        action="store_true",
        help="rewrite the expected texts (tests/trees) instead of comparing with them",
    )


@pytest.fixture(scope="session")
def update(pytestconfig: pytest.Config) -> bool:
    """Whether expected texts are to be rewritten."""
    return pytestconfig.getoption("--update")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hf"):
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f'needs {package}: pip install -e ".[hf]"')
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: JAX_PLATFORMS=cuda,cpu pytest -m gpu")


# Linux grants a process 65530 mappings, and kills it in the middle of compiling when it
# asks for more. A compiled program takes a dozen, and a worker compiles thousands.
MOST_MAPPINGS = 20_000


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between modules, which share no programs, drops the compiled ones if many."""
    if nextitem is None or item.path == nextitem.path:
        return
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
