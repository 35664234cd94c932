"""File of a geometry: what was written is read, and anything else is refused in one sentence that names the file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.geometry.checkpoint import SAMPLE_BYTES, digest_of, folder_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "geometry.safetensors")


def same(one: QueryGeometry, other: QueryGeometry) -> bool:
    return (one.digest, one.num_tokens, one.max_offset) == (other.digest, other.num_tokens, other.max_offset)


@pytest.mark.parametrize("rope", [make_rope(16), make_rope(20, 4, is_interleaved=True, factor=1.3)])
def test_what_was_written_is_read(path: str, rope: object) -> None:
    geometry = make_geometry(rope=rope)  # type: ignore[arg-type]
    file.write(path, geometry)
    back = file.read(path)
    assert same(back, geometry)
    assert torch.equal(back.centres, geometry.centres) and torch.equal(back.rope.inv_freq, geometry.rope.inv_freq)


def refused(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        file.read(path)
    sentence = str(raised.value)
    assert path in sentence and "expected a file that evicpress calibrate geometry has written" in sentence
    assert "\n" not in sentence


def test_another_file_is_refused(path: str, tmp_path: Path) -> None:
    refused(path, "is no file")
    refused(str(tmp_path), "is no file")
    Path(path).write_text("not a file of tensors")
    refused(path, "cannot be read")
    Path(path).write_bytes(b"")
    refused(path, "cannot be read")
    save_file({"weight": torch.zeros(2)}, path, {"format": "pt"})
    refused(path, "holds weight")


def test_a_file_that_was_cut_is_refused(path: str) -> None:
    file.write(path, make_geometry())
    data = Path(path).read_bytes()
    for size in (4, 100, len(data) - 1):
        Path(path).write_bytes(data[:size])
        refused(path, "cannot be read")


def rewrite(path: str, **changes: object) -> None:
    geometry = make_geometry()
    about = {
        "model": {name: getattr(geometry.model, name) for name in geometry.model.__slots__},
        **{"is_interleaved": False, "factor": 1.0, "num_tokens": 10, "max_offset": 64, **changes},
    }
    tensors = {"centres": geometry.centres, "lengths": geometry.lengths, "inv_freq": geometry.rope.inv_freq}
    save_file(tensors, path, {file.FORMAT: json.dumps(about)})


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "Llama"},
        {"model": {}},
        {"model": {"name": "x"}},
        {"num_tokens": True},
        {"num_tokens": 10**400},
        {"max_offset": 2**63},
        {"factor": "1"},
        {"factor": float("nan")},
        {"is_interleaved": 1},
        {"num_tokens": None},
        {"max_offset": 0},
        {"max_offset": 1.5},
    ],
)
def test_a_file_with_other_facts_is_damaged(path: str, changes: dict[str, object]) -> None:
    rewrite(path)
    file.read(path)
    rewrite(path, **changes)
    refused(path, "is damaged")


@pytest.mark.parametrize("about", ["[" * 100_000, '{"model": {"name": 7}}', "[]", "7"])
def test_a_file_about_something_else_is_damaged(path: str, about: str) -> None:
    file.write(path, make_geometry())
    with safe_open(path, "pt") as written:
        tensors = {name: written.get_tensor(name) for name in written.keys()}  # noqa: SIM118 - not a mapping
    save_file(tensors, path, {file.FORMAT: about})
    refused(path, "is damaged")


@pytest.mark.parametrize("name", [7, "\ud800"])
def test_a_name_that_has_no_digest_is_damaged(path: str, name: object) -> None:
    rewrite(path)
    about = asdict(file.read(path).model)
    rewrite(path, model={**about, "name": name})
    refused(path, "is damaged")


def test_shapes_that_do_not_fit_the_facts_are_damaged(path: str) -> None:
    geometry = make_geometry()
    facts = {name: getattr(geometry.model, name) for name in geometry.model.__slots__}
    rewrite(path, model={**facts, "num_layers": 2})
    refused(path, r"centres are torch.float32 \(3, 4, 16\)")


# ---- the checkpoint that a file is of


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    weights = torch.randn(3 * SAMPLE_BYTES)
    digests = set()
    for number, at in enumerate((None, 0, 2 * SAMPLE_BYTES, -1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        changed = weights.clone()
        if at is not None:
            changed[at] += 1
        save_file({"weight": changed}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        digests.add(digest_of(folder_of(str(folder))))
    assert len(digests) == 4


def test_a_digest_does_not_depend_on_where_files_lie(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.arange(9)}, tmp_path / name / "model.safetensors")
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "other")
    save_file({"weight": torch.arange(9)}, tmp_path / "other" / "model-2.safetensors")
    assert digest_of(tmp_path / "one") != digest_of(tmp_path / "other")


def test_a_folder_without_weights_and_a_name_that_is_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights: expected one of"):
        digest_of(tmp_path)
    with pytest.raises(ValueError, match="'nobody/nothing-of-this-name' has no folder here"):
        folder_of("nobody/nothing-of-this-name")


def test_a_spread_is_never_below_0() -> None:
    geometry = make_geometry()
    assert bool((geometry.spread > 0).all())
    none = replace(geometry, lengths=geometry.rope.lengths(geometry.centres) * 0.999)
    assert bool((none.spread == 0).all())
