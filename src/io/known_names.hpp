// SPDX-License-Identifier: Apache-2.0
// Names that other libraries give tensors. Where the meaning is that of a role (tensor_roles.hpp), the name is an alias
// of it; where the tensor would change the result and is not computed with, the name is refused. One table for files,
// the C interface and Python.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ringattn {

// The jobs that a name is known to: one bit each.
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
  std::string_view role;  // what it is an alias of; empty: it is refused
  // The reason and suggestion of the refusal, without the full stop.
  std::string_view why = {};
  std::string_view suggestion = {};
  // A tensor beside which the name is not refused, because it belongs to another job of the file; empty: none.
  std::string_view unless = {};

  bool is_for(JobKind job) const { return (jobs & static_cast<unsigned>(job)) != 0; }
};

// All of them. A name stands in several rows where its meaning differs between jobs, which then have no job in common.
std::span<const KnownName> known_names();

// The table as JSON, as ringattn_tensor_names() says it.
std::string known_names_json();

}  // namespace ringattn
