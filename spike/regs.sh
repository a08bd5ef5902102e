#!/bin/sh
# Registers and spills of the variants in compile_check.cu; leaves fold.cubin.
nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -I../src -I. -cubin -o fold.cubin compile_check.cu 2>&1 |
  grep -E "error|warning|registers|spill|Compiling" | c++filt |
  sed -E "s/ptxas info    : //; s/Compiling entry function 'void ringattn::[a-z0-9]+:://; s/\(ringattn.*//; s/cumulative.*//" | paste - - -
