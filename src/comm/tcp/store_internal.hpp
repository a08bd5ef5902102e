// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: declarations that both sides of the store share.
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

// The frame by which a rank introduces itself. Texts end with a NUL, or at the end of their array.
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

// The system's text for an errno.
std::string error_text(int number);

// Packs texts into the body of one frame.
std::string pack_texts(const std::vector<std::string>& texts);
std::optional<std::vector<std::string>> unpack_texts(std::string_view bytes, int count);

// Replaces control characters and limits the length, so that text of a stranger may be shown in a message.
std::string printable(std::string_view text);

// The largest contribution of a rank to an all-gather through the store (comm/transport.hpp: a few KiB).
inline constexpr std::size_t kMaxStoreMessage = std::size_t{16} << 10;
// The largest body that the store may send for `size` ranks.
inline std::size_t max_gathered(int size) {
  return (static_cast<std::size_t>(size) + 1) * (kMaxStoreMessage + sizeof(std::uint32_t));
}

std::unique_ptr<Store> serve_store(const StoreOptions& options, const Secret& secret);
std::unique_ptr<Store> connect_to_store(const StoreOptions& options, const Secret& secret);

}  // namespace ringattn
