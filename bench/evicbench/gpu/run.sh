#!/usr/bin/env bash
# Everything that needs a GPU, as one script. `bench/evicbench/gpu/run.sh help` says how.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
bench/evicbench/gpu/run.sh PHASE [OPTIONS]

On a machine where pip reaches PyPI (no GPU needed):
  pack         pack .carry, what a bare GPU machine needs (at most 64 MiB; `pack --help` lists options)
On a machine with an H100 or H200, Python 3.12, torch 2.11 and Triton 3.6, with .carry in this checkout (or from inside
the packed folder: bash .carry/run.sh):
  boot         unpack it and say what is there
  correctness  kernels against their references, then greedy answers over holes against transformers
  speed        copy rates, then every kernel at 32k tokens of Llama-3.1-8B's KV, score + select + compact
  server       real servers with the shapes of Llama-3.1-8B and Qwen2.5-14B: TTFT by tier, ITL, metadata, load back, storm
  all          boot, correctness, speed, server

Each GPU phase starts no part after 560 s, and writes after every part: killed at 10 minutes it loses the part that was
running. What it did not get to is listed as not measured. `--only WORD` measures the parts whose name holds the word, `--seconds N` changes the limit; so a server
phase is split as `server --only llama` and `server --only qwen`. Results go to $OUT, or bench/results/gpu-DATE: PHASE.jsonl,
PHASE.md and the logs of servers. Status: 0 measured and nothing missed, 1 something missed or failed, 2 cannot run here.
TEXT
}

fail() { echo "run.sh: $1" >&2; exit "${2:-1}"; }

# The packed folder: the one this script lies in, or .carry of this checkout.
find_carry() {
  for carry in "${EVICPRESS_CARRY:-}" "$here" "$here/../../../.carry"; do
    [ -n "$carry" ] && [ -e "$carry/site.tar.xz" ] && { (cd "$carry" && pwd); return; }
  done
}

boot() {
  local carry
  carry=$(find_carry)
  if [ -n "$carry" ]; then
    . "$carry/boot.sh" || return 1
  else  # SGLang is installed here: nothing to unpack
    EVICPRESS_SOURCE=$(cd "$here/../../.." && pwd)
    export EVICPRESS_SOURCE EVICPRESS_PYTHON=${EVICPRESS_PYTHON:-python3}
    export PYTHONPATH=$EVICPRESS_SOURCE/python:$EVICPRESS_SOURCE/bench${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    echo "boot: no packed folder; using $EVICPRESS_PYTHON as it is"
  fi
}

need_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU ||
    fail "no NVIDIA GPU here: $1 needs one; run.sh pack runs without" 2
}

measure() {  # PHASE OPTIONS...
  local phase=$1
  shift
  echo "== $phase"
  "$EVICPRESS_PYTHON" -m "evicbench.gpu.$phase" "$@"
}

phase=${1:-help}
[ $# -gt 0 ] && shift
case $phase in
  help | -h | --help) usage ;;
  pack)
    root=$(cd "$here/../../.." && pwd)
    [ -e "$root/pyproject.toml" ] || fail "pack runs in a clone of the repository, not in the packed folder" 2
    PYTHONPATH=$root/bench exec "${EVICPRESS_PYTHON:-python3}" -m evicbench.gpu.pack "$@"
    ;;
  boot)
    need_gpu boot
    boot || exit 1
    "$EVICPRESS_PYTHON" -m evicbench.gpu.machine "$@"
    ;;
  correctness | speed | server)
    case " $* " in *" --device cpu "*) ;; *) need_gpu "$phase" ;; esac
    boot || exit 1
    measure "$phase" "$@"
    ;;
  all)
    need_gpu all
    boot || exit 1
    "$EVICPRESS_PYTHON" -m evicbench.gpu.machine || exit $?
    status=0
    for phase in correctness speed server; do
      measure "$phase" "$@" || status=1
    done
    exit $status
    ;;
  *) fail "phase $phase is not known: expected pack, boot, correctness, speed, server or all" 2 ;;
esac
