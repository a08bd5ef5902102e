// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: what the two sides of the store share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/tcp/store.hpp"
#include "comm/tcp/wire.hpp"

namespace ringattn {

// How a rank introduces itself. Texts end with a zero, or with their array.
struct Hello {
  std::int32_t rank;
  std::int32_t size;
  char host[120];
  char job[kLongestJob + 1];

  std::string host_text() const;
  std::string job_text() const;
};

Hello hello_of(const StoreOptions& options);
std::string job_name(const std::string& job);

// What the system says of an errno.
std::string error_text(int number);

// Texts as the body of one frame.
std::string pack_texts(const std::vector<std::string>& texts);
std::optional<std::vector<std::string>> unpack_texts(std::string_view bytes, int count);

// What one rank may contribute to an all-gather while ranks come together.
inline constexpr std::size_t kMostStorePart = std::size_t{1} << 20;

std::unique_ptr<Store> serve_store(const StoreOptions& options);
std::unique_ptr<Store> visit_store(const StoreOptions& options);

}  // namespace ringattn
