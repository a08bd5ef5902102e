#include "sm90_fold.cuh"
using namespace ringattn::sm90;
#define K(...) template __global__ void ringattn::sm90::fold_kernel<Config<__VA_ARGS__>>(const __grid_constant__ Params);
K(2, true, 2)
K(2, false, 2, false, false, 3, false)
