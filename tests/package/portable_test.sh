#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# portable_test.sh [WHEEL]: builds the wheel for CPUs that runs anywhere, or takes WHEEL, for CPUs or with CUDA code, and installs
# it into bare roots of Debian 12 and 13, which have Python and nothing that a build needs, and no GPU. There the package and
# the program compute, with the same bits, within a minute from `pip install` on. Needs root, debootstrap and network; exits
# 77 without.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[[ $(id -u) == 0 ]] || { echo "skipped: chroot needs root"; exit 77; }
command -v debootstrap >/dev/null || { echo "skipped: debootstrap isn't installed"; exit 77; }
place=$(mktemp -d)
leave() {
  umount "$place"/*/proc 2>/dev/null || true
  rm -rf --one-file-system "$place"
}
trap leave EXIT
wheel=${1:-}
if [[ -z $wheel ]]; then
  "$root/packaging/build-wheel.sh" cpu
  wheel=$(echo "$root"/build/wheel/dist-cpu/*.whl)
fi

cat >"$place/first_result.py" <<'END'
import numpy, ringattn

normal = numpy.random.default_rng(1).standard_normal
q, k, v = (normal((300, heads, 64), dtype="float32") for heads in (4, 2, 2))
out, lse = ringattn.attention(q, k, v)
ringattn.testing.check_attention(q, k, v, out, lse)
print("digest", __import__("hashlib").sha256(out.tobytes()).hexdigest())
END
cat >"$place/in_root.sh" <<'END'
set -euo pipefail
export HOME=/root PATH=/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /root
for name in libfmt libhwy libgomp libtomlplusplus; do
  ! ldconfig -p | grep "$name" || { echo "this root isn't bare: it has $name"; exit 1; }
done
python3 -m venv /venv
begin=$(date +%s)
pip install --quiet --no-index --find-links /wheels ringattn
python /wheels/first_result.py >result
seconds=$(($(date +%s) - begin))
cat result
echo "from pip install to the first result: $seconds s"
((seconds <= 60)) || { echo "that is more than 60 s"; exit 1; }
folder=$(python -c 'import importlib.util as u; print(u.find_spec("ringattn").submodule_search_locations[0])')
for file in "$folder/libringattn_c.so" "$folder/bin/ringattn"; do
  ! ldd "$file" | grep -E 'not found|libstdc\+\+' || { echo "$file must not need these"; exit 1; }
done
job=(--synthetic 7 --seq 1k --heads 4 --kv-heads 2 --head-dim 64)
ringattn run "${job[@]}" --json run.json
ringattn run "${job[@]}" --ranks 3 --json three.json
digests=$(grep -ho '"digest": .*' run.json three.json | sort | uniq -c | awk '{print $1}')
[[ $digests == 2 ]] || { echo "one rank and three have other bits"; cat run.json three.json; exit 1; }
ringattn verify "${job[@]}"
ringattn verify "${job[@]}" --against oracle --rows 16
ringattn-goldens list | grep attention-bf16 >/dev/null
ringattn-mpirun --dry-run -np 2 run "${job[@]}"
ringattn info >info
grep -q 'GPU *none' info
ringattn collect-env >facts
python -m ringattn collect-env >facts_of_python
grep -q '^ringattn' facts
grep -qE "^  ringattn +[0-9]" facts_of_python  # the installed package
END
failed=0
for suite in bookworm trixie; do
  echo "==== $suite ===="
  bare=$place/$suite
  debootstrap --variant=minbase --include=python3-venv "$suite" "$bare" http://deb.debian.org/debian >"$place/log" 2>&1 ||
    { tail -n 20 "$place/log"; echo "skipped: debootstrap can't make $suite"; exit 77; }
  python=$(ls "$bare"/usr/bin/python3.*[0-9] | sed 's/.*python//' | head -n 1)
  mkdir "$bare/wheels"
  cp "$wheel" "$place/first_result.py" "$place/in_root.sh" "$bare/wheels"
  # Downloaded outside, so that the time doesn't depend on the network.
  python3 -m pip download --quiet --only-binary :all: --python-version "$python" --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --dest "$bare/wheels" numpy
  mount -t proc proc "$bare/proc"  # by which the dynamic linker finds a program's folder
  env -i PATH="$PATH" chroot "$bare" /bin/bash /wheels/in_root.sh || failed=1
  grep digest "$bare/root/result" >>"$place/digests" || true
  umount "$bare/proc"
  rm -rf --one-file-system "$bare"
done
if (($(sort -u "$place/digests" | wc -l) != 1 || $(wc -l <"$place/digests") != 2)); then
  echo "the roots have other bits"
  cat "$place/digests"
  failed=1
fi
exit "$failed"
