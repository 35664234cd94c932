"""The engine as a running server: SGLang's own ``/generate`` for requests, ``/evicpress/...`` for shadows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sglang_evicpress.core import Form
from sglang_evicpress.profiler.engine import (
    Answer,
    EngineError,
    Likelihood,
    NotMakeable,
    Shadow,
    ShadowLost,
    ShadowRefused,
)
from sglang_evicpress.profiler.transport import BadRequest, Conflict, Json, NotThere, Transport
from sglang_evicpress.quality.profile import BLOCK_TOKENS

FILL_TOKENS = 256
"""Tokens that one request computes of a shadow's missing part: users wait for no more than that."""


class ServerEngine:
    """Asks a server, by way of ``transport``, for what a profiler needs. One thread at a time; any call may raise
    EngineError.

    ``fill_tokens`` is how much of a shadow that users' KV does not cover is computed by one request; ``may_evict``
    lets shadows push out users' idle KV.
    """

    def __init__(self, transport: Transport, *, fill_tokens: int = FILL_TOKENS, may_evict: bool = False) -> None:
        if fill_tokens < BLOCK_TOKENS:
            raise ValueError(f"fill_tokens is {fill_tokens}: expected at least {BLOCK_TOKENS}")
        self._transport = transport
        self._fill_tokens = fill_tokens
        self._may_evict = may_evict
        self._least_tokens = 0  # to generate; 1 for a server that refuses 0
        self._shadow_tokens: dict[str, int] = {}  # what every prompt in a namespace must find there
        self._forms: dict[int, dict[Form, str]] = {}

    def open_shadow(self, tokens: Sequence[int], namespace: str | None) -> Shadow:
        """Copy, or where it is not there compute, the exact KV of ``tokens`` as users' requests with ``extra_key``
        ``namespace`` have it. ``tokens`` are whole blocks. Raises ShadowRefused."""
        ids = [int(token) for token in tokens]
        body = {"token_ids": ids, "extra_key": namespace, "may_evict": self._may_evict}
        opened = self._transport.ask("POST", "/evicpress/shadows", body)
        try:
            shadow = Shadow(
                int(opened["shadow"]), bytes.fromhex(opened["key"]), int(opened["num_tokens"]), str(opened["extra_key"])
            )
            num_present = int(opened["num_present"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"POST /evicpress/shadows answered {opened!r:.200}: {error!r}") from None
        try:
            if shadow.num_tokens != len(ids):
                raise EngineError(f"a shadow of {len(ids)} tokens was asked for: the server has {shadow.num_tokens}")
            self._fill(shadow, ids, num_present)
        except BaseException:
            with suppress(EngineError):  # why it could not be filled is what counts
                self.close_shadow(shadow)
            raise
        self._shadow_tokens[shadow.namespace] = shadow.num_tokens
        self._forms[shadow.id] = {}
        return shadow

    def make_form(self, shadow: Shadow, form: Form, *, layer_tokens: Sequence[int] | None = None) -> str:
        """Compress a further copy of the shadow, to ``layer_tokens`` in its layers where they are given; returns its
        namespace. Raises ShadowRefused or ShadowLost, and NotMakeable when the form cannot be made of this context."""
        given = {} if layer_tokens is None else {"layer_tokens": list(layer_tokens)}
        try:
            made = self._ask_shadow(shadow, "forms", {"form": str(form), **given})
        except (BadRequest, Conflict) as error:
            raise NotMakeable(str(error)) from None
        namespace = made.get("extra_key")
        if not isinstance(namespace, str):
            raise EngineError(f"the server made {form} and answered {made!r:.200}: expected an extra_key")
        self._shadow_tokens[namespace] = shadow.num_tokens
        self._forms.setdefault(shadow.id, {})[form] = namespace
        return namespace

    def drop_form(self, shadow: Shadow, form: Form) -> None:
        """Free that copy."""
        namespace = self._forms.get(shadow.id, {}).pop(form, None)
        if namespace is not None:
            self._shadow_tokens.pop(namespace, None)
        with suppress(ShadowLost):  # so is the form
            self._ask_shadow(shadow, "drop", {"form": str(form)})

    def close_shadow(self, shadow: Shadow, *, adopt: bool = False) -> None:
        """Free the shadow and what was made of it; one that is gone already is closed. ``adopt``: users' lossy nodes of
        this context get its exact KV."""
        self._shadow_tokens.pop(shadow.namespace, None)
        for namespace in self._forms.pop(shadow.id, {}).values():
            self._shadow_tokens.pop(namespace, None)
        with suppress(ShadowLost):
            self._ask_shadow(shadow, "close", {"adopt": adopt})

    def generate(self, namespace: str, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        """The greedy answer to each prompt. The prompts begin with the shadow's tokens; raises ShadowLost when those
        did not come from the cache."""
        results = self._ask_prompts(namespace, prompts, {"return_logprob": True}, max_new_tokens)
        return [_answer(result) for result in results]

    def score(
        self, namespace: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, top: int = 0
    ) -> list[Likelihood]:
        """Likelihood of each answer behind its prompt, in one forward pass each. ``top``: with how many of the
        likeliest tokens ``best`` and ``expected`` are made; 0 leaves them empty. Raises ShadowLost as ``generate``."""
        inputs = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        # The server answers from that position on, and nothing for the position itself: the answer's tokens follow.
        fields = {"return_logprob": True, "logprob_start_len": [len(prompt) - 1 for prompt in prompts]}
        if top:
            fields["top_logprobs_num"] = top
        results = self._ask_prompts(namespace, inputs, fields, 0)
        return [_likelihood(result, answer, top) for result, answer in zip(results, answers, strict=True)]

    def _fill(self, shadow: Shadow, ids: Sequence[int], num_present: int) -> None:
        """Compute what was not copied, a bounded part at a time, each on top of the one before it."""
        while num_present < len(ids):
            end = num_present + self._fill_tokens
            end = min(end - end % BLOCK_TOKENS, len(ids))
            (result,) = self._post(shadow.namespace, [ids[:end]], {}, 0)
            # The last block of what is there need not have been a whole page.
            _check_cached(result, num_present - BLOCK_TOKENS)
            num_present = end

    def _ask_shadow(self, shadow: Shadow, what: str, body: Mapping[str, object]) -> Json:
        try:
            return self._transport.ask("POST", f"/evicpress/shadows/{shadow.id}/{what}", body)
        except NotThere as error:
            raise ShadowLost(str(error)) from None

    def _ask_prompts(
        self, namespace: str, prompts: Sequence[Sequence[int]], fields: Mapping[str, object], max_new_tokens: int
    ) -> list[Json]:
        num_tokens = self._shadow_tokens.get(namespace)
        if num_tokens is None:
            raise EngineError("prompts were given for a namespace that is not of an open shadow")
        if not prompts:
            return []
        inputs = [[int(token) for token in prompt] for prompt in prompts]
        results = self._post(namespace, inputs, fields, max_new_tokens)
        for result in results:
            _check_cached(result, num_tokens)
        return results

    def _post(
        self, namespace: str, inputs: Sequence[Sequence[int]], fields: Mapping[str, object], max_new_tokens: int
    ) -> list[Json]:
        while True:
            num_new = max(max_new_tokens, self._least_tokens)
            sampling = {"temperature": 0, "max_new_tokens": num_new}
            body = {"input_ids": inputs, "extra_key": namespace, "sampling_params": sampling, **fields}
            try:
                results = self._transport.generate(body)
            except BadRequest:
                if num_new > 0:
                    raise
                self._least_tokens = 1
                continue
            if len(results) != len(inputs):
                raise EngineError(f"{len(inputs)} prompts were asked: the server answered {len(results)}")
            for result in results:
                reason = _meta(result).get("finish_reason")
                if isinstance(reason, Mapping) and reason.get("type") == "abort":
                    raise _given_up(str(reason.get("message", "it says not why")))
            return results


def _given_up(why: str) -> EngineError:
    """A request of ours that the server aborted: its shadow is gone, or users needed what it had."""
    kind = ShadowLost if why.startswith("the shadow is gone") else ShadowRefused if "users" in why else EngineError
    return kind(f"the server gave up a request: {why}")


def _meta(result: Mapping[str, Any]) -> Json:
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    if not isinstance(meta, dict):
        raise EngineError(f"the server answered {result!r:.200}: expected an object with meta_info")
    return meta


def _check_cached(result: Json, num_tokens: int) -> None:
    num_cached = _meta(result).get("cached_tokens")
    if not isinstance(num_cached, int) or num_cached < num_tokens:
        raise ShadowLost(f"a request found {num_cached} of the {num_tokens} tokens of its shadow in the cache")


def _answer(result: Json) -> Answer:
    pairs = [_pair(entry) for entry in _rows(_meta(result), "output_token_logprobs")]
    text = result.get("text")
    return Answer(
        tuple(token for _, token in pairs),
        tuple(logprob for logprob, _ in pairs),
        text if isinstance(text, str) else "",
    )


def _likelihood(result: Json, answer: Sequence[int], top: int) -> Likelihood:
    """The first row stands for the prompt's last token, of which nothing is said."""
    meta = _meta(result)
    pairs = [_pair(entry) for entry in _rows(meta, "input_token_logprobs")[1:]]
    # SGLang shows tokens at the very end of the vocabulary as 0.
    if len(pairs) != len(answer) or any(
        shown not in (int(token), 0) for (_, shown), token in zip(pairs, answer, strict=True)
    ):
        shown = [token for _, token in pairs]
        raise EngineError(f"the server scored the tokens {shown!r:.100}: expected the answer's, {list(answer)!r:.100}")
    logprobs = tuple(logprob for logprob, _ in pairs)
    if not top:
        return Likelihood(logprobs)
    rows = _rows(meta, "input_top_logprobs")[1:]
    if len(rows) != len(answer) or not all(rows):
        raise EngineError(f"the server named likeliest tokens at {len(rows)} of {len(answer)} positions")
    likeliest = [[_pair(entry)[0] for entry in row] for row in rows]
    return Likelihood(logprobs, tuple(max(row) for row in likeliest))


def _rows(meta: Json, name: str) -> Sequence[Any]:
    rows = meta.get(name)
    if not isinstance(rows, Sequence):
        raise EngineError(f"the server answered {rows!r:.100} as {name}: expected a list")
    return rows


def _pair(entry: Any) -> tuple[float, int]:
    """(log-probability, token) of SGLang's [log-probability, token, text]."""
    try:
        logprob, token = float(entry[0]), int(entry[1])
    except (TypeError, ValueError, LookupError):
        logprob, token = math.nan, 0
    if not math.isfinite(logprob):
        raise EngineError(
            f"the server answered {entry!r:.100} for a token: expected a finite log-probability and an id"
        )
    return logprob, token
