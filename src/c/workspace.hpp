// SPDX-License-Identifier: Apache-2.0
// The workspace of an object's runs: the caller's, or the object's own.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <span>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "c/tensors.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn::c {

class Workspace {
 public:
  // The bytes of the caller's tensor or, for NULL, the object's own, allocated on first use. Throws kUsage if the
  // caller's are too few.
  std::span<std::byte> choose(const TensorReader& reader, const DLTensor* tensor, std::size_t needed,
                              Backend& backend) {
    if (tensor != nullptr) {
      const std::span<std::byte> callers = reader.bytes("workspace", tensor);
      if (callers.size() >= needed) return callers;
      fail(ErrorCode::kUsage, fmt::format("the workspace has {} bytes", callers.size()),
           fmt::format("a run needs {}", needed), "Pass the number that the object's facts say, or NULL.");
    }
    if (own_.bytes() < needed) own_ = backend.allocate(needed);
    return {own_.data(), own_.bytes()};
  }

 private:
  Buffer own_;
};

}  // namespace ringattn::c
