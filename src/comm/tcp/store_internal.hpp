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
  char job[kMaxJobName + 1];

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

// Printable, and not long: what a stranger has sent may stand in a message.
std::string printable(std::string_view text);

// What one rank may contribute to an all-gather while ranks come together (comm/transport.hpp: a few KiB).
inline constexpr std::size_t kMaxStoreMessage = std::size_t{16} << 10;
// And so what the store may send of `size` ranks.
inline std::size_t max_gathered(int size) {
  return (static_cast<std::size_t>(size) + 1) * (kMaxStoreMessage + sizeof(std::uint32_t));
}

std::unique_ptr<Store> serve_store(const StoreOptions& options, const Secret& secret);
std::unique_ptr<Store> connect_to_store(const StoreOptions& options, const Secret& secret);

}  // namespace ringattn
