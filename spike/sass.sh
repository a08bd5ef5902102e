#!/bin/sh
# How often the instructions that matter stand in each kernel of fold.cubin. NOPs behind HMMAs are stalls; LDL in the
# loop and R2UR behind LDG are what to look for first.
cuobjdump --dump-sass fold.cubin | c++filt | awk '
  /Function :/ {if (n) show(); n = $0; delete c}
  {for (i = 1; i <= NF; i++) if ($i ~ /^(HMMA|HGMMA|NOP|LDSM|LDL|STL|MUFU|FFMA|FMUL|FADD|FMNMX|R2UR|SHFL|LDGSTS|UTMALDG|WARPGROUP|BAR)/) {split($i, a, /[.;]/); c[a[1]]++; break}}
  function show(  k, s) {s = n; for (k in c) s = s " " k ":" c[k]; print s}
  END {show()}' | sed -E 's/.*fold_kernel<[a-z0-9:]*::Config/Config/; s/\(ringattn[^)]*\)//'
