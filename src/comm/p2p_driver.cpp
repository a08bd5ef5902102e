// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p_driver.hpp"

#include <fmt/format.h>

#include "base/cuda.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

template <typename Call>
void find(Call& call, const char* name) {
  constexpr unsigned kVersion = 12000;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found);
  if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    fail(ErrorCode::kUnsupported, fmt::format("CUDA's driver has no {}", name), "it is too old", "Update the driver.");
  }
  call = reinterpret_cast<Call>(address);
}

Driver find_driver() {
  Driver found{};
  find(found.stream_batch_mem_op, "cuStreamBatchMemOp");
  find(found.get_address_range, "cuMemGetAddressRange");
  find(found.get_pointer_attribute, "cuPointerGetAttribute");
  find(found.get_error_string, "cuGetErrorString");
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = find_driver();
  return found;
}

void check_driver(CUresult result, std::string_view call) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().get_error_string(result, &text);
  fail(ErrorCode::kInternal, fmt::format("{} failed", call), text == nullptr ? "unknown error" : text);
}

}  // namespace ringattn
