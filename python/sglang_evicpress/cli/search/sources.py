"""Sources of the scores of a search: a local model of transformers, or a running server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from sglang_evicpress.cli.parser import naming
from sglang_evicpress.cli.profile.connection import connect
from sglang_evicpress.cli.profile.offline import FILL_TOKENS, read_server
from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.device import checked_device
from sglang_evicpress.geometry.checkpoint import digest_of, settings_digest
from sglang_evicpress.press import get_press
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.contexts import GivenContext
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.local.model import LocalModel
from sglang_evicpress.profiler.local.objective import SINKS, Objective, prepare
from sglang_evicpress.profiler.measure import Asked
from sglang_evicpress.profiler.prompts import Prompts, served_tokens
from sglang_evicpress.profiler.served_objective import ServedObjective, layers_of, prepare_served
from sglang_evicpress.profiler.transport import Transport
from sglang_evicpress.progress import Progress
from sglang_evicpress.search.layer_budgets import Budgets

NUM_RETRIES = 6  # for room: two minutes in all
Split = tuple[list[int], str | None, list[Asked]]
"""Tokens of a context, its namespace and its questions."""

T = TypeVar("T")


class Scored(Protocol):
    """Objective on some contexts, which also gives the score of every question."""

    @property
    def exact(self) -> float | None: ...
    def __call__(self, budgets: Budgets) -> float: ...
    def by_question(self, budgets: Budgets) -> list[list[float]]: ...


class Source(Protocol):
    """``name`` is shown; ``sinks``: the first tokens, which every layer keeps; ``identity`` is what scores depend on
    besides the arguments."""

    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def sinks(self) -> int: ...
    @property
    def identity(self) -> str: ...

    def split(self, contexts: Sequence[GivenContext]) -> list[Split]:
        """Raises ValueError for a context that is too short."""

    def objective(self, split: Sequence[Split], *, is_shown: bool) -> Scored: ...


def source_of(args: argparse.Namespace) -> Source:
    """That of ``--model`` or ``--url``. Raises ValueError for none, both, and one that cannot be used."""
    if (args.model is None) == (args.url is None):
        given = "both --model and --url are" if args.model else "neither --model nor --url is"
        raise ValueError(f"{given} given: expected one of them")
    return LocalSource.of(args) if args.url is None else ServerSource.of(args)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder of a model."""

    args: argparse.Namespace
    model: LocalModel
    name: str
    num_layers: int
    sinks: int
    identity: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> LocalSource:
        if PRESSES[args.press].needs_geometry:
            raise ValueError(
                f"--press: {args.press!r} needs what was calibrated of the model's queries, which only a server with "
                "--kv-geometry has: expected --url, or another press"
            )
        folder = Path(args.model)
        with naming("--device"):
            checked_device(args.device)
        with naming("--model"):
            model = LocalModel(folder, device=args.device)
            identity = f"{digest_of(folder)} {settings_digest(folder)} {model.dtype}"
        return cls(args, model, folder.name, model.num_layers, SINKS, identity)

    def split(self, contexts: Sequence[GivenContext]) -> list[Split]:
        return _split(self.args, partial(self.model.tokens, self.args.prompt), contexts)

    def objective(self, split: Sequence[Split], *, is_shown: bool) -> Objective:
        args = self.args
        pairs = [(tokens, asked) for tokens, _, asked in split]
        tasks = prepare(self.model, get_press(args.press), pairs, args.max_new_tokens, batch=args.batch)
        shown = _shown(tasks, len(split), is_shown=is_shown)
        return Objective(self.model, shown, args.objective, args.max_new_tokens, batch=args.batch)


@dataclass(frozen=True, slots=True)
class ServerSource:
    """A server whose layers may each keep another number of tokens; its users go first."""

    args: argparse.Namespace
    transport: Transport
    name: str
    num_layers: int
    sinks: int
    identity: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> ServerSource:
        transport = connect(args.url, args.api_key, args.admin_api_key, num_retries=NUM_RETRIES)
        try:
            server = read_server(transport, (Form(args.press, 0.5),))
            num_layers, sinks = layers_of(transport, server.page_size)
        except EngineError as error:
            raise ValueError(f"--url: {error}") from None
        return cls(args, transport, args.url, num_layers, sinks, server.identity.hex())

    def split(self, contexts: Sequence[GivenContext]) -> list[Split]:
        return _split(self.args, partial(served_tokens, self.transport, self.args.prompt), contexts)

    def objective(self, split: Sequence[Split], *, is_shown: bool) -> ServedObjective:
        args = self.args
        engine = ServerEngine(self.transport, fill_tokens=FILL_TOKENS, may_evict=True)
        tasks = _shown(prepare_served(engine, split, args.max_new_tokens), len(split), is_shown=is_shown)
        return ServedObjective(engine, tasks, args.objective, args.press, args.max_new_tokens)


def _split(
    args: argparse.Namespace, tokenize: Callable[[str], list[int]], contexts: Sequence[GivenContext]
) -> list[Split]:
    prompts, split = Prompts(tokenize, args.template), list[Split]()
    for context in contexts:
        with naming(f"context {context.id!r:.60}"):
            tokens, asked = prompts.split(context.text, context.questions)
            split.append((tokens, context.namespace, asked))
    return split


def _shown(tasks: Iterable[T], count: int, *, is_shown: bool) -> list[T]:
    """All tasks, with a bar while they are prepared."""
    prepared = list[T]()
    with Progress(count, "contexts", is_shown=is_shown) as progress:
        progress.name("prefill")
        for task in tasks:
            prepared.append(task)
            progress.step()
    return prepared
