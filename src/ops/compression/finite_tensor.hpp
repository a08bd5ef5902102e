// SPDX-License-Identifier: Apache-2.0
// Numbers of a file that are NaN or infinite, found before its tensors take memory: they are read part by part.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "io/safetensors_file.hpp"

namespace ringattn {

// Bytes of a tensor that are read at a time where it need not be held.
inline constexpr std::int64_t kPartBytes = std::int64_t{4} << 20;

struct NonFiniteElement {
  std::int64_t element = 0;  // as the tensor lies in the file
  float value = 0.0F;
};

// The first of the whole tensor, or of its elements [begin, end); of one that holds neither BF16, F16 nor F32, none.
// Throws kFile.
std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor);
std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor, std::int64_t begin, std::int64_t end);

// Refuses (kFile) a tensor of a job whose O is compared, by the name that it has here and the place in its own axes.
void check_compared(const TensorSource& tensor, std::string_view name);

}  // namespace ringattn
