#!/usr/bin/env bash
# What a GPU with FP8 units is asked, in the order of what is wanted most: 27 minutes, in calls of under ten.
# $ bash tests/gpu/measure.sh kernels gpt2    # OUT=results/gpu: the folder of the JSONs and of log
# $ bash tests/gpu/measure.sh train xl
# $ bash tests/gpu/measure.sh peers tests rest
#   kernels    2 min  whether the kernels are right: a wrong one voids all times
#   gpt2       4 min  steps of GPT-2 124M, 32 x 1,024 tokens, in bf16 and each FP8, profiled, in one process
#   peers      4 min  nanoGPT's training step, nanochat's FP8 linear and block
#   xl         3 min  gpt2's figures for GPT-2 XL, 16 x 1,024 tokens
#   tests      6 min  diagnose.py, the tests of tests/gpu
#   train      5 min  200 steps of train_fp8.py with evaluation and HellaSwag; how often it compiled again
#   rest       3 min  batch_size 8, 350M, other backends and recipes, losses of whole runs, as far as time allows
# Before each step's speed is measured, plan.py's prediction is printed; write down your own, too.
# Each item prints its lines and leaves its JSON in OUT at once. One that fails says FAILED and why in a line; a
# benchmark whose verdict is FAIL did not fail. Taken from the current folder, the repository's, where they are:
#   .whl    wheels to install first        .data    data_dir, with fineweb_edu-gpt2, hellaswag, tiktoken's cache
#   .peers  clones: nanoGPT, nanochat
# A rehearsal on any machine, of tiny sizes; `train` takes .data/fineweb_edu-byte in it (tests/test_rehearsal.py):
# $ QUICK=1 OUT=/tmp/out bash tests/gpu/measure.sh gpt2
set -uo pipefail
declare -A minutes=([kernels]=2 [gpt2]=4 [peers]=4 [xl]=3 [tests]=6 [train]=5 [rest]=3)
[[ $# -gt 0 ]] || { sed -n '2,13s/^# \?//p' "$0"; exit 2; }
for part; do [[ ${minutes[$part]:-} ]] || { echo "no part is called $part" >&2; exit 2; }; done
[[ -x .venv/bin/python ]] && here=.venv/bin/python || here=python3
python=${PYTHON:-$here} quick=${QUICK:-} out=${OUT:-results/gpu}
tmp=${TMPDIR:-${XDG_CACHE_HOME:-$HOME/.cache}/fp8gpt-measure} # no folder that others write: code lies there
cache=$tmp/fp8gpt-cache log=$out/log end_of_call=$((SECONDS + 580)) # of the 600 seconds of a call
mkdir -p "$out" "$cache"
export PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$cache FP8GPT_COMMIT=${COMMIT:-}    # of a copy of the files
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton
[[ ! -d .data/tiktoken ]] || export TIKTOKEN_CACHE_DIR=$PWD/.data/tiktoken
one=--gradient_accumulation_steps=1  # micro-step a step: the configs' 16 would take all the time there is
four=--gradient_accumulation_steps=4
pair=(--steps=10 $one) others=te,torchao
run=(--total_batch_size=131072 --max_steps=200 --hellaswag_freq=100)
losses=(--total_batch_size=32768 --steps=600) extra=() workers=(-n 6)
if [[ $quick ]]; then
    workers=()
    end_of_call=$((SECONDS + 3600)) pair=(--steps=1 $one) others=emulate
    run=(--total_batch_size=512 --max_steps=4 --hellaswag_freq=2) losses=(--total_batch_size=512 --steps=4)
    extra=(--n_layer=1 --n_embd=128 --n_head=4 --block_size=128 --batch_size=2 --tokenizer=byte --eval_tokens=1024
        --device=cpu --fp8_backend=native --warmup_steps=1)
fi
[[ -d .data ]] && data=(--data_dir=.data --dataset=fineweb_edu) || data=()
gpt2=(config/gpt2_fp8.py --batch_size=32)                        # 15 of 151 GB by plan.py
medium=(config/h100_350m_fp8.py --batch_size=32)                 # 43 GB
xl=(--init_from=gpt2-xl --batch_size=16 --max_steps=100)         # 72 GB

item() {  # SECONDS TITLE WORDS...: one measurement, at most so long; prints the lines that match $only
    local limit=$((! quick && $1 < end - SECONDS ? $1 : end - SECONDS)) title=$2 start=$SECONDS rc
    shift 2
    echo "== $title" | tee -a "$log"
    ((limit > 20)) || { echo 'left out: the time of this part is over'; return; }
    echo "$*" >>"$log"
    # interrupted, pytest still writes its results
    timeout -s INT -k 10 "$limit" "$@" 2>"$out/error" | tee -a "$log" | grep -E --line-buffered "${only:-^[^{]}"
    rc=${PIPESTATUS[0]}  # 4: seeds too few to tell
    cat "$out/error" >>"$log"
    local why=$(grep -v '^ *$' "$out/error" | tail -n 1)
    case "$rc $why" in
    0\ * | 4\ *) ;;
    1\ *FAIL:*) echo "verdict: ${why#error: }" ;;
    *) echo "FAILED (exit code $rc; 124: out of time): $why" ;;
    esac
    rm "$out/error"
    echo "   ($((SECONDS - start)) s)"
}
steps() {  # SECONDS NAME VARIANTS SETTINGS...: see steps.py
    item "$1" "steps of $2: $3" "$python" tests/gpu/steps.py "$out/$2.json" "$3" "${@:4}" "${extra[@]}" $four
}

wheels=.whl
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$tmp/site
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$wheels"/*.whl && export PYTHONPATH=$site
    # Transformer Engine would take the machine's cuDNN, beside torch's own
    cudnn=$("$python" -c 'import nvidia.cudnn as c; print(c.__path__[0])' 2>/dev/null) &&
        export LD_LIBRARY_PATH=$cudnn/lib:${LD_LIBRARY_PATH:-}
fi
"$python" -c 'import torch as t; print("torch", t.__version__, t.cuda.is_available() and t.cuda.get_device_name())'

for part; do
    end=$((SECONDS + 60 * ${minutes[$part]}))
    ((end < end_of_call && ! quick)) || end=$end_of_call
    case $part in
    kernels)
        item 110 'kernels' "$python" -m pytest tests/gpu -q "${workers[@]}" -rf --tb=line --show-capture=no -p no:cacheprovider \
            -k 'casts_kernels or norms_kernel or operands_are or (fused and tensorwise)'
        ;;
    gpt2) steps 240 124m bf16,triton,delayed,head,inductor "${gpt2[@]}" ;;
    peers)
        peer() { item "$1" "$2" "$python" tests/gpu/rivals.py "${2,,}" "$out" ${quick:+quick}; }
        [[ ! -d .peers/nanoGPT ]] || peer 100 nanoGPT
        [[ ! -d .peers/nanochat ]] || peer 140 nanochat
        ;;
    xl) steps 180 1.5b bf16,triton,delayed,inductor "${xl[@]}" ;;
    tests)
        item 40 'diagnose.py' "$python" diagnose.py
        item 320 'tests/gpu' "$python" -m pytest tests/gpu -v "${workers[@]}" -rfEs --tb=short --show-capture=no \
            -p no:cacheprovider --junitxml="$out/tests.xml"
        ;;
    train)
        TORCH_LOGS=recompiles only='^precision|^memory|^speed|^step +(100|200) |FP8|val loss|HellaSwag' \
            item 300 'train_fp8.py, GPT-2 124M' "$python" train_fp8.py "${gpt2[@]}" "${data[@]}" "${run[@]}" \
            --warmup_steps=20 --eval_freq=100 --eval_tokens=1048576 --log_freq=20 --sample_freq=0 --overwrite \
            --checkpoint_freq=1000 --checkpoint_dir="$tmp/train" --fp8_backend=native "${extra[@]}"
        cp "$tmp/train/log.jsonl" "$out/train.jsonl"
        echo "recompiled $(grep -c 'Recompiling function' "$log") times"
        ;;
    rest)
        steps 60 124m-8 bf16,triton "${gpt2[@]}" --batch_size=8
        steps 80 350m bf16,triton "${medium[@]}"
        pair=("$python" bench.py pair "${gpt2[@]}" "${data[@]}" "${pair[@]}" "${extra[@]}" --results="$out")
        item 100 'other backends' "${pair[@]}" --backends=$others --recipes=tensorwise
        item 100 'other recipes' "${pair[@]}" --backends=native --recipes=rowwise,blockwise
        only='^(run|results|[|])' item 300 'losses of whole runs' "$python" bench.py quality "${gpt2[@]}" \
            "${data[@]}" --eval_freq=100 --warmup_steps=60 "${extra[@]}" "${losses[@]}" --seeds=1 --results="$out" \
            --out="$tmp/quality"
        ;;
    esac
done
