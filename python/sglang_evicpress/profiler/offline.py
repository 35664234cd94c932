"""Profiles contexts one after the other at a running server, which keeps each as soon as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.chat import EndpointError
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.contexts import GivenContext, GivenQuestion
from sglang_evicpress.profiler.engine import EngineError
from sglang_evicpress.profiler.measure import Asked, profile_context
from sglang_evicpress.profiler.profile import Profile, context_keys, query_set
from sglang_evicpress.profiler.progress import Progress
from sglang_evicpress.profiler.prompts import ContextTooShort, Prompts
from sglang_evicpress.profiler.scorers import Scorer
from sglang_evicpress.profiler.transport import NotThere, Transport, Unreachable

FILL_TOKENS = 2048
"""Tokens that one request computes of a context the server does not hold: an offline run delays no one."""

PROFILES = "/evicpress/profiles"

_FIELDS = {field.name for field in fields(Profile)}


@dataclass(frozen=True, slots=True)
class Plan:
    """``make_questions`` makes those of a context that has none."""

    contexts: Sequence[GivenContext]
    forms: tuple[Form, ...]
    scorer: Scorer
    max_new_tokens: int
    is_resumed: bool
    make_questions: Callable[[str], list[GivenQuestion]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one context: a ``profile``, which the server has now (``was_there``: had before), or ``error``,
    for which it failed, or was left out when ``is_skipped``."""

    id: str
    profile: Profile | None = None
    was_there: bool = False
    error: str = ""
    is_skipped: bool = False


@dataclass(slots=True)
class Run:
    """``outcomes`` has those of the contexts done so far, also after Ctrl-C. ``identity`` is that of the server."""

    plan: Plan
    transport: Transport
    prompts: Prompts
    identity: bytes
    outcomes: list[Outcome]

    def run(self, progress: Progress) -> None:
        """Raises Unreachable when the server is gone; the context at hand is the last of ``outcomes`` then."""
        engine = ServerEngine(self.transport, fill_tokens=FILL_TOKENS, may_evict=True)
        num_forms = len(self.plan.forms)
        for context in self.plan.contexts:
            progress.name(context.id[:20])
            num_done = 0

            def step(form: Form, done: int, of: int) -> None:
                nonlocal num_done
                progress.step(done - num_done)
                num_done = done

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

    def _profile(
        self, engine: ServerEngine, context: GivenContext, on_progress: Callable[[Form, int, int], None]
    ) -> Outcome:
        plan = self.plan
        questions = context.questions or self.plan.make_questions(context.text)
        tokens, queries = self.prompts.split(context.text, questions)
        known = self._known(tokens, context.namespace, queries) if plan.is_resumed else None
        if known is not None:
            return Outcome(context.id, known, was_there=True)
        profile = profile_context(
            engine,
            tokens,
            context.namespace,
            queries,
            plan.forms,
            plan.scorer,
            max_new_tokens=plan.max_new_tokens,
            on_progress=on_progress,
        )
        self.transport.ask("POST", PROFILES, {"profile": profile.to_json(), "is_fresh": True})
        return Outcome(context.id, profile)

    def _known(self, tokens: Sequence[int], namespace: str | None, queries: Sequence[Asked]) -> Profile | None:
        """The server's profile if it says of the same queries by the same scorer what is to be measured."""
        key = context_keys(self.identity, namespace, tokens)[-1]
        try:
            profile = profile_of(self.transport.ask("GET", f"{PROFILES}/{key.hex()}"), key.hex())
        except NotThere:
            return None
        asked = query_set([query.tokens for query in queries])
        is_same = (profile.scorer, profile.query_set) == (self.plan.scorer.name, asked)
        return profile if is_same and set(self.plan.forms) <= set(profile.forms) else None


def read_identity(transport: Transport) -> bytes:
    """That of the model, tokenizer and version of forms of the server. Raises EngineError."""
    try:
        identity = transport.ask("GET", PROFILES).get("identity")
    except NotThere as error:
        raise EngineError(f"{error}: expected a server with EvicPress that keeps profiles") from None
    try:
        read = bytes.fromhex(identity) if isinstance(identity, str) else b""
    except ValueError:
        read = b""
    if len(read) != 16:
        raise EngineError(f"GET {PROFILES} answered {identity!r:.100} as identity: expected 32 hex digits")
    return read


def profile_of(answer: Mapping[str, object], key: str) -> Profile:
    """The profile in the server's answer about the context with ``key``, in hex. Raises EngineError."""
    try:
        return Profile.from_json({name: value for name, value in answer.items() if name in _FIELDS})
    except ValueError as error:
        raise EngineError(f"GET {PROFILES}/{key}: {error}") from None
