#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the GPU half of the suite on a GPU host, in parts of a few minutes: tests/run_gpu.sh does what fits into 10
# minutes, and called again goes on where it stopped. --list shows the parts, --help the options.
#
# A part that passed leaves build/gpu/<part>.passed with the build it was; a new build does them all anew. The log of
# each part is build/gpu/<part>.log. Environment: GPU_PRESET, the CMake preset [dev]; RINGATTN_TEST_LONG=1, long
# variants too.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/support/parts.sh
source tests/support/parts.sh

preset=${GPU_PRESET:-dev}
state=build/gpu
gpus=$(count_gpus)
ringattn=build/$preset/bin/ringattn
mkdir -p "$state"

part build 5 "configure and build, preset $preset"
part gpu-tests 5 "every test that is labelled gpu: transports on devices, op classes, what only GPUs have"
part kernels 4 "devices, and the tables of folds, head products, linear layers and scans on every kernel of GPUs"
part decoding 2 "caches, decoding, shares and shared prefixes on every kernel of GPUs"
part worlds 3 "the same digest on 1 … N GPUs, layouts and block sizes, p2p and nccl, under mpirun"
part mpirun-tests 2 "op classes under mpirun on 1 … N GPUs, p2p and nccl: the rows of one rank alone"
part one-connection 2 "p2p with CUDA_DEVICE_MAX_CONNECTIONS=1: no deadlock, the same digest"
part several-a-gpu 2 "worlds of 2 to 7 ranks on one GPU, as threads, p2p: the same bits"
part oracle 2 "256k tokens on all GPUs: 64 rows against fp64"
part sanitizers 9 "compute-sanitizer's four tools beside each other, over short tests of all kinds of kernels, and p2p"
part python 1 "PyTorch tensors: streams, graphs, torch.compile, two ranks of torch.distributed; the cost of a call"
part faults 2 "a killed rank ends the others with code 6"
part stops 3 "ranks that block, stop or die at named places: noticed and named in time, no output left half-written"

job=(--synthetic 7 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16)

build_id() { "$ringattn" info --json - 2>/dev/null | sed -n 's/.*"build_id": "\([0-9a-f]*\)".*/\1/p'; }

part_is_done() {
  [[ $1 != build && -x $ringattn && -s $state/$1.passed && $(cat "$state/$1.passed") == "$(build_id)" ]]
}

# logged NAME COMMAND…: the log, and the mark of a part that passed.
logged() {
  local name=$1 code
  shift
  set +e  # a condition would switch errexit off inside, too
  ( set -euo pipefail; "$@" ) >"$state/$name.log" 2>&1
  code=$?
  set -e
  if ((code != 0)); then
    tail -n 40 "$state/$name.log"
    echo "the whole log: $state/$name.log"
    return 1
  fi
  grep -E '^[0-9]+% tests passed|^PASS|skipped' "$state/$name.log" | tail -n 12 || true
  build_id >"$state/$name.passed"
}

need_build() { need test -x "$ringattn" -- "a build: tests/run_gpu.sh build"; }
need_gpus() { need test "$gpus" -ge "$1" -- "$1 GPU$([[ $1 == 1 ]] || echo s), there are $gpus"; }
# on_gpus RANKS [OPTIONS of the launcher] SUBCOMMAND FLAGS…
on_gpus() { RINGATTN_PROGRAM=$ringattn launch/ringattn-mpirun -np "$@"; }

# tests NAME ARGUMENTS…: of ctest, several beside each other: references on the CPU take most of their time. One at a time
# where a test has the GPU to itself.
tests() {
  need_build
  need_gpus 1
  local name=$1
  shift
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
  local cores beside
  cores=$(env -u OMP_NUM_THREADS nproc)  # nproc prints OMP_NUM_THREADS where that is set
  beside=$((cores / OMP_NUM_THREADS))
  logged "$name" ctest --preset "$preset" --parallel "${GPU_PARALLEL:-$((beside > 2 ? beside : 2))}" "$@"
}

part_build() {
  need_gpus 1
  build_preset "$preset"
  "$ringattn" info
}

part_gpu_tests() { tests gpu-tests --label-regex gpu; }
# Rows of the CPU's kernels are in tests/run.sh.
part_kernels() {
  local programs='(attention_kernel|batched_gemm|gemm_kernel|linear_kernel|ssm_kernel)_test'
  tests kernels --label-exclude gpu --tests-regex "^(base_test|$programs.*/(sm[0-9]|cuda_))"
}
part_decoding() { tests decoding --tests-regex '^decode_test.*/sm[0-9]' --label-exclude gpu; }

worlds() {
  local transport
  for transport in p2p nccl; do
    on_gpus "$gpus" verify "${job[@]}" --seq 10000 --mask causal --transport "$transport"
    on_gpus "$gpus" verify "${job[@]}" --seq 3001 --batch 3 --mask full --transport "$transport"
  done
  # Recorded on one GPU, found again on all of them.
  "$ringattn" verify "${job[@]}" --seq 64k --record "$state/golden.json" --force
  for transport in p2p nccl; do
    on_gpus "$gpus" verify "${job[@]}" --seq 64k --golden "$state/golden.json" --transport "$transport"
  done
}
part_worlds() {
  need_build
  need_gpus 2
  logged worlds worlds
}

# MPI tests, on worlds with a GPU for each rank.
part_mpirun_tests() {
  need_gpus 1
  tests mpirun-tests --tests-regex "^mpi_[a-z]*_test[.]np($(seq -s '|' "$gpus"))\$"
}

one_connection() {
  export CUDA_DEVICE_MAX_CONNECTIONS=1
  local block
  for block in 1k 4k 16k; do
    on_gpus "$gpus" -x CUDA_DEVICE_MAX_CONNECTIONS run "${job[@]}" --seq 64k --block "$block" --transport p2p
  done | tee "$state/one-connection.digests"
  # Three digests, all the same.
  grep -v '^#' "$state/one-connection.digests" | awk '{print $NF}' | sort | uniq -c |
    awk '{n[NR] = $1} END {exit !(NR == 1 && n[1] == 3)}'
}
part_one_connection() {
  need_build
  need_gpus 2
  logged one-connection one_connection
}

part_several_a_gpu() {
  need_build
  need_gpus 1
  logged several-a-gpu env CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" "$ringattn" verify "${job[@]}" --seq 5003 \
    --ranks 7 --transport p2p
}

part_oracle() {
  need_build
  need_gpus 1
  logged oracle on_gpus "$gpus" verify "${job[@]}" --seq 256k --against oracle --rows 64
  # a split of dV is 4,032 rows, whose sum in fp32 needs more than one chain of multiply-adds
  logged oracle-backward "$ringattn" verify --backward --synthetic 7 --seq 3000 --heads 6 --kv-heads 2 --head-dim 72 \
    --dtype fp32 --mask causal --backend cuda --against oracle
}

# One short test of each kind: the tools slow kernels down a hundredfold, and racecheck sm80_simt so much that it only
# sees that kernel's smallest test. A filter that finds nothing, or only skipped tests, is a failure too.
# sanitizer TOOL SECONDS: when the script's clock shows SECONDS its time is over.
sanitizer() {
  local tool=$1 ended=$2 log=$state/sanitizer-$1.log entry left code failed=0
  local rows='Kernels/AttentionExact.RowsWithoutKeysAreZero' nan='*NanInAValueStaysInItsTile*' all='sm*'
  local codes='Formats/CudaRowsTest.QuantizedAndDequantizedValuesAreTheHosts' append='Formats/CudaRowsTest.AFewRowsAreAppended'
  local formats='fp8_token_head int4_channel_group_32 int4_token_group_32 vector_width_8' format filter=
  for format in $formats; do filter+=${filter:+:}$codes/$format:$append/$format; done
  # racecheck doesn't follow that one lane gives shared memory back, or hands it on, for its warp, as sm90_ssd, its
  # gradients, those of attention, both kernels of latents and sm90_attention's decoding, of plain caches and of codes,
  # have it: their tests are left to other tools. So are those of sm80_attention_backward, whose warps hand P on by
  # bar.arrive: it reports races there between accesses that a __syncthreads() separates.
  if [[ $tool == racecheck ]]; then
    nan='Kernels/CudaAttentionTest.NanInAValueStaysInItsTile' all='sm80*'
    nan=$nan/sm80_attention:$nan/sm90_attention
  fi
  local -a entries=("attention_kernel_test $rows/sm80*:$rows/sm90*" "cuda_attention_test $nan"
    'decode_test Backends/CacheUpdates.*'
    'gemm_kernel_test Kernels/BatchedGemm.OneNanLeaves/sm*'
    'gemm_kernel_test Kernels/WeightGradients.NanAndNoTokens/sm*:Kernels/WeightGradients.StridesAndThreadsChangeNoBit/sm*'
    'attention_backward_test Kernels/AttentionBackward.SumsOfRowsInOrder/sm*'
    'attention_backward_test Kernels/AttentionBackward.WithoutGradientOfLse/sm80_simt_backward'
    'linear_kernel_test Kernels/Linear.NanAndInfinityStayInTheirRowsAndColumns/sm*'
    'linear_kernel_test Kernels/Rope.IsAccurate/cuda_rope'
    "ssm_kernel_test Kernels/SsmKernels.KeepTheStateWhereDtIsZero/$all:Kernels/SsmKernels.GoOnInTheirSlots/$all"
    "ssm_kernel_test Kernels/SsmKernels.GoOnInManySequencesOfFewStates/$all:Kernels/SsmKernels.GoOnBehindASegment/$all"
    "ssm_kernel_test Kernels/SsdBackward.NoGradientWhereDtIsAtItsLimits/$all"
    'ssm_kernel_test Kernels/Conv1dKernels.AreAccurate/sm*:Kernels/Conv1dKernels.GoOnInTheirSlots/sm*'
    'ssm_kernel_test Kernels/Conv1dGradients.AreAccurate/sm*:Kernels/Conv1dGradients.TakeManySequencesAndChannels/sm*'
    "cuda_compressed_test $filter"
    'cuda_compressed_test CudaTables.StridesMoveNoBitOfTables:CudaTables.TheFirstNumberThatIsNotFiniteIsReported'
    'cuda_decode_test CudaBlockChoice.MeansFollowGrowingSequences:CudaBlockMaskChoice.AFewBlocks'
    'attention_kernel_test Kernels/AttentionBlockMask.OfOneBlock/sm*_attention'
    'attention_kernel_test Kernels/AttentionPaged.WithNonFiniteValues/sm*_attention'
    "decode_test Kernels/MlaFp8Cache.OneTile/$all"
    "decode_test Kernels/DecodePrefixes.ManyRows/$all" "decode_test Kernels/DecodeBlockMask.NothingOutsideTheBlockMaskIsRead/$all"
    'gpu_reshard_test GpuReshard.RowsOfTwoRanksFindTheirPlaces'
    'gpu_ssm_test GpuSsmOfTwoRanks.ReportsItsPhasesInOrder'
    'gpu_invariance_test *GpuInvariance.FewTokensManyRanks*'
    'comm_p2p_test P2p.FreedMemoryGoesBackAtTheNextAllGather')
  if [[ $tool != racecheck ]]; then
    # The last one has 40 steps, too many for racecheck even where it could follow them.
    local few='*CudaMla.OneTile/*:*CudaMla.CtaGroupsOfAFewTiles/*'
    local gradients=Kernels/AttentionBackward
    entries+=("attention_backward_test $gradients.WithoutGradientOfLse/sm*attention_backward:$gradients.QuerySplitsCutAnyhow/sm*"
      'gpu_mla_test GpuMlaBackward.WorldsAndHeadsAtATime')
    entries+=("cuda_mla_test $few:*CudaMla.ManyRowsOfSeveralKvSplits/sm90_mla_split1k_bf16"
      'cuda_compressed_test CudaCompressedDecode.AFewTiles' 'gpu_decode_test GpuDecode.ChecksOnTheDevice'
      'cuda_decode_test CudaDecode.AGraphOfPartitionsFollowsGrowingSequences')
  fi
  complain() {
    echo "FAILED $tool, ${entry%% *}: $1"
    failed=1
  }
  for entry in "${entries[@]}"; do
    left=$((ended - SECONDS)) code=0
    if ((left < 1)); then
      complain "not run, for the part's 9 minutes are over"
      continue
    fi
    echo "== $tool: $entry"
    timeout --kill-after=5 "$left" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$(find "build/$preset" -type f -executable -name "${entry%% *}")" --gtest_filter="${entry#* }" >"$log" 2>&1 || code=$?
    cat "$log"
    case $code in
      0) grep -qE '^\[  PASSED  \] [1-9]' "$log" || complain "no test ran" ;;
      124 | 137) complain "the part's 9 minutes were over" ;;
      *) complain "code $code" ;;
    esac
  done
  return "$failed"
}
# The tools run beside each other; their reports follow one another.
sanitizers() {
  local tool ended=$((SECONDS + 530)) failed=0
  local -a tools=(memcheck racecheck initcheck synccheck) pids=()
  for tool in "${tools[@]}"; do
    sanitizer "$tool" "$ended" >"$state/sanitizers-$tool.log" 2>&1 &
    pids+=($!)
  done
  for tool in "${!tools[@]}"; do
    wait "${pids[$tool]}" || failed=1
    cat "$state/sanitizers-${tools[$tool]}.log"
  done
  return "$failed"
}
part_sanitizers() {
  need_build
  need_gpus 1
  need command -v compute-sanitizer -- "compute-sanitizer of the CUDA Toolkit"
  logged sanitizers sanitizers
}

# Rank 1 ends itself as it starts; the launcher reports code 6, and no rank hangs.
faults() {
  local code=0
  cat >"$state/dying-rank.sh" <<END
#!/bin/sh
[ "\$OMPI_COMM_WORLD_RANK" = 1 ] && kill -9 \$\$
exec "$PWD/$ringattn" "\$@"
END
  chmod +x "$state/dying-rank.sh"
  RINGATTN_PROGRAM=$state/dying-rank.sh timeout 120 launch/ringattn-mpirun -np 2 run "${job[@]}" --seq 64k --timeout 10 || code=$?
  echo "code $code"
  ((code == 6))
}
python_tests() {
  local name
  export RINGATTN_LIBRARY=build/$preset/lib/libringattn_c.so PYTHONPATH=python
  for name in gpu_batched_gemm_test gpu_test; do python3 "tests/python/$name.py"; done
}
part_python() {
  need_build
  need python3 -c "import torch" -- "PyTorch"
  logged python python_tests
  grep "a call\|C call" "$state/python.log" || true
}
part_stops() { tests stops --tests-regex '^stops_gpu$'; }
part_faults() {
  need_build
  need_gpus 2
  logged faults faults
}

run_parts "$@"
