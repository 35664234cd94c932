"""Profiles contexts one after the other at a running server, which keeps each as soon as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256

from sglang_evicpress.cli.profile.chat import EndpointError
from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.contexts import GivenContext, GivenQuestion
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.measure import Asked, NothingMade, profile_context
from sglang_evicpress.profiler.prompts import ContextTooShort, Prompts
from sglang_evicpress.profiler.scorers import Scorer
from sglang_evicpress.profiler.transport import NotThere, Transport, Unreachable
from sglang_evicpress.progress import Progress
from sglang_evicpress.quality.profile import Profile, context_keys, query_set

FILL_TOKENS = 2048
"""Tokens that one request computes of a context the server does not hold: an offline run delays no one."""

PROFILES = "/evicpress/profiles"

_FIELDS = {each.name for each in fields(Profile)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one context: a ``profile``, which the server has now (``was_there``: had before), or ``error``,
    for which it failed, or was left out when ``is_skipped``; both where it was measured in part."""

    id: str
    profile: Profile | None = None
    was_there: bool = False
    error: str = ""
    is_skipped: bool = False


@dataclass(slots=True)
class Run:
    """``outcomes`` has those of the contexts done so far, also after Ctrl-C. ``identity`` is that of the server, which
    can make the ``makeable`` ones of ``forms``. ``make_questions`` makes those of a context that has none."""

    contexts: Sequence[GivenContext]
    forms: tuple[Form, ...]
    scorer: Scorer
    max_new_tokens: int
    is_resumed: bool
    make_questions: Callable[[str], list[GivenQuestion]]
    transport: Transport
    prompts: Prompts
    identity: bytes
    makeable: Sequence[Form]
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, progress: Progress) -> None:
        """Raises Unreachable when the server is gone; the context at hand is the last of ``outcomes`` then."""
        engine = ServerEngine(self.transport, fill_tokens=FILL_TOKENS, may_evict=True)
        num_forms = len(self.forms)
        for context in self.contexts:
            progress.name(context.id[:20])
            num_done = 0

            def step() -> None:
                nonlocal num_done
                progress.step()
                num_done += 1

            try:
                outcome = self._profile(engine, context, step)
            except ContextTooShort as error:
                outcome = Outcome(context.id, error=str(error), is_skipped=True)
            except (EngineError, EndpointError, ValueError) as error:
                outcome = Outcome(context.id, error=str(error))
                if isinstance(error, Unreachable):
                    self.outcomes.append(outcome)
                    raise
            self.outcomes.append(outcome)
            progress.leave_out(num_forms - num_done)
            if outcome.error:
                progress.say(f"{context.id!r} {'is left out' if outcome.is_skipped else 'failed'}: {outcome.error}")

    def _profile(self, engine: ServerEngine, context: GivenContext, on_progress: Callable[[], None]) -> Outcome:
        questions = context.questions or self.make_questions(context.text)
        tokens, queries = self.prompts.split(context.text, questions)
        known = self._known(tokens, context.namespace, queries) if self.is_resumed else None
        missing = [form for form in self.makeable if known is None or form not in known.forms]
        if known is not None and not missing:
            return Outcome(context.id, known, was_there=True)
        num_asked = 0

        def step() -> None:
            nonlocal num_asked
            num_asked += 1
            on_progress()

        try:
            profile = profile_context(
                engine,
                tokens,
                context.namespace,
                queries,
                missing,
                self.scorer,
                max_new_tokens=self.max_new_tokens,
                on_progress=step,
            )
        except NothingMade:
            if known is None:
                raise
            return Outcome(context.id, known, was_there=True)
        profile = replace(profile, query_set=asked_set(queries, self.scorer, self.max_new_tokens))
        self.transport.ask("POST", PROFILES, {"profile": profile.to_json(), "is_fresh": True})
        num_left = len(missing) - num_asked
        error = f"users needed the room, {num_left} of {len(missing)} forms are left: --resume goes on"
        return Outcome(context.id, profile.completed(known), error=error if num_left else "")  # as the server does

    def _known(self, tokens: Sequence[int], namespace: str | None, queries: Sequence[Asked]) -> Profile | None:
        """The server's profile if it is of the same queries, asked in the same way, by the same scorer."""
        key = context_keys(self.identity, namespace, tokens)[-1]
        try:
            profile = profile_of(self.transport.ask("GET", f"{PROFILES}/{key.hex()}"), key.hex())
        except NotThere:
            return None
        asked = asked_set(queries, self.scorer, self.max_new_tokens)
        return profile if (profile.scorer, profile.query_set) == (self.scorer.name, asked) else None


def asked_set(queries: Sequence[Asked], scorer: Scorer, max_new_tokens: int) -> str:
    """A ``query_set`` that also tells apart whatever else changes what is measured: the length of the answers and, for
    a scorer that looks at them, the reference answers."""
    asked = sorted(
        (query_set([query.tokens]), (query.reference or "") if scorer.needs_reference else "") for query in queries
    )
    return sha256(repr((max_new_tokens, asked)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """``identity`` of a server's model, tokenizer and version of forms; the forms that it can make of some context; the
    slots of its pages."""

    identity: bytes
    makeable: list[Form]
    page_size: int


def read_server(transport: Transport, forms: Sequence[Form]) -> ServerFacts:
    """Facts of a server, and the ``forms`` that it can make. Raises EngineError, also when these are none."""
    try:
        answer = transport.ask("GET", PROFILES)
    except NotThere as error:
        raise EngineError(f"{error}: expected a server with EvicPress that keeps profiles") from None
    identity = answer.get("identity")
    try:
        read = bytes.fromhex(identity) if isinstance(identity, str) else b""
    except ValueError:
        read = b""
    if len(read) != 16:
        raise EngineError(f"GET {PROFILES} answered {identity!r:.100} as identity: expected 32 hex digits")
    page_size, named = answer.get("page_size", 1), ", ".join(map(str, forms))
    if not isinstance(page_size, int) or page_size < 1:
        raise EngineError(f"GET {PROFILES} answered {page_size!r:.100} as page_size: expected a whole number above 0")
    makeable = list(forms)
    if answer.get("has_geometry") is False:
        makeable = [form for form in makeable if form.press is None or not PRESSES[form.press].needs_geometry]
        if not makeable:
            raise EngineError(f"none of {named} can be made: the server was started without --kv-geometry")
    kept = answer.get("forms")  # the server's own
    query_presses = {name for name, press in PRESSES.items() if press.needs_queries}
    if isinstance(kept, list) and not any(str(form).partition("@")[0] in query_presses for form in kept):
        makeable = [form for form in makeable if form.press not in query_presses]
        if not makeable:
            raise EngineError(f"none of {named} can be made: --kv-forms of the server names none of their presses")
    return ServerFacts(read, makeable, page_size)


def profile_of(answer: Mapping[str, object], key: str) -> Profile:
    """The profile in the server's answer about the context with ``key``, in hex. Raises EngineError."""
    try:
        return Profile.from_json({name: value for name, value in answer.items() if name in _FIELDS})
    except ValueError as error:
        raise EngineError(f"GET {PROFILES}/{key}: {error}") from None
