// SPDX-License-Identifier: Apache-2.0
// The handle of attention and the facts of attention and its gradients.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <tuple>

#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/workspace.hpp"
#include "ops/attention/attention.hpp"

struct ringattn_attention : ringattn::c::Object<ringattn::Attention> {
  static constexpr const char* kName = "attention";
  ringattn::c::Workspace workspace;
  std::string machine;

  std::tuple<ringattn::Inputs, ringattn::Outputs, std::span<std::byte>, ringattn::Stream> read(
      const ringattn_attention_tensors* given);
};

namespace ringattn::c {

// Op: Attention or AttentionBackward. `machine`: text that lives as long as the handle.
template <class Op>
void write_facts(const Op& instance, const std::string& machine, ringattn_attention_facts* facts) {
  constexpr std::size_t kFirstFacts = 40;
  // Kernel names are literals, so they end in a zero byte.
  write_struct("ringattn_attention_facts",
               {0, instance.q_rows(), instance.k_rows(), instance.workspace_bytes(false),
                instance.kernel().row->name.data(), instance.time_estimate().seconds, machine.c_str()},
               facts, kFirstFacts);
}

}  // namespace ringattn::c
