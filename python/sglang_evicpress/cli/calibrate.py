"""``evicpress calibrate geometry``: from a model and a text to the file of its queries' geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import naming, say
from sglang_evicpress.cli.parsers import calibrate_geometry as make_parser
from sglang_evicpress.device import checked_device
from sglang_evicpress.files import check_output, read_text
from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.calibrate import CalibratedModel, read_sequences
from sglang_evicpress.geometry.checkpoint import folder_of


def calibrate_geometry(argv: Sequence[str]) -> int:
    """Measure, write the file, and say what is in it; the exit status. Raises ValueError for bad input."""
    args = make_parser().parse_values(argv)
    with naming("--out"):
        check_output(args.out, {"--text": args.text})
    with naming("--device"):
        checked_device(args.device)
    with naming("--text"):
        text = read_text(args.text, repr(args.text), "a text in UTF-8")
    with naming("--model-path"):
        folder = folder_of(args.model_path, args.revision)
    if Path(args.out).resolve().parent == folder.resolve():
        raise ValueError(f"--out: {args.out!r} is in the model's folder, whose files it tells of: expected another")
    with naming("--model-path"):
        sequences = read_sequences(args.model_path, text, args.tokens, args.sequence_tokens, args.revision)
    if not sequences:
        raise ValueError(f"--text: {args.text!r} has no token: expected a text in UTF-8")
    with naming("--model-path"):
        num_tokens = sum(map(len, sequences))
        if num_tokens < args.tokens:
            say(f"{args.text} has {num_tokens} tokens, and {args.tokens} were asked for")
        model = CalibratedModel(args.model_path, args.device, args.revision)
        geometry = model.measure(sequences, args.max_offset)
    file.write(args.out, geometry)
    facts = geometry.model
    line = (
        f"{args.out}: {facts.name}, {facts.num_layers} layers of {facts.num_heads} query and {facts.num_kv_heads} KV "
        f"heads, {geometry.num_tokens} tokens, queries up to {geometry.max_offset} tokens ahead"
    )
    counts = {"num_tokens": geometry.num_tokens, "max_offset": geometry.max_offset}
    print_result(args, {"file": args.out, "model": asdict(facts), **counts}, [line])
    return 0
