"""The graph of the cache's parts, read from the source: who is given whom, and that nobody reaches further."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "patches"
STAGES = ("TreeParts", "TierParts", "Parts")
HOLDERS = ("self", "tree", "tiers")  # names by which the three know each other


@cache
def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Every class of the patches but protocols, by name."""
    found = {}
    for path in SOURCE.glob("*/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                found[node.name] = path, node
    return found


def init_of(part: str) -> ast.FunctionDef:
    (found,) = (
        each for each in classes()[part][1].body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    return found


@cache
def parameters(part: str) -> dict[str, ast.expr | None]:
    """Annotations of what a part is given: the fields of a dataclass, else the parameters of its constructor."""
    _, definition = classes()[part]
    if any("dataclass" in ast.unparse(each) for each in definition.decorator_list):
        fields = [each for each in definition.body if isinstance(each, ast.AnnAssign)]
        return {ast.unparse(each.target): each.annotation for each in fields if "init=False" not in ast.unparse(each)}
    arguments = init_of(part).args
    return {each.arg: each.annotation for each in [*arguments.args[1:], *arguments.kwonlyargs]}


@cache
def made() -> dict[str, tuple[str, ast.Call]]:
    """Class and call that makes each part, by its name, in the order in which they are made."""
    parts: dict[str, tuple[str, ast.Call]] = {}
    for line in (line for stage in STAGES for line in init_of(stage).body):
        match line:
            case ast.Assign([ast.Attribute(ast.Name("self"), name)], ast.Call() as call):
                made_of = call.func.value if isinstance(call.func, ast.Attribute) else call.func
                if isinstance(made_of, ast.Name) and classes().get(made_of.id, (None,))[0]:
                    parts[name] = made_of.id, call
    return parts


def given(name: str) -> dict[str, str]:
    """Parts that a part is given, by its parameter."""
    part, call = made()[name]
    if isinstance(call.func, ast.Attribute):
        return {}  # opened by itself
    names = (name for name in parameters(part) if name != "_")
    pairs = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    found = {}
    for parameter, value in pairs:
        match value:
            case ast.Attribute(ast.Name(holder), other) | ast.Attribute(ast.Attribute(ast.Name(holder), other)) if (
                holder in HOLDERS and other in made()
            ):
                found[str(parameter)] = other
    return found


def attributes(name: str) -> dict[str, str]:
    """Attributes of a part that hold other parts."""
    parts = given(name)
    _, definition = classes()[made()[name][0]]
    if definition.decorator_list:
        return parts
    found = {}
    for line in ast.walk(init_of(definition.name)):
        match line:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], ast.Name(parameter)) if parameter in parts:
                found[attribute] = parts[parameter]
    return found


def annotated(part: str) -> set[str]:
    names = (ast.walk(each) for each in parameters(part).values() if each is not None)
    return {node.id for found in names for node in found if isinstance(node, ast.Name)}


def test_each_part_is_given_parts_that_were_made_before() -> None:
    seen: set[str] = set()
    for name in made():
        print(f"{name:18} <- {', '.join(given(name).values()) or '-'}")
        assert set(given(name).values()) <= seen, f"{name} is given what is made after it: a circle, or the wrong order"
        seen.add(name)
    assert len(seen) >= 15, "the composition was not understood"


@pytest.mark.parametrize("name", made())
def test_a_part_is_given_protocols_and_values_only(name: str) -> None:
    part, _ = made()[name]
    named = annotated(part)
    others = {other for other, _ in made().values()}
    assert not named & others, f"{part} is given a class of another part"
    assert not named & {"EvicPressCache", "Any", "cast"}, f"{part} is given more than it may use"


@pytest.mark.parametrize("name", made())
def test_the_module_of_a_part_knows_no_other_part(name: str) -> None:
    part, _ = made()[name]
    path, _ = classes()[part]
    others = {other for other, _ in made().values()} - {part}
    imports = (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ImportFrom))
    assert not others & {alias.name for each in imports for alias in each.names}


@pytest.mark.parametrize("name", made())
def test_no_expression_reaches_through_a_part_into_a_part(name: str) -> None:
    path, _ = classes()[made()[name][0]]
    held = attributes(name)
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(ast.Attribute(ast.Name() | ast.Attribute(), first), second) if first in held:
                reached = attributes(held[first])
                assert second not in reached, f"line {node.lineno}: .{first}.{second} is a part of {held[first]}"


@pytest.mark.parametrize(
    "path", sorted({classes()[part][0] for part, _ in made().values()}), ids=lambda path: path.stem
)
def test_what_a_part_is_given_has_twelve_members_at_most(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
            members = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AnnAssign)]
            assert len(members) <= 12, f"{node.name} has {len(members)} members"


@pytest.mark.parametrize("room", ["tree", "tiers"])
def test_shared_protocols_have_twelve_members_at_most(room: str) -> None:
    test_what_a_part_is_given_has_twelve_members_at_most(SOURCE / room / "types.py")


def test_the_cache_has_no_mixins() -> None:
    assert [ast.unparse(base) for base in classes()["EvicPressCache"][1].bases] == ["RadixCache"]
