# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Long work in named parts that can be resumed; sourced by bench/run.sh and tests/run_gpu.sh. The script says
#   part NAME MINUTES "what it does"          once for each part, in order
#   part_NAME() { … }                         with _ for -; returns 0 (done), 77 (can't run here, it says why), or fails
#   run_part NAME                             optional: runs a part, if that takes more than its function
#   part_is_done NAME                         whether an earlier call has done it
#   parts_more_options="…"                    lines of --help for options that it takes itself
# and calls run_parts "$@". Parts that are done are skipped. A part that does not fit into the remaining time is postponed
# to the next call.

part_names=()
declare -A part_minutes part_what

part() {
  part_names+=("$1")
  part_minutes[$1]=$2
  part_what[$1]=$3
}

run_part() { "part_${1//-/_}"; }

parts_usage() {
  cat <<END
Usage: $parts_program [--list] [--again] [--minutes N] [PART …]
  --list        the parts, and which are done
  --again       do parts that are done anew
  --minutes N   put off parts that would not end in time; the first one always runs [10]${parts_more_options:-}
Without PART: all of them. Exit codes: 0 done, 1 a part failed, 2 usage, 75 parts were put off: call it again, 77 nothing
of it can run here.
END
}

# run_parts [arguments …]
run_parts() {
  parts_program=$0
  local again=0 list=0 budget=10 name
  local -a wanted=()
  while (($# > 0)); do
    case $1 in
      --list) list=1 ;;
      --again) again=1 ;;
      --minutes)
        if [[ ! ${2:-} =~ ^[1-9][0-9]*$ ]]; then
          echo "$0: error: --minutes is \"${2:-}\" (it takes a whole number, at least 1). Try --minutes 10." >&2
          return 2
        fi
        budget=$2; shift ;;
      -h | --help) parts_usage; return 0 ;;
      *)
        if [[ -z ${part_minutes[$1]:-} ]]; then
          echo "$0: error: unknown part or option $1 (the parts are ${part_names[*]}). See $0 --help." >&2
          return 2
        fi
        wanted+=("$1") ;;
    esac
    shift
  done
  ((${#wanted[@]} > 0)) || wanted=("${part_names[@]}")

  if ((list)); then
    for name in "${wanted[@]}"; do
      printf '%-20s %-5s about %2s min  %s\n' "$name" "$(part_is_done "$name" && echo "done")" "${part_minutes[$name]}" \
        "${part_what[$name]}"
    done
    return 0
  fi

  local -a failed=() skipped=() later=()
  local begun=0 code started
  for name in "${wanted[@]}"; do
    if ((!again)) && part_is_done "$name"; then
      echo "== $name: done before (--again does it anew)"
      continue
    fi
    if ((begun && SECONDS + 60 * part_minutes[$name] > 60 * budget)); then
      later+=("$name")
      continue
    fi
    begun=1 started=$SECONDS
    echo "== $name: ${part_what[$name]}"
    # In a subshell, so that a part's variables and directory changes do not persist.
    set +e  # not `|| code=$?`: it would switch off errexit inside, too
    ( set -euo pipefail; run_part "$name" )
    code=$?
    set -e
    case $code in
      0) echo "== $name: done in $((SECONDS - started)) s" ;;
      77) skipped+=("$name"); echo "== $name: skipped" ;;
      *) failed+=("$name"); echo "== $name: FAILED with code $code" ;;
    esac
  done
  ((${#skipped[@]} == 0)) || echo "skipped: ${skipped[*]}"
  ((${#later[@]} == 0)) || echo "put off, call $0 again: ${later[*]}"
  if ((${#failed[@]} > 0)); then
    echo "failed: ${failed[*]}"
    return 1
  fi
  ((${#later[@]} == 0)) || return 75
  ((${#skipped[@]} < ${#wanted[@]})) || return 77
}

# need CONDITION-COMMAND… -- "what is needed": ends a part that can't run here.
need() {
  local -a check=()
  while [[ $1 != -- ]]; do check+=("$1"); shift; done
  "${check[@]}" >/dev/null 2>&1 && return 0
  echo "skipped: needs $2"
  exit 77
}

# GPUs that this process may use.
count_gpus() {
  if ! command -v nvidia-smi >/dev/null; then echo 0; return; fi
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^ *([0-9]+|GPU-|MIG-)' || true
  else
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
  fi
}

gpu_name() { { nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true; } | head -n 1; }

# build_preset PRESET [TARGET …]: configures and builds. Prints the whole output only if that fails.
build_preset() {
  local preset=$1
  shift
  local -a launcher=() targets=()
  if command -v ccache >/dev/null; then
    launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  local target
  for target in "$@"; do targets+=(--target "$target"); done
  mkdir -p build
  cmake --preset "$preset" "${launcher[@]}" >"build/$preset-configure.log" 2>&1 ||
    { cat "build/$preset-configure.log" >&2; return 4; }
  cmake --build --preset "$preset" "${targets[@]}" >"build/$preset-build.log" 2>&1 ||
    { tail -n 60 "build/$preset-build.log" >&2; return 4; }
}
