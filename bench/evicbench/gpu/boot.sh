# Sourced on the GPU machine:  . .carry/boot.sh   Unpacks once, then sets what Python and the compilers need.
# Works in bash, with -u too, leaves shell options alone, and returns 1 with one sentence when the machine lacks something.

_carry=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
_begin=$SECONDS
export EVICPRESS_CARRY=$_carry
export EVICPRESS_PLACE=${EVICPRESS_PLACE:-${TMPDIR:-/tmp}/evicpress-gpu}
export EVICPRESS_PYTHON=${EVICPRESS_PYTHON:-python3}

_found=$("$EVICPRESS_PYTHON" - <<'PYTHON' 2>&1
import sys
import torch, triton
if sys.version_info[:2] != (3, 12):
    sys.exit(f"the packed wheels are for Python 3.12, this is {sys.version.split()[0]}")
if not (torch.__version__.startswith("2.11.") and triton.__version__.startswith("3.6.")):
    sys.exit(f"SGLang 0.5.17 wants torch 2.11 and Triton 3.6, here are {torch.__version__} and {triton.__version__}")
PYTHON
) || { echo "boot: ${_found##*$'\n'}" >&2; return 1; }

# Into a folder named by the digest of what was packed: another packing is never taken for this one.
_place=$("$EVICPRESS_PYTHON" - "$_carry" "$EVICPRESS_PLACE" <<'PYTHON'
import hashlib, json, os, shutil, sys, tarfile
from concurrent.futures import ThreadPoolExecutor
carry, parent = sys.argv[1:]
digest, archives = hashlib.sha256(), {}
for name in ("site", "source", "compiled"):  # as evicbench.gpu.pack.digest_of
    archive = os.path.join(carry, name + ".tar.xz")
    if os.path.exists(archive):
        archives[name] = archive
        with open(archive, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
with open(os.path.join(carry, "manifest.json")) as file:
    if json.load(file).get("digest") != digest.hexdigest():
        sys.exit(f"boot: the archives in {carry} are not those of its manifest.json: pack again")
place = os.path.join(parent, digest.hexdigest()[:16])

def unpack(name):
    with tarfile.open(archives[name], "r:xz") as tar:
        tar.extractall(os.path.join(place, name), filter="tar")

if not os.path.exists(os.path.join(place, "ready")):
    shutil.rmtree(place, ignore_errors=True)  # what a run that was cut off left
    os.makedirs(place)
    with ThreadPoolExecutor() as pool:
        list(pool.map(unpack, archives))
    compiled = os.path.join(place, "compiled", "aot")  # FlashInfer looks here before it compiles
    if os.path.isdir(compiled):
        os.symlink(compiled, os.path.join(place, "site", "flashinfer", "data", "aot"))
print(place)
PYTHON
) || { echo "boot: unpacking $_carry failed" >&2; return 1; }
if [ ! -e "$_place/ready" ]; then
  "$EVICPRESS_PYTHON" -m compileall -q -j 0 -x '/transformers/models/|/flashinfer/data/|/sglang/test/' \
    "$_place/site" >/dev/null 2>&1
  touch "$_place/ready"
fi

# A checkout around the folder wins over the carried source.
EVICPRESS_SOURCE=$_place/source
if [ -e "$_carry/../pyproject.toml" ] && [ -e "$_carry/../bench/evicbench/gpu/run.sh" ]; then
  EVICPRESS_SOURCE=$(cd "$_carry/.." && pwd)
fi
export EVICPRESS_SOURCE
export PYTHONPATH=$_place/site:$EVICPRESS_SOURCE/python:$EVICPRESS_SOURCE/bench
export TVM_FFI_CACHE_DIR=$_place/compiled/tvm TRITON_CACHE_DIR=$_place/compiled/triton
export FLASHINFER_WORKSPACE_BASE=$_place/compiled/flashinfer FLASHINFER_USE_CUDA_NORM=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# Compilers, for kernels that were not carried: nvcc, the headers its toolkit lacks, and the libraries by plain names.
_nvcc=$(readlink -f "$(command -v nvcc || echo /nowhere)")
for _home in "${CUDA_HOME:-}" /usr/local/cuda "${_nvcc%/bin/nvcc}"; do
  if [ -n "$_home" ] && [ -x "$_home/bin/nvcc" ]; then export CUDA_HOME=$_home; break; fi
done
_toolkit=${CUDA_HOME:-/nowhere}
_nvidia=$("$EVICPRESS_PYTHON" -c 'import os, importlib.util as u; print(os.path.join(os.path.dirname(os.path.dirname(u.find_spec("torch").origin)), "nvidia", "cu13"))')
_links=$_place/links
mkdir -p "$_links/include"
# One by one: the whole folder may hold another CUDA's crt/, which breaks nvcc.
for _header in "$_nvidia"/include/cu{blas,rand,sparse,solver,fft}*.h "$_nvidia"/include/nvrtc.h; do
  [ -e "$_header" ] && [ ! -e "$_toolkit/include/${_header##*/}" ] && ln -sf "$_header" "$_links/include/"
done
_runtime=$(ls "$_nvidia"/lib/libcudart.so.13 "$_toolkit"/lib64/libcudart.so.13 2>/dev/null | head -1)
[ -n "$_runtime" ] && ln -sf "$_runtime" "$_links/libcudart.so"
_driver=$(ldconfig -p 2>/dev/null | awk '/libcuda\.so\.1 /{print $NF; exit}')
[ -z "$_driver" ] && _driver=$(ls /usr/local/nvidia/lib64/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 2>/dev/null | head -1)
[ -n "$_driver" ] && ln -sf "$_driver" "$_links/libcuda.so"
case ":${CPATH:-}:" in *":$_links/include:"*) ;; *) export CPATH=${CPATH:+$CPATH:}$_links/include ;; esac
case ":${LIBRARY_PATH:-}:" in *":$_links:"*) ;; *) export LIBRARY_PATH=$_links${LIBRARY_PATH:+:$LIBRARY_PATH} ;; esac
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
echo "boot: $((SECONDS - _begin)) s; source $EVICPRESS_SOURCE; nvcc ${CUDA_HOME:-none}; driver ${_driver:-none}; compiled kernels $(ls "$_place/compiled/aot" 2>/dev/null | wc -l)"
