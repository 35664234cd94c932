"""Outcomes of what tensor-parallel ranks all try, and their agreement on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from sglang_evicpress.error_text import code_path

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_FINE, _NO_MEMORY, _FAILED = range(3)  # how it went on a rank; the worst counts


def tried_here(run: Callable[[], Made]) -> Made | Exception:
    """Result of ``run``, or the exception that it raises, which is logged unless it is for want of memory."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        return error
    except Exception as error:  # noqa: BLE001 - raised on every rank
        logger.error("evicpress: this rank failed at what all must do: %s", code_path(error))
        return error


def raised(outcome: Made | Exception) -> Made:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def agree(
    tried: Sequence[object], values: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor | Exception]:
    """Agreement of the ranks of ``group``: for each try an exception, or its ``values`` (int64 [n], on the host) as
    maximum over ranks, if it went well on every rank.

    One collective, whatever happens. Else each rank has an exception for it: torch.OutOfMemoryError where one had
    no device memory left; after any other exception RuntimeError, so that none goes on as if nothing were.
    """
    outcomes = [torch.tensor([_outcome_of(each)]) for each in tried]
    reduced = torch.cat([part for pair in zip(values, outcomes, strict=True) for part in pair])
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    results: list[torch.Tensor | Exception] = []
    for each, part in zip(tried, reduced.split([len(row) + 1 for row in values]), strict=True):
        worst, error = int(part[-1]), each if isinstance(each, Exception) else None
        if worst == _FINE:
            results.append(part[:-1])
        elif worst == _NO_MEMORY:
            results.append(error or torch.OutOfMemoryError("another rank has no device memory for it"))
        else:
            failure = RuntimeError("evicpress: a rank failed at what all must do: see its log")
            failure.__cause__ = error
            results.append(failure)
    return results


def _outcome_of(tried: object) -> int:
    if isinstance(tried, torch.OutOfMemoryError):
        return _NO_MEMORY
    return _FAILED if isinstance(tried, Exception) else _FINE
