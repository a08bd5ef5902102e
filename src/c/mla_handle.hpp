// SPDX-License-Identifier: Apache-2.0
// The handle of MLA, from which the handle of its gradients can be made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>

#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/tensors.hpp"
#include "c/workspace.hpp"
#include "ops/mla/mla.hpp"

struct ringattn_mla : ringattn::c::Object<ringattn::Mla> {
  static constexpr const char* kName = "mla";
  ringattn::c::Workspace workspace;

  std::tuple<ringattn::MlaInputs, ringattn::MlaOutputs, std::span<std::byte>, ringattn::Stream> read(
      const ringattn_mla_tensors* given);
};

namespace ringattn::c {

// Op: Mla or MlaBackward.
template <class Op>
void write_facts(const Op& instance, std::size_t workspace_bytes, std::int64_t form, ringattn_mla_facts* facts) {
  constexpr std::size_t kFirstFacts = 48;
  write_struct("ringattn_mla_facts",
               {0, instance.q_rows(), instance.k_rows(), workspace_bytes, instance.kernel().row->name.data(), form},
               facts, kFirstFacts);
}

}  // namespace ringattn::c
