"""Conversations with the server of one family: without compression, compressed, and back from host memory and SSD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from evicbench.codecs.path import PLAY_TRIES, CodedCase, Recomputed, Setting
from evicbench.correctness.case import Case
from evicbench.correctness.exactness import one_compressed_node, two_compressed_nodes
from evicbench.correctness.findings import Finding
from evicbench.testbed.server import ServerError

TIERS = ("host", "ssd")


class FamilyCase(CodedCase):
    """A conversation whose nodes move down as they are: wrong caches are those of any case."""

    _controls = Case._controls


def uncompressed(case: FamilyCase) -> None:
    """The control: a prompt that nobody has asked before, and one over an exact prefix."""
    case.ask(case.unknown(), cached=0)
    text = case.context(100, 300)
    (node,) = case.path(text.token_ids)
    case.ask(text, cached=len(node.token_ids))


def through_tiers(case: FamilyCase, form: str | None) -> None:
    """A node goes to the host and back, and to the SSD and back; ``form``: compressed before, exact if None."""
    text = case.context(150, 300)
    (node,) = case.path(text.token_ids)
    if form is not None:
        case.compress(text, node, form)
    for tier in TIERS:
        case.push(text, tier, "raw")
        case.ask_from(tier, text, cached=len(node.token_ids), with_controls=form is not None)


def plays(forms: tuple[str, str]) -> Mapping[str, Callable[[FamilyCase], None]]:
    """Conversations over compressed and moved KV."""
    first, second = forms
    return {
        first: partial(one_compressed_node, form=first),
        second: partial(one_compressed_node, form=second),
        "two nodes": partial(two_compressed_nodes, first=second, second=first),
        "tiers": partial(through_tiers, form=None),
        f"tiers, {first}": partial(through_tiers, form=first),
    }


def play(setting: Setting, name: str, run: Callable[[FamilyCase], None]) -> list[Finding]:
    """All findings of a conversation; what it raises is one too. If KV was computed that could have been loaded, it has
    shown nothing: another one follows."""
    for number in range(1, PLAY_TRIES + 1):
        case = FamilyCase(f"{name}, {number}", setting)
        try:
            run(case)
        except Recomputed as error:
            if number < PLAY_TRIES:
                continue
            case.findings.append(Finding(case.name, (str(error),)))
        except (ServerError, OSError, ValueError, RuntimeError, IndexError) as error:
            case.findings.append(Finding(case.name, (f"{type(error).__name__}: {error}",)))
        return case.findings
    raise AssertionError("no try")
