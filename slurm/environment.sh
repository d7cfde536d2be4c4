# shellcheck shell=bash
# What a job needs before anything runs. `sbatch --export=CONFIG=...` hands on nothing else: no PATH, no HOME.
cd "$SLURM_SUBMIT_DIR" || exit                  # the repository
export HOME=~                                   # as the password file has it, where it is not set
export PATH=$PWD/.venv/bin:$PATH                # where there is no .venv: the python of a module or container
# caches of compiled code: on the node's own disk, since many processes write there at once
caches=${TMPDIR:-/tmp}/fp8gpt_$UID
mkdir -p -m 700 "$caches"
if [ -L "$caches" ] || [ ! -O "$caches" ]; then caches=$(mktemp -d); fi     # another user made it first
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$caches/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$caches/triton}
# vocabularies: prepare_data.py, run on a node with network, left them there
export TIKTOKEN_CACHE_DIR=${TIKTOKEN_CACHE_DIR:-$PWD/data/tiktoken_cache}
