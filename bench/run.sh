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

gpus=$(count_gpus)
model=${BENCH_MODEL:-$(gpu_name | tr '[:upper:] ' '[:lower:]-')}
if [[ -z ${BENCH_MODEL:-} ]] && ((gpus > 1)); then model+=-x$gpus; fi
results=bench/results/${model:-cpu-$(nproc)-cores}
date=${BENCH_DATE:-$(date +%F)}
python=${PYTHON:-python3}
machine=$results/$date-machine.json
ringattn=${RINGATTN_PROGRAM:-$PWD/build/release/bin/ringattn}
beside=$(dirname "$ringattn")
library=$(dirname "$beside")/lib/libringattn_c.so

# The shape that peers are measured at at every length, and scaling, too.
main_shape=(--heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --mask causal)

# Name, minutes, needs, and what is measured; after a semicolon the peers, which take turns with ringattn. A part needs
# "gpu", one GPU, and sees no other; "gpus" or "gpus:N", all GPUs, at least 1 or N; "torch"; "library", that of Python;
# programs of bench/ beside ringattn. With "rounds" it is done BENCH_ROUNDS times, and $round counts: a step's readings
# count as their median.
#
# Where several files have the same job, bench/tables.py compare shows the last one by name. precision-and-state
# measures shapes of one-gpu and one-gpu-shapes again, and sorts after both in every locale.
declare -A part_needs
while read -r name minutes needs what; do
  part "$name" "$minutes" "$what"
  part_needs[$name]=${needs//,/ }
done <<'END'
machine             1 gpus                           the machine model that plans and time estimates rest on
one-gpu             4 gpu,torch                      every head_dim, 1k to 128k tokens; cuDNN, FlashAttention-2 and -3
one-gpu-shapes      4 gpu,torch                      other lengths, heads and masks; a sliding window, KV blocks
precision-and-state 4 gpu,torch,attention_gpu_bench  fp16, by tiles touched, soft-cap, state in and out, host time
decode              2 gpu,rounds,decode_gpu_bench    pages of 16 to 128 beside dense caches, more rows, forced slices
decode-updates      1 gpu,rounds,decode_gpu_bench    with updates (checks, new rows): plain, quantized and MLA caches
decode-peers        6 gpu,torch,rounds,decode_gpu_bench 1k to 1m keys; cuDNN and FlashAttention-2
sparse-peers        6 gpu,torch,rounds               prefill with a block-sparse mask of 10 %, and all; FlexAttention
choice              1 gpu,attention_gpu_bench        choosing KV blocks for a prefill, 32k to 2m tokens
products            3 gpu,torch,rounds,gemm_gpu_bench batched GEMMs of MLA, bf16 and fp16; cuBLAS
linear              2 gpu,torch,rounds,linear_gpu_bench linear layers, few and many rows, gated, row-parallel; cuBLAS
rope                1 gpu,rope_gpu_bench             RoPE of many and few heads; decode-size appends with and without it
latents             3 gpu,rounds,decode_gpu_bench    MLA decode, 16 and 128 heads, in each kind of CTA group; FP8 cache
latents-peers       4 gpu,torch,rounds,decode_gpu_bench MLA decode, also in KV splits of 1,024 keys; FlashMLA
compressed          4 gpu,rounds,decode_gpu_bench,compress_gpu_bench decode, prefill with quantized caches; compression
scans               1 gpu,ssm_gpu_bench              SSD, scans, updates, conv1d; Hopper's kernel, the portable one
gated-delta         1 gpu,gated_delta_gpu_bench      the gated delta rule, GDN and KDA, prefill and updates
scans-peers         5 gpu,torch,ssm_gpu_bench        SSD, scans, updates, conv1d; mamba_ssm, causal_conv1d, PyTorch
backward-peers      3 gpu,torch,library              gradients: speed beside cuDNN, FlashAttention; repeated; bias
scaling             3 gpus:2                         1, 2, 4 ... GPUs, 32k to 512k tokens, compute only; zigzag ring
ring-p2p            3 gpus:2                         all GPUs, 32k to 1m tokens, compute only, transport p2p
ring-nccl           3 gpus:2                         the same, transport nccl
ring-peers          4 gpus:2,torch                   the same shapes; zigzag ring and PyTorch's context_parallel
two-million         3 gpus                           2,097,152 tokens on 1, 2, 4 ... GPUs, the same digest
two-million-oracle  3 gpus                           64 rows of it against fp64, on all GPUs
two-million-peers   2 gpus:2,torch                   compute only and the zigzag ring at 2,097,152 tokens
latent-ring         3 gpus                           MLA on 1, 2, 4 ... GPUs, 128k and 512k, compute only, plain job
latent-two-million  6 gpus                           MLA at 2,097,152 tokens on 1, 2, 4 ... GPUs, the same digest
latent-oracle       6 gpus:2                         64 rows of it against fp64, on two GPUs or more
scan-ranks          2 gpus                           SSD on 1, 2, 4 ... GPUs, 128k and 2m tokens: time, the same digest
scan-oracle         3 gpus                           64 rows of SSD at 2m tokens against fp64, on all GPUs
decode-ranks        1 gpus                           a decode step over 1m keys on 1, 2, 4 ... GPUs, the same digest
backward-ranks      3 gpus:2                         gradients on 1, 2, 4 ... GPUs, 32k and 128k, compute only; forward
linear-ranks        1 gpus:2,torch                   a row-parallel layer on 1, 2, 4 ... GPUs; cuBLAS and NCCL
long-sum            3 gpus,torch                     the bias of sums over up to 2m keys; cuDNN, FlashAttention-2
compressed-ring     1 any                            two ranks on a slowed link, plain and quantized: bytes moved, time
cpu                 2 any                            the CPU, one rank and two under mpirun, compute only
END

readme_parts=(one-gpu scaling two-million decode-peers)
if ((gpus > 1)); then readme_parts=(machine "${readme_parts[@]}"); fi  # several ranks plan with it
ranks_parts=(machine scaling two-million backward-ranks scan-ranks decode-ranks linear-ranks latent-ring ring-nccl
  ring-peers two-million-peers)
parts_more_options="
  --readme      as the first word: the parts that the README shows, or those PARTs alone; then the pages are written
  --ranks       as the first word: the parts that show what more GPUs of this host bring"

part_file() { echo "$results/$date-$1.jsonl"; }
part_is_done() {
  if [[ $1 == machine ]]; then [[ -s $machine ]]; else [[ -s $(part_file "$1") ]]; fi
}

# prepare [PROGRAM …]: ours, and programs of bench/ beside it, are built; "library" is libringattn_c.
prepare() {
  if [[ -z ${RINGATTN_PROGRAM:-} ]]; then build_preset release ringattn_program "${@/#library/ringattn_c}"; fi
  [[ -x $ringattn ]] || { echo "$ringattn can't be run. Check RINGATTN_PROGRAM." >&2; exit 4; }
  local program
  for program in "$@"; do
    if [[ $program == library ]]; then
      [[ -e $library ]] && continue
      echo "$library isn't there (RINGATTN_PROGRAM is $ringattn). Build ringattn_c, too, or unset RINGATTN_PROGRAM." >&2
      exit 4
    fi
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

# Prepares what the part needs, and calls its function; parts.sh calls it.
run_part() {
  local name=$1 need last=1 round
  local -a programs=()
  for need in ${part_needs[$name]}; do
    case $need in
      gpu | gpus) need_gpus 1 ;;
      gpus:*) need_gpus "${need#gpus:}" ;;
      torch) need has_torch -- "PyTorch with CUDA (PYTHON=$python has none)" ;;
      rounds) last=$rounds ;;
      any) ;;
      *) programs+=("$need") ;;
    esac
  done
  prepare "${programs[@]}"
  if [[ " ${part_needs[$name]} " == *" gpu "* ]]; then export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}; fi
  for ((round = 1; round <= last; ++round)); do
    ((last == 1)) || echo "round $round of $last"
    "part_${name//-/_}"
  done
  [[ $name == machine ]] || finish "$name"
}

rounds=${BENCH_ROUNDS:-3}
if [[ ! $rounds =~ ^[1-9][0-9]{0,3}$ ]]; then
  echo "$0: error: BENCH_ROUNDS is \"$rounds\" (it takes a whole number, 1 to 9999). Try BENCH_ROUNDS=3." >&2
  exit 2
fi

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
has_torch() { "$python" -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; }

part_machine() {
  launch/ringattn-mpirun -np "$gpus" info --measure --machine "$machine" --force
}

# in_turn WORDS…: runs ours and the peers at some shapes, one directly after the other. A GPU's clock follows its power
# and temperature, so what is compared is measured within a minute.
in_turn() {
  ours 1 "$@" --total-tokens 16k
  peer sdpa "$@" --total-tokens 16k
}

part_one_gpu() {
  local lengths
  for lengths in 1k-4k*2 8k-32k*2 64k-128k*2; do in_turn --seq "$lengths" "${main_shape[@]}"; done
  in_turn --seq 32k --heads 32 --kv-heads 8 --head-dim 128 --mask full
  in_turn --seq 32k --heads 32 --kv-heads 32 --head-dim 64 --mask causal
  in_turn --seq 32k --heads 8 --kv-heads 8 --head-dim 256 --mask causal
  in_turn --seq 8k --heads 128 --kv-heads 128 --head-dim 192 --head-dim-v 128 --mask causal
}

# The shapes that one-gpu leaves out.
part_one_gpu_shapes() {
  in_turn --seq 4k-16k*2 --heads 32 --kv-heads 8 --head-dim 128 --mask full
  in_turn --seq 4k-32k*2 --heads 16 --kv-heads 16 --head-dim 128 --mask causal
  in_turn --seq 4k-16k*2 --heads 32 --kv-heads 32 --head-dim 64 --mask causal
  in_turn --seq 4k-32k*2 --heads 32 --kv-heads 32 --head-dim 64 --mask full
  in_turn --seq 4k-16k*2 --heads 8 --kv-heads 8 --head-dim 256 --mask causal
  in_turn --seq 4k-32k*2 --heads 8 --kv-heads 8 --head-dim 256 --mask full
  # A sliding window, and one sequence in one piece and with its state saved and resumed every 32k tokens.
  ours 1 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --window 4095,0
  ours 1 --seq 128k --block 128k,32k "${main_shape[@]}"
}

part_precision_and_state() {
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
}

# Decode steps that are measured: sequences x keys, and heads.
reach=(--steps "1x1k,1x4k,1x16k,1x64k,1x128k,1x1m,32x1k,32x4k,32x16k" --heads 32 --kv-heads 8 --head-dim 128)
fewer_kv_heads=(--steps "1x4k,1x64k,32x4k" --heads 32 --kv-heads 4 --head-dim 128)
equal_heads=(--steps "1x4k,1x64k,8x4k" --heads 32 --kv-heads 32 --head-dim 128)
narrow_heads=(--steps "1x4k,1x64k,32x4k" --heads 32 --kv-heads 8 --head-dim 64)

latents=(--kernel sm90_mla --kv-heads 1 --head-dim 576 --latent-dim 512 --page-size 64)
latents_1k=("${latents[@]/sm90_mla/sm90_mla_split1k}")  # in KV splits of 1,024 keys

part_decode() {
  alone decode_gpu_bench "${reach[@]}" --page-size 0,16,64,128
  alone decode_gpu_bench --steps 1x4k,1x64k,32x4k --rows 1,4,16
  ((round == rounds)) || return 0
  alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,1x64k,1x128k,32x4k --slices 2,4
  # The portable kernel, which decodes where there is no Hopper.
  alone decode_gpu_bench --kernel sm80_attention --steps 1x4k,1x64k,32x4k
  # 16k keys that all sequences share, and 256 of their own, without and with --prefix.
  alone decode_gpu_bench --steps 32x16640 --page-size 64
  alone decode_gpu_bench --steps 32x16640 --page-size 64 --prefix 16k
  # Prefixes that end within a KV split, and 1k of each sequence's own.
  alone decode_gpu_bench --steps 32x13312,32x4k --page-size 64
  alone decode_gpu_bench --steps 32x13312 --page-size 64 --prefix 12k
  alone decode_gpu_bench --steps 32x4k --page-size 64 --prefix 3k
  # A tenth of the keys, drawn at random or chosen by each step; and a cache of that length.
  alone decode_gpu_bench --steps 1x128k --page-size 0,64 --listed 102
  alone decode_gpu_bench --steps 1x128k --page-size 64 --best 102
  alone decode_gpu_bench --steps 1x12800 --page-size 0,64
}

part_decode_updates() {
  alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,32x1k,1x128k --page-size 64 --update 0,1
  # A group of int4 closes at 4k, and none at 4,095.
  alone decode_gpu_bench --steps 1x4k,1x4095,32x1k --page-size 64 --cache fp8,int4 --update 0,1
  alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 1x4k,16x4k --update 0,1
}

part_decode_peers() {
  decode_in_turn "${reach[@]}"
  decode_in_turn "${fewer_kv_heads[@]}"
  decode_in_turn "${equal_heads[@]}"
  decode_in_turn "${narrow_heads[@]}"
}
decode_in_turn() { alone decode_gpu_bench "$@" && peer decode "$@"; }

# ringattn without a mask is compared with the peer's mask of all blocks.
part_sparse_peers() {
  local seq pattern
  local -a patterns=(random-10 window-10)
  for seq in 32k 128k; do
    ((round > 1)) ||
      "$python" bench/peers/sparse.py --seq "$seq" --patterns "$(joined "${patterns[@]}")" --write-masks "$lines.masks/$seq"
  done
  for seq in 32k 128k; do
    ours 1 --seq "$seq" "${main_shape[@]}"
    for pattern in "${patterns[@]}"; do
      ours 1 --seq "$seq" "${main_shape[@]}" --block-mask "$lines.masks/$seq/$pattern.safetensors"
    done
    peer sparse --seq "$seq" "${main_shape[@]}" --patterns "dense,$(joined "${patterns[@]}")"
  done
}
joined() { local IFS=,; echo "$*"; }

# Expand to 16 and 128 heads, absorb and back: rows of a prefill, of a batch of decode steps, and of one.
products=(--shapes "expand:32kx16,expand:4kx128,absorb:128x128,back:128x128,absorb:4kx128,back:4kx128,absorb:1x128,back:1x128")

part_choice() {
  alone attention_gpu_bench choice sm90_attention
}

part_products() {
  local dtype
  for dtype in bf16 fp16; do
    alone gemm_gpu_bench "${products[@]}" --dtype "$dtype"
    peer gemm "${products[@]}" --dtype "$dtype"
  done
}

# Prefill, gated, row-parallel, and decode steps.
linear_shapes=8192x8192x8192,1024x4096x4096,8192x4096x4096,1024x12288x5376,8192x12288x5376,8192x14336x4096:swiglu
linear=(--shapes "$linear_shapes,8192x4096x14336:none:row,1x12288x5376,16x12288x5376,64x12288x5376")

part_linear() {
  alone linear_gpu_bench "${linear[@]}"
  peer linear "${linear[@]}"
}

part_latents() {
  local format stored
  alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 1x4k,1x32k,1x128k,16x4k,128x4k --slices auto,1,2,4,6,8
  alone decode_gpu_bench "${latents_1k[@]}" --heads 128 --steps 1x4k,1x32k,16x4k
  alone decode_gpu_bench "${latents[@]}" --heads 128 --steps 64x16k --rows 2 --slices auto,1,2
  alone decode_gpu_bench "${latents[@]}" --heads 16 --steps 128x4k,128x16k --slices auto,1,2
  # Whole decode steps of the program, with their batched GEMMs.
  for format in bf16 fp8; do
    stored=(--op mla --q-len 1 --page-size 64 --cache-format "$format")
    ours 1 "${stored[@]}" --heads 128 --seq 4k,128k
    ours 1 "${stored[@]}" --heads 128 --seq 4k --batch 128
    ours 1 "${stored[@]}" --heads 16 --seq 16k --batch 128
  done
}

part_latents_peers() {
  mla_in_turn --heads 128 --steps 1x4k,1x32k,1x128k,16x4k,128x4k
  mla_in_turn --heads 128 --steps 64x16k --rows 2
  mla_in_turn --heads 16 --steps 128x4k,128x16k
}
mla_in_turn() {
  alone decode_gpu_bench "${latents[@]}" "$@" && alone decode_gpu_bench "${latents_1k[@]}" "$@" && peer mla "$@"
}

part_compressed() {
  local format
  alone decode_gpu_bench --steps 1x1k,1x4k,1x16k,1x64k,1x128k,32x4k --cache plain,fp8,int8,int4
  for format in bf16 fp8 int4; do ours 1 --seq 16k,64k "${main_shape[@]}" --cache-format "$format"; done
  alone compress_gpu_bench
  ((round == rounds)) || return 0
  # The portable kernel.
  alone decode_gpu_bench --kernel sm80_attention --steps 1x4k,1x16k,1x128k,32x4k --cache plain,fp8,int8,int4
}

part_rope() {
  alone rope_gpu_bench
}

part_scans() {
  alone ssm_gpu_bench && alone ssm_gpu_bench --kernel sm80_ssd ssd-16k ssd-131k
}

part_gated_delta() { alone gated_delta_gpu_bench; }

part_scans_peers() {
  local shapes
  for shapes in ssd-16k,ssd-8x2k,ssd-131k,ssd-gated-131k \
    selective-131k,update-128,selective-update-128,conv1d-131k ssd-2m; do
    alone ssm_gpu_bench ${shapes//,/ }
    peer ssm --shapes "$shapes"
  done
}

part_backward_peers() {
  local dtype
  export RINGATTN_LIBRARY=$library PYTHONPATH=$PWD/python
  peer attention_backward turn
  peer attention_backward repeat
  for dtype in bf16 fp16; do peer attention_backward bias --dtype "$dtype"; done
}

part_long_sum() {
  local dtype
  for dtype in fp16 bf16; do
    env -u RINGATTN_PROGRAM "$python" bench/peers/long_sum.py --seq 16k,128k,2m --heads 8 --kv-heads 1 --rows 4096 \
      --dtype "$dtype" --ringattn "$ringattn" --jsonl "$lines"
  done
}

# Numbers of ranks to show scaling at: powers of two, and all GPUs.
worlds() {
  local ranks
  for ((ranks = 1; ranks < gpus; ranks *= 2)); do echo "$ranks"; done
  echo "$gpus"
}

part_scaling() {
  local ranks
  for ranks in $(worlds); do
    local -a how=()
    if ((ranks > 1)); then how=(--transport p2p --against compute); fi
    ours "$ranks" --seq 32k,128k "${main_shape[@]}" "${how[@]}"
    ours "$ranks" --seq 512k --samples 3 "${main_shape[@]}" "${how[@]}"
  done
  ours "$gpus" --seq 32k,128k "${main_shape[@]}" --transport nccl
  ours "$gpus" --seq 512k --samples 3 "${main_shape[@]}" --transport nccl
  if has_torch; then
    peers zigzag_ring --seq 32k,128k "${main_shape[@]}"
    peers zigzag_ring --seq 512k --samples 3 "${main_shape[@]}"
  else
    echo "skipped: the zigzag ring needs PyTorch with CUDA (PYTHON=$python has none)"
  fi
}

ring() {
  ours "$gpus" --seq 32k,128k,256k "${main_shape[@]}" --transport "$1" --against compute
  ours "$gpus" --seq 1m --samples 3 "${main_shape[@]}" --transport "$1" --against compute
}
part_ring_p2p() { ring p2p; }
part_ring_nccl() { ring nccl; }

part_ring_peers() {
  local -a tokens=(--seq "32k,128k,256k")
  peers zigzag_ring "${tokens[@]}" "${main_shape[@]}"
  peers zigzag_ring --seq 1m --samples 3 "${main_shape[@]}"
  peers context_parallel "${tokens[@]}" "${main_shape[@]}"
  peers context_parallel --seq 1m --samples 3 "${main_shape[@]}"
}

# One rank needs the memory of its share of 2m tokens: 43 GB on one GPU.
two_million=(--synthetic 7 --seq 2m "${main_shape[@]}")

part_two_million() {
  local ranks
  for ranks in $(worlds); do whole "$ranks" run "${two_million[@]}"; done
}

part_two_million_oracle() {
  whole "$gpus" verify "${two_million[@]}" --against oracle --rows 64
}

part_two_million_peers() {
  ours "$gpus" --seq 2m --samples 1 "${main_shape[@]}" --against compute
  peers zigzag_ring --seq 2m --samples 1 "${main_shape[@]}"
}

# MLA with 16 heads, and attention over the keys and values that its latents are expanded to.
latent_job=(--op mla --form expanded --heads 16 --head-dim 128 --rope-dim 64 --latent-dim 512 --dtype bf16 --mask causal)
expanded_job=(--heads 16 --kv-heads 16 --head-dim 192 --head-dim-v 128 --dtype bf16 --mask causal)

part_latent_ring() {
  local ranks seq
  for ranks in $(worlds); do
    for seq in 128k 512k; do whole "$ranks" run --synthetic 7 --seq "$seq" "${latent_job[@]}"; done
    ours "$ranks" --seq 128k "${latent_job[@]}" --against compute
    ours "$ranks" --seq 128k "${expanded_job[@]}"
    ours "$ranks" --seq 512k --samples 3 "${latent_job[@]}" --against compute
    ours "$ranks" --seq 512k --samples 3 "${expanded_job[@]}"
  done
}

part_latent_two_million() {
  local ranks
  for ranks in $(worlds); do
    whole "$ranks" run --synthetic 7 --seq 2m "${latent_job[@]}"
    ours "$ranks" --seq 2m --samples 1 "${expanded_job[@]}"
  done
  ours "$gpus" --seq 2m --samples 1 "${latent_job[@]}" --against compute
}

# The oracle takes two hours of a core: a host of one GPU has too few of them.
part_latent_oracle() {
  whole "$gpus" verify --synthetic 7 --seq 2m "${latent_job[@]}" --against oracle --rows 64
}

scan_job=(--op ssd --heads 80 --head-dim 64 --state-dim 128 --dtype bf16)

part_scan_ranks() {
  local ranks
  for ranks in $(worlds); do ours "$ranks" --seq 128k,2m "${scan_job[@]}"; done
  if ((gpus > 1)); then ours "$gpus" --seq 128k,2m "${scan_job[@]}" --transport nccl; fi
}

# Eight heads: the oracle goes through all tokens of each.
part_scan_oracle() {
  whole "$gpus" verify --synthetic 7 --op ssd --seq 2m --heads 8 --head-dim 64 --state-dim 128 --against oracle --rows 64
}

part_decode_ranks() {
  local ranks
  local -a step=(--op decode --q-len 1 --seq 1m --batch 1 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16)
  for ranks in $(worlds); do ours "$ranks" "${step[@]}"; done
  if ((gpus > 1)); then ours "$gpus" "${step[@]}" --transport nccl; fi
}

part_backward_ranks() {
  local ranks
  for ranks in $(worlds); do
    local -a how=()
    if ((ranks > 1)); then how=(--transport p2p --against compute); fi
    ours "$ranks" --seq 32k,128k --samples 7 "${main_shape[@]}" "${how[@]}"
    ours "$ranks" --backward --seq 32k,128k --samples 7 "${main_shape[@]}" "${how[@]}"
  done
}

part_linear_ranks() {
  local ranks
  local -a layer=(--op linear --parallel row --seq 8k --in-features 14336 --out-features 4096)
  for ranks in $(worlds); do
    ours "$ranks" "${layer[@]}"
    ((ranks == 1)) || ours "$ranks" "${layer[@]}" --transport nccl
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" bench/peers/row_parallel.py \
      --shapes 8192x4096x14336 --jsonl "$lines"
  done
}

# Four megabytes a second: sending uncompressed keys and values takes longer than computing with them.
part_compressed_ring() {
  local format
  export RINGATTN_PACE=4000000
  for format in bf16 fp8 int8 int4; do
    whole 2 run --backend cpu --synthetic 7 --seq 8k --heads 8 --kv-heads 8 --head-dim 128 --cache-format "$format"
  done
}

part_cpu() {
  local -a job=(--backend cpu --seq 4k --heads 8 --kv-heads 2 --samples 5 --against compute)
  ours 1 "${job[@]}"
  ours 2 "${job[@]}"
}

# Pages show whole measurements only: not where a part failed, or was put off.
write_pages() {
  if (($1 == 0)); then python3 bench/tables.py --select "${model%-x[0-9]*}"; fi
}

if [[ ${1:-} == --ranks ]]; then
  shift
  set -- "$@" "${ranks_parts[@]}"
elif [[ ${1:-} == --readme ]]; then
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
