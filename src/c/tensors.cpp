// SPDX-License-Identifier: Apache-2.0
#include "c/tensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "ops/common/shard_checks.hpp"

namespace ringattn::c {

namespace {

[[noreturn]] void refuse(const std::string& problem, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, problem, why, suggestion);
}

std::optional<Dtype> known_dtype(const DLDataType& type) {
  if (type.lanes != 1) return std::nullopt;
  if (type.code == kDLFloat && type.bits == 32) return Dtype::kF32;
  if (type.code == kDLFloat && type.bits == 16) return Dtype::kF16;
  if (type.code == kDLBfloat && type.bits == 16) return Dtype::kBf16;
  return std::nullopt;
}

std::string type_name(const DLDataType& type) {
  if (type.lanes != 1) return fmt::format("vectors of {} {}", type.lanes, type_name({type.code, type.bits, 1}));
  if (const auto dtype = known_dtype(type)) return std::string(dtype_name(*dtype));
  if (type.code == kDLInt) return fmt::format("int{}", type.bits);
  if (type.code == kDLUInt) return fmt::format("uint{}", type.bits);
  if (type.code == kDLFloat) return fmt::format("fp{}", type.bits);
  return fmt::format("DLPack's type {} of {} bits", type.code, type.bits);
}

std::string shape_text(const DLTensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, tensor.shape + tensor.ndim, ", "));
}

// The stride of an axis of one element is ignored, and NumPy may report 0. Returns the stride of a dense tensor.
std::int64_t stride(const DLTensor& tensor, int axis) {
  if (tensor.strides != nullptr && tensor.shape[axis] > 1) return tensor.strides[axis];
  std::int64_t dense = 1;
  for (int i = axis + 1; i < tensor.ndim; ++i) dense *= tensor.shape[i];
  return dense;
}

// Strides of a tensor without elements are ignored.
bool is_empty(const DLTensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

// The innermost axis of one element has any stride.
bool is_contiguous(const DLTensor& tensor, int axis) {
  return is_empty(tensor) || tensor.shape[axis] <= 1 || stride(tensor, axis) == 1;
}

bool is_dense(const DLTensor& tensor) {
  if (tensor.strides == nullptr || is_empty(tensor)) return true;
  std::int64_t dense = 1;
  for (int axis = tensor.ndim; axis-- > 0; dense *= tensor.shape[axis]) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != dense) return false;
  }
  return true;
}

void check_contiguous(const char* name, const DLTensor& tensor, int axis) {
  if (is_contiguous(tensor, axis)) return;
  refuse(fmt::format("axis {} of {} has a stride of {}", axis, name, stride(tensor, axis)),
         "elements of a head are contiguous", "Make the tensor contiguous, or transpose only other axes.");
}

void check_dense(const char* name, const DLTensor& tensor) {
  if (is_dense(tensor)) return;
  refuse(fmt::format("{} is not dense", name), "it is read as contiguous memory", "Make it contiguous.");
}

void check_type(const char* name, const DLTensor& tensor, int code, int bits, const char* wanted) {
  if (tensor.dtype.code == code && tensor.dtype.bits == bits && tensor.dtype.lanes == 1) return;
  refuse(fmt::format("{} holds {}", name, type_name(tensor.dtype)), fmt::format("it should hold {}", wanted),
         "Convert it.");
}

void check_axes(const char* name, const DLTensor& tensor, int axes) {
  if (axes >= 0 && tensor.ndim != axes) {
    refuse(fmt::format("{} has {} axes", name, tensor.ndim), fmt::format("it should have {}", axes),
           "Reshape it; batch and sequence are one axis, of rows.");
  }
  if (tensor.ndim > 0 && tensor.shape == nullptr) {
    refuse(fmt::format("{} has no shape", name), "DLTensor::shape is NULL", "Set it.");
  }
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    if (tensor.shape[axis] < 0) {
      refuse(fmt::format("{} has the shape {}", name, shape_text(tensor)), "no axis has a negative length",
             "Check how its shape is made.");
    }
  }
}

std::int64_t element_bytes(const DLTensor& tensor) { return std::int64_t{tensor.dtype.bits} * tensor.dtype.lanes / 8; }

std::int64_t elements(const DLTensor& tensor) {
  std::int64_t count = 1;
  for (int axis = 0; axis < tensor.ndim; ++axis) count *= tensor.shape[axis];
  return count;
}

std::byte* first_element(const char* name, const DLTensor& tensor) {
  if (tensor.data == nullptr) {
    if (elements(tensor) == 0) return nullptr;
    refuse(fmt::format("{} of shape {} has no data", name, shape_text(tensor)), "DLTensor::data is NULL",
           "Pass NULL for an absent tensor.");
  }
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

Dtype dtype_of(const char* name, const DLTensor& tensor) {
  if (const auto dtype = known_dtype(tensor.dtype)) return *dtype;
  refuse(fmt::format("{} holds {}", name, type_name(tensor.dtype)), "elements are fp32, bf16 or fp16",
         "Convert it to one of these.");
}

}  // namespace

Dtype read_dtype(const DLDataType& type) {
  if (const auto dtype = known_dtype(type)) return *dtype;
  refuse(fmt::format("dtype is {}", type_name(type)), "elements are fp32, bf16 or fp16", "Choose one of these.");
}

std::byte* TensorReader::data(const char* name, const DLTensor& tensor, int axes) const {
  check_axes(name, tensor, axes);
  if (memory_ == MemoryKind::kHost) {
    const auto type = static_cast<int>(tensor.device.device_type);
    if (type != kDLCPU && type != kDLCUDAHost) {
      refuse(fmt::format("{} is on device type {}", name, type), "the world's tensors are in host memory",
             "Copy it to the host, or use a world of the device.");
    }
  } else if (tensor.device.device_type != kDLCUDA || tensor.device.device_id != device_) {
    refuse(fmt::format("{} is on device {}:{}", name, static_cast<int>(tensor.device.device_type),
                       tensor.device.device_id),
           fmt::format("the world's tensors are on GPU {} ({}:{})", device_, static_cast<int>(kDLCUDA), device_),
           "Copy it there, or use a world of its device.");
  }
  std::byte* const first = first_element(name, tensor);
  note(name, tensor, first);
  return first;
}

// Upper limit of byte offsets. Tensors that exceed it are refused by their op or are invalid.
constexpr std::int64_t kFarthest = std::int64_t{1} << 60;

void TensorReader::note(const char* name, const DLTensor& tensor, const std::byte* first) const {
  if (is_empty(tensor)) return;
  Read& read = read_.at(read_count_++);
  read.tensor = &tensor;
  read.first = first;
  read.name[std::string_view(name).copy(read.name.data(), read.name.size() - 1)] = '\0';
  read.begin = reinterpret_cast<std::intptr_t>(first);
  read.end = read.begin + element_bytes(tensor);
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    std::int64_t way = 0;
    if (__builtin_mul_overflow((tensor.shape[axis] - 1) * element_bytes(tensor), stride(tensor, axis), &way) ||
        std::abs(way / 2) > kFarthest) {
      read.tensor = nullptr;
      return;
    }
    (way < 0 ? read.begin : read.end) += way;
  }
}

MemoryShape TensorReader::Read::shape() const {
  std::array<MemoryAxis, MemoryShape::kMaxAxes> axes;
  // A tensor with more axes was read by bytes() and is dense, so only its byte range counts.
  const bool dense = tensor->ndim > static_cast<int>(axes.size());
  if (dense) return {first, 1, std::array{MemoryAxis{end - begin, 1}}};
  for (int axis = 0; axis < tensor->ndim; ++axis) {
    axes[static_cast<std::size_t>(axis)] = {tensor->shape[axis], stride(*tensor, axis) * element_bytes(*tensor)};
  }
  return {first, element_bytes(*tensor), std::span(axes.data(), static_cast<std::size_t>(tensor->ndim))};
}

void TensorReader::check_written(std::string_view name, std::string_view in_place) const {
  const std::span<const Read> all(read_.data(), read_count_);
  name = name.substr(0, Read{}.name.size() - 1);
  const auto of_name = [&](const Read& read) { return read.text() == name; };
  const auto written = std::ranges::find_if(all, of_name);
  if (written == all.end() || written->tensor == nullptr) return;
  const MemoryShape shape = written->shape();
  for (const Read& other : all) {
    if (&other == &*written || other.tensor == nullptr || other.text() == in_place || other.begin >= written->end ||
        written->begin >= other.end) {
      continue;
    }
    if (!are_apart(shape, other.shape())) refuse_overlap(name, other.text());
  }
  if (!shape.overlaps_itself()) return;
  std::vector<std::int64_t> strides;
  for (int axis = 0; axis + 1 < written->tensor->ndim; ++axis) strides.push_back(stride(*written->tensor, axis));
  refuse(fmt::format("{} has strides {}", name, fmt::join(strides, " and ")), "its rows would overlap",
         "Give each row memory of its own.");
}

MutableTensorView TensorReader::rows(const char* name, const DLTensor* tensor) const {
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, 3);
  check_contiguous(name, *tensor, 2);
  const std::int64_t* shape = tensor->shape;
  return {at, dtype_of(name, *tensor), shape[0], shape[1], shape[2], stride(*tensor, 0), stride(*tensor, 1)};
}

RowView TensorReader::row_values(const char* name, const DLTensor* tensor, std::int64_t rows,
                                 std::int64_t heads) const {
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, 2);
  check_type(name, *tensor, kDLFloat, 32, "fp32");
  if (tensor->shape[0] != rows || tensor->shape[1] != heads) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)), fmt::format("it should be [{}, {}]", rows, heads),
           "Transpose it if its axes are exchanged.");
  }
  return {reinterpret_cast<float*>(at), stride(*tensor, 0), stride(*tensor, 1)};
}

MutableCacheView TensorReader::cache(const char* name, const DLTensor* tensor) const {
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, 4);
  check_contiguous(name, *tensor, 3);
  const std::int64_t* shape = tensor->shape;
  return {at,       dtype_of(name, *tensor), shape[0],           shape[1],          shape[2],
          shape[3], stride(*tensor, 0),      stride(*tensor, 1), stride(*tensor, 2)};
}

GemmWeights TensorReader::matrices(const char* name, const DLTensor* tensor) const {
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, 3);
  if (!is_contiguous(*tensor, 1)) check_contiguous(name, *tensor, 2);
  const std::int64_t* shape = tensor->shape;
  return {at,       dtype_of(name, *tensor), shape[0],           shape[1],
          shape[2], stride(*tensor, 0),      stride(*tensor, 1), stride(*tensor, 2)};
}

float* TensorReader::numbers(const char* name, const DLTensor* tensor, std::span<const std::int64_t> shape) const {
  if (tensor == nullptr) return nullptr;
  std::byte* at = data(name, *tensor, static_cast<int>(shape.size()));
  check_type(name, *tensor, kDLFloat, 32, "fp32");
  if (!std::equal(shape.begin(), shape.end(), tensor->shape)) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)), fmt::format("it should be [{}]", fmt::join(shape, ", ")),
           "Check it against the job.");
  }
  check_dense(name, *tensor);
  return reinterpret_cast<float*>(at);
}

std::int32_t* TensorReader::integers(const char* name, const DLTensor* tensor, std::int64_t count) const {
  if (tensor == nullptr) return nullptr;
  std::byte* at = data(name, *tensor, 1);
  check_type(name, *tensor, kDLInt, 32, "int32");
  if (tensor->shape[0] != count) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)), fmt::format("it should be [{}]", count),
           "It has one entry per sequence.");
  }
  check_dense(name, *tensor);
  return reinterpret_cast<std::int32_t*>(at);
}

RopePositions TensorReader::positions(const char* name, const DLTensor* tensor, std::int64_t rows, int axes) const {
  if (tensor == nullptr) return {};
  const std::byte* const at = data(name, *tensor, tensor->ndim == 2 ? 2 : 1);
  const bool is_int64 = tensor->dtype.bits == 64;
  check_type(name, *tensor, kDLInt, is_int64 ? 64 : 32, "int32 or int64");
  const bool several = tensor->ndim == 2;
  if (tensor->shape[several ? 1 : 0] != rows || (several ? tensor->shape[0] : 1) != axes) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)),
           axes == 1 ? fmt::format("it should be [{}]", rows) : fmt::format("it should be [{}, {}]", axes, rows),
           "It has a position for each row, on each axis of mrope_section.");
  }
  check_contiguous(name, *tensor, several ? 1 : 0);
  return {at, is_int64, several ? stride(*tensor, 0) : 0};
}

std::int32_t* TensorReader::slots(const char* name, const DLTensor* tensor, std::int64_t count,
                                  std::int64_t slots) const {
  std::int32_t* const numbers = integers(name, tensor, count);
  if (numbers == nullptr || memory_ != MemoryKind::kHost) return numbers;
  std::vector<std::int64_t> taken(static_cast<std::size_t>(slots), -1);  // index of the row that uses the slot, or -1
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t slot = numbers[row];
    if (slot < 0) continue;
    if (slot >= slots) {
      refuse(fmt::format("{}[{}] is {}", name, row, slot), fmt::format("there are {} slots", slots),
             "Count them from 0; a number below 0 marks a padding row.");
    }
    std::int64_t& other = taken[static_cast<std::size_t>(slot)];
    if (other >= 0) {
      refuse(fmt::format("{}[{}] is {}, as {}[{}] is", name, row, slot, name, other), "two rows can't update one state",
             "Give each row a slot of its own.");
    }
    other = row;
  }
  return numbers;
}

BlockTable TensorReader::table(const char* name, const DLTensor* tensor, std::int64_t sequences,
                               std::int64_t& pages) const {
  pages = 0;
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, 2);
  check_type(name, *tensor, kDLInt, 32, "int32");
  check_contiguous(name, *tensor, 1);
  if (tensor->shape[0] != sequences) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)), fmt::format("it should be [{}, pages]", sequences),
           "It has a row for each sequence.");
  }
  pages = tensor->shape[1];
  return {reinterpret_cast<const std::int32_t*>(at), stride(*tensor, 0)};
}

Part TensorReader::part(const char* name, const DLTensor* tensor, std::span<const DLDataType> types,
                        std::span<const std::int64_t> shape, bool dense) const {
  if (tensor == nullptr) refuse(fmt::format("{} is NULL", name), "the format has it", "Pass all parts of the format.");
  Part part;
  part.data = data(name, *tensor, static_cast<int>(shape.size()));
  const auto is_type = [&](const DLDataType& type) {
    return type.code == tensor->dtype.code && type.bits == tensor->dtype.bits && type.lanes == tensor->dtype.lanes;
  };
  if (std::none_of(types.begin(), types.end(), is_type)) {
    refuse(fmt::format("{} holds {}", name, type_name(tensor->dtype)),
           fmt::format("it should hold {}", type_name(types.front())), "Check it against the format.");
  }
  std::string wanted;
  bool fits = true;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    wanted += fmt::format("{}{}", axis == 0 ? "" : ", ", shape[axis] < 0 ? "…" : std::to_string(shape[axis]));
    fits = fits && (shape[axis] < 0 || shape[axis] == tensor->shape[axis]);
    part.lengths[axis] = tensor->shape[axis];
    part.strides[axis] = stride(*tensor, static_cast<int>(axis)) * tensor->dtype.bits / 8;
  }
  if (!fits) {
    refuse(fmt::format("{} is {}", name, shape_text(*tensor)), fmt::format("it should be [{}]", wanted),
           "Check it against the format.");
  }
  check_contiguous(name, *tensor, tensor->ndim - 1);
  if (dense) check_dense(name, *tensor);
  return part;
}

std::span<std::byte> TensorReader::bytes(const char* name, const DLTensor* tensor) const {
  if (tensor == nullptr) return {};
  std::byte* at = data(name, *tensor, -1);
  check_dense(name, *tensor);
  return {at, static_cast<std::size_t>(elements(*tensor) * tensor->dtype.bits * tensor->dtype.lanes / 8)};
}

}  // namespace ringattn::c
