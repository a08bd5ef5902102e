# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# shellcheck disable=SC2154  # what bench/run.sh has
# The parts of bench/run.sh that several ranks measure, or one beside them; sourced by it.

# Numbers of ranks to show scaling at: powers of two, and all GPUs.
worlds() {
  local ranks
  for ((ranks = 1; ranks < gpus; ranks *= 2)); do echo "$ranks"; done
  echo "$gpus"
}

part_scaling() {
  need_gpus 2
  prepare
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
  finish scaling
}

ring() {
  need_gpus 2
  prepare
  ours "$gpus" --seq 32k,128k,256k "${main_shape[@]}" --transport "$1" --against compute
  ours "$gpus" --seq 1m --samples 3 "${main_shape[@]}" --transport "$1" --against compute
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
  need_gpus 1
  prepare
  local ranks
  for ranks in $(worlds); do whole "$ranks" run "${two_million[@]}"; done
  finish two-million
}

part_two_million_oracle() {
  need_gpus 1
  prepare
  whole "$gpus" verify "${two_million[@]}" --against oracle --rows 64
  finish two-million-oracle
}

part_two_million_peers() {
  need_gpus 2
  need_torch
  prepare
  peers zigzag_ring --seq 2m --samples 1 "${main_shape[@]}"
  finish two-million-peers
}

# Latents of a model with 16 heads, and the job over the keys and values that they are expanded to.
latent_job=(--op mla --form expanded --heads 16 --head-dim 128 --rope-dim 64 --latent-dim 512 --dtype bf16 --mask causal)
expanded_job=(--heads 16 --kv-heads 16 --head-dim 192 --head-dim-v 128 --dtype bf16 --mask causal)

part_latent_ring() {
  need_gpus 1
  prepare
  local ranks seq
  for ranks in $(worlds); do
    for seq in 128k 512k; do whole "$ranks" run --synthetic 7 --seq "$seq" "${latent_job[@]}"; done
    ours "$ranks" --seq 128k "${latent_job[@]}" --against compute
    ours "$ranks" --seq 128k "${expanded_job[@]}"
    ours "$ranks" --seq 512k --samples 3 "${latent_job[@]}" --against compute
    ours "$ranks" --seq 512k --samples 3 "${expanded_job[@]}"
  done
  finish latent-ring
}

part_latent_two_million() {
  need_gpus 1
  prepare
  local ranks
  for ranks in $(worlds); do
    whole "$ranks" run --synthetic 7 --seq 2m "${latent_job[@]}"
    ours "$ranks" --seq 2m --samples 1 "${expanded_job[@]}"
  done
  ours "$gpus" --seq 2m --samples 1 "${latent_job[@]}" --against compute
  finish latent-two-million
}

# The oracle takes two hours of a core: a host of one GPU has too few of them.
part_latent_oracle() {
  need_gpus 2
  prepare
  whole "$gpus" verify --synthetic 7 --seq 2m "${latent_job[@]}" --against oracle --rows 64
  finish latent-oracle
}

scan_job=(--op ssd --heads 80 --head-dim 64 --state-dim 128 --dtype bf16)

part_scan_ranks() {
  need_gpus 1
  prepare
  local ranks
  for ranks in $(worlds); do ours "$ranks" --seq 128k,2m "${scan_job[@]}"; done
  if ((gpus > 1)); then ours "$gpus" --seq 128k,2m "${scan_job[@]}" --transport nccl; fi
  finish scan-ranks
}

# Eight heads: the oracle goes through all tokens of each.
part_scan_oracle() {
  need_gpus 1
  prepare
  whole "$gpus" verify --synthetic 7 --op ssd --seq 2m --heads 8 --head-dim 64 --state-dim 128 --against oracle --rows 64
  finish scan-oracle
}

part_decode_ranks() {
  need_gpus 1
  prepare
  local ranks
  local -a step=(--op decode --q-len 1 --seq 1m --batch 1 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16)
  for ranks in $(worlds); do ours "$ranks" "${step[@]}"; done
  if ((gpus > 1)); then ours "$gpus" "${step[@]}" --transport nccl; fi
  finish decode-ranks
}

# Four megabytes a second: sending uncompressed keys and values takes longer than computing with them.
part_compressed_ring() {
  prepare
  local format
  export RINGATTN_PACE=4000000
  for format in bf16 fp8 int8 int4; do
    whole 2 run --backend cpu --synthetic 7 --seq 8k --heads 8 --kv-heads 8 --head-dim 128 --cache-format "$format"
  done
  finish compressed-ring
}

part_cpu() {
  prepare
  local -a job=(--backend cpu --seq 4k --heads 8 --kv-heads 2 --samples 5 --against compute)
  ours 1 "${job[@]}"
  ours 2 "${job[@]}"
  finish cpu
}
