// SPDX-License-Identifier: Apache-2.0
// Finds NaN and infinite elements of a file part by part, before its tensors take memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "io/safetensors_file.hpp"

namespace ringattn {

// Bytes of a tensor that are read at a time if it is not kept in memory.
inline constexpr std::int64_t kPartBytes = std::int64_t{4} << 20;

struct NonFiniteElement {
  std::int64_t element = 0;  // index in the tensor as stored
  float value = 0.0F;
};

// The first non-finite element of the whole tensor, or of its elements [begin, end). None for dtypes other than BF16,
// F16 and F32. Throws kFile.
std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor);
std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor, std::int64_t begin, std::int64_t end);

// For a job whose O is compared: throws kFile if an element is not finite, naming the tensor and the index in its own
// axes.
void check_compared(const TensorSource& tensor, std::string_view name);

}  // namespace ringattn
