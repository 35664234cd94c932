"""Settings shared by the runs over one trace: as numbers, as lines to read and as a record."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

from sglang_evicpress import __version__
from sglang_evicpress.cli.parser import naming
from sglang_evicpress.cli.replay.units import Size, plain, show_bytes, three_digits
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy.cost_model import CostSnapshot, TransferCost
from sglang_evicpress.policy.layer_counts import LayerGroups
from sglang_evicpress.search.form_budgets import Shares
from sglang_evicpress.search.menu_budgets import layer_groups
from sglang_evicpress.simulator.queue import NO_QUEUE
from sglang_evicpress.simulator.replay import Machine
from sglang_evicpress.simulator.runs import Settings, servers_at_load
from sglang_evicpress.traces import Trace

FIXED_LOAD_S = {Tier.HOST: 0.0005, Tier.SSD: 0.002, Tier.EXTERNAL: 0.005}
"""Seconds every load takes besides its bytes."""

MAX_COUNTS = 4
"""Different numbers of tokens in the layers of a node, as a server has it unless told otherwise."""


def make_settings(args: argparse.Namespace, trace: Trace, working_set_tokens: int) -> Settings:
    """Sizes become bytes, a load becomes servers. ValueError for a tier too small for one token, or no load."""
    sizes: dict[Tier, Size] = {
        Tier.GPU: args.gpu,
        Tier.HOST: args.host,
        Tier.SSD: args.ssd,
        Tier.EXTERNAL: args.external,
    }
    capacity = {
        tier: _capacity(tier, size, working_set_tokens, args.slot_bytes) for tier, size in sizes.items() if size.amount
    }
    rates = {
        Tier.HOST: args.host_bandwidth,
        Tier.SSD: args.ssd_bandwidth,
        Tier.EXTERNAL: args.external_bandwidth,
    }
    load = {tier: TransferCost(fixed_s, rates[tier]) for tier, fixed_s in FIXED_LOAD_S.items()}
    costs = CostSnapshot(args.prefill, load, {})
    number = NO_QUEUE if args.servers is None else args.servers.number
    if args.servers is not None and args.servers.is_load:
        with naming("--servers"):
            number = servers_at_load(trace, costs, number)
    curves = None if args.curves is None else args.curves[1]
    machine = Machine(capacity, costs, args.noise, number)
    forms, shares = args.forms
    with naming("--forms"):
        groups = _groups(forms, shares, args.layers)
    return Settings(
        *(machine, args.slot_bytes, forms, args.seed, curves, args.recompute),
        min_compress_tokens=args.min_compress_tokens,
        groups=groups,
    )


def _groups(forms: Sequence[Form], shares: Shares, num_layers: int | None) -> LayerGroups:
    """Groups of as many layers as are given, or a budget file has. ValueError where neither tells or both differ."""
    if num_layers is None:
        num_layers = next((len(each) for each in shares.values()), None)
    uneven = [form for form in forms if form.is_uneven]
    if uneven and num_layers is None:
        raise ValueError(f"form {uneven[0]} is spread over the layers of a model: expected --layers N, their number")
    return layer_groups(forms, shares, num_layers or 1, MAX_COUNTS)


def _capacity(tier: Tier, size: Size, working_set_tokens: int, slot_bytes: int) -> int:
    num_bytes = size.num_bytes(working_set_tokens, slot_bytes)
    if num_bytes < slot_bytes:
        raise ValueError(
            f"--{tier.label}: {num_bytes} bytes at a working set of {working_set_tokens} tokens: expected room for "
            f"one token of {slot_bytes} bytes at least"
        )
    return num_bytes


def header(
    args: argparse.Namespace, settings: Settings, trace: Trace, working_set_tokens: int, command: str
) -> dict[str, str]:
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
        load = f", busy {args.servers.number:g} of the time if nothing is cached" if args.servers.is_load else ""
        servers = f"{three_digits(machine.num_servers)}{load}"
    about = {
        "trace": f"{trace.name}: {len(trace.requests):,} requests{skipped}, blocks of {trace.block_tokens:,} tokens",
        "working set": _both(working_set_tokens * slot, slot),
        "sizes": "; ".join(f"{tier.label} {_both(size, slot)}" for tier, size in machine.capacity.items()),
        "costs": costs,
        "servers": servers,
        "recompute": f"{settings.recompute} may prefill again what takes longer to load",
        "forms": ", ".join(map(str, settings.forms)) or "exact only",
        "quality": f"drawn per context, seed {settings.seed}" if args.curves is None else args.curves[0],
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "command": command,
    }
    return {name: plain(text) for name, text in about.items()}


def settings_record(
    args: argparse.Namespace, settings: Settings, trace: Trace, working_set_tokens: int, command: str
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
        "forms": [str(form) for form in settings.forms],
        "min_compress_tokens": settings.min_compress_tokens,
        "seed": settings.seed,
        "curves": None if args.curves is None else plain(args.curves[0]),
        "versions": dict(versions()),
        "command": plain(command),
    }


def versions() -> Mapping[str, str]:
    return {"sglang-evicpress": __version__, "python": platform.python_version(), "numpy": version("numpy")}


def _both(num_bytes: int, slot_bytes: int) -> str:
    return f"{num_bytes // slot_bytes:,} tokens ({show_bytes(num_bytes)})"
