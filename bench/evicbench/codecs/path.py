"""Answers of real servers whose KV went down through a codec and came up again, against transformers over a cache that
went through the same codec: of each node what it stores, in groups from its slot 0."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from evicbench.codecs.coded import NOISE, Entry, positions_of, read_entry, replaced, settled, through
from evicbench.correctness.case import Case
from evicbench.correctness.findings import TOLERANCE, Finding, judged
from evicbench.correctness.reference import (
    KV,
    Node,
    Reference,
    Text,
    changed_model,
    expected_match,
    largest_difference,
    make_peaky_model,
)
from evicbench.moves import nodes_of, sources, wait_until_idle
from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server, ServerError
from evicbench.tiers.inputs import scratch
from evicbench.tiers.restart import Stoppable
from sglang_evicpress.codec.layout import BITS, GROUP

WRONG = ("KV before it was encoded", "groups from slot 1 on", "another codec")
NEIGHBOUR = {"int8": "int4", "int4": "int8", "int2": "int4"}
PRESSED = "keydiff@0.5"
HOLD_S = 600
SOURCES = {"host": "host", "ssd": "storage"}
"""Tier, and SGLang's name for it in answers."""

MOVE_TRIES = 20
PLAY_TRIES = 8
NAN_TOKEN, INF_TOKEN = 0, 1
"""No case draws them, and no answer has them."""

BFLOAT16_NOISE = 0.25
"""A value of the KV in bfloat16 and the reference's in fp32 differ by less."""

BFLOAT16_TOLERANCE = 0.5
"""A log probability of a server in bfloat16, all of whose sums are rounded to 8 bits: twice what answers over exact KV,
which are among those compared, were seen to differ by."""


def server_arguments(folder: Path, page_size: int, *more: str) -> tuple[str, ...]:
    """Room for everything, so that nothing moves but what is moved by hand; computing is taken to be dear, until enough
    of it was seen."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({"prefill_per_token_s": 1.0}))
    return (
        *("--kv-policy", "evicpress", *GUESSED, "--max-total-tokens", "32768", "--skip-tokenizer-init"),
        *("--kv-policy-config", str(config)),
        *("--kv-host-gb", "0.2", "--kv-ssd-dir", str(folder), "--kv-ssd-gb", "0.5", "--page-size", str(page_size)),
        *("--kv-forms", f"exact,{PRESSED},{PRESSED}+int4,exact+int8,exact+int4,exact+int2", *more),
    )


@dataclass(slots=True)
class Tally:
    """Entries of a server: values that were compared with the reference's, those on the edge between two codes that it
    rounds the other way, and those under a code that they may not have; nodes that were encoded once more from decoded
    KV, and those of them that became other bytes."""

    num_values: int = 0
    num_ties: int = 0
    num_wrong: int = 0
    num_again: int = 0
    num_changed: int = 0


@dataclass(slots=True)
class Setting:
    """A server, the folder of its SSD, and the dtype of its KV."""

    server: Server
    reference: Reference
    folder: Path
    page_size: int
    dtype: torch.dtype = torch.float32
    tally: Tally = field(default_factory=Tally)


class Recomputed(RuntimeError):
    """The server took computing for quicker than loading, or a load came late: on a busy machine either may be."""


class CodedCase(Case):
    """A conversation whose nodes are stored by a codec. ``came_from``: sources of the KV of the last answer."""

    def __init__(self, name: str, setting: Setting, codec: str = "int4") -> None:
        super().__init__(name, setting.server, setting.reference, setting.page_size)
        self.codec = codec
        self.came_from: dict[str, int] = {}
        self.setting = setting
        self._wrong: list[KV] = []
        if not self.is_fp32:
            self.tie = BFLOAT16_TOLERANCE

    def resumed(self, server: Server) -> Self:
        """The same conversation with another server."""
        again = copy(self)
        again._server, again.findings = server, []
        return again

    @property
    def is_fp32(self) -> bool:
        return self.setting.dtype == torch.float32

    def push(self, text: Text, tier: str, codec: str | None = None) -> None:
        """Bring the nodes of the path of ``text`` and all below them to a lower tier, stored by the case's codec, or
        another one. What is further down stays there."""
        codec = codec or self.codec
        wait_until_idle(self._server)
        mine = {node.id for node in self.path(text.token_ids)}
        for node in (shown := nodes_of(self._server)):
            if node["parent_id"] in mine:
                mine.add(node["id"])
        body = {"tier": tier, "codec": codec, "hold_seconds": HOLD_S}
        below = {"ssd"} - {tier}
        for node in reversed([each for each in shown if each["id"] in mine and each["tier"] not in below]):
            for _ in range(MOVE_TRIES):
                answer = self._server.post(f"/evicpress/nodes/{node['id']}/demote", body)
                if answer["is_there"]:
                    break
            self.expect("moved", (answer["tier"], answer["form"].partition("+")[2] or "raw"), (tier, codec))
        wait_until_idle(self._server)

    def down(self, text: Text) -> Text:
        """Bring ``text`` to the SSD; the text with the KV that comes back. Wrong for it are then: what it was before,
        in groups that begin one slot later, and by another codec."""
        self.push(text, "ssd")
        tally, dtype, kv = self.setting.tally, self.setting.dtype, text.kv
        self._wrong = [kv] * 3
        for node in self._whole_nodes(text):
            entry = self._entry_of(node)
            positions = positions_of(node, kv)
            before = kv.gather(positions)
            rows = through(self.codec, before, dtype)
            rows, num_ties, num_wrong = settled(before, rows, entry, NOISE if self.is_fp32 else 0.0)
            tally.num_values += 2 * before.keys.numel()
            tally.num_ties += num_ties
            tally.num_wrong += num_wrong
            kv = replaced(kv, positions, rows)
            others = through(self.codec, before, dtype, first=1), through(NEIGHBOUR[self.codec], before, dtype)
            for index, other in enumerate(others, 1):
                self._wrong[index] = replaced(self._wrong[index], positions, other)
        return Text(text.token_ids, kv, text.queries, text.prompt_end)

    def taken(self, text: Text) -> Text:
        """``text`` with the KV that the server has, of an exact node, in place of the reference's, which it must be but
        for the rounding of bfloat16. The node is on the GPU again."""
        self.push(text, "ssd", "raw")
        (node,) = self._whole_nodes(text)
        positions, rows = positions_of(node, text.kv), self._entry_of(node).decoded()
        mine = text.kv.gather(positions)
        off = max(float((rows.keys - mine.keys).abs().max()), float((rows.values - mine.values).abs().max()))
        if off > BFLOAT16_NOISE:
            self.findings.append(Finding(self.name, (f"KV off by {off:.2g}",)))
        text = Text(text.token_ids, replaced(text.kv, positions, rows), text.queries, text.prompt_end)
        self.ask_from("ssd", text)
        self.forget_copies()
        return text

    def digests(self, text: Text) -> list[list[bytes]]:
        """Checksums of the entries of a path on the SSD."""
        return [self._entry_of(node).digests for node in self._whole_nodes(text)]

    def _entry_of(self, node: Node) -> Entry:
        entry = read_entry(self.setting.folder, node)
        if entry is None:
            raise RuntimeError(f"the SSD has no entry of the {len(node.token_ids)} tokens from {node.start} on")
        return entry

    def _whole_nodes(self, text: Text) -> list[Node]:
        """The path but for a node that only begins with the end of ``text``."""
        path = self.path(text.token_ids)
        return [node for node in path if node.start + len(node.token_ids) <= len(text.token_ids)]

    def forget_copies(self) -> None:
        """The GPU alone has what there is."""
        for tier in ("host", "ssd"):
            self._server.post(f"/evicpress/flush?tier={tier}")
        wait_until_idle(self._server)

    def check(
        self,
        text: Text,
        path: list[Node],
        prompt: tuple[int, ...],
        answer: Any,
        *,
        cached: int | None = None,
        with_controls: bool = False,
    ) -> Text:
        """As for any case; raises Recomputed where the server has computed what it could load."""
        self.came_from = sources(answer)
        wanted = expected_match(path, prompt, self.page_size) if cached is None else cached
        if answer["meta_info"]["cached_tokens"] < wanted:
            raise Recomputed(f"{answer['meta_info']['cached_tokens']} of {wanted} tokens were loaded")
        return super().check(text, path, prompt, answer, cached=wanted, with_controls=with_controls)

    def ask_from(self, tier: str, text: Text, **given: Any) -> Text:
        """``ask``, whose KV must come from a tier."""
        asked = self.ask(text, **given)
        self.expect(f"KV from {tier}", self.came_from.get(SOURCES[tier], 0) > 0, True)
        return asked

    def _controls(self, kv: KV, held: Tensor, cached: int, new: Sequence[int], top: Any) -> tuple[float, float, float]:
        """Distance of the answer over KV that is wrong: see ``down``."""

        def off_by(wrong: KV) -> float:
            past = self._reference.extend(wrong.gather(held), cached, new)
            return largest_difference(past.logprobs[-len(top) - 1 : -1], top)

        raw, shifted, neighbour = map(off_by, self._wrong)
        return raw, shifted, neighbour


# ---- the cases


def whole_node(case: CodedCase) -> None:
    """To the SSD and back; then encoded anew from what was decoded, to the host and back, and to the SSD."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    end = len(node.token_ids)
    text = case.down(text if case.is_fp32 else case.taken(text))
    digests = case.digests(text)
    case.ask_from("ssd", text, cached=end, with_controls=True)
    case.forget_copies()
    case.expect("an entry on the SSD", read_entry(case.setting.folder, node), None)
    case.push(text, "host")
    case.ask_from("host", text, cached=end)
    case.push(text, "ssd")
    tally = case.setting.tally
    tally.num_again += 1
    tally.num_changed += case.digests(text) != digests


def split_node(case: CodedCase) -> None:
    """Split inside a group: its halves come back from the entry of the whole node; encoded anew, the lower one has
    groups of its own."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    end, point = len(node.token_ids), len(node.token_ids) // 2 // GROUP * GROUP + GROUP // 2
    text = case.down(text)
    case.leave(text, point, cached=point)
    case.expect("nodes after a split", len(case.path(text.token_ids)), 2)
    case.ask(text, cached=end)
    case.forget_copies()
    text = case.down(text)
    case.ask_from("ssd", text, cached=end, with_controls=True)


def partial_matches(case: CodedCase) -> None:
    """Prompts that leave a node at points inside groups, from either tier."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    end = len(node.token_ids)
    text = case.down(text)
    for tier, point in (("ssd", end - 5), ("host", 2 * end // 3 | 1), ("ssd", 77), ("host", 21)):
        case.push(text, tier)
        case.leave(text, point)
        case.expect(f"KV from {tier}", case.came_from.get(SOURCES[tier], 0) > 0, True)
    case.ask(text, cached=end)


def pressed_node(case: CodedCase, form: str = PRESSED) -> None:
    """Fewer tokens of every head, then the codec; a part of it as well."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    case.compress(text, node, form)
    text = case.down(text)
    case.ask_from("ssd", text, cached=len(node.token_ids), with_controls=True)
    case.push(text, "host")
    case.leave(text, 2 * len(node.token_ids) // 3)
    case.ask(text, cached=len(node.token_ids))


def next_turn(case: CodedCase) -> None:
    """A turn computed on decoded KV; then it goes down itself."""
    text = case.down(case.context(150, 300))
    turn = case.ask_from("ssd", text, suffix=case.words(120))
    case.expect("lineage of the turn", {node.lineage for node in case.path(turn.token_ids)}, {"lossy"})
    case.ask(turn)
    turn = case.down(turn)
    case.ask_from("ssd", turn, with_controls=True)


Played: TypeAlias = tuple[CodedCase, Text, list[Node]]
"""A case with a text of which all is on the SSD, and the nodes it has there."""


def before_restart(case: CodedCase, form: str | None = None) -> Played:
    """A node on the SSD, pressed to ``form`` before if one is given."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    if form is not None:
        case.compress(text, node, form)
    text = case.down(text)
    return case, text, case.path(text.token_ids)


def after_restart(played: Played, server: Server) -> list[Finding]:
    """Ask the next server about it, which knows nothing but the SSD."""
    before, text, path = played
    case = before.resumed(server)
    case.expect("nodes of the new server", case.path(text.token_ids), [])
    prompt = text.token_ids + case.words(20)
    end = len(path[0].token_ids)
    try:
        case.check(text, path, prompt, case.generate(prompt), cached=end, with_controls=True)
    except Recomputed as error:
        case.findings.append(Finding(case.name, (str(error),)))
    case.expect("tokens from the SSD", case.came_from.get("storage"), end)
    return case.findings


def not_finite(setting: Setting) -> Line:
    """Nodes with NaN and with Inf in their KV stay where they are, and are counted."""
    server, case = setting.server, CodedCase("not finite", setting)
    counted, problems = 0, []
    for token in (NAN_TOKEN, INF_TOKEN):
        before = server.get("/evicpress/tiers")["errors"].get("host_not_finite", 0)
        prompt = (*case.words(100), token, *case.words(60))
        server.generate(list(prompt), 1, extra_key=case.name)
        (node,) = case.path(prompt)
        for tier, codec in product(("host", "ssd"), BITS):
            body = {"tier": tier, "codec": codec}
            answer = server.post(f"/evicpress/nodes/{node.id}/demote", body)
            if answer["tier"] != "gpu" or answer["is_there"]:
                problems.append(f"token {token} by {codec}: {answer}")
        counted += server.get("/evicpress/tiers")["errors"].get("host_not_finite", 0) - before
        if read_entry(setting.folder, node) is not None:
            problems.append(f"token {token}: an entry on the SSD")
    return Line(
        f"path: nodes with NaN and with Inf, sent down by each codec (page size {setting.page_size})",
        "none is stored, each is counted once",
        f"{counted} counted; {'; '.join(problems) or 'none stored'}",
        counted == 2 and not problems,
    )


# ---- all of them

WHOLE = {"whole node": whole_node, "pressed node": pressed_node, "next turn": next_turn}
PARTS = {"split inside a group": split_node, "partial matches": partial_matches}


def play(setting: Setting, plays: Mapping[str, Callable[[CodedCase], None]], codec: str = "int4") -> list[Finding]:
    """One conversation after the other, since copies are forgotten for all; what one raises is a finding too. One in
    which KV was computed instead of loaded has shown nothing: another one follows."""
    findings = []
    for name, run in plays.items():
        for number in range(1, PLAY_TRIES + 1):
            case = CodedCase(f"{name}, {codec}, {number}", setting, codec)
            try:
                run(case)
            except Recomputed as error:
                case.findings.append(Finding(case.name, (str(error),)))
                if number < PLAY_TRIES and len([each for each in case.findings if each.problems]) == 1:
                    continue
            except (ServerError, OSError, ValueError, RuntimeError, IndexError) as error:
                case.findings.append(Finding(case.name, (f"{type(error).__name__}: {error}",)))
            findings += case.findings
            break
    return findings


def answers_line(what: str, findings: Sequence[Finding], tolerance: float = TOLERANCE) -> Line:
    """Answers, and what wrong caches would have changed in those that were asked with controls."""
    is_right, worst, said = judged(findings, tolerance)
    controls = [min(kind) for kind in zip(*(each.controls for each in findings if each.controls), strict=True)]
    told = ", ".join(f"{name} {off:.2g}" for name, off in zip(WRONG, controls, strict=False))
    least = 10 * tolerance if tolerance == TOLERANCE else tolerance
    return Line(
        f"path: {what}",
        f"log probabilities within {tolerance:g}, no token wrong; off by more than {least:g} over KV that is wrong",
        f"{worst:.1e}, {said}; least of all answers over {told}",
        is_right and bool(controls) and min(controls) > least,
    )


def codes_line(setting: Setting) -> Line:
    tally, dtype = setting.tally, str(setting.dtype).removeprefix("torch.")
    return Line(
        f"path: entries on the SSD against the reference's KV, encoded (page size {setting.page_size}, {dtype})",
        "no value under another code but on the edge between two; encoded again after decoding the same bytes",
        f"{tally.num_values} values, {tally.num_wrong} under another code, {tally.num_ties} on an edge; "
        f"{tally.num_changed} of {tally.num_again} entries changed",
        not tally.num_wrong and tally.num_values > 0 and not tally.num_changed and tally.num_again > 0,
    )


def integrity_line(server: Server, where: str) -> Line:
    violations = server.post("/evicpress/check")["violations"]
    return Line(f"path: integrity afterwards ({where})", "no violation", f"{violations or 'none'}", not violations)


def make_model(folder: Path) -> Path:
    """The peaky model in weights that bfloat16 can hold, with two tokens that bring NaN and Inf into the KV."""

    def change(weights: dict[str, Tensor]) -> None:
        for weight in weights.values():
            weight.copy_(weight.bfloat16())
        embeddings = weights["model.embed_tokens.weight"]
        embeddings[:, -1] = 0.0
        embeddings[INF_TOKEN, -1] = 100.0
        embeddings[NAN_TOKEN] = torch.nan
        weights["model.layers.0.self_attn.v_proj.weight"][0, -1] = 3e38
        weights["lm_head.weight"][[NAN_TOKEN, INF_TOKEN]] = 0.0

    return changed_model(make_peaky_model(folder / "peaky"), folder / "spoiled", change)


def on_pages(model: Path, folder: Path, page_size: int, codecs: Sequence[str] = ()) -> Iterator[Line]:
    """All cases on a server, and what the next one on its folder finds; ``codecs``: one case each."""
    reference, where = Reference(model), f"page size {page_size}"
    with Stoppable(*server_arguments(folder, page_size), model=model) as server:
        setting = Setting(server, reference, folder, page_size)
        yield answers_line(f"int4: {', '.join(WHOLE)} ({where})", play(setting, WHOLE))
        yield answers_line(f"int4: {', '.join(PARTS)} ({where})", play(setting, PARTS))
        for codec in codecs:
            yield answers_line(f"{codec}: whole node ({where})", play(setting, {"whole node": whole_node}, codec))
        yield not_finite(setting)
        yield integrity_line(server, where)
        cases = CodedCase("restart", setting), CodedCase("restart, pressed", setting)
        played = [before_restart(case, form) for case, form in zip(cases, (None, PRESSED), strict=True)]
        server.end(signal.SIGTERM)
    with Stoppable(*server_arguments(folder, page_size), model=model) as server:
        findings = [finding for each in played for finding in after_restart(each, server)]
        yield answers_line(f"int4: restart on the SSD, whole and pressed node ({where})", findings)
        yield integrity_line(server, f"{where}, after the restart")
    yield codes_line(setting)


def lossless_line(setting: Setting) -> Line:
    """The same request over KV that never left the GPU, and over what came back from the SSD."""
    case = CodedCase("lossless", setting, "lossless")
    text = case.context(150, 300)
    prompt = (*text.token_ids, *case.words(20))
    case.generate(prompt)
    stayed = case.generate(prompt)
    case.push(text, "ssd")
    came = case.generate(prompt)
    told = [answer["meta_info"] for answer in (stayed, came)]
    same = all(told[0][name] == told[1][name] for name in ("output_token_logprobs", "output_top_logprobs"))
    num_cached, from_ssd = (told[1]["cached_tokens"], sources(came).get(SOURCES["ssd"], 0))
    lineages = {node.lineage for node in case.path(prompt)}
    return Line(
        "path: lossless, bfloat16: an answer over KV that came back from the SSD (page size 16)",
        "every log probability the same, bit for bit; all of it from the SSD, and exact",
        f"{'the same' if same else 'others'}; {from_ssd} of {num_cached} tokens from the SSD, {', '.join(lineages)}",
        same and from_ssd == num_cached == told[0]["cached_tokens"] > 0 and lineages == {"exact"},
    )


def in_bfloat16(model: Path, folder: Path) -> Iterator[Line]:
    forms = ("--kv-forms", "exact,exact+int8,exact+int4,exact+lossless")
    with Server(*server_arguments(folder, 16, "--dtype", "bfloat16", *forms), model=model) as server:
        setting = Setting(server, Reference(model), folder, 16, torch.bfloat16)
        yield lossless_line(setting)
        findings = play(setting, {"whole node": whole_node})
        yield answers_line("int4 of bfloat16: whole node (page size 16)", findings, BFLOAT16_TOLERANCE)
    yield codes_line(setting)


def quick() -> Iterator[Line]:
    with scratch(1 << 29) as folder, tempfile.TemporaryDirectory() as models:
        model = make_model(Path(models))
        with Server(*server_arguments(folder / "ssd", 16), model=model) as server:
            setting = Setting(server, Reference(model), folder / "ssd", 16)
            plays = {"whole node": whole_node, "split inside a group": split_node}
            yield answers_line(f"int4: {', '.join(plays)} (page size 16)", play(setting, plays))
            yield not_finite(setting)
        yield codes_line(setting)


def measure() -> Iterator[Line]:
    with scratch(1 << 30) as folder, tempfile.TemporaryDirectory() as models:
        model = make_model(Path(models))
        yield from on_pages(model, folder / "pages of 1", 1, ("int8", "int2"))
        yield from on_pages(model, folder / "pages of 16", 16)
        yield from in_bfloat16(model, folder / "bfloat16")
