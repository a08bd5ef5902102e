// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p/memops.hpp"

#include <cudaTypedefs.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "comm/p2p/driver.hpp"

namespace ringattn {

namespace {

PFN_cuStreamBatchMemOp_v11070 batch_function() {
  static const auto function = driver_function<PFN_cuStreamBatchMemOp_v11070>("cuStreamBatchMemOp", 11070);
  return function;
}

}  // namespace

void MemoryOperations::write(const Counter& counter, std::uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = map_.address(counter);
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  operations_.push_back(operation);
}

void MemoryOperations::wait(const Counter& counter, std::uint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = map_.address(counter);
  operation.waitValue.value = value;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  operations_.push_back(operation);
}

void MemoryOperations::enqueue(cudaStream_t stream) {
  constexpr std::size_t kMaxBatch = 128;  // the driver accepts 256 per call
  for (std::size_t at = 0; at < operations_.size(); at += kMaxBatch) {
    const auto count = static_cast<unsigned>(std::min(kMaxBatch, operations_.size() - at));
    const CUresult result = batch_function()(stream, count, operations_.data() + at, 0);
    if (result == CUDA_SUCCESS) continue;
    fail(result == CUDA_ERROR_NOT_SUPPORTED ? ErrorCode::kUnsupported : ErrorCode::kInternal,
         "cuStreamBatchMemOp failed", fmt::format("the driver's error {}", static_cast<int>(result)),
         {"Use ", setting("transport", "nccl"), "."});
  }
  operations_.clear();
}

void check_memory_operations() { batch_function(); }

}  // namespace ringattn
