"""One sentence for what pydantic finds wrong, from what the fields say they accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

T = TypeVar("T")


def sentence(error: ValidationError, kind: type, values: Mapping[str, object], where: str = "") -> str:
    """The first problem of ``values``, which were to become a ``kind``: "WHERE: NAME is VALUE: expected TITLE".

    The ``title`` of a field says what it accepts. A validator's own ValueError is told as it is where it says what it
    expected; ``where`` then still comes first.
    """
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    fields, value, parts = fields_of(kind), dict[str, object](values), list(first["loc"])
    while parts:
        name = str(parts.pop(0))
        if name not in fields:
            return f"{where} has the unknown key {name!r:.100}: expected {', '.join(fields)}"
        field, held = fields[name], value.get(name)
        index = parts[0] if parts and isinstance(held, list | tuple) else None
        inner = _kind_in(field.annotation)
        if inner is not None and any(isinstance(part, str) for part in parts):
            where = f"{where}: {name}" if where else name
            if isinstance(index, int) and isinstance(held, list | tuple):
                held = held[index]
                parts.pop(0)
            fields, value = fields_of(inner), dict(held) if isinstance(held, Mapping) else {}
            continue
        if isinstance(own, ValueError) and "expected" in str(own):
            break
        if first["type"] in ("missing", "missing_argument") or (held is None and field.is_required()):
            return f"{where} has no {name}: expected {field.title}"
        return f"{where}{': ' if where else ''}{name} is {held!r:.100}: expected {field.title}"
    return f"{where}{': ' if where else ''}{own or first['msg']}"


def checked(kind: type[T], values: Mapping[str, object], where: str = "") -> T:
    """The pydantic dataclass ``kind`` made of ``values``. Raises ValueError, which ``sentence`` words."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise ValueError(sentence(error, kind, values, where)) from None


def fields_of(kind: type) -> dict[str, FieldInfo]:
    """The fields of a pydantic dataclass by the names that files give them."""
    known: Mapping[str, FieldInfo] = getattr(kind, "__pydantic_fields__", {})
    return {field.alias or name: field for name, field in known.items()}


def _kind_in(annotation: object) -> type | None:
    """The pydantic dataclass that values of a field are, or are made of."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and hasattr(found, "__pydantic_fields__"):
            return found
    return None
