"""`make show-kernels`: measures every promise of the GPU path that a machine without a GPU can; one line each.

Ends with status 1 if a line is MISSED. Takes at most 20 minutes on 2 cores. `--only WORD` runs the parts whose name
holds the word. What needs a GPU is measured by `bench/gpu/run.sh` and only named here.
"""

from __future__ import annotations

import sys

from lines import run_parts
from without_gpu import backends, compiled, device_reads, interpreter, packing

PARTS = {
    "compiled": compiled.measure,
    "interpreter": interpreter.measure,
    "device_reads": device_reads.measure,
    "backends": backends.measure,
    "packing": packing.measure,
}

if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
