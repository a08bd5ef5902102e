// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: the calls of CUDA's driver that the runtime library has no form of. Found at run time, so the
// program starts on machines without a driver.
#pragma once

#include <cuda.h>

#include <string_view>

namespace ringattn {

struct Driver {
  CUresult (*stream_batch_mem_op)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  CUresult (*get_address_range)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  CUresult (*get_pointer_attribute)(void*, CUpointer_attribute, CUdeviceptr);
  CUresult (*get_error_string)(CUresult, const char**);
};

// Throws kUnsupported where the driver lacks one of them.
const Driver& driver();

// Throws kInternal with the driver's own text unless `result` is CUDA_SUCCESS.
void check_driver(CUresult result, std::string_view call);

}  // namespace ringattn
