#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# goldens_test.sh PROGRAM LAUNCH: ringattn-goldens records small jobs of every op, finds them equal on several numbers of
# ranks, names the one whose digest has changed, and says what it was not given.
set -euo pipefail
export RINGATTN_PROGRAM=$1
goldens=$2/ringattn-goldens
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
failed=0
# expect CODE TEXT COMMAND…
expect() {
  local wanted=$1 text=$2 code=0 said
  shift 2
  said=$("$@" 2>&1) || code=$?
  [[ $code == "$wanted" && $said == *"$text"* ]] || { echo "$*: code $code, said: $said"; failed=1; }
}

jobs=$("$goldens" list | wc -l)
for op in attention attention-int4 decode mla mla-decode ssd ssd-convolution ssd-update selective-scan convolution; do
  "$goldens" list | grep "^$op" >/dev/null || { echo "no job of $op"; failed=1; }
done
expect 3 "$jobs of $jobs differ or could not be done" "$goldens" check "$place/none" --ranks 1
expect 0 "$jobs jobs recorded" "$goldens" record "$place/goldens" -- --backend cpu
[[ $(find "$place/goldens" -name '*.json' | wc -l) == "$jobs" ]] || { echo "a job has no file"; failed=1; }
expect 0 "$((2 * jobs)) jobs have the bits that were recorded" "$goldens" check "$place/goldens" -- --backend cpu

# One digit of one digest.
digit=$(grep -o '"digest_lse": "[0-9a-f]*' "$place/goldens/mla-absorbed.json" | tail -c 2)
sed -i -E "s/(\"digest_lse\": \"[0-9a-f]{31})./\1$([[ $digit == 0 ]] && echo 1 || echo 0)/" "$place/goldens/mla-absorbed.json"
expect 1 "mla-absorbed, 2 ranks: code 1" "$goldens" check "$place/goldens" --ranks 2
expect 1 "1 of $jobs differ" "$goldens" check "$place/goldens" --ranks 1

expect 2 "there are record, check and list" "$goldens" compare "$place"
expect 2 "no folder is given" "$goldens" check
expect 2 "unknown argument --backend" "$goldens" record "$place/x" --backend cpu
expect 2 "--ranks 1,0 can't be used" "$goldens" check "$place/goldens" --ranks 1,0
expect 0 "Usage: ringattn-goldens" "$goldens" --help
exit "$failed"
