// SPDX-License-Identifier: Apache-2.0
// What jobs of gradients have in common: their input, the op that prepare() makes, the result that run() fetches, and
// the printing of digests.
//
//   Input      an input with source(), fingerprints() and unread()
//   Backward   the op's class, with backend() and kernel()
//   Result     a rank's gradients, for which there is digest_gradients(Input, Result, Collective)
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

template <class Input, class Backward, class Result>
class GradientOpJob : public OpJob {
 public:
  explicit GradientOpJob(const OpRequest& request) : input_(request) {}

  std::string source() const final { return input_.source(); }
  std::vector<FileFingerprint> fingerprints() const final { return input_.fingerprints(); }
  UnreadTensors unread() const final { return input_.unread(); }

  Backend& backend() final { return backward_->backend(); }
  const KernelEntry& kernel() final { return *backward_->kernel().row; }
  const std::string& kernel_reason() final { return backward_->kernel().reason; }

  void release() final {
    result_.reset();
    backward_.reset();
  }

  std::vector<ResultDigest> digests(const Collective& collective) final {
    return digest_gradients(input_, *result_, collective);
  }
  // The first digest is in the table; these are the others.
  std::vector<std::string> result_lines(const std::vector<ResultDigest>& digests) const final {
    std::vector<std::string> lines;
    for (std::size_t i = 1; i < digests.size(); ++i) {
      lines.push_back("digest of " + digests[i].title + ": " + digests[i].hex);
    }
    return lines;
  }

 protected:
  // The metadata of an output file: kernel, digests, op, and additions of the op and the caller. Collective.
  FileMetadata file_metadata(const Collective& collective, const FileMetadata& of_op, const FileMetadata& of_caller) {
    FileMetadata all = output_metadata(kernel(), identity_of(kernel(), backend()));
    for (const ResultDigest& digest : digests(collective)) all.emplace_back("digest." + digest.key, digest.hex);
    all.emplace_back("op", std::string(op()));
    all.insert(all.end(), of_op.begin(), of_op.end());
    all.insert(all.end(), of_caller.begin(), of_caller.end());
    return all;
  }
  // `difference`: the first difference from an earlier result; empty if there is none.
  static Check earlier_check(const std::string& difference) {
    Check check;
    check.passes = difference.empty();
    if (!difference.empty()) check.lines.push_back("first difference: " + difference);
    return check;
  }

  Input input_;
  Transport* world_ = nullptr;  // of prepare()
  std::optional<Backward> backward_;
  std::optional<Result> result_;
};

}  // namespace ringattn
