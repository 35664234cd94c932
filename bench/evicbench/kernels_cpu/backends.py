"""Attention over compact rows: what each backend's own planning gets, answers of SGLang's Triton kernels, interpreted
on a real server, against transformers over the same survivors, and which backend is chosen or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from evicbench.correctness.case import Case
from evicbench.correctness.exactness import server_arguments
from evicbench.correctness.findings import sensitivity, summary
from evicbench.correctness.reference import Reference
from evicbench.pytest_runs import passed
from evicbench.report import Line
from evicbench.testbed.server import MODEL, Server

PAGE_SIZES = (1, 16)
ON_CUDA = ("fa3", "flashinfer", "triton")
FORMS = ("keydiff@0.5", "snapkv@0.2", "knorm@0.8")


def check(case: Case, form: str) -> None:
    """One compressed node, matched whole and left in the middle."""
    text = case.context(96, 128)
    (node,) = case.path(text.token_ids)
    case.compress(text, node, form)
    case.ask(text, cached=len(node.token_ids), with_controls=True)
    case.leave(text, len(text.token_ids) // 2)


def answers() -> Iterator[Line]:
    reference = Reference(MODEL)
    flags = ("--attention-backend", "triton", "--max-running-requests", "8", "--context-length", "4096")
    for page_size in PAGE_SIZES:
        findings = []
        with Server(*server_arguments(page_size), *flags, env={"TRITON_INTERPRET": "1"}) as server:
            for form, turn in product(FORMS, range(2)):
                case = Case(f"{form} {turn} p{page_size}", server, reference, page_size)
                check(case, form)
                findings += case.findings
            is_triton = "compact rows on TritonAttnBackend" in server.log_tail(100_000)
            violations = server.post("/evicpress/check")["violations"]
        line = summary(f"greedy answers on SGLang's Triton backend, interpreted, page size {page_size}", findings)
        yield replace(line, ok=line.ok and is_triton and not violations)
        yield sensitivity(f"controls of these answers, page size {page_size}", findings)


def choice() -> Iterator[Line]:
    """By the hook that every start goes through, with the device set to cuda; nothing is loaded."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

    from sglang_evicpress.patches import server_args, unsupported

    server_args.add_flags()
    logged: list[str] = []
    server_args.logger.setLevel(logging.INFO)
    server_args.logger.addFilter(lambda record: bool(logged.append(record.getMessage())) or True)

    def started(backend: str | None) -> str:
        """The backend that is taken, or why none is."""
        asked = ServerArgs(model_path="dummy")
        asked.kv_policy, asked.device, asked.attention_backend = "evicpress", "cuda", backend
        try:
            server_args._prepare(asked)
        except unsupported.UnsupportedError as error:
            return str(error)
        return str(asked.attention_backend)

    chosen = started(None)
    is_logged = any("attention backend flashinfer" in message for message in logged)
    yield Line(
        "--kv-policy evicpress on CUDA without --attention-backend",
        "flashinfer, and the log says so",
        f"{chosen}, {'logged' if is_logged else 'not logged'}",
        chosen == "flashinfer" and is_logged,
    )
    outcomes = {name: started(name) for name in ATTENTION_BACKEND_CHOICES}
    taken = sorted(name for name, said in outcomes.items() if said == name)
    told = [name for name, said in outcomes.items() if name in said and "so choose " in said]
    others = [name for name in outcomes if name not in taken and name not in told]
    yield Line(
        f"each of SGLang's {len(outcomes)} attention backends asked for by name on CUDA",
        f"taken: {', '.join(ON_CUDA)}; every other refused at start with the way out",
        f"taken: {', '.join(taken)}; {len(told)} refused, all with the way out; otherwise: {others or 'none'}",
        taken == list(ON_CUDA) and not others,
    )


def measure() -> Iterator[Line]:
    yield passed(
        "what triton, flashinfer and fa3 plan from the view: indptr, indices, page tables, lengths; eager and replay",
        "every case equals the slots that the rows hold",
        "tests/contract/attention/test_backend_inputs.py",
        interpreted=True,
    )
    yield from answers()
    yield from choice()
