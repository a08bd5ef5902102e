#include "sm90_turns.cuh"
template __global__ void ringattn::sm90::turns_kernel<ringattn::sm90::Turns<16, true>>(const __grid_constant__ ringattn::sm90::Params);
