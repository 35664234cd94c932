"""Table of layers and their imports; read from the source, so a lazy import inside a function counts as well.

In three sentences: only patches/ imports sglang; only kernels/ imports triton; what decides (core, policy) imports
nothing but the standard library and numpy, so every decision can be made and tested anywhere.
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
    """Allowed imports of a layer: layers of ours (its own is always allowed) and packages beyond the stdlib."""

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


PURE = ("core", "policy")
NUMPY = ("numpy",)
SETTINGS = (*PURE, "config", "flags")
TABLE = {
    # The package itself: importing it does nothing.
    "__init__": Layer(),
    "spawn": Layer(),
    # Decisions: standard library and numpy.
    "core": Layer(),
    "policy": Layer(("core",), NUMPY),
    "error_text": Layer(),
    # Settings, checked by pydantic.
    "asked_quality": Layer(("error_text",)),
    "asked_retention": Layer(("error_text",)),
    "tenants": Layer(("asked_quality", "core", "error_text")),
    "files": Layer((), ("orjson",)),
    "validation": Layer((), ("pydantic",)),
    # Layer budgets: their arithmetic, their files, and the search for them.
    "search": Layer((*PURE, "files"), ("cmaes", "numpy", "orjson")),
    "flag_groups": Layer(("files",), ("pydantic",)),
    "config": Layer((*PURE, "flag_groups", "files", "search", "tenants", "validation"), ("pydantic",)),
    "flags": Layer(("config",)),
    # Small things of the standard library that many parts use.
    "threads": Layer(("error_text",)),
    "quantiles": Layer((), NUMPY),
    "tables": Layer(),
    "progress": Layer((), ("tqdm",)),
    # Traces, and what a policy would do with them.
    "traces": Layer((), ("numpy", "orjson", "zstandard")),
    "simulator": Layer(("core", "policy", "traces"), ("numpy",)),
    # Tensors.
    "codec": Layer(("core",), ("torch",)),
    "kernels": Layer(("codec",), ("torch", "triton")),
    "device": Layer((), ("torch",)),
    "survivors": Layer(("core", "device"), ("numpy", "torch")),
    # What is calibrated of a model's queries; transformers runs the model.
    "geometry": Layer(("device", "files", "kernels"), ("safetensors", "torch", "transformers")),
    "press": Layer(("core", "device", "geometry", "kernels", "survivors"), ("torch",)),
    # Budgets of running requests: when, how much and which, for the patches to carry out.
    "decode_budget": Layer(("error_text", "geometry", "kernels", "press"), ("torch",)),
    "cpu_attention": Layer(("core", "kernels"), ("torch",)),
    # Where KV is kept below the GPU.
    "tiers": Layer(
        ("codec", "config", "core", "device", "error_text", "kernels", "survivors", "threads"),
        ("numpy", "psutil", "torch", "xxhash"),
    ),
    # What is known of the quality of contexts, and how it is measured.
    "quality": Layer(
        ("core", "error_text", "policy", "tiers", "validation"), ("numpy", "orjson", "pydantic", "xxhash")
    ),
    "profiler": Layer(
        ("core", "device", "press", "quality", "search", "validation"),
        ("httpx", "numpy", "orjson", "pydantic", "safetensors", "tokenizers", "torch", "transformers"),
    ),
    # Systems side by side, as users meet them: real servers, which it only talks to.
    "benchmark": Layer(
        ("config", "core", "files", "profiler", "progress", "quantiles", "search", "tables", "validation"),
        ("aiohttp", "httpx", "matplotlib", "numpy", "orjson", "psutil", "pydantic", "transformers", "yaml"),
    ),
    # The only writer of state, and what is asked and shown of it.
    "controller": Layer((*PURE, "error_text")),
    "introspect": Layer(("core", "error_text", "quality", "quantiles", "tables", "tiers"), ("orjson",)),
    "dashboard": Layer(),
    # The only code that knows SGLang.
    "patches": Layer(
        (
            *SETTINGS,
            *("asked_quality", "asked_retention", "codec", "controller", "cpu_attention", "dashboard", "decode_budget"),
            *("device", "error_text", "geometry", "introspect", "kernels", "press", "profiler", "quality", "search"),
            *("spawn", "survivors", "tenants", "threads", "tiers"),
        ),
        ("fastapi", "flashinfer", "numpy", "orjson", "prometheus_client", "sglang", "starlette", "torch", "zmq"),
    ),
    "plugin": Layer(("config", "patches", "spawn")),
    "cli": Layer(
        (
            *SETTINGS,
            *("benchmark", "device", "files", "geometry", "press", "profiler", "progress", "quality", "quantiles"),
            *("search", "simulator", "tables", "tiers", "traces"),
        ),
        ("matplotlib", "numpy", "openai", "orjson", "pydantic", "shtab"),
    ),
}

Floors = tuple[tuple[str, ...], ...]
FLOORS: Floors = (
    ("hook_points",),
    ("tree", "unsupported", "kv_flags"),
    ("compat",),
    ("hook_check", "last_word", "attention", "tiers"),
    ("scheduler",),
    ("profiling", "decode_budget", "http"),
    ("cache",),
    ("install",),
    ("server_args",),
)
"""Rooms of patches/, the lowest floor first: a room imports itself and rooms of lower floors."""

MAX_ROOT_MODULES = 8
MAX_LAZY_IMPORTS = 3


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


def floor_violations(
    source: str, room: str, rooms: Floors = FLOORS, root: tuple[str, ...] = (PACKAGE, "patches")
) -> list[str]:
    """One sentence for each import in ``source`` of a room of ``root`` that is not on a lower floor."""
    floors = {name: number for number, names in enumerate(rooms) for name in names}
    if room not in floors:
        return [f"{room} is on no floor: add it"]
    found = []
    for line, name in imports(ast.parse(source)):
        parts = name.split(".")
        other = parts[len(root)] if tuple(parts[: len(root)]) == root and len(parts) > len(root) else room
        if other != room and floors.get(other, len(floors)) >= floors[room]:
            found.append(f"line {line}: {room} may not import {other}")
    return found


def modules_of_patches() -> list[Path]:
    return sorted((SOURCE / "patches").glob("**/*.py"))


@pytest.mark.parametrize("path", modules_of_patches(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_module_of_patches_imports_only_lower_floors(path: Path) -> None:
    room = path.relative_to(SOURCE / "patches").parts[0].removesuffix(".py")
    assert floor_violations(path.read_text(encoding="utf-8"), room) == []


def test_an_import_upwards_is_found() -> None:
    assert len(floor_violations("from sglang_evicpress.patches.cache import factory", "tiers")) == 1
    assert len(floor_violations("from sglang_evicpress.patches.http.start import x", "decode_budget")) == 1
    assert floor_violations("from sglang_evicpress.patches.tree.node import iter_nodes", "tree") == []
    assert len(floor_violations("import os", "cellar")) == 1
    assert len(floor_violations("from evicbench.load.grid import x", "tiers", BENCH_FLOORS, ("evicbench",))) == 1


BENCH = Path(__file__).parents[2] / "bench" / "evicbench"
BENCH_FLOORS = (
    ("__init__", "paths", "report", "testbed"),
    ("moves", "plugins", "pytest_runs", "streams", "stress"),
    ("always_load",),
    ("correctness", "demo", "house"),
    ("serving",),
    ("policy",),
    ("decode_budget", "geometry", "gpu", "tiers"),
    ("budgets", "codecs", "kernels_cpu", "load", "mend", "profiler", "releases", "trust"),
    ("families", "operator"),
)
"""Rooms of the benchmarks, the lowest floor first: a room imports itself and rooms of lower floors."""


@pytest.mark.parametrize("path", sorted(BENCH.rglob("*.py")), ids=lambda path: path.relative_to(BENCH).as_posix())
def test_module_of_the_benchmarks_is_short_and_imports_only_lower_floors(path: Path) -> None:
    room = path.relative_to(BENCH).parts[0].removesuffix(".py")
    source = path.read_text(encoding="utf-8")
    assert floor_violations(source, room, BENCH_FLOORS, ("evicbench",)) == []
    assert len(source.splitlines()) <= MAX_LINES


def import_graph(paths: dict[str, str]) -> dict[str, set[str]]:
    """Modules of ours that each imports anywhere, from the dotted names and sources."""
    graph = {}
    for name, source in paths.items():
        found = [imported for _, imported in imports(ast.parse(source)) if imported.startswith(PACKAGE)]
        graph[name] = {part for whole in found for part in (whole, whole.rpartition(".")[0]) if part in paths} - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that are left when those that import no other one that is left are taken away, again and again."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_import_goes_in_a_circle() -> None:
    sources = {}
    for path in files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))
        sources[name] = path.read_text(encoding="utf-8")
    graph = import_graph(sources)
    assert sum(map(len, graph.values())) > len(graph)
    assert circle(graph) == []


def test_a_planted_circle_is_found() -> None:
    one, two = f"{PACKAGE}.one", f"{PACKAGE}.two"
    sources = {one: f"from {two} import x", two: f"def f():\n    from {PACKAGE} import one", PACKAGE: "import os"}
    assert circle(import_graph(sources)) == [one, two]


def test_patches_import_at_the_top() -> None:
    lazy = [
        f"{path.name}:{node.lineno}"
        for path in modules_of_patches()
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
    ]
    assert len(lazy) <= MAX_LAZY_IMPORTS, lazy


def test_few_modules_stand_at_the_door_of_patches() -> None:
    assert len(list((SOURCE / "patches").glob("*.py"))) <= MAX_ROOT_MODULES


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import numpy"),
        ("config", "import torch"),
        ("core", "from sglang_evicpress import policy"),
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
