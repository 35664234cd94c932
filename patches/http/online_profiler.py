"""Profiling beside a running server: a thread of the process that answers HTTP takes jobs from the scheduler and
carries them out with ordinary requests, which give way to users' (background_requests.py).

What users asked stays in this machine's memory: it comes from the scheduler and goes back into its requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_evicpress.core import Form
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.operations import read_object
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.patches.http.routes import SchedulerCalls, find_route
from sglang_evicpress.profiler.client import ServerEngine
from sglang_evicpress.profiler.engine import EngineError, Shadow, ShadowLost, ShadowRefused
from sglang_evicpress.profiler.measure import Asked, answer, measure_forms, observe
from sglang_evicpress.profiler.scorers import get_scorer
from sglang_evicpress.profiler.transport import Json, refusal
from sglang_evicpress.quality.profile import Profile, query_set
from sglang_evicpress.quality.recorder import Query
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.threads import WatchedThread

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # between two looks for a job, when there was none
MAX_NEW_TOKENS = 64  # of an answer on exact KV
REQUEST_S = 600.0


Result = TypeVar("Result")


class GeneratingServer(Protocol):
    """SGLang's TokenizerManager, as far as it serves requests of our own."""

    event_loop: asyncio.AbstractEventLoop | None

    def generate_request(self, request: GenerateReqInput, http_request: None) -> AsyncIterator[Iterable[Json]]:
        """The answers, as they come."""


@dataclass(eq=False, repr=False)
class InProcess:
    """``Transport`` to the scheduler behind this process, from another thread than the event loop's."""

    loop: asyncio.AbstractEventLoop
    tokenizer_manager: GeneratingServer
    calls: SchedulerCalls

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        route, path_arguments = find_route(method, path)
        return self.call(route.name, {**path_arguments, **(body or {})})

    def call(self, op: str, arguments: Mapping[str, object]) -> Json:
        """The scheduler's answer to one operation."""
        status, payload = self._wait(self._call(op, dict(arguments)))
        body = read_object(payload)
        if status == 200:
            return body
        error = body.get("error")
        reason = str(error.get("reason")) if isinstance(error, dict) else "no reason given"
        raise refusal(status, "it failed: see the log" if status == 500 else reason, op)  # its words may be a prompt

    def generate(self, body: Mapping[str, object]) -> list[Json]:
        return self._wait(self._generate(GenerateReqInput(**body)))

    def _wait(self, coroutine: Coroutine[object, object, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(REQUEST_S)
        except TimeoutError:
            future.cancel()
            raise EngineError(f"no answer within {REQUEST_S:g} s") from None
        except CancelledError:
            raise EngineError("the server stops") from None

    async def _call(self, op: str, arguments: Json) -> tuple[int, bytes]:
        try:
            response = await self.calls.call(op, arguments)
        except IntrospectionError as error:
            raise EngineError(error.reason) from None
        return response.status, response.payload

    async def _generate(self, request: GenerateReqInput) -> list[Json]:
        try:
            async for results in self.tokenizer_manager.generate_request(request, None):
                return list(results)
        except Exception as error:  # SGLang refuses and aborts requests by ValueError and by web errors
            words = f": {error}" if isinstance(error, ValueError | HTTPException) else ""  # others' may be a prompt
            raise EngineError(f"{type(error).__name__}{words}") from error
        raise EngineError("the server answered nothing")


class OnlineProfiler:
    """One thread. Its failures are a profile less, never a request's."""

    def __init__(self, tokenizer_manager: GeneratingServer, calls: SchedulerCalls, file: ProfileFile) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._calls = calls
        self._file = file
        self._is_over = threading.Event()
        self.thread = WatchedThread("evicpress-profiler", self._run)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """It takes no further job; what it waits for is not waited for here."""
        self._is_over.set()
        self.thread.stop()

    def _run(self) -> None:
        while (loop := self._tokenizer_manager.event_loop) is None:  # until the first request
            if self._is_over.wait(PAUSE_S):
                return
        self._transport = InProcess(loop, self._tokenizer_manager, self._calls)
        self._engine = ServerEngine(self._transport)
        self._scorer = get_scorer("logprob")
        while not self._is_over.is_set():
            try:
                job = self._transport.call("profiling_job", {})
                if job:
                    self._do(job)
            except (EngineError, RuntimeError, OSError) as error:  # the event loop is closed, or the socket
                logger.info("evicpress: looking for something to profile failed: %s", error)
                job = {}
            if self._is_over.wait(0.0 if job else PAUSE_S):
                return

    def _do(self, job: Json) -> None:
        key, tokens = str(job["key"]), job["token_ids"]
        shadow: Shadow | None = None
        should_adopt = job["why"] == "drift"
        try:
            shadow = self._engine.open_shadow(tokens, job["extra_key"])
            if job["kind"] == "observe":
                # The next job need not be this context's: users may have come, or nothing new was asked about it.
                job = self._transport.call("profiling_job", {}) if self._observe(shadow, job) else {}
                should_adopt = job.get("kind") == "profile" and job["key"] == key
                if not should_adopt:
                    return
            self._profile(shadow, job)
        except (ShadowRefused, ShadowLost) as error:
            logger.debug("evicpress: context %s is not profiled now: %s", key, error)
            self._transport.call("note_failed", {"key": key})
        except (EngineError, ValueError) as error:
            logger.warning("evicpress: context %s could not be profiled: %s", key, error)
            self._transport.call("note_failed", {"key": key})
        finally:
            if shadow is not None:
                with suppress(ShadowLost):
                    self._engine.close_shadow(shadow, adopt=should_adopt)

    def _observe(self, shadow: Shadow, job: Json) -> bool:
        queries = [Query(query["token_ids"], query["answer"], query["predicted"]) for query in job["queries"]]
        qualities = observe(self._engine, shadow, job["token_ids"], queries)
        pairs = [[query.predicted, quality] for query, quality in zip(queries, qualities, strict=True)]
        return bool(self._transport.call("note_observed", {"key": job["key"], "pairs": pairs})["is_drifted"])

    def _profile(self, shadow: Shadow, job: Json) -> None:
        queries = [Asked(query["token_ids"]) for query in job["queries"]]
        forms = [Form.parse_stored(text) for text in job["forms"]]
        tokens, engine = job["token_ids"], self._engine
        exact = answer(engine, shadow.namespace, tokens, queries, MAX_NEW_TOKENS)
        measured: dict[Form, RunningStats] = {}
        is_whole = True
        try:
            for form, stats in measure_forms(engine, shadow, tokens, queries, forms, self._scorer, exact):
                measured[form] = stats
        except (ShadowRefused, ShadowLost):
            if not measured:
                raise
            is_whole = False
        if not measured:
            raise EngineError(f"none of {', '.join(job['forms'])} can be made of it")
        asked = query_set([query.tokens for query in queries])
        profile = Profile(shadow.key, shadow.num_tokens, measured, self._scorer.name, asked, len(queries), time.time())
        self._put(profile.to_json(), is_whole)
        if not is_whole:  # users came: the other forms are measured another time
            self._transport.call("note_failed", {"key": job["key"]})

    def _put(self, profile: Mapping[str, object], is_whole: bool) -> None:
        """In place of what was known, or of a part, beside it."""
        answered = self._transport.call("put_profile", {"profile": profile, "is_fresh": is_whole})
        with suppress(IntrospectionError):  # it was logged; the profile is used all the same
            self._file.keep_now(answered)
