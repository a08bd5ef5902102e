// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: HMAC-SHA256, from OpenSSL's libcrypto where the build has found it. The one source beside
// this header sees OpenSSL's headers.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace ringattn {

using Mac = std::array<char, 32>;

// Whether this build has a library for it.
bool has_mac();

// HMAC-SHA256 of the parts in a row (RFC 2104, FIPS 180-4). Throws kUnsupported where the build has no library.
Mac make_mac(std::string_view key, std::initializer_list<std::string_view> parts);

// In a time that doesn't depend on where they differ.
bool is_same_mac(const Mac& mac, std::string_view theirs);

// From the kernel's generator. Throws kInternal where it gives nothing.
using Nonce = std::array<char, 32>;
Nonce make_nonce();

}  // namespace ringattn
