#!/usr/bin/env bash
# From a bare machine with one GPU or eight to a model that is tested and talks.
# $ bash speedrun.sh --dry_run                            # runs nothing: the plan and each stage's command
# $ USD_PER_GPU_HOUR=3 bash speedrun.sh                   # runs them; stopped, the same line goes on
# $ CONFIG=config/shakespeare_fp8.py bash speedrun.sh --max_steps=500         # settings of train_fp8.py
set -uo pipefail
cd "$(dirname "$0")" || exit

CONFIG=${CONFIG:-config/gpt2_fp8.py}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c ^GPU)}                # 0: trains on the CPU
USD_PER_GPU_HOUR=${USD_PER_GPU_HOUR:-0}                                 # 0: without dollars
header=$(sed -n 's/^# \$ python prepare_data.py \([^&#]*\).*/\1/p' "$CONFIG")
ITEMS=${ITEMS:-hellaswag}                                               # HellaSwag's, also of prepare_data.py
PROMPT=${PROMPT:-The moon is}
name=${CONFIG##*/}
run=${RUN:-checkpoints_${name%.*}}                                      # the folder of the run
GPU=${GPU:-}                                                            # to plan for another: h200, b200, ...

dry='' settings=()
for word in "$@"; do
    [[ $word == --dry_run ]] && dry=yes || settings+=("$word")
done
export PATH=$PWD/.venv/bin:$PATH
launch=(python)
((GPUS > 1)) && launch=(torchrun --standalone --nproc_per_node="$GPUS")

stop() {
    echo "speedrun.sh: $1" >&2
    exit 1
}

[[ ${DATA:-} || " $*" != *' --dataset'* ]] || stop '--dataset wants DATA=..., what prepare_data.py is to make'
DATA=${DATA:-$header}                                                   # as the config says

stage() {  # NAME WORDS...: the command, unless it was done before
    local name=$1 said=$run/speedrun/$1.log mark=$run/speedrun/$1.done
    [[ $name != @(data|items) ]] || mark=data/speedrun_$name.done       # a mark lies beside what it is of
    shift
    echo "== $name"
    if [[ $name != install && -f $mark && $(<"$mark") == "$*" ]]; then
        echo '   done before, left out'
        return
    fi
    echo "   ${*@Q}"
    [[ $dry ]] && return
    mkdir -p "$run/speedrun"
    [[ $name != train ]] || rm -f "$run/speedrun/"{evaluate,sample}.done    # of the model before
    "$@" | tee -i "$said" ||
        stop "$name ended with exit code $?; with that put right, the same line goes on there"
    ! grep -q '^stopped at step' "$said" || stop "$name was stopped; the same line goes on there"
    echo "$*" >"$mark"
}

read -ra data <<<"$DATA"
read -ra items <<<"$ITEMS"
stage install make install
[[ -x .venv/bin/python ]] || stop 'the other stages are planned once there is a .venv: make install'
planned=("$CONFIG" --gpus=$((GPUS > 0 ? GPUS : 1)) --usd_per_gpu_hour="$USD_PER_GPU_HOUR" "${settings[@]}")
[[ ! $GPU ]] || planned+=(--gpu="$GPU")
python train_fp8.py "$CONFIG" "${settings[@]}" --list_checkpoints >/dev/null || stop 'these are no settings'
python plan.py "${planned[@]}" || stop 'these settings make no plan'
stage data python prepare_data.py "${data[@]}"
stage items python prepare_data.py "${items[@]}"
stage train "${launch[@]}" train_fp8.py "$CONFIG" "${settings[@]}" --resume=auto --checkpoint_dir="$run"
stage evaluate "${launch[@]}" hellaswag.py --ckpt="$run/latest.pt"
stage sample python sample.py --ckpt="$run/latest.pt" --prompt="$PROMPT"
