"""Settings shared by the runs over one trace: as numbers, as lines to read and as a record."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version

from sglang_evicpress import __version__
from sglang_evicpress.cli.replay.flags import Plan
from sglang_evicpress.cli.replay.units import Size, plain, show_bytes, three_digits
from sglang_evicpress.core import Tier
from sglang_evicpress.simulator.replay import NO_QUEUE, Machine
from sglang_evicpress.simulator.runs import Settings, servers_at_load
from sglang_evicpress.traces import Trace


def make_settings(plan: Plan, trace: Trace, working_set_tokens: int) -> Settings:
    """Sizes become bytes, a load becomes servers. ValueError for a tier too small for one token, or no load."""
    capacity = {tier: _capacity(tier, size, working_set_tokens, plan.slot_bytes) for tier, size in plan.sizes.items()}
    number = plan.servers.number
    if plan.servers.is_load:
        try:
            number = servers_at_load(trace, plan.costs, number)
        except ValueError as error:
            raise ValueError(f"--servers: {error}") from None
    machine = Machine(capacity, plan.costs, plan.noise, number)
    return Settings(machine, plan.slot_bytes, plan.forms, plan.half_life_s, plan.seed, plan.curves, plan.recompute)


def _capacity(tier: Tier, size: Size, working_set_tokens: int, slot_bytes: int) -> int:
    num_bytes = size.num_bytes(working_set_tokens, slot_bytes)
    if num_bytes < slot_bytes:
        raise ValueError(
            f"--{tier.label}: {num_bytes} bytes at a working set of {working_set_tokens} tokens: expected room for "
            f"one token of {slot_bytes} bytes at least"
        )
    return num_bytes


def header(plan: Plan, settings: Settings, trace: Trace, working_set_tokens: int, command: str) -> dict[str, str]:
    """Settings needed to replay again, by name, for people."""
    skipped = f", {trace.num_skipped:,} bad lines skipped" if trace.num_skipped else ""
    slot = settings.slot_bytes
    machine = settings.machine
    prefill = machine.costs.prefill
    costs = f"prefill {prefill.fixed_s:g} + {prefill.per_token_s:g} n + {prefill.per_pair_s:g} n (depth + n/2) s"
    for tier, cost in machine.costs.load.items():
        if tier in machine.capacity:
            costs += f"; {tier.label} {cost.fixed_s:g} s + bytes / {show_bytes(cost.bytes_per_s)}/s"
    if machine.noise:
        costs += f"; times exp(normal(0, {machine.noise:g})), seed {settings.seed}, and learned"
    servers = "nothing waits"
    if machine.num_servers != NO_QUEUE:
        load = f", busy {plan.servers.number:g} of the time if nothing is cached" if plan.servers.is_load else ""
        servers = f"{three_digits(machine.num_servers)}{load}"
    half_life = "learned" if settings.half_life_s is None else f"{settings.half_life_s:g} s"
    about = {
        "trace": f"{trace.name}: {len(trace.requests):,} requests{skipped}, blocks of {trace.block_tokens:,} tokens",
        "working set": _both(working_set_tokens * slot, slot),
        "sizes": "; ".join(f"{tier.label} {_both(size, slot)}" for tier, size in machine.capacity.items()),
        "costs": costs,
        "servers": servers,
        "half-life": half_life,
        "recompute": f"{settings.recompute} may prefill again what takes longer to load",
        "forms": ", ".join(map(str, settings.forms)) or "exact only",
        "quality": f"drawn per context, seed {settings.seed}" if plan.curves_file is None else plan.curves_file,
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "command": command,
    }
    return {name: plain(text) for name, text in about.items()}


def settings_record(
    plan: Plan, settings: Settings, trace: Trace, working_set_tokens: int, command: str
) -> dict[str, object]:
    """The same as JSON takes it: bytes and seconds. ``num_servers`` is None where nothing waits."""
    machine = settings.machine
    return {
        "trace": plain(trace.name),
        "num_requests": len(trace.requests),
        "num_skipped": trace.num_skipped,
        "block_tokens": trace.block_tokens,
        "working_set_tokens": working_set_tokens,
        "capacity_bytes": {tier.label: size for tier, size in machine.capacity.items()},
        "slot_bytes": settings.slot_bytes,
        "prefill": asdict(machine.costs.prefill),
        "load": {tier.label: asdict(cost) for tier, cost in machine.costs.load.items()},
        "num_servers": None if machine.num_servers == NO_QUEUE else machine.num_servers,
        "noise": machine.noise,
        "half_life_s": "auto" if settings.half_life_s is None else settings.half_life_s,
        "forms": [str(form) for form in settings.forms],
        "seed": settings.seed,
        "curves": None if plan.curves_file is None else plain(plan.curves_file),
        "versions": dict(versions()),
        "command": plain(command),
    }


def versions() -> Mapping[str, str]:
    return {"sglang-evicpress": __version__, "python": platform.python_version(), "numpy": version("numpy")}


def _both(num_bytes: int, slot_bytes: int) -> str:
    return f"{num_bytes // slot_bytes:,} tokens ({show_bytes(num_bytes)})"
