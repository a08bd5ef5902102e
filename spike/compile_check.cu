#include "sm80_fold.cuh"
using namespace ringattn::sm80;
#define K(...) template __global__ void ringattn::sm80::fold_kernel<Config<__VA_ARGS__>>(const __grid_constant__ Params);
K(128, 64, 4, 2, 2, 2, false, 1)
K(128, 64, 4, 2, 2, 2, false, 2)
K(128, 64, 4, 2, 2, 2, false, 2, true, true)
K(128, 64, 4, 2, 2, 2, false, 1, true, true)
