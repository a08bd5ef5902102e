// SPDX-License-Identifier: Apache-2.0
// Names of tensors in other libraries. If a tensor has the meaning of a role (tensor_roles.hpp), its name is an alias
// of the role. If it would change the result and is not supported, its name is refused. Files, the C interface and
// Python share this table.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ringattn {

// The jobs in which a name is known: one bit each.
enum class JobKind : unsigned {
  kAttention = 1,       // q, k and v in rows
  kDecode = 2,          // q and a paged KV cache
  kMla = 4,             // q and latents in rows
  kMlaDecode = 8,       // q and latents in pages
  kSsd = 16,            // x and dt
  kSelectiveScan = 32,  // u and delta
  kConv1d = 64,         // x and conv1d_weight, without dt
};

struct KnownName {
  std::string_view name;
  unsigned jobs;          // bits of JobKind
  std::string_view role;  // the role that it is an alias of; empty: it is refused
  // The reason and suggestion of the refusal, without the full stop.
  std::string_view why = {};
  std::string_view suggestion = {};
  // If the file has this tensor, the name is not refused, because it belongs to another job of the file. Empty: none.
  std::string_view unless = {};

  bool is_for(JobKind job) const { return (jobs & static_cast<unsigned>(job)) != 0; }
};

// All names. A name has several rows if its meaning differs between jobs. These rows then have no job in common.
std::span<const KnownName> known_names();

// The table as JSON, as ringattn_tensor_names() returns it.
std::string known_names_json();

}  // namespace ringattn
