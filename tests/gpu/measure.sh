#!/usr/bin/env bash
# What a GPU with FP8 units is asked, in parts of under nine minutes. The most wanted comes first, since what does not fit is left out.
# $ bash tests/gpu/measure.sh                   # all of it; the JSON in results/gpu
# $ bash tests/gpu/measure.sh PART OUT
#   smoke    Transformer Engine's own check, diagnose.py, the tests of tests/gpu
#   speed    training steps of GPT-2 124M: bf16 and FP8 by torch.compile's casts, by fp8_kernels/, by Transformer Engine; what plan.py says
#   quality  losses of whole runs of GPT-2 124M, bf16 against FP8; tokens/s of train_fp8.py with all that is around a step
#   wide     the same steps of the 350M model and of GPT-2 XL
#   layers   fp8_head, weights kept over micro-steps, fp8_keep=auto, the other recipes, single linears
#   peers    nanoGPT's training step, nanochat's FP8 linear
#   all      each part after the other, with its own nine minutes
# Each item prints its table and leaves its JSON in OUT; all that was said is in OUT/PART.log. One that fails says FAILED and why in a line;
# a benchmark whose verdict is FAIL did not fail.
# Taken from the current folder, the repository's, where they are there:
#   .whl     wheels to install first      .data    data_dir, with fineweb_edu-gpt2      .peers    clones: nanoGPT, nanochat
# STEPS=600: length of the runs of `quality`. EXTRA='--fp8_format=e4m3': settings for every item that takes any; they win.
# A rehearsal on any machine, of tiny sizes; `quality` takes .data/fineweb_edu-byte in it (tests/test_rehearsal.py makes one):
# $ QUICK=1 bash tests/gpu/measure.sh speed /tmp/out
set -uo pipefail
usage() { sed -n '2,13s/^# \?//p' "$0"; exit 2; }
part=${1:-all} out=${2:-results/gpu}
[[ $# -le 2 && ' smoke speed quality wide layers peers all ' == *" $part "* ]] || usage
[[ -x .venv/bin/python ]] && here=.venv/bin/python || here=python3
end=$((SECONDS + 530)) python=${PYTHON:-$here} steps=${STEPS:-600} log=$out/$part.log quick=${QUICK:-}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
read -ra extra <<<"${EXTRA:-}"
one=--gradient_accumulation_steps=1  # micro-step a step: the configs' 16 would take all the time there is
pair=(--rounds=5 --steps=10 $one) short=(--rounds=3 --steps=5 $one) gemm=(--rounds=10 --steps=20) native=native others=te
quality_tokens=32768 train_tokens=131072 train_steps=200
if [[ $quick ]]; then
    pair=(--rounds=1 --steps=1 --warmup=1 $one) short=("${pair[@]}") gemm=(--rounds=1 --steps=1 --warmup=1) others=emulate steps=${STEPS:-8}
    quality_tokens=512 train_tokens=512 train_steps=8 end=$((SECONDS + 3600))     # a loaded CPU has time
    extra=(--n_layer=1 --n_embd=128 --n_head=4 --block_size=128 --batch_size=2 --tokenizer=byte --eval_tokens=1024 --device=cpu
        --fp8_backend=$native --warmup_steps=2 "${extra[@]}")
fi
[[ -d .data ]] && data=(--data_dir=.data --dataset=fineweb_edu) || data=()  # without it random tokens do, for speed
gpt2=(config/gpt2_fp8.py --batch_size=32 "${data[@]}")   # also of `quality`, which finds the graphs compiled; 15 of 151 GB by plan.py
medium=(config/h100_350m_fp8.py --batch_size=32 "${data[@]}")                # 43 GB
xl=(--init_from=gpt2-xl --batch_size=16 "${data[@]}")                        # 72 GB

item() {  # SECONDS TITLE WORDS...: one measurement, at most so long; prints the lines that match $only
    local title=$2 limit=$((! quick && $1 < end - SECONDS ? $1 : end - SECONDS)) start=$SECONDS rc
    shift 2
    echo "== $title" | tee -a "$log"
    ((limit > 20)) || { echo 'left out: the time of this part is over'; return; }
    echo "$*" >>"$log"
    timeout -k 5 "$limit" "$@" 2>"$out/error" | tee -a "$log" | grep -E --line-buffered "${only:-^[^{]}"  # a benchmark's JSON is in its file
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
planned() { only='batch_size|^memory|^time|  sum|tokens/s|^verdict' item 60 "plan.py $*" "$python" plan.py "$@" "${extra[@]}"; }

steps_of() {  # SECONDS TITLE WORDS...: training steps by torch.compile's casts and by fp8_kernels/
    local limit=$1 title=$2 kernels
    shift 2
    for kernels in inductor triton; do
        item "$limit" "$title, $kernels" "$python" bench.py pair "$@" --fp8_kernels=$kernels "${extra[@]}" --backends=$native --results="$out/$kernels"
    done
}

wheels=.whl
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=${TMPDIR:-/tmp}/site
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl && export PYTHONPATH=$site
fi
"$python" -c 'import torch; print("torch", torch.__version__, "|", torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

case $part in
smoke)
    [[ ! -f $wheels/gpu_smoke.py ]] || item 90 'Transformer Engine by itself' "$python" "$wheels/gpu_smoke.py"
    [[ ! -f diagnose.py ]] || item 60 'diagnose.py' "$python" diagnose.py
    [[ ! $quick ]] && "$python" -c 'import xdist' 2>/dev/null && workers=(-n 4) || workers=()
    item 400 'tests/gpu' "$python" -m pytest tests/gpu -q "${workers[@]}" -rfEs --tb=short -p no:cacheprovider --junitxml="$out/tests.xml"
    ;;
speed)
    steps_of 170 'GPT-2 124M' "${gpt2[@]}" "${pair[@]}" --recipes=tensorwise,delayed
    item 120 'GPT-2 124M, other backends' "$python" bench.py pair "${gpt2[@]}" "${short[@]}" "${extra[@]}" --backends=$others \
        --recipes=tensorwise --results="$out/others"
    planned "${gpt2[@]}"
    planned "${gpt2[@]}" --batch_size=0 --max_batch_size=512
    ;;
quality)
    runs=("${gpt2[@]}" --total_batch_size=$quality_tokens --eval_tokens=1048576 --eval_freq=$((steps / 4)) --warmup_steps=$((steps / 10))
        "${extra[@]}" --steps=$steps --results="$out" --out="${TMPDIR:-/tmp}/quality")
    only='^(run|results|[|])' item 150 "GPT-2 124M, $steps steps, one seed" "$python" bench.py quality "${runs[@]}" --seeds=1
    only='^(run|results|[|])' item 180 "GPT-2 124M, $steps steps, two seeds" "$python" bench.py quality "${runs[@]}" --seeds=2
    only='^precision|^memory|^speed|^step +(100|200) |FP8|val loss' item 180 'GPT-2 124M, train_fp8.py' "$python" train_fp8.py "${gpt2[@]}" \
        --total_batch_size=$train_tokens --max_steps=$train_steps --warmup_steps=20 --eval_freq=0 --eval_tokens=1048576 --log_freq=20 \
        --sample_freq=0 --hellaswag_freq=0 --checkpoint_freq=1000 --checkpoint_dir="${TMPDIR:-/tmp}/train" --overwrite "${extra[@]}"
    ;;
wide)
    steps_of 120 '350M' "${medium[@]}" "${short[@]}" --recipes=tensorwise
    planned "${medium[@]}"
    steps_of 120 'GPT-2 XL' "${xl[@]}" "${short[@]}" --recipes=tensorwise
    planned "${xl[@]}"
    ;;
layers)
    item 80 'GPT-2 124M, fp8_head' "$python" bench.py pair "${gpt2[@]}" --fp8_head "${short[@]}" "${extra[@]}" --backends=$native --recipes=tensorwise \
        --results="$out/head"
    item 100 'GPT-2 124M, four micro-steps, weights kept' "$python" bench.py pair "${gpt2[@]}" "${short[@]}" --gradient_accumulation_steps=4 "${extra[@]}" \
        --backends=$native --recipes=tensorwise --results="$out/kept"
    item 90 'GPT-2 124M, fp8_keep=auto' "$python" bench.py pair "${gpt2[@]}" --fp8_keep=auto "${short[@]}" "${extra[@]}" --results="$out/auto"
    item 90 'GPT-2 124M, other recipes' "$python" bench.py pair "${gpt2[@]}" "${short[@]}" "${extra[@]}" --backends=$native \
        --recipes=rowwise,blockwise --results="$out/recipes"
    item 80 'linears of GPT-2 124M' "$python" bench.py gemm "${gpt2[@]}" "${gemm[@]}" "${extra[@]}" --backends=$native,$others \
        --recipes=tensorwise --results="$out"
    item 90 'GPT-2 XL, 12 layers, fp8_keep=auto' "$python" bench.py pair "${xl[@]}" --n_layer=12 --fp8_keep=auto "${short[@]}" "${extra[@]}" \
        --results="$out/auto"
    ;;
peers)
    [[ ! -d .peers/nanoGPT ]] || item 150 "nanoGPT's step" "$python" tests/gpu/rivals.py nanogpt "$out" ${quick:+quick}
    item 150 'our steps' "$python" bench.py pair "${gpt2[@]}" "${short[@]}" "${extra[@]}" --backends=$native --recipes=tensorwise --results="$out"
    [[ ! -d .peers/nanochat ]] || item 200 "nanochat's FP8 linear" "$python" tests/gpu/rivals.py nanochat "$out" ${quick:+quick}
    ;;
all)
    for each in smoke speed quality wide layers peers; do
        bash "$0" $each "$out"
    done
    ;;
esac
