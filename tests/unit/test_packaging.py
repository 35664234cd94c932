"""The package as a user installs it: built from a copy of the tree, offline, by the hooks every front end calls."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_evicpress.patches.hook_points import SUPPORTED_SGLANG

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_evicpress"
PARTS = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.py", "kernels", "patches", "python")


def build(kind: str, tree: Path, out: Path) -> Path:
    """Run the backend's ``build_<kind>`` in ``tree``; the file it wrote under ``out``."""
    out.mkdir(exist_ok=True)
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=tree, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


def copy_tree(tree: Path) -> Path:
    tree.mkdir()
    leftovers = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "dist")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=leftovers)
        else:
            shutil.copy2(ROOT / name, tree / name)
    return tree


def lose_links(tree: Path) -> list[Path]:
    """Turns the links of the package into text files that hold their targets, as some tools unpack archives."""
    links = [path for path in (tree / "python" / PACKAGE).iterdir() if path.is_symlink()]
    for link in links:
        target = str(link.readlink())
        link.unlink()
        link.write_text(target, encoding="utf-8")
    return links


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("packaging") / "tree")
    return build("sdist", tree, tree.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built directly from the tree the sdist came from."""
    return build("wheel", sdist.parent.parent / "tree", sdist.parent.parent / "wheel")


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_every_module_through_the_links(wheel: Path) -> None:
    source = ROOT / "python" / PACKAGE
    expected = {
        f"{PACKAGE}/{path.relative_to(source).as_posix()}"
        for root in (source, source / "kernels", source / "patches")
        for path in root.glob("**/*.py")
    }
    modules = {name for name in members(wheel) if name.endswith(".py")}
    assert modules == expected
    assert {name.split("/")[1] for name in modules} >= {"core.py", "kernels", "patches", "plugin.py"}


def test_an_archive_that_lost_its_links_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    links = lose_links(tree)
    assert sorted(link.name for link in links) == ["kernels", "patches"]
    assert members(build("wheel", tree, tmp_path / "wheel")).keys() == members(wheel).keys()
    assert all(link.is_symlink() and link.is_dir() for link in links)


def run_import(tree: Path) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(tree / 'python')!r}); before = set(sys.modules); import {PACKAGE}; "
        f"print(*sorted(name for name in set(sys.modules) - before if name.partition('.')[0] not in "
        "sys.stdlib_module_names))"
    )
    return subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)


def test_importing_a_tree_that_lost_its_links_says_what_to_do(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    lose_links(tree)
    last = run_import(tree).stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and "kernels is not a folder: expected a link" in last
    assert "`pip install .` or `make setup`" in last


def test_importing_the_package_imports_nothing_else() -> None:
    imported = run_import(ROOT)
    assert (imported.returncode, imported.stdout.split()) == (0, [PACKAGE]), imported.stderr


def test_wheel_is_typed_and_licensed_and_registers_the_plugin(wheel: Path) -> None:
    held = members(wheel)
    assert {f"{PACKAGE}/{name}" for name in ("py.typed", "dashboard/page.html")} <= held.keys()
    (entry_points,) = (data.decode() for name, data in held.items() if name.endswith("/entry_points.txt"))
    assert entry_points.split("\n\n") == [
        "[console_scripts]\nevicpress = sglang_evicpress.cli.main:main",
        "[sglang.srt.plugins]\nevicpress = sglang_evicpress.plugin:load\n",
    ]
    assert any(name.endswith("/licenses/LICENSE") for name in held)


def test_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in members(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {PACKAGE}


def test_wheel_from_the_sdist_equals_the_direct_one(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(tmp_path)], check=True)
    (tree,) = tmp_path.iterdir()
    assert members(build("wheel", tree, tmp_path / "wheel")) == members(wheel)


def test_version_is_the_same_in_the_package_and_its_metadata() -> None:
    import sglang_evicpress

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sglang_evicpress.__version__ == project["version"]


def test_installing_it_changes_no_package_that_is_there(wheel: Path) -> None:
    """Whatever SGLang and torch an environment has, they stay: the release is checked when a server starts."""
    (metadata,) = (data.decode() for name, data in members(wheel).items() if name.endswith("/METADATA"))
    wanted = [
        Requirement(line.partition(":")[2]) for line in metadata.splitlines() if line.startswith("Requires-Dist:")
    ]
    wanted = [each for each in wanted if each.marker is None]  # extras are left out
    assert {str(each) for each in wanted} >= {"sglang", "torch"}
    changed = [str(each) for each in wanted if not each.specifier.contains(importlib.metadata.version(each.name))]
    assert wanted and not changed


def test_every_supported_release_has_its_group_and_its_lock() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    locked = {package["version"] for package in packages if package["name"] == "sglang"}
    for version in SUPPORTED_SGLANG:
        assert groups[f"release-{version.replace('.', '-')}"] == [f"sglang=={version}"]
        assert version in locked


def test_lock_and_pre_commit_name_the_same_ruff() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    (version,) = (package["version"] for package in packages if package["name"] == "ruff")
    assert f"rev: v{version}\n" in (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")


def test_lock_names_only_the_public_index() -> None:
    lines = (ROOT / "uv.lock").read_text(encoding="utf-8").splitlines()
    addresses = {part for line in lines for part in line.split('"') if "://" in part}
    public = ("https://pypi.org/simple", "https://files.pythonhosted.org/packages/")
    assert [address for address in sorted(addresses) if not address.startswith(public)] == []
