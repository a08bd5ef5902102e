// SPDX-License-Identifier: Apache-2.0
// An immutable value with shared ownership, or nothing. Comparison compares the values, not the pointers.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace ringattn {

template <class T>
class SharedValue {
 public:
  SharedValue(std::nullptr_t = nullptr) {}
  SharedValue(std::shared_ptr<const T> value) : value_(std::move(value)) {}
  operator std::shared_ptr<const T>() const { return value_; }

  const T* get() const { return value_.get(); }
  const T& operator*() const { return *value_; }
  const T* operator->() const { return value_.get(); }

  bool operator==(std::nullptr_t) const { return value_ == nullptr; }
  bool operator==(const SharedValue& other) const {
    return value_ == other.value_ || (value_ != nullptr && other.value_ != nullptr && *value_ == *other.value_);
  }

 private:
  std::shared_ptr<const T> value_;
};

}  // namespace ringattn
