#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks of this host's GPUs in parts of a few minutes: bench/run.sh does what fits into 10 minutes, and
# called again goes on where it stopped. bench/run.sh --list shows the parts, --help the options.
#
# bench/run.sh --readme measures what the README shows, and then has bench/tables.py write its tables and pictures, and
# those of docs/results.md, from the newest results of this GPU. What one host can't measure, another one adds: speeds
# beside peers need one GPU, scaling two or more.
#
# A part writes bench/results/<gpu>/<date>-<part>.jsonl, whole or not at all, where several GPUs of a host are <gpu>-x4;
# each line holds its command and the source revision. Environment: BENCH_DATE resumes an earlier day's run, BENCH_MODEL
# names the folder, PYTHON has PyTorch and, if wanted, FlashAttention-3 (else python3), RINGATTN_PROGRAM is a program that
# is built already, with the program beside it that a part measures with (attention_gpu_bench for precision-and-state,
# decode_gpu_bench for the parts of decoding, …); these go over their steps BENCH_ROUNDS times (else 3).
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/support/parts.sh
source tests/support/parts.sh
# shellcheck source=bench/ranks.sh
source bench/ranks.sh

gpus=$(count_gpus)
model=${BENCH_MODEL:-$(gpu_name | tr '[:upper:] ' '[:lower:]-')}
if [[ -z ${BENCH_MODEL:-} ]] && ((gpus > 1)); then model+=-x$gpus; fi
results=bench/results/${model:-cpu-$(nproc)-cores}
date=${BENCH_DATE:-$(date +%F)}
python=${PYTHON:-python3}
machine=$results/$date-machine.json
ringattn=${RINGATTN_PROGRAM:-$PWD/build/release/bin/ringattn}
beside=$(dirname "$ringattn")

# The shape that peers are measured at at every length, and scaling, too.
main_shape=(--heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --mask causal)

# Where several files have the same job, bench/tables.py compare shows the last one by name. precision-and-state measures
# shapes of one-gpu and one-gpu-shapes again, and sorts after both in every locale.
part machine 1 "measure the machine model that plans and predictions rest on"
part one-gpu 4 "ours in turn with cuDNN, FlashAttention-2 and FlashAttention-3 on one GPU, 1k to 128k tokens, every head_dim"
part one-gpu-shapes 4 "the same at other lengths, heads and masks; ours with a sliding window and in blocks"
part precision-and-state 4 "fp16 beside bf16, cuDNN too; by tiles touched; soft-cap; state in and out; host time of a call"
part decode 2 "decoding: pages of 16 to 128 beside dense caches, more rows, forced numbers of slices; ours alone"
part decode-updates 1 "decode steps with their updates (checks, new rows): plain caches, codes, latents; ours alone"
part decode-peers 6 "decoding: ours in turn with cuDNN and FlashAttention-2, 1k to 1m keys, in rounds"
part sparse-peers 6 "prefill over lists: ours in turn with FlexAttention over the same 10 % of the blocks, and all, in rounds"
part choice 1 "choosing blocks of keys for a prefill, 32k to 2m tokens; ours alone"
part products 3 "products around a latent: ours in turn with cuBLAS, bf16 and fp16, in rounds"
part latents 3 "decoding over latents, 16 and 128 heads, by a CTA, a pair or a team; groups of 1,024 keys; 8 bits; ours alone"
part latents-peers 4 "decoding over latents: ours, in groups of 1,024 keys too, in turn with FlashMLA, in rounds"
part compressed 4 "decoding and prefill over codes beside plain caches, in rounds; compressing, decompressing; ours alone"
part scans 1 "scans, updates and convolutions; ours alone, Hopper's kernel beside the portable one"
part scans-peers 5 "scans, updates and convolutions: ours in turn with mamba_ssm, causal_conv1d and PyTorch's convolution"
part scaling 3 "ours on 1, 2, 4 ... GPUs, 32k to 512k tokens, beside compute only and the zigzag ring"
part ring-p2p 3 "ours on all GPUs, 32k to 1m tokens, beside compute only, transport p2p"
part ring-nccl 3 "the same, transport nccl"
part ring-peers 4 "zigzag ring and PyTorch context_parallel on all GPUs, the same shapes"
part two-million 3 "2,097,152 tokens on 1, 2, 4 ... GPUs: time, memory, and the same digest"
part two-million-oracle 3 "64 rows of it against fp64, on all GPUs"
part two-million-peers 2 "the zigzag ring at 2,097,152 tokens"
part latent-ring 3 "latents on 1, 2, 4 ... GPUs, 128k and 512k, beside compute only and the plain job of the same dims"
part latent-two-million 6 "2,097,152 latents on 1, 2, 4 ... GPUs: time and digest, compute only, the plain job"
part latent-oracle 6 "64 rows of it against fp64, on two GPUs or more"
part scan-ranks 2 "scans on 1, 2, 4 ... GPUs, 128k and 2m tokens: time, the same digest"
part scan-oracle 3 "64 rows of a scan of 2m tokens against fp64, on all GPUs"
part decode-ranks 1 "a decode step over 1m keys on 1, 2, 4 ... GPUs: time, the same digest"
part long-sum 3 "the bias of sums over up to 2m keys: cuDNN, FlashAttention-2, ours"
part compressed-ring 1 "two ranks on a slowed link, keys and values as they are and as codes: bytes moved, time (any host)"
part cpu 2 "ours on the CPU, one rank and two under mpirun, beside compute only (any host)"

readme_parts=(one-gpu scaling two-million decode-peers)
if ((gpus > 1)); then readme_parts=(machine "${readme_parts[@]}"); fi  # several ranks plan with it
parts_more_options="
  --readme      as the first word: the parts that the README shows, or those PARTs alone; then the pages are written"

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
  trap 'rm -rf "$lines" "$lines.one" "$lines.json" "$lines.masks"' EXIT
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

# alone PROGRAM WORDS…: runs one program of bench/ and adds the command and the revision to each line.
alone() {
  "$beside/$1" "${@:2}" >"$lines.one"
  [[ -s $lines.one ]] || { echo "$* measured nothing" >&2; return 1; }
  python3 -c '
import json, os, sys
for text in open(sys.argv[1]):
    print(json.dumps({**json.loads(text), "command": " ".join(sys.argv[2:]), "git": os.environ["BENCH_GIT"]}))
' "$lines.one" "$@" >>"$lines"
}
kernel_alone() { alone attention_gpu_bench "$@"; }

peer() { "$python" "bench/peers/$1.py" "${@:2}" --jsonl "$lines"; }
peers() {
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "bench/peers/$1.py" "${@:2}" --jsonl "$lines"
}
need_gpus() { need test "$gpus" -ge "$1" -- "$1 GPU$([[ $1 == 1 ]] || echo s), there are $gpus"; }
# on_one_gpu [PROGRAM …]: what a part does first that measures one GPU.
on_one_gpu() {
  need_gpus 1
  prepare "$@"
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
}
has_torch() { "$python" -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; }
need_torch() {
  need has_torch -- "PyTorch with CUDA (PYTHON=$python has none)"
}

part_machine() {
  need_gpus 1
  prepare
  launch/ringattn-mpirun -np "$gpus" info --measure --machine "$machine" --force
}

# in_turn WORDS…: runs ours and the peers at some shapes, one directly after the other. A GPU's clock follows its power
# and temperature, so what is compared is measured within a minute.
in_turn() {
  ours 1 "$@" --total-tokens 16k
  peer sdpa "$@" --total-tokens 16k
}

part_one_gpu() {
  need_gpus 1
  need_torch
  on_one_gpu
  local lengths
  for lengths in 1k-4k*2 8k-32k*2 64k-128k*2; do in_turn --seq "$lengths" "${main_shape[@]}"; done
  in_turn --seq 32k --heads 32 --kv-heads 8 --head-dim 128 --mask full
  in_turn --seq 32k --heads 32 --kv-heads 32 --head-dim 64 --mask causal
  in_turn --seq 32k --heads 8 --kv-heads 8 --head-dim 256 --mask causal
  in_turn --seq 8k --heads 128 --kv-heads 128 --head-dim 192 --head-dim-v 128 --mask causal
  finish one-gpu
}

# What one-gpu leaves out.
part_one_gpu_shapes() {
  need_gpus 1
  need_torch
  on_one_gpu
  in_turn --seq 4k-16k*2 --heads 32 --kv-heads 8 --head-dim 128 --mask full
  in_turn --seq 4k-32k*2 --heads 16 --kv-heads 16 --head-dim 128 --mask causal
  in_turn --seq 4k-16k*2 --heads 32 --kv-heads 32 --head-dim 64 --mask causal
  in_turn --seq 4k-32k*2 --heads 32 --kv-heads 32 --head-dim 64 --mask full
  in_turn --seq 4k-16k*2 --heads 8 --kv-heads 8 --head-dim 256 --mask causal
  in_turn --seq 4k-32k*2 --heads 8 --kv-heads 8 --head-dim 256 --mask full
  # A sliding window, and one sequence in one piece and with its state saved and resumed every 32k tokens.
  ours 1 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --window 4095,0
  ours 1 --seq 128k --block 128k,32k "${main_shape[@]}"
  finish one-gpu-shapes
}

part_precision_and_state() {
  need_gpus 1
  need_torch
  on_one_gpu attention_gpu_bench
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

rounds=${BENCH_ROUNDS:-3}
if [[ ! $rounds =~ ^[1-9][0-9]{0,3}$ ]]; then
  echo "$0: error: BENCH_ROUNDS is \"$rounds\" (it takes a whole number, 1 to 9999). Try BENCH_ROUNDS=3." >&2
  exit 2
fi
# Decode steps that are measured: sequences x keys, and heads.
reach=(--steps "1x1k,1x4k,1x16k,1x64k,1x128k,1x1m,32x1k,32x4k,32x16k" --heads 32 --kv-heads 8 --head-dim 128)
fewer_kv_heads=(--steps "1x4k,1x64k,32x4k" --heads 32 --kv-heads 4 --head-dim 128)
equal_heads=(--steps "1x4k,1x64k,8x4k" --heads 32 --kv-heads 32 --head-dim 128)
narrow_heads=(--steps "1x4k,1x64k,32x4k" --heads 32 --kv-heads 8 --head-dim 64)

latents=(--kernel sm90_mla --kv-heads 1 --head-dim 576 --latent-dim 512 --page-size 64)
latents_1k=("${latents[@]/sm90_mla/sm90_mla_split1k}")  # in groups of 1,024 keys

part_decode() {
  on_one_gpu decode_gpu_bench
  local round
  for ((round = 1; round <= rounds; ++round)); do  # a file's readings of one step count as their median
    echo "round $round of $rounds"
    alone decode_gpu_bench "${reach[@]}" --page-size 0,16,64,128
    alone decode_gpu_bench --steps 1x4k,1x64k,32x4k --rows 1,4,16
  done
  alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,1x64k,1x128k,32x4k --slices 2,4
  # The portable kernel, which decodes where there is no Hopper.
  alone decode_gpu_bench --kernel sm80_attention --steps 1x4k,1x64k,32x4k
  # 16k keys that all sequences share, and 256 of their own; and the same without telling.
  alone decode_gpu_bench --steps 32x16640 --page-size 64
  alone decode_gpu_bench --steps 32x16640 --page-size 64 --prefix 16k
  # Prefixes whose last group is open, and 1k of each sequence's own.
  alone decode_gpu_bench --steps 32x13312,32x4k --page-size 64
  alone decode_gpu_bench --steps 32x13312 --page-size 64 --prefix 12k
  alone decode_gpu_bench --steps 32x4k --page-size 64 --prefix 3k
  # A tenth of the keys: drawn, and chosen by each step; and a cache of as many.
  alone decode_gpu_bench --steps 1x128k --page-size 0,64 --listed 102
  alone decode_gpu_bench --steps 1x128k --page-size 64 --best 102
  alone decode_gpu_bench --steps 1x12800 --page-size 0,64
  finish decode
}

part_decode_updates() {
  on_one_gpu decode_gpu_bench
  local round
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,32x1k,1x128k --page-size 64 --update 0,1
    # A group of int4 closes at 4k, and none at 4,095.
    alone decode_gpu_bench --steps 1x4k,1x4095,32x1k --page-size 64 --cache fp8,int4 --update 0,1
    alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 1x4k,16x4k --update 0,1
  done
  finish decode-updates
}

part_decode_peers() {
  need_gpus 1
  need_torch
  on_one_gpu decode_gpu_bench
  local round
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    decode_in_turn "${reach[@]}"
    decode_in_turn "${fewer_kv_heads[@]}"
    decode_in_turn "${equal_heads[@]}"
    decode_in_turn "${narrow_heads[@]}"
  done
  finish decode-peers
}
decode_in_turn() { alone decode_gpu_bench "$@" && peer decode "$@"; }

# Ours without lists stands beside the peer's list of all blocks.
part_sparse_peers() {
  need_gpus 1
  need_torch
  on_one_gpu
  local round seq pattern
  local -a patterns=(random-10 window-10)
  for seq in 32k 128k; do
    "$python" bench/peers/sparse.py --seq "$seq" --patterns "$(joined "${patterns[@]}")" --write-masks "$lines.masks/$seq"
  done
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    for seq in 32k 128k; do
      ours 1 --seq "$seq" "${main_shape[@]}"
      for pattern in "${patterns[@]}"; do
        ours 1 --seq "$seq" "${main_shape[@]}" --block-mask "$lines.masks/$seq/$pattern.safetensors"
      done
      peer sparse --seq "$seq" "${main_shape[@]}" --patterns "dense,$(joined "${patterns[@]}")"
    done
  done
  finish sparse-peers
}
joined() { local IFS=,; echo "$*"; }

# To keys of 16 and 128 heads, into the latent, and back, by the rows of a prefill, a batch of decode steps and one step.
products=(--shapes "expand:32kx16,expand:4kx128,absorb:128x128,back:128x128,absorb:4kx128,back:4kx128,absorb:1x128,back:1x128")

part_choice() {
  on_one_gpu attention_gpu_bench
  alone attention_gpu_bench choice sm90_attention
  finish choice
}

part_products() {
  need_gpus 1
  need_torch
  on_one_gpu gemm_gpu_bench
  local round dtype
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    for dtype in bf16 fp16; do
      alone gemm_gpu_bench "${products[@]}" --dtype "$dtype"
      peer gemm "${products[@]}" --dtype "$dtype"
    done
  done
  finish products
}

part_latents() {
  on_one_gpu decode_gpu_bench
  local round format stored
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 1x4k,1x32k,1x128k,16x4k,128x4k --slices auto,1,2,4,6,8
    alone decode_gpu_bench "${latents_1k[@]}" --heads 128 --steps 1x4k,1x32k,16x4k
    alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 64x16k --rows 2 --slices auto,1,2
    alone decode_gpu_bench "${latents[@]}" --heads 16 --steps 128x4k,128x16k --slices auto,1,2
    # Whole steps of the program, products and all.
    for format in bf16 fp8; do
      stored=(--op mla --q-len 1 --page-size 64 --cache-format "$format")
      ours 1 "${stored[@]}" --heads 128 --seq 4k,128k
      ours 1 "${stored[@]}" --heads 128 --seq 4k --batch 128
      ours 1 "${stored[@]}" --heads 16 --seq 16k --batch 128
    done
  done
  finish latents
}

part_latents_peers() {
  need_gpus 1
  need_torch
  on_one_gpu decode_gpu_bench
  local round
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    mla_in_turn --heads 128 --steps 1x4k,1x32k,1x128k,16x4k,128x4k
    mla_in_turn --heads 128 --steps 64x16k --rows 2
    mla_in_turn --heads 16 --steps 128x4k,128x16k
  done
  finish latents-peers
}
mla_in_turn() {
  alone decode_gpu_bench "${latents[@]}" "$@" && alone decode_gpu_bench "${latents_1k[@]}" "$@" && peer mla "$@"
}

part_compressed() {
  on_one_gpu decode_gpu_bench compress_gpu_bench
  local round format
  for ((round = 1; round <= rounds; ++round)); do
    echo "round $round of $rounds"
    alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,1x64k,1x128k,32x4k --cache plain,fp8,int8,int4
    for format in bf16 fp8 int4; do ours 1 --seq 16k,64k "${main_shape[@]}" --cache-format "$format"; done
    alone compress_gpu_bench
  done
  # The portable kernel.
  alone decode_gpu_bench --kernel sm80_attention --steps 1x4k,1x16k,1x128k,32x4k --cache plain,fp8,int8,int4
  finish compressed
}

part_scans() {
  on_one_gpu ssm_gpu_bench
  alone ssm_gpu_bench && alone ssm_gpu_bench --kernel sm80_ssd ssd-16k ssd-131k
  finish scans
}

part_scans_peers() {
  need_gpus 1
  need_torch
  on_one_gpu ssm_gpu_bench
  local shapes
  for shapes in ssd-16k,ssd-8x2k,ssd-131k,ssd-gated-131k \
    selective-131k,update-128,selective-update-128,conv1d-131k ssd-2m; do
    alone ssm_gpu_bench ${shapes//,/ }
    peer ssm --shapes "$shapes"
  done
  finish scans-peers
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

# Pages show whole measurements only: not where a part failed, or was put off.
write_pages() {
  if (($1 == 0)); then python3 bench/tables.py --select "${model%-x[0-9]*}"; fi
}

if [[ ${1:-} == --readme ]]; then
  shift
  named=0 asks=0
  for word in "$@"; do
    if [[ -n ${part_minutes[$word]:-} ]]; then named=1; fi
    if [[ $word == --list || $word == --help || $word == -h ]]; then asks=1; fi
  done
  ((named)) || set -- "$@" "${readme_parts[@]}"
  ((asks)) || trap 'write_pages $?' EXIT
fi
run_parts "$@"
