"""``evicpress calibrate geometry``: from a model and a text to the file of its queries' geometry."""

from __future__ import annotations

import argparse

from sglang_evicpress.cli.parser import naming, say
from sglang_evicpress.files import check_output, read_text
from sglang_evicpress.geometry import file
from sglang_evicpress.geometry.calibrate import CalibratedModel, read_sequences


def calibrate_geometry(args: argparse.Namespace) -> int:
    """Measure, write the file, and say what is in it; the exit status. Raises ValueError for bad input."""
    with naming("--out"):
        check_output(args.out, {"--text": args.text})
    with naming("--text"):
        text = read_text(args.text, repr(args.text), "a text in UTF-8")
    with naming("--model-path"):
        sequences = read_sequences(args.model_path, text, args.tokens, args.sequence_tokens, args.revision)
        num_tokens = sum(map(len, sequences))
        if num_tokens < args.tokens:
            say(f"{args.text} has {num_tokens} tokens, and {args.tokens} were asked for")
        model = CalibratedModel(args.model_path, args.device, args.revision)
        geometry = model.measure(sequences, args.max_offset)
    file.write(args.out, geometry)
    facts = geometry.model
    print(
        f"{args.out}: {facts.name}, {facts.num_layers} layers of {facts.num_heads} query and {facts.num_kv_heads} KV "
        f"heads, {geometry.num_tokens} tokens, queries up to {geometry.max_offset} tokens ahead"
    )
    return 0
