"""Geometry on the real server: answers over what its press keeps, budgets by its score, and files of other models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from evicbench.correctness.case import Case
from evicbench.correctness.exactness import (
    Jobs,
    follow_up,
    one_compressed_node,
    partial_matches,
    run_jobs,
    split_after_compression,
    two_compressed_nodes,
)
from evicbench.correctness.findings import TOLERANCE
from evicbench.correctness.reference import KV, SINKS, Node, Reference, Text, make_peaky_model
from evicbench.families import checkpoint
from evicbench.families.table import FAMILIES
from evicbench.testbed.server import Server
from tests.e2e.test_decode import PAGE, Request, answers, check_answer, prompt, serve
from torch import Tensor

from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.calibrate import CalibratedModel
from sglang_evicpress.geometry.centres import QueryGeometry

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

FORM, SMALLER = "geometry@0.5", "geometry@0.2"
SCORE_TOLERANCE = 1e-4  # in deviations; scores are fp32 over keys that are alike to 1e-6


def scores_by_formula(geometry: QueryGeometry, keys: Tensor, positions: Tensor, last: int) -> Tensor:
    """float64 [layers, kv_heads, m] of cached keys [layers, kv_heads, m, head_dim]: each is turned back to before RoPE,
    and asked for by the centres at each future distance in turn."""
    freq, num = geometry.rope.inv_freq.double(), geometry.rope.num_turning
    centres = geometry.centres.double()
    middle = torch.complex(centres[..., :num], centres[..., num:])
    heads = keys.double()
    pre = torch.complex(heads[..., :num], heads[..., num:]) * torch.exp(-1j * positions[..., None] * freq)
    group = middle.shape[1] // keys.shape[1]
    pre = pre.repeat_interleave(group, 1)
    at = positions.repeat_interleave(group, 1)[..., None]
    phase, size = middle.angle()[:, :, None] - pre.angle(), middle.abs()[:, :, None] * pre.abs()
    distances = [2**power for power in range(17) if 2**power <= geometry.max_offset]
    series = sum((size * torch.cos((last + far - at) * freq + phase)).sum(-1) for far in distances) / len(distances)
    spread = geometry.lengths.double() - middle.abs()
    logits = series + (spread[:, :, None] * pre.abs()).sum(-1)
    deviations = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True, correction=0)
    return deviations.unflatten(1, (-1, group)).amax(2)


class GeometryCase(Case):
    """A conversation whose survivors are checked by the formula of the geometry as well."""

    geometry: QueryGeometry

    def compress(self, text: Text, node: Node, form: str, query_end: int | None = None) -> Node:
        after = super().compress(text, node, form, query_end)
        start, end = node.start, node.start + len(node.token_ids)
        held = text.kv.every_position()[..., start:end] if node.positions is None else node.positions
        assert after.positions is not None
        is_kept = (held[..., None] == after.positions[..., None, :]).any(-1)
        scores = scores_by_formula(self.geometry, text.kv.gather(held).keys, held, end - 1)
        worst = scores.masked_fill(~is_kept | (held < SINKS), torch.inf).amin(-1)
        best = scores.masked_fill(is_kept, -torch.inf).amax(-1)
        self.expect("a token of a lower score was kept", bool((worst < best - SCORE_TOLERANCE).any()), False)
        return after


@dataclass(frozen=True, slots=True)
class GeometryRequest(Request):
    """A request whose budget keeps what the geometry scores highest."""

    score: str = "geometry"
    geometry: QueryGeometry | None = None

    def scores(self, kv: KV, held: Tensor, queries: Tensor, end: int, num_cached: int) -> Tensor:
        assert self.geometry is not None
        return scores_by_formula(self.geometry, kv.keys, held, end - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peaky_model(tmp_path_factory.mktemp("peaky"))


@pytest.fixture(scope="module")
def geometry(model: Path) -> QueryGeometry:
    measured = CalibratedModel(str(model)).measure([prompt(seed, 200) for seed in range(3)])
    draw = torch.Generator().manual_seed(3)  # a random model's centres are near 0, those of a trained one are not
    centres = measured.centres + 0.3 * torch.randn(measured.centres.shape, generator=draw)
    lengths = torch.maximum(measured.lengths, 1.1 * measured.rope.lengths(centres))
    return replace(measured, centres=centres, lengths=lengths)


@pytest.fixture(scope="module")
def geometry_file(geometry: QueryGeometry, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("geometry") / "peaky.safetensors")
    file.write(path, geometry)
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def server(model: Path, geometry_file: str) -> Iterator[Server]:
    flags = ("--kv-forms", f"{FORM},{SMALLER}", "--kv-geometry", geometry_file, "--kv-decode-client-budgets", "trace")
    with serve(model, *flags, "--kv-policy", "evicpress", "--kv-alpha", "1", "--max-total-tokens", "32768") as running:
        yield running


def jobs() -> Jobs:
    yield "one", partial(one_compressed_node, form=FORM)
    yield "one, smaller", partial(one_compressed_node, form=SMALLER)
    yield "two", partial(two_compressed_nodes, first=FORM, second=SMALLER)
    yield "split", partial(split_after_compression, form=FORM, smaller=SMALLER)
    yield "turns", partial(follow_up, form=FORM, later=SMALLER)
    yield "partial", partial(partial_matches, form=FORM, num_points=5)


def test_answers_over_what_the_press_keeps_equal_the_reference(
    server: Server, reference: Reference, geometry: QueryGeometry
) -> None:
    kind = type("PeakyCase", (GeometryCase,), {"geometry": geometry})
    findings = run_jobs(server, reference, PAGE, jobs(), kind)
    assert [finding for finding in findings if not finding.ok] == []
    controls = [finding.controls for finding in findings if finding.controls]
    assert len(controls) == 2 and min(map(min, controls)) > 100 * TOLERANCE
    assert sum(finding.num_tokens > 0 for finding in findings) >= 10
    assert server.post("/evicpress/check")["violations"] == []


def calibrated(name: str, folder: Path) -> tuple[Path, QueryGeometry]:
    """A tiny model of a family, and its geometry."""
    family = next(each for each in FAMILIES if each.name == name)
    model, _ = checkpoint.write(family, folder / "model")
    return model, CalibratedModel(str(model)).measure([prompt(seed, 100) for seed in range(2)])


@pytest.mark.parametrize(("name", "kind"), [("qwen2", (False, 32, 1.1386)), ("glm4", (True, 16, 1.0))])
def test_yarn_and_partial_interleaved_rope_are_known(name: str, kind: tuple[bool, int, float], tmp_path: Path) -> None:
    rope = calibrated(name, tmp_path)[1].rope
    assert (rope.is_interleaved, rope.num_turning, round(rope.factor, 4)) == kind


def test_partial_interleaved_rope_is_that_of_the_server(tmp_path: Path) -> None:
    name = "glm4"
    model, geometry = calibrated(name, tmp_path)
    file.write(str(tmp_path / "geometry"), geometry)
    flags = ("--kv-forms", FORM, "--kv-geometry", str(tmp_path / "geometry"), "--max-total-tokens", "8192")
    with serve(model, *flags, "--kv-policy", "evicpress", "--kv-alpha", "1") as server:
        one = iter([(name, partial(one_compressed_node, form=FORM))])
        findings = run_jobs(server, Reference(model), PAGE, one)
    assert [finding for finding in findings if not finding.ok] == []
    assert [finding.controls for finding in findings if finding.controls]


def test_budgets_by_its_score_equal_the_reference(
    server: Server, reference: Reference, geometry: QueryGeometry
) -> None:
    requests = [
        GeometryRequest(prompt(50, 100), 100, 64, "repack", every=16, geometry=geometry),
        GeometryRequest(prompt(51, 60), 100, 64, "holefill", every=24, geometry=geometry),
        GeometryRequest(prompt(52, 100), 100, 96, "paged", geometry=geometry),
    ]
    given = answers(server, requests)
    kinds: set[str] = set()
    for index, request in enumerate(requests):
        kinds |= {record["kind"] for record in check_answer(server, reference, index, request, given[index])}
    assert {"page", "repack", "holefill"} <= kinds
