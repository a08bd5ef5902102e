// SPDX-License-Identifier: Apache-2.0
// The checks of gradients: against the fp64 oracle, against an earlier result, and in other worlds, layouts and blocks.
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "attention/ring/reshard.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention_backward/backward_accuracy.hpp"
#include "ops/attention_backward/backward_op_job.hpp"

namespace ringattn {

namespace {

std::string location(const RowSample& sample) { return fmt::format("token {}, head {}", sample.token, sample.head); }

void add_lines(std::string_view name, const AttentionGradientAccuracy& accuracy, std::vector<std::string>& lines) {
  if (accuracy.compared > 0) {
    lines.push_back(fmt::format("{}: greatest error {:.3g}, allowed {:.3g} (same precision {:.3g}), at {}", name,
                                accuracy.error, accuracy.allowed(), accuracy.same_precision_error,
                                location(accuracy.worst)));
  } else {
    lines.push_back(fmt::format("{}: no value is finite both here and in fp64, so none is compared", name));
  }
  if (accuracy.misplaced > 0) {
    lines.push_back(fmt::format("{}: {} values are NaN or infinite where fp64 has another value, the first at {}", name,
                                accuracy.misplaced, location(accuracy.first_misplaced)));
  }
}

void write_accuracy(JsonWriter& json, const BackwardAccuracy& all) {
  json.begin_object().member("rows", all.q_rows + all.k_rows);
  const auto write = [&](std::string_view tensor, const AttentionGradientAccuracy& accuracy) {
    json.key(tensor);
    if (accuracy.compared == 0) {
      json.null();
      return;
    }
    json.begin_object().member("greatest_error", accuracy.error).member("allowed", accuracy.allowed());
    json.member("token", accuracy.worst.token).member("head", accuracy.worst.head).end_object();
  };
  write("dq", all.dq);
  write("dk", all.dk);
  write("dv", all.dv);
  json.key("dsinks");
  if (all.has_sinks) {
    json.begin_object().member("greatest_error", all.dsinks.error).member("allowed", all.dsinks.allowed);
    json.member("head", all.dsinks.head).end_object();
  } else {
    json.null();
  }
  const std::int64_t misplaced =
      all.dq.misplaced + all.dk.misplaced + all.dv.misplaced + (all.dsinks.misplaced ? 1 : 0);
  json.member("misplaced", misplaced).end_object();
}

// The token runs of all ranks in rank 0's layout.
Layout layout_of_first(const Collective& collective, const std::optional<Layout>& mine,
                       const std::vector<std::int64_t>& lengths) {
  std::string text;
  if (collective.rank() == 0) {
    for (int rank = 0; rank < mine->world(); ++rank) {
      const std::span<const TokenRun> runs = mine->runs(rank);
      const std::int64_t count = std::ssize(runs);
      text.append(reinterpret_cast<const char*>(&count), sizeof count);
      text.append(reinterpret_cast<const char*>(runs.data()), runs.size_bytes());
    }
  }
  const std::string first = collective.gather(text).front();
  std::vector<std::vector<TokenRun>> runs;
  for (std::size_t at = 0; at < first.size();) {
    const auto count = gathered_value<std::int64_t>(first, at);
    at += sizeof count;
    std::vector<TokenRun>& of_rank = runs.emplace_back();
    for (std::int64_t i = 0; i < count; ++i, at += sizeof(TokenRun)) {
      of_rank.push_back(gathered_value<TokenRun>(first, at));
    }
  }
  runs.resize(static_cast<std::size_t>(collective.size()));  // ranks outside of the shape have no tokens
  return {lengths, std::move(runs)};
}

// Gradients of a shape, moved to the even layout of the whole world.
struct EvenGradients {
  std::vector<Buffer> rows;  // as gradient_tensors()
  std::vector<float> dsinks;
  std::int64_t blocks = 0;
};

// Runs shapes, each in its own world of ranks 0 … size − 1. A failure inside of it is raised in the whole world.
class GradientShapes {
 public:
  GradientShapes(const BackwardInput& input, const Options& options, Transport& world)
      : input_(input),
        options_(options),
        world_(world),
        collective_(world, Timeouts(options.timeout_seconds)),
        tensors_(gradient_tensors(input.job().forward.spec)) {}

  EvenGradients run(const Shape& shape) const;
  // A description of the first difference; empty if there is none.
  std::string compare(const EvenGradients& left, const EvenGradients& right) const;

 private:
  std::vector<std::int64_t> lengths(GradientAxis axis) const {
    const Batch& batch = input_.job().forward.batch;
    return axis == GradientAxis::kQueries ? batch.q_lengths() : batch.k_lengths();
  }
  std::int64_t token_bytes(const GradientTensor& tensor) const {
    return tensor.heads * tensor.dim * static_cast<std::int64_t>(size_of(input_.job().gradients));
  }

  const BackwardInput& input_;
  const Options& options_;
  Transport& world_;
  Collective collective_;
  std::vector<GradientTensor> tensors_;
};

EvenGradients GradientShapes::run(const Shape& shape) const {
  const std::unique_ptr<Transport> part = world_.split_world(shape.ranks, collective_.timeouts().for_peer());
  Options options = options_;
  options.layout = shape.layout;
  options.block_tokens = shape.block;
  BackwardRankResult result;
  EvenGradients even;
  std::map<GradientAxis, std::optional<Layout>> layouts{{GradientAxis::kQueries, {}}, {GradientAxis::kKeys, {}}};
  std::optional<Error> agreed;  // agreed by the shape's ranks; the others don't know it yet
  if (part) {
    try {
      AttentionBackward backward(input_.job(), *part, options);
      even.blocks = std::ssize(backward.plan().blocks);
      layouts[GradientAxis::kQueries] = backward.layout().queries;
      layouts[GradientAxis::kKeys] = backward.layout().keys;
      LoadedBackward loaded(input_, backward, Collective(*part, collective_.timeouts()), *part);
      result = loaded.fetch(loaded.run());
    } catch (const AgreedError& error) {
      agreed = error;
    }
  }
  const double estimated = backward_flops(input_.job()) / (shape.ranks * options_.machine.flops_per_second);
  agree(world_, agreed ? &*agreed : nullptr, collective_.timeouts().for_work(estimated));
  for (const GradientTensor& tensor : tensors_) {
    const Layout from = layout_of_first(collective_, layouts[tensor.axis], lengths(tensor.axis));
    const Layout to = even_layout(lengths(tensor.axis), world_.size());
    Buffer& rows = even.rows.emplace_back();
    collective_.run_collectively(
        [&] { rows = allocate_host(static_cast<std::size_t>(to.tokens(world_.rank()) * token_bytes(tensor))); });
    reshard(world_.host(), from, to, (result.*tensor.rows).data(), rows.data(), token_bytes(tensor),
            collective_.timeouts().for_peer());
  }
  even.dsinks = std::move(result.dsinks);
  return even;
}

std::string GradientShapes::compare(const EvenGradients& left, const EvenGradients& right) const {
  const BackwardJob& job = input_.job();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const GradientTensor& tensor = tensors_[i];
    const Layout even = even_layout(lengths(tensor.axis), world_.size());
    const std::vector<PackedRun> runs = packed_runs(even.runs(world_.rank()), even.cu());
    const auto view = [&](const EvenGradients& gradients) {
      return dense_view(static_cast<const void*>(gradients.rows[i].data()), job.gradients, total_tokens(runs),
                        tensor.heads, tensor.dim);
    };
    const auto difference = earliest(collective_, first_difference(false, view(left), view(right), runs));
    if (difference) return describe_difference(tensor, *difference, job.forward.batch);
  }
  // Ranks outside of the shape have no sum.
  std::string mine;
  if (left.dsinks.size() == right.dsinks.size()) mine = describe_sink_difference(left.dsinks, right.dsinks);
  for (const std::string& theirs : collective_.gather(mine)) {
    if (!theirs.empty()) return theirs;
  }
  return {};
}

}  // namespace

Check BackwardOpJob::check_oracle(const Collective& collective, std::int64_t count) {
  const BackwardAccuracy all =
      check_gradients(collective, input_, backward_->plan().kernel.key_tile, count, *result_, threads());
  Check check;
  check.rows = all.q_rows + all.k_rows;
  check.write = [all](JsonWriter& json) { write_accuracy(json, all); };
  check.context.push_back(fmt::format("{} of dq and {} of dk and dv against the fp64 oracle",
                                      counted(static_cast<std::uint64_t>(all.q_rows), "row"), all.k_rows));
  if (check.rows == 0) {
    check.lines.emplace_back("the job has no rows: nothing is compared");
    return check;
  }
  check.passes = all.passes();
  add_lines("dq", all.dq, check.lines);
  add_lines("dk", all.dk, check.lines);
  add_lines("dv", all.dv, check.lines);
  if (all.has_sinks) {
    check.lines.push_back(fmt::format("dsinks: error {:.3g}, allowed {:.3g}, at head {}", all.dsinks.error,
                                      all.dsinks.allowed, all.dsinks.head));
    if (all.dsinks.misplaced) {
      check.lines.emplace_back("dsinks: a value is NaN or infinite where fp64 has another value");
    }
  }
  return check;
}

Check BackwardOpJob::check_earlier(const Collective& collective) {
  Check check = earlier_check(earlier_->compare(collective, input_, *result_));
  check.context = earlier_->other_job();
  return check;
}

VariantTable BackwardOpJob::list_variants(const VariantRequest& request, const Options& options) {
  shapes_ =
      shapes_of({request.ranks, request.layout, request.block}, input_.forward(), backward_->plan().kernel.key_tile);
  shape_options_ = options;
  shape_options_.machine = backward_->options().machine;  // timeouts of the variants are computed from it
  release();
  return {{{"ranks", "", ""},
           {"layout", "", ""},
           {"stripe", "(tokens)", ""},
           {"block", "(tokens)", ""},
           {"blocks", "", ""}},
          std::ssize(shapes_),
          {}};
}

void BackwardOpJob::run_variants(Transport& world, const VariantDone& done) {
  const GradientShapes runner(input_, shape_options_, world);
  std::optional<EvenGradients> first;
  for (const Shape& shape : shapes_) {
    EvenGradients even = runner.run(shape);
    const std::vector<std::string> cells = shape_cells(shape, even.blocks);
    const std::string difference = first ? runner.compare(*first, even) : std::string();
    if (!first) first = std::move(even);
    done(cells, difference);
  }
}

}  // namespace ringattn
