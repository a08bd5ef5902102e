// SPDX-License-Identifier: Apache-2.0
// Structs and tensors of the C interface, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "c/ringattn.h"

#define EXPECT_OK(call) EXPECT_EQ(call, RINGATTN_OK) << ringattn_error_text()

namespace ringattn::testing {

using Numbers = std::vector<float>;

inline Numbers normal(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  Numbers numbers(static_cast<std::size_t>(count));
  for (float& number : numbers) number = draw(random);
  return numbers;
}

inline TensorView view(const Numbers& data, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return dense_view(static_cast<const void*>(data.data()), Dtype::kF32, rows, heads, dim);
}
inline MutableTensorView view(Numbers& data, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return dense_view(static_cast<void*>(data.data()), Dtype::kF32, rows, heads, dim);
}

inline bool same(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class Struct>
Struct sized() {
  Struct cleared{};
  cleared.size = sizeof(Struct);
  return cleared;
}

inline DLDataType c_dtype(Dtype dtype) {
  return {static_cast<std::uint8_t>(dtype == Dtype::kBf16 ? kDLBfloat : kDLFloat),
          static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
}
inline constexpr DLDataType kInt32{kDLInt, 32, 1};

// A view with its shape and strides; without strides it is dense.
class CTensor {
 public:
  CTensor(const void* data, const DLDataType& dtype, std::vector<std::int64_t> shape,
          std::vector<std::int64_t> strides = {})
      : shape_(std::move(shape)), strides_(std::move(strides)) {
    view_.data = const_cast<void*>(data);
    view_.device = {kDLCPU, 0};
    view_.ndim = static_cast<std::int32_t>(shape_.size());
    view_.dtype = dtype;
    view_.shape = shape_.data();
    view_.strides = strides_.empty() ? nullptr : strides_.data();
  }
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;

  DLTensor* get() { return &view_; }
  DLTensor* operator->() { return &view_; }

 private:
  std::vector<std::int64_t> shape_, strides_;
  DLTensor view_{};
};

// A world of one rank, on the host.
class SelfWorld {
 public:
  SelfWorld() {
    auto options = sized<ringattn_world_options>();
    options.abi = RINGATTN_ABI;
    EXPECT_EQ(ringattn_world_self(&options, &world_), RINGATTN_OK) << ringattn_error_text();
  }
  ~SelfWorld() { ringattn_world_destroy(world_); }
  SelfWorld(const SelfWorld&) = delete;
  SelfWorld& operator=(const SelfWorld&) = delete;

  ringattn_world* get() const { return world_; }

 private:
  ringattn_world* world_ = nullptr;
};

}  // namespace ringattn::testing
