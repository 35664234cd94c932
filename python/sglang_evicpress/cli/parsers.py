"""Parsers of commands whose own modules take long to import."""

from __future__ import annotations

from pathlib import Path

from sglang_evicpress.cli.parser import Parser, whole

_SERVE_EPILOG = """The same command, without --fresh, goes on where an earlier one was stopped: it runs what is missing.

Exit status: 0 all is there, 1 a server failed, 2 bad input, 130 Ctrl-C.

example:
  evicpress bench serve --config bench/configs/cpu-testbed.yaml --systems full-cache,lru,evicpress
"""

_GEOMETRY_EPILOG = """A few thousand tokens of a text like those that the server will read are enough.
transformers runs the model: a folder, or a name in the local cache of the Hugging Face hub. The file is of this
model alone: a server that serves another one refuses it.

Exit status: 0 written, 1 it could not be written, 2 bad input, 130 Ctrl-C.

example:
  evicpress calibrate geometry --model-path MODEL --text book.txt --out geometry.safetensors
  python -m sglang.launch_server --model-path MODEL --kv-policy evicpress --kv-forms geometry@0.5 \\
    --kv-geometry geometry.safetensors
"""

_FSCK_EPILOG = """Exit status: 0 all good, 1 something was found (also when it is repaired now), 2 it could not be
checked, as while a server uses the folder.
"""

_COMPLETION_EPILOG = """Exit status: 0 printed, 2 bad input.

examples:
  evicpress completion bash > ~/.local/share/bash-completion/completions/evicpress
  evicpress completion zsh > ~/.zfunc/_evicpress     # a folder of $fpath
"""

SHELLS = ("bash", "zsh", "tcsh")


def bench_serve() -> Parser:
    parser = Parser.of(
        "bench serve",
        "Start every system of a config as a real server in turn, send all of them the same requests, and keep what "
        "users would notice.",
        _SERVE_EPILOG,
    )
    add = parser.add_argument
    add("--config", required=True, type=Path, metavar="FILE", help="YAML, such as bench/configs/cpu-testbed.yaml")
    add("--out", type=Path, metavar="FOLDER", help="for all that is written; default bench/out/serve/NAME")
    add(
        "--systems",
        metavar="NAMES",
        help="of the config's, separated by commas: lru, 'evicpress a=1', or all evicpress",
    )
    add("--repetitions", type=int, metavar="N", help="instead of the config's")
    add("--fresh", action="store_true", help="put earlier runs in the folder aside, and begin anew")
    parser.add_json()
    return parser


def calibrate_geometry() -> Parser:
    parser = Parser.of(
        "calibrate geometry",
        "Measure where the queries of every head of a model lie before RoPE, for the press and the decode score "
        "geometry.",
        _GEOMETRY_EPILOG,
    )
    add, add_value = parser.add_argument, parser.add_value
    add("--model-path", required=True, metavar="MODEL", help="what --model-path of the server is")
    add("--revision", metavar="NAME", help="what --revision of the server is")
    add("--text", required=True, metavar="FILE", help="text to read, UTF-8")
    add("--out", required=True, metavar="FILE", help="the file to write")
    add_value("--tokens", whole(1), "N", "read at most; default %(default)s", "4096")
    add_value("--sequence-tokens", whole(16), "N", "in a sequence; default %(default)s", "1024")
    far = "ahead of a key for which it may be asked for, as far as the model reads; default %(default)s"
    add_value("--max-offset", whole(1), "N", f"tokens {far}", "65536")
    add("--device", default="cpu", metavar="NAME", help="of torch; default %(default)s")
    parser.add_json()
    return parser


def fsck() -> Parser:
    parser = Parser.of(
        "fsck", "Read every entry in the folder of an SSD tier and compare it with its checksums.", _FSCK_EPILOG
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="what --kv-ssd-dir was")
    parser.add_argument("--key-file", metavar="FILE", help="what --kv-ssd-key-file was")
    parser.add_argument("--repair", action="store_true", help="remove bad entries, and bytes that belong to none")
    parser.add_json()
    return parser


def completion() -> Parser:
    parser = Parser.of("completion", "Print a script that completes commands and flags in a shell.", _COMPLETION_EPILOG)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    return parser
