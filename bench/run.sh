#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks of this host's GPUs in parts of a few minutes: bench/run.sh does what fits into 10 minutes, and
# called again goes on where it stopped. bench/run.sh --list shows the parts, --help the options.
#
# A part writes bench/results/<gpu>/<date>-<part>.jsonl, whole or not at all; each line holds its command and the source
# revision. Environment: BENCH_DATE resumes an earlier day's run, BENCH_MODEL names the folder (else the GPU's name),
# PYTHON has PyTorch (else python3), RINGATTN_PROGRAM is a program that is built already, fold_gpu_bench beside it for
# precision-and-state.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/support/parts.sh
source tests/support/parts.sh

gpus=$(count_gpus)
model=${BENCH_MODEL:-$(gpu_name | tr '[:upper:] ' '[:lower:]-')}
results=bench/results/${model:-cpu-$(nproc)-cores}
date=${BENCH_DATE:-$(date +%F)}
python=${PYTHON:-python3}
machine=$results/$date-machine.json
ringattn=${RINGATTN_PROGRAM:-$PWD/build/release/bin/ringattn}
beside=$(dirname "$ringattn")

# The shape that peers are measured at, and others (head_dim 64 and 256, full mask).
main_shape=(--heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --mask causal)

# Of what several files have, bench/compare.py shows the last one's, by name: precision-and-state measures shapes of one-gpu
# and one-gpu-peers again, and sorts behind both in every locale.
part machine 1 "measure the machine model that plans and predictions rest on"
part one-gpu 2 "ours on one GPU, 1k to 128k tokens, three head dims, causal and full"
part one-gpu-peers 2 "PyTorch SDPA with cuDNN and with FlashAttention-2, the same shapes"
part precision-and-state 4 "fp16 beside bf16, cuDNN too; by tiles touched; soft-cap; state in and out; host time of a call"
part ring-p2p 3 "ours on all GPUs, 32k to 1m tokens, beside the folds alone, transport p2p"
part ring-nccl 3 "the same, transport nccl"
part ring-peers 4 "zigzag ring and PyTorch context_parallel on all GPUs, the same shapes"
part two-million 3 "2,097,152 tokens on all GPUs: time, memory, digest, 64 rows against fp64"
part two-million-one 5 "2,097,152 tokens on one GPU: the same digest"
part two-million-peers 2 "the zigzag ring at 2,097,152 tokens"
part long-sum 3 "the bias of sums over up to 2m keys: cuDNN, FlashAttention-2, ours"
part cpu 2 "ours on the CPU, one rank and two under mpirun, beside the folds alone (any host)"

part_file() { echo "$results/$date-$1.jsonl"; }
part_is_done() {
  if [[ $1 == machine ]]; then [[ -s $machine ]]; else [[ -s $(part_file "$1") ]]; fi
}

# prepare [PROGRAM …]: ours, and programs of bench/ beside it, are built.
prepare() {
  if [[ -z ${RINGATTN_PROGRAM:-} ]]; then build_preset release ringattn_program "$@"; fi
  [[ -x $ringattn ]] || { echo "$ringattn can't be run. Check RINGATTN_PROGRAM." >&2; exit 4; }
  local program
  for program in "$@"; do
    [[ -x $beside/$program ]] && continue
    echo "$program isn't in $beside (RINGATTN_PROGRAM lies there). Build its target, too, or unset RINGATTN_PROGRAM." >&2
    exit 4
  done
  mkdir -p "$results"
  export RINGATTN_PROGRAM=$ringattn
  # Peers name the revision that our program was built from, also where the checkout isn't one.
  BENCH_GIT=$("$ringattn" --version | sed -n 's/.*(git \([^,]*\),.*/\1/p')
  export BENCH_GIT
  lines=$(mktemp "$results/.lines.XXXXXX")
  trap 'rm -f "$lines" "$lines.one" "$lines.json"' EXIT
}

finish() {  # the part's file appears whole
  [[ -s $lines ]] || { echo "nothing was measured" >&2; exit 1; }
  chmod 644 "$lines"
  mv "$lines" "$(part_file "$1")"
  echo "wrote $(part_file "$1")"
}

# ours RANKS WORDS…: lines of `ringattn bench`.
ours() {
  local ranks=$1
  shift
  local -a command=(env -u RINGATTN_PROGRAM "$ringattn") flags=()
  # Several ranks plan with what was measured of the links.
  if ((ranks > 1)); then
    command=(launch/ringattn-mpirun -np "$ranks")
    if [[ $1 != --backend && -s $machine ]]; then flags=(--machine "$machine"); fi
  fi
  "${command[@]}" bench "$@" "${flags[@]}" --jsonl "$lines.one" --force
  cat "$lines.one" >>"$lines"
}

# whole RANKS WORDS…: the report of `ringattn run` or `verify`, as a line.
whole() {
  local ranks=$1
  shift
  local -a command=(env -u RINGATTN_PROGRAM "$ringattn")
  ((ranks == 1)) || command=(launch/ringattn-mpirun -np "$ranks")
  "${command[@]}" "$@" --json "$lines.json" --force
  python3 -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))' "$lines.json" >>"$lines"
}

# kernel_alone WORDS…: lines of fold_gpu_bench, each with its command and the revision.
kernel_alone() {
  "$beside/fold_gpu_bench" "$@" >"$lines.one"
  [[ -s $lines.one ]] || { echo "fold_gpu_bench $* measured nothing" >&2; return 1; }
  python3 -c '
import json, os, sys
for text in open(sys.argv[1]):
    print(json.dumps({**json.loads(text), "command": " ".join(sys.argv[2:]), "git": os.environ["BENCH_GIT"]}))
' "$lines.one" fold_gpu_bench "$@" >>"$lines"
}

peer() { "$python" "bench/peers/$1.py" "${@:2}" --jsonl "$lines"; }
peers() {
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "bench/peers/$1.py" "${@:2}" --jsonl "$lines"
}
need_gpus() { need test "$gpus" -ge "$1" -- "$1 GPU$([[ $1 == 1 ]] || echo s), there are $gpus"; }
need_torch() {
  need "$python" -c 'import torch; assert torch.cuda.is_available()' -- "PyTorch with CUDA (PYTHON=$python has none)"
}

part_machine() {
  need_gpus 1
  prepare
  launch/ringattn-mpirun -np "$gpus" info --measure --machine "$machine" --force
}

# each_shape COMMAND…: with the flags of each family of shapes.
each_shape() {
  "$@" --seq 1k-128k*2 --total-tokens 16k "${main_shape[@]}"
  "$@" --seq 4k-32k*2 --total-tokens 16k --heads 32 --kv-heads 8 --head-dim 128 --mask full
  "$@" --seq 4k-32k*2 --total-tokens 16k --heads 16 --kv-heads 16 --head-dim 128 --mask causal
  local mask
  for mask in causal full; do
    "$@" --seq 4k-32k*2 --total-tokens 16k --heads 32 --kv-heads 32 --head-dim 64 --mask "$mask"
    "$@" --seq 4k-32k*2 --total-tokens 16k --heads 8 --kv-heads 8 --head-dim 256 --mask "$mask"
  done
  "$@" --seq 8k --total-tokens 16k --heads 128 --kv-heads 128 --head-dim 192 --head-dim-v 128 --mask causal
}

part_one_gpu() {
  need_gpus 1
  prepare
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
  each_shape ours 1
  # A sliding window, and one sequence in one piece and with its state saved and resumed every 32k tokens.
  ours 1 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --window 4095,0
  ours 1 --seq 128k --block 128k,32k "${main_shape[@]}"
  finish one-gpu
}

part_one_gpu_peers() {
  need_gpus 1
  need_torch
  prepare
  each_shape peer sdpa
  finish one-gpu-peers
}

part_precision_and_state() {
  need_gpus 1
  need_torch
  prepare fold_gpu_bench
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
  local dtype kernel
  local -a job=(--seq "8k,32k" --total-tokens 16k --heads 32 --kv-heads 8 --head-dim 128 --mask causal)
  for dtype in bf16 fp16 bf16 fp16; do  # in turn: the card's clock changes between them, too
    ours 1 "${job[@]}" --dtype "$dtype"
    peer sdpa --kernels cudnn "${job[@]}" --dtype "$dtype"
  done
  kernel=$(python3 -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["kernel"])' "$lines")
  kernel_alone touched "$kernel"
  kernel_alone host "$kernel"
  kernel_alone state "$kernel"
  kernel_alone speed "$kernel" 0 8192  # a soft-cap and a short window, beside 8k without
  finish precision-and-state
}

ring() {
  need_gpus 2
  prepare
  ours "$gpus" --seq 32k,128k,256k "${main_shape[@]}" --transport "$1" --against folds
  ours "$gpus" --seq 1m --samples 3 "${main_shape[@]}" --transport "$1" --against folds
  finish "ring-$1"
}
part_ring_p2p() { ring p2p; }
part_ring_nccl() { ring nccl; }

part_ring_peers() {
  need_gpus 2
  need_torch
  prepare
  local -a tokens=(--seq "32k,128k,256k")
  peers zigzag_ring "${tokens[@]}" "${main_shape[@]}"
  peers zigzag_ring --seq 1m --samples 3 "${main_shape[@]}"
  peers context_parallel "${tokens[@]}" "${main_shape[@]}"
  peers context_parallel --seq 1m --samples 3 "${main_shape[@]}"
  finish ring-peers
}

# One rank needs the memory of its share of 2m tokens: 43 GB on one GPU.
two_million=(--synthetic 7 --seq 2m "${main_shape[@]}")

part_two_million() {
  need_gpus 2
  prepare
  whole "$gpus" run "${two_million[@]}"
  whole "$gpus" verify "${two_million[@]}" --against oracle --rows 64
  finish two-million
}

part_two_million_one() {
  need_gpus 1
  prepare
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
  whole 1 run "${two_million[@]}"
  finish two-million-one
}

part_two_million_peers() {
  need_gpus 2
  need_torch
  prepare
  peers zigzag_ring --seq 2m --samples 1 "${main_shape[@]}"
  finish two-million-peers
}

part_long_sum() {
  need_gpus 1
  need_torch
  prepare
  local dtype
  for dtype in fp16 bf16; do
    env -u RINGATTN_PROGRAM "$python" bench/peers/long_sum.py --seq 16k,128k,2m --heads 8 --kv-heads 1 --rows 4096 \
      --dtype "$dtype" --ringattn "$ringattn" --jsonl "$lines"
  done
  finish long-sum
}

part_cpu() {
  prepare
  local -a job=(--backend cpu --seq 4k --heads 8 --kv-heads 2 --samples 5 --against folds)
  ours 1 "${job[@]}"
  ours 2 "${job[@]}"
  finish cpu
}

run_parts "$@"
