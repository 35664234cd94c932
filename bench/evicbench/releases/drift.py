"""Rows of the hook table that a wheel of SGLang does not have, read from its source: nothing of it is imported.

`make drift` fetches the newest release's wheel alone, some seconds, and lists them: what a port to it begins with.
Names that are made at run time cannot be found this way, and count as missing.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from sglang_evicpress.patches.hook_points import SUPPORTED_SGLANG, HookPoint, number_of, points_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Wheel:
    """Definitions in a wheel's modules."""

    def __init__(self, path: Path) -> None:
        self.version = path.name.split("-")[1]
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())
        self._module = cache(self._parse)

    def find(self, path: str) -> ast.stmt | None:
        """The definition of a dotted name, through imports and base classes; None where there is none."""
        names = path.split(".")
        for length in range(len(names), 0, -1):
            module = ".".join(names[:length])
            if self._file_of(module) is not None:
                return self._within(module, names[length:])
        return None

    def _file_of(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self._names), None)

    def _parse(self, module: str) -> dict[str, ast.stmt]:
        name = self._file_of(module)
        assert name is not None
        found: dict[str, ast.stmt] = {}
        for bound, statement in _definitions(ast.parse(self._archive.read(name)).body):
            if not (isinstance(found.get(bound), ast.ClassDef) and isinstance(statement, ast.Assign)):
                found[bound] = statement  # what a class is remade into has what the class has
        return found

    def _within(self, module: str, names: Sequence[str]) -> ast.stmt | None:
        if not names:
            return ast.Pass()
        defined = self._module(module)
        found = defined.get(names[0])
        if found is None:
            stars = [each for name, each in defined.items() if name.endswith(" import *")]
            each_found = (self.find(".".join((self._source_of(module, star), *names))) for star in stars)
            return next((each for each in each_found if each is not None), None)
        if isinstance(found, ast.ImportFrom | ast.Import):
            return self._imported(module, found, names)
        for name in names[1:]:
            found = self._member(module, found, name) if isinstance(found, ast.ClassDef) else None
        return found

    def _imported(self, module: str, statement: ast.ImportFrom | ast.Import, names: Sequence[str]) -> ast.stmt | None:
        alias = next(each for each in statement.names if (each.asname or each.name) == names[0])
        if isinstance(statement, ast.Import):
            return self.find(".".join((alias.name, *names[1:])))
        return self.find(".".join((self._source_of(module, statement), alias.name, *names[1:])))

    def _source_of(self, module: str, statement: ast.stmt) -> str:
        """Absolute name of the module that a ``from`` imports of."""
        assert isinstance(statement, ast.ImportFrom)
        source = statement.module or ""
        if not statement.level:
            return source
        is_package = (self._file_of(module) or "").endswith("/__init__.py")
        parents = module.split(".")[: None if is_package and statement.level == 1 else is_package - statement.level]
        return ".".join((*parents, source)).rstrip(".")

    def _member(self, module: str, cls: ast.ClassDef, name: str) -> ast.stmt | None:
        own = dict(_definitions(cls.body))
        if name in own:
            return own[name]
        for base in cls.bases:
            parent = self._within(module, ast.unparse(base).split("."))
            if isinstance(parent, ast.ClassDef):
                found = self._member(self._home_of(module, base), parent, name)
                if found is not None:
                    return found
        for function in (each for each in own.values() if isinstance(each, Function)):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                    return ast.Pass()
        return None

    def _home_of(self, module: str, base: ast.expr) -> str:
        """Module in which a base class is defined, as far as one import tells."""
        statement = self._module(module).get(ast.unparse(base).split(".")[0])
        return (statement.module or module) if isinstance(statement, ast.ImportFrom) else module


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a body binds, those in branches too."""
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                name = ast.unparse(statement) if alias.name == "*" else alias.asname or alias.name
                yield name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement) for target in targets if isinstance(target, ast.Name))
        else:
            for branch in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(statement, branch, ()):
                    yield from _definitions([inner] if isinstance(inner, ast.stmt) else inner.body)


def parameters_of(definition: ast.stmt) -> tuple[str, ...] | None:
    """Names that a call of it takes, in order; None where the source does not tell."""
    if isinstance(definition, ast.ClassDef):
        definition = dict(_definitions(definition.body)).get("__init__", definition)
    if not isinstance(definition, Function):
        return None
    given = definition.args
    variable = [each for each in (given.vararg,) if each], [each for each in (given.kwarg,) if each]
    names = [each.arg for each in (*given.posonlyargs, *given.args, *variable[0], *given.kwonlyargs, *variable[1])]
    is_bound = any(ast.unparse(decorator) == "classmethod" for decorator in definition.decorator_list)
    return tuple(names[1:] if is_bound else names)


def differences(wheel: Wheel, points: Sequence[HookPoint]) -> Iterator[str]:
    """A sentence for each row that the wheel does not have."""
    for point in points:
        definition = wheel.find(point.path)
        if definition is None:
            yield f"{point.path} is missing"
            continue
        found = parameters_of(definition)
        if point.parameters is not None and found is not None and found != point.parameters:
            yield f"{point.path} takes ({', '.join(found)}) instead of ({', '.join(point.parameters)})"


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a release, of the newest where ``version`` is empty, without what it needs."""
    wanted = f"sglang=={version}" if version else "sglang"
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where rows of the newest supported release differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", default="", help="release to compare with (default: the newest)")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        wheel = Wheel(options.wheel or fetch(options.version, Path(folder)))
        known = wheel.version if wheel.version in SUPPORTED_SGLANG else max(SUPPORTED_SGLANG, key=number_of)
        points = points_of(known)
        found = list(differences(wheel, points))
    print(
        f"SGLang {wheel.version}: {len(found)} of {len(points)} rows differ from those of {known}", *found, sep="\n  "
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
