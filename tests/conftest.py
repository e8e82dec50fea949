"""Configuration of all tests: one thread per process, repeatable hypothesis runs, golden files, GPU
tests.

What ``make test`` leaves to ``--long`` is marked in the tests, with the names of
``helpers/sample.py``.
"""

from __future__ import annotations

import difflib
import gc
import os
from collections.abc import Callable, Generator
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest

from browsers import browser as browser

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: the tensors are small, and tests run in parallel

# A name server that loses a query costs a connection to a store 1 second, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

hypothesis.settings.register_profile("fpipe", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("fpipe")

preload = forkserver.set_forkserver_preload
# Processes that are started by a test import its file; what most files import is imported once,
# before the fork.
forkserver.set_forkserver_preload = lambda names: preload([*names, "started"])


#: Files and tests that run in one process: they share traces of the same functions, results of an
#: oracle, syntax trees, or imports of transformers, which take seconds.
TOGETHER = {
    "test_bitwise": "bitwise",
    "test_slices": "slices",
    "test_memory": "memory",
    "test_layout": "layout",
    "test_families": "families",
    "test_torchtitan": "torchtitan",
    **dict.fromkeys(
        (
            "test_huggingface",
            "test_huggingface_all_schedules",
            "test_huggingface_files",
            "test_third_party_models",
            "test_rl_parts",
            "test_verl",
            "test_huggingface_loss_falls",
            "test_a_killed_run_resumes_with_the_same_losses",
            "test_blocks[docs/howto/huggingface.md]",
        ),
        "transformers",
    ),
}


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than cores, where these are few: tests of faults and time-outs wait, and leave
    theirs to others.
    """
    cores = yield
    return cores + 1 if cores < 8 and not os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") else cores


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All test files are imported, and stay: meanwhile nothing is garbage."""
    import collector

    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        collector.settle()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Skip tests that need an accelerator on machines without one; name the groups of ``TOGETHER``.
    Of the tests that were selected, leave out those for ``--long``.
    """
    _prepare(items)
    result = yield
    if not config.getoption("--long"):
        from sample import taken

        kept = taken(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    return result


def _prepare(items: list[pytest.Item]) -> None:
    for item in items:
        group = TOGETHER.get(item.name) or TOGETHER.get(item.path.stem)
        if group and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only if there are such tests

    if not torch.accelerator.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags that run all cases and rewrite golden files."""
    parser.addoption(
        "--long",
        action="store_true",
        help="run all cases of tables from which the suite takes a part",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write the current output to the golden files"
    )


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether to run all cases of a large table."""
    return bool(request.config.getoption("--long", default=False))


# ---- golden files ----
@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture
def golden(update_golden: bool) -> Callable[..., None]:
    """Compare a text with a file of the repository, or write it there."""

    def compare(path: Path, actual: str, update: bool = update_golden) -> None:
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if expected == actual:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual, encoding="utf-8")
            return
        lines = difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), "file", "actual", lineterm="", n=1
        )
        diff = "\n".join(line[:160] for line in islice(lines, 30))
        pytest.fail(
            f"{path.name} differs from the current output; if the change is intended: make "
            f"golden\n{diff}",
            pytrace=False,
        )

    return compare
