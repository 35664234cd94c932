"""Who may import whom, as data; read from the source, so a lazy import inside a function counts as well.

In three sentences: only patches/ imports sglang; only kernels/ imports triton; what decides (core, costs, profile,
reuse, utility, policy, config, journal) imports nothing but the standard library and numpy, so every decision can be
made and tested anywhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "sglang_evicpress"
SOURCE = Path(__file__).parents[2] / "python" / PACKAGE
MAX_LINES = 500


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer may import: layers of ours (its own is always allowed) and packages beyond the stdlib."""

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


PURE = ("core", "costs", "profile", "reuse", "utility", "policy", "config", "journal")
NUMPY = ("numpy",)
TABLE = {
    # The package itself: importing it does nothing.
    "__init__": Layer(),
    "handover": Layer(),
    # Decisions: standard library and numpy.
    "core": Layer(),
    "costs": Layer(("core",), NUMPY),
    "profile": Layer(("core",), NUMPY),
    "reuse": Layer((), NUMPY),
    "utility": Layer(("core", "profile"), NUMPY),
    "policy": Layer(("core", "costs", "profile", "utility"), NUMPY),
    "config": Layer(("core", "policy", "profile"), NUMPY),
    "journal": Layer(("core",)),
    # Small things of the standard library that many parts use.
    "call_times": Layer(),
    "error_text": Layer(),
    "weights_digest": Layer((), ("numpy", "torch")),
    "keyed_hash": Layer(),
    "threads": Layer(("error_text",)),
    "census": Layer(("core",)),
    "recomputed": Layer(),
    # Traces, and what a policy would do with them.
    "traces": Layer((), ("numpy", "orjson", "tqdm", "zstandard")),
    "simulator": Layer(
        ("core", "costs", "policy", "profile", "reuse", "traces", "utility"),
        ("matplotlib", "numpy", "orjson", "tqdm", "zstandard"),
    ),
    # Tensors.
    "kernels": Layer((), ("torch", "triton")),
    "layout": Layer(("core",), ("numpy", "torch")),
    "press": Layer(("core", "kernels", "layout"), ("torch",)),
    # Budgets of running requests: when, how much and which, for the patches to carry out.
    "decode": Layer(("kernels", "press"), ("torch",)),
    "cpu_attention": Layer(("core", "kernels", "layout"), ("torch",)),
    # Where KV is kept below the GPU.
    "tiers": Layer(("core", "error_text", "kernels", "layout", "threads"), ("numpy", "torch", "xxhash")),
    # What is measured of contexts.
    "profiler": Layer(
        ("core", "profile", "tiers"),
        ("matplotlib", "numpy", "orjson", "safetensors", "tokenizers", "torch", "tqdm", "transformers", "xxhash"),
    ),
    # Systems side by side, as users meet them: real servers, which it only talks to.
    "benchmark": Layer(
        ("config", "core", "profiler"),
        ("aiohttp", "matplotlib", "numpy", "orjson", "tqdm", "transformers", "yaml"),
    ),
    # The only writer of state, and what is asked and shown of it.
    "controller": Layer((*PURE, "error_text")),
    "arguments": Layer(("core", "error_text")),
    "profile_questions": Layer(("arguments", "core", "error_text", "profiler", "tiers")),
    "introspect": Layer(("arguments", "core", "error_text", "profile_questions"), ("orjson",)),
    # The only code that knows SGLang.
    "patches": Layer(
        (
            *PURE,
            *("arguments", "controller", "cpu_attention", "decode", "handover", "introspect", "kernels", "layout"),
            *("press", "profile_questions", "profiler", "tiers"),
            *("call_times", "census", "error_text", "keyed_hash", "recomputed", "threads", "weights_digest"),
        ),
        ("fastapi", "flashinfer", "numpy", "orjson", "prometheus_client", "sglang", "starlette", "torch"),
    ),
    "plugin": Layer(("config", "handover", "patches")),
    "cli": Layer((*PURE, "benchmark", "profiler", "simulator", "tiers", "traces"), ("numpy", "orjson", "tqdm")),
}


def files() -> list[Path]:
    """Every module, the linked folders included (`**` does not enter links)."""
    roots = (SOURCE, SOURCE / "kernels", SOURCE / "patches")
    return sorted({path for root in roots for path in root.glob("**/*.py")})


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, also by ``import_module``; ``.x`` if relative."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(level=0, module=str(module)):
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"
            case ast.ImportFrom():
                yield node.lineno, "." * node.level + (node.module or "")
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(source: str, layer: str) -> list[str]:
    """One sentence for each import in ``source`` that the table does not allow to ``layer``."""
    if layer not in TABLE:
        return [f"{layer} is not in the table of layers: add it"]
    allowed, found = TABLE[layer], []
    for line, name in imports(ast.parse(source)):
        top, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if not top:
            found.append(f"line {line}: relative import {name}")
        elif top == PACKAGE:
            # `from sglang_evicpress import __version__` names no module of ours.
            if inner and inner in TABLE and inner not in (layer, *allowed.ours):
                found.append(f"line {line}: {layer} may not import {inner}")
        elif top not in sys.stdlib_module_names and top not in allowed.others:
            found.append(f"line {line}: {layer} may not import {top}")
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), layer_of(path)) == []


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_module_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_every_folder_of_modules_is_read() -> None:
    assert {"__init__", "core", "kernels", "patches", "press"} <= {layer_of(path) for path in files()}


def test_the_table_says_the_three_sentences() -> None:
    assert [name for name, layer in TABLE.items() if "sglang" in layer.others] == ["patches"]
    assert [name for name, layer in TABLE.items() if "triton" in layer.others] == ["kernels"]
    assert all(set(TABLE[name].others) <= set(NUMPY) and set(TABLE[name].ours) <= set(PURE) for name in PURE)


def test_the_table_has_no_cycle() -> None:
    """A row imports only rows above it."""
    above: set[str] = set()
    for name, layer in TABLE.items():
        assert set(layer.ours) <= above, f"{name} imports {sorted(set(layer.ours) - above)}"
        above.add(name)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import numpy"),
        ("costs", "import torch"),
        ("config", "from sglang_evicpress import costs"),
        ("policy", "import torch"),
        ("policy", "def plan():\n    from sglang_evicpress.kernels.score import score"),
        ("policy", "from sglang_evicpress import controller"),
        ("press", "import sglang.srt.server_args"),
        ("press", "import triton"),
        ("press", "from . import base"),
        ("press", "from ..core import Form"),
        ("introspect", "import torch"),
        ("plugin", "import torch"),
        ("controller", "import importlib\nimportlib.import_module('sglang.srt')"),
        ("novelty", "import os"),
    ],
)
def test_a_planted_violation_is_found(layer: str, source: str) -> None:
    assert len(violations(source, layer)) == 1


def test_what_is_allowed_is_not_found() -> None:
    source = "import os\nfrom sglang_evicpress import __version__\nfrom sglang_evicpress.core import Form\n"
    assert violations(source, "config") == []
