// SPDX-License-Identifier: Apache-2.0
// Plans of ops around the ring, for `ringattn plan`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/options.hpp"
#include "ops/attention/plan_summary.hpp"
#include "ops/common/op_plan.hpp"

namespace ringattn {

struct WorldPlanSummary;

// The kernels of a ring job, without ranks and devices.
class PlannedRing {
 public:
  virtual ~PlannedRing() = default;

  virtual const KernelEntry& kernel() const = 0;
  virtual const std::string& kernel_reason() const = 0;
  virtual const Backend& backend() const = 0;
  // The machine model of the kernel, where a rank computes `tokens` queries: job_machine().
  virtual MachineModel machine(const MachineModel& given, std::int64_t tokens) const = 0;
  virtual int key_tile() const = 0;
  virtual std::int64_t q_tokens() const = 0;
  // In a world of `world` ranks. Refers to the object's kernels, until the next call.
  virtual RingJob ring(int world) = 0;

  // Additions to what all plans show: lines about the job, the text of one length among several, lines about a world,
  // and members of its JSON object.
  virtual std::vector<std::string> lines() const { return {}; }
  virtual std::string length_text() const { return {}; }
  virtual std::vector<std::string> world_lines(const WorldPlanSummary&) const { return {}; }
  virtual void write(JsonWriter&, const WorldPlanSummary&) const {}
};

// `make`: the returned object may refer to the options, which outlive it.
using MakePlannedRing = std::function<std::unique_ptr<PlannedRing>(const Options& options)>;
std::unique_ptr<OpPlan> plan_ring(const PlanRequest& request, const MakePlannedRing& make);

}  // namespace ringattn
