#!/bin/sh
# SASS of a cubin's kernels: counts of the instructions that matter, per kernel.
/tmp/tritonpkg/triton/backends/nvidia/bin/cuobjdump --dump-sass ${1:-/tmp/c.cubin} | c++filt | awk '/Function :/{if(n)pr();n=$0;delete c} {for(i=1;i<=NF;i++){if($i ~ /^(HMMA|NOP|LDSM|LDL|STL|MUFU|FFMA|FMUL|FADD|FMNMX|R2UR|SHFL|LDGSTS|HGMMA|WARPGROUP|BAR)/){split($i,a,".");c[a[1]]++;break}}} function pr(){s=n; for(k in c)s=s" "k":"c[k]; print s} END{pr()}' | sed -E 's/.*fold_kernel<[a-z0-9:]*::Config/Config/; s/\(ringattn[^)]*\)//'
