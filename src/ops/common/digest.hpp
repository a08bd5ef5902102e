// SPDX-License-Identifier: Apache-2.0
// The digest of an output: one hex string that does not depend on world size, layout and transport.
//
//   digest = hex(XXH3-128(h₀ ‖ h₁ ‖ …)),  hᵢ = XXH3-128(rows of packed tokens [128·i, 128·(i + 1)))
//
// A row's bytes are [heads, dim] (LSE: [heads] fp32), little endian and unchanged, so −0 differs from 0, and NaNs
// differ by their bits. hᵢ are in xxHash's canonical form, 16 bytes big endian, and so is the hex string. Seed 0,
// default secret.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"

namespace ringattn {

inline constexpr std::int64_t kDigestTokens = 128;

// `rows`, [total_tokens(runs), heads, dim] in host memory, are this rank's. The runs of all ranks cover [0, tokens)
// once. Collective; every rank gets the digest. If ranks share 128 tokens, they pass on the state of the hash, 576
// bytes, instead of rows. Throws kInternal if tokens are missing.
std::string digest(const Collective& collective, const TensorView& rows, std::span<const PackedRun> runs,
                   std::int64_t tokens);

// The same for an LSE, [total_tokens(runs), heads].
std::string digest(const Collective& collective, const RowView& lse, std::int64_t heads,
                   std::span<const PackedRun> runs, std::int64_t tokens);

}  // namespace ringattn
