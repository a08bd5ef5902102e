// SPDX-License-Identifier: Apache-2.0
// The checks of attention, decode and MLA.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/attention/attention_op_job.hpp"
#include "ops/attention_jobs/kept_mass.hpp"
#include "ops/common/difference.hpp"
#include "ops/decode/replay.hpp"

namespace ringattn {

namespace {

// Page sizes of a replay: without pages, and with pages whose ends cut tiles.
constexpr std::int64_t kReplayedCaches[] = {0, 16};

std::string location(const RowSample& sample) { return fmt::format("token {}, head {}", sample.token, sample.head); }

// `whose`: "" or "theirs: ". `has_lse`: whether LSEs were compared.
void add_lines(const Accuracy& all, std::string_view whose, bool has_lse, std::vector<std::string>& lines) {
  if (all.compared == 0) {
    lines.push_back(fmt::format("{}out: no value is finite both here and in fp64, so none is compared", whose));
  } else {
    lines.push_back(
        fmt::format("{}out: greatest error {:.3g} at {}; allowed {:.3g} (the same-precision reference has {:.3g})",
                    whose, all.error, location(all.worst), all.allowed(), all.same_precision_error));
  }
  if (has_lse && all.lse_allowed > 0.0) {
    lines.push_back(fmt::format("{}lse: greatest error {:.3g} of what is allowed, at {}", whose, all.lse_error,
                                location(all.worst_lse)));
  } else if (has_lse) {
    lines.push_back(fmt::format("{}lse: no value is finite both here and in fp64", whose));
  }
  if (all.misplaced > 0) {
    lines.push_back(fmt::format("{}{} values are NaN or infinite where fp64 has another value, the first at {}", whose,
                                all.misplaced, location(all.first_misplaced)));
  }
}

void write_accuracy(JsonWriter& json, const Accuracy& accuracy) {
  const auto write = [&](std::string_view tensor, bool compared, double error, double allowed, const RowSample& row) {
    json.key(tensor);
    if (!compared) {
      json.null();
      return;
    }
    json.begin_object().member("greatest_error", error).member("allowed", allowed).member("token", row.token);
    json.member("head", row.head).end_object();
  };
  json.begin_object().member("rows", accuracy.rows);
  write("out", accuracy.compared > 0, accuracy.error, accuracy.allowed(), accuracy.worst);
  write("lse", accuracy.lse_allowed > 0.0, accuracy.lse_error * accuracy.lse_allowed, accuracy.lse_allowed,
        accuracy.worst_lse);
  json.member("misplaced", accuracy.misplaced).end_object();
}

Check check_of(const Accuracy& accuracy) {
  Check check;
  check.passes = accuracy.passes();
  check.rows = accuracy.rows;
  check.write = [accuracy](JsonWriter& json) { write_accuracy(json, accuracy); };
  return check;
}

}  // namespace

// Uses as many CPU threads as the job, because ranks on the same machine check at the same time.
Accuracy AttentionOpJob::accuracy_of(const Collective& collective, std::int64_t count, const TensorView& out,
                                     const RowView& lse, std::vector<RowError>* each) {
  return check_result(collective, input_, prepared_->tiles(), count, result().runs, out, lse, prepared_->threads(),
                      each);
}

Check AttentionOpJob::check_oracle(const Collective& collective, std::int64_t count) {
  const AttentionSpec& spec = input_.job().spec;
  const Accuracy all = accuracy_of(collective, count, result().out_view(spec), result().lse_view(spec));
  Check check = check_of(all);
  check.context.push_back(
      fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.rows), "row")));
  if (all.rows == 0) {
    check.passes = true;
    check.lines.emplace_back("the job has no rows: nothing is compared");
    return check;
  }
  add_lines(all, "", true, check.lines);
  if (input_.job().block_mask != nullptr) {
    const KeptMass kept = kept_mass(collective, input_, count, prepared_->threads());
    check.lines.push_back(
        fmt::format("the block mask keeps {:.2f} % of the softmax weight in the mean of {}, and at least {:.2f} %",
                    100.0 * kept.mean, counted(static_cast<std::uint64_t>(kept.rows), "row"), 100.0 * kept.minimum));
  }
  return check;
}

Check AttentionOpJob::check_earlier(const Collective& collective) {
  const AttentionSpec& spec = input_.job().spec;
  std::optional<Difference> mine;
  collective.run_collectively(
      [&] { mine = earlier_->compare(result().runs, result().out_view(spec), result().lse_view(spec)); });
  const auto difference = earliest(collective, mine);
  Check check;
  check.passes = !difference;
  check.context = earlier_->other_job();
  if (difference) {
    check.lines.push_back(fmt::format("first difference: {}", ringattn::describe(*difference, input_.job())));
  }
  return check;
}

// The verdict is on the other system's result. It may be wrong in any row, so all rows are compared if the job is
// small.
Check AttentionOpJob::check_peer(const Collective& collective, std::int64_t count) {
  const AttentionSpec& spec = input_.job().spec;
  PeerFile::Rows rows;
  collective.run_collectively([&] { rows = peer_->read(result().runs, spec.dtype); });
  if (count == 0) count = few_rows(input_.job());
  std::vector<RowError> each;
  const bool has_lse = peer_->has_lse();
  const Accuracy theirs = accuracy_of(collective, count, rows.out, has_lse ? rows.lse : RowView{}, &each);
  const Accuracy ours = accuracy_of(collective, count, result().out_view(spec), result().lse_view(spec));
  Check check = check_of(theirs);
  add_lines(theirs, "theirs: ", has_lse, check.lines);
  add_lines(ours, "ours: ", has_lse, check.lines);
  if (!has_lse) check.lines.emplace_back("theirs has no lse: only out is compared");
  if (const auto wrong = first_wrong_row(collective, theirs, each)) {
    const std::string of_lse = has_lse ? fmt::format(", of lse {:.3g} of what is allowed", wrong->lse_error) : "";
    check.lines.push_back(fmt::format("the first wrong row of theirs: {}; error of out {:.3g}{}",
                                      location(wrong->sample), wrong->error, of_lse));
  }
  return check;
}

VariantTable AttentionOpJob::list_variants(const VariantRequest& request, const Options& options) {
  const bool steps = input_.decodes();
  ShapeRequest shapes{request.ranks, request.layout, request.block, request.page_size};
  // A kernel that only decodes gives other bits than the attention kernels.
  const auto same = [&](const AttentionRow& row) { return row.name == kernel().name; };
  shapes.as_rows = std::ranges::any_of(kernel_table<AttentionSpec>(), same);
  shapes_ = steps ? decode_shapes_of(shapes, input_) : shapes_of(shapes, input_, prepared_->tiles().key_tile);
  // The timeouts of the variants are computed from the machine model.
  shape_options_ = options;
  if (!steps) {
    shape_options_.machine = prepared_->ring().options.machine;
  } else if (options.machine == MachineModel{}) {
    shape_options_.machine = default_machine(kernel(), backend());
  }
  prepared_.reset();
  VariantTable table;
  table.count = static_cast<std::int64_t>(shapes_.size());
  table.columns = {
      {"ranks", "", ""}, {"layout", "", ""}, {"stripe", "(tokens)", ""}, {"block", "(tokens)", ""}, {"blocks", "", ""}};
  if (steps) table.columns = {{"ranks", "", ""}, {"op", "", ""}, {"page", "(tokens)", ""}, {"KV splits", "", ""}};
  return table;
}

// Ranks, layout and blocks for attention, ranks and pages for decode.
std::vector<std::string> AttentionOpJob::variant_cells(const Shape& shape, const ShapeResult& result) const {
  if (!input_.decodes()) return shape_cells(shape, result.blocks);
  const std::int64_t own = input_.pages() == nullptr ? 0 : input_.pages()->page_size;
  const std::int64_t page_size = shape.page_size.value_or(own);
  const std::string page = page_size > 0 ? fmt::format("{}", page_size) : "dense";
  return {fmt::format("{}", shape.ranks), shape.decoded ? "decode" : "attention", shape.decoded ? page : "-",
          fmt::format("{}", result.blocks)};
}

void AttentionOpJob::run_variants(Transport& world, const VariantDone& done) {
  run_shapes(input_, shape_options_, shapes_, world, [&](const Shape& shape, const ShapeResult& result) {
    done(variant_cells(shape, result),
         result.difference ? ringattn::describe(*result.difference, input_.job()) : std::string());
  });
}

std::unique_ptr<OpJob> AttentionOpJob::prefill_of_replay() {
  check_replayable(input_);
  std::unique_ptr<AttentionOpJob> prefill =
      make(input_.attended(input_.decodes() ? "steps are compared with a prefill of its rows" : ""), {});
  prefill->replayed_as_ = decode_spec(input_);
  return prefill;
}

VariantTable AttentionOpJob::replay_table() const {
  return {{{"cache", "", ""}, {"page", "(tokens)", ""}, {"rows", "", ""}}, std::ssize(kReplayedCaches), {}};
}

void AttentionOpJob::replay(std::int64_t rows, const Options& options, Transport& world,
                            const ProgressCallback& on_progress,
                            const std::function<void(RankFigures, std::vector<ResultDigest>)>& prefilled,
                            const VariantDone& done) {
  const Collective collective(world, Timeouts(options.timeout_seconds));
  replay_rows(
      input_, options, rows, kReplayedCaches, world, on_progress,
      [&](PreparedJob& prepared, const RankResult& result) {
        const Digests digests = digest_result(prepared.input(), result, collective);
        prefilled(figures_of(prepared, world.rank(), result),
                  {{"out", "out", digests.out}, {"lse", "lse", digests.lse}});
      },
      [&](const ReplayResult& result) {
        const bool paged = result.page_size > 0;
        done({paged ? "paged" : "dense", paged ? fmt::format("{}", result.page_size) : "-",
              fmt::format("{}", result.rows)},
             result.difference ? ringattn::describe(*result.difference, input_.job()) : std::string());
      });
}

}  // namespace ringattn
