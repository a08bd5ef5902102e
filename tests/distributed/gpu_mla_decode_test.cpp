// SPDX-License-Identifier: Apache-2.0
// MLA decode on GPUs, by every kernel of the cuda backend that does: GEMMs, rows that are appended to the cache, and
// the step. Rows of several ranks, pages, FP8 rows and launches of a graph equal those of one rank without pages,
// byte for byte; these are right, and those of an absorbed Mla where an attention kernel has the decoding kernel's
// name. Ranks are threads of this process and share the GPUs that there are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "comm/self.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/decode_runner.hpp"
#include "tests/support/mla_reference.hpp"
#include "tests/support/mla_steps.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<DecodeSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr int kSteps = 4;

MlaSpec deepseek(Dtype dtype) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = 4;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

// Sequences of none, one and two KV splits before the first step, and some that grow into another one. A KV split of
// sm90_mla has 4096 keys, and one of sm90_mla_split1k has 1024.
MlaJob steps_of(const MlaSpec& spec, int rows) {
  return stepwise_job(spec, {kSteps * rows, 130, 1024 + 2, 4096 + 2, 4096 + 70, 8192 + 9}, rows, kSteps);
}

class GpuMlaDecode : public ::testing::TestWithParam<DecodeRow> {
 protected:
  void SetUp() override {
    if (!GetParam().missing({absorbed_spec(deepseek(Dtype::kBf16)), true}).empty()) {
      GTEST_SKIP() << "decodes no latents";
    }
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs a GPU: " << reason;
  }

  static DecodeOptions options() {
    DecodeOptions options;
    options.kernel = {"cuda", std::string(GetParam().name)};
    return options;
  }

  // All steps of a rank, consecutively.
  static void do_steps(Transport& transport, const MlaJob& job, const MlaTensors& tensors, const MlaDecodeJob& of,
                       bool enqueued, const std::function<void(MlaSteps&, int)>& done) {
    MlaDecode decode(of, transport, options());
    MlaSteps steps(decode, job, tensors);
    for (int step = 0; step < kSteps; ++step) {
      steps.load(step);
      if (enqueued) {
        decode.enqueue(steps.inputs(), steps.outputs(), steps.stream());
        decode.wait();
      } else {
        decode.run(steps.inputs(), steps.outputs(), steps.stream());
      }
      done(steps, step);
    }
    transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
  }

  // By one rank, without pages.
  static JobResult alone(const MlaJob& job, const MlaTensors& tensors, int rows) {
    JobResult result = poisoned_mla_result(job, 1);
    do_steps(*make_self_transport(MemoryKind::kDevice), job, tensors, mla_decode_job(job, rows, 0), false,
             [&](MlaSteps& steps, int step) { steps.take(result, step); });
    return result;
  }

  static void expect_same(const MlaJob& job, const MlaTensors& tensors, const MlaDecodeJob& of,
                          const JobResult& reference) {
    for (const int world : {1, 2, 3}) {
      for (const bool enqueued : {false, true}) {
        run_gpu_world(world, [&](Transport& rank) {
          do_steps(rank, job, tensors, of, enqueued, [&](MlaSteps& steps, int step) {
            EXPECT_EQ(steps.difference(reference, step), "")
                << "step " << step << ", rank " << rank.rank() << " of " << world << ", pages of " << of.page_size
                << (enqueued ? ", enqueued" : "");
          });
        });
      }
    }
  }
};

TEST_P(GpuMlaDecode, RowsAreRightAndThoseOfAttentionOfTheSameName) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const MlaJob few = stepwise_job(deepseek(dtype), {2 * kSteps, 130, 700}, 2, kSteps);
    const MlaTensors few_tensors = random_mla_tensors(few, 30);
    expect_as_right(few, few_tensors, alone(few, few_tensors, 2));
    const MlaJob job = steps_of(deepseek(dtype), 2);
    const MlaTensors tensors = random_mla_tensors(job, 31);
    const JobResult result = alone(job, tensors, 2);
    const auto same = [&](const AttentionRow& row) { return row.name == GetParam().name; };
    if (std::ranges::none_of(kernel_table<AttentionSpec>(), same)) continue;
    MlaOptions folds;
    folds.ring.kernel = options().kernel;
    EXPECT_TRUE(run_gpu_mla_job(job, folds, tensors, 1).same_bits(result)) << dtype_name(dtype);
  }
}

TEST_P(GpuMlaDecode, RanksAndPagesHaveTheSameBits) {
  for (const int rows : {1, 3}) {
    const MlaJob job = steps_of(deepseek(Dtype::kBf16), rows);
    const MlaTensors tensors = random_mla_tensors(job, 32);
    const JobResult reference = alone(job, tensors, rows);
    for (const std::int64_t page_size : {0, 64}) {
      expect_same(job, tensors, mla_decode_job(job, rows, page_size), reference);
    }
  }
}

// New rows are packed as they join the cache.
TEST_P(GpuMlaDecode, Fp8RowsAreWhatTheyAreDequantizedTo) {
  const MlaSpec spec = deepseek(Dtype::kBf16);
  const RowFormat format = latent_format(spec.rope_dim);
  if (!GetParam().missing({absorbed_spec(spec), true, {format, {}}}).empty()) GTEST_SKIP() << "reads no such rows";
  const MlaJob job = steps_of(spec, 1);
  const MlaTensors tensors = random_mla_tensors(job, 33);
  const JobResult reference = alone(job, with_fp8_latents(spec, tensors), 1);
  for (const std::int64_t page_size : {0, 64}) {
    expect_same(job, tensors, mla_decode_job(job, 1, page_size, format), reference);
  }
}

// One captured step, launched again and again: each launch multiplies, grows the lengths, appends the rows and decodes.
TEST_P(GpuMlaDecode, EachLaunchOfAGraphIsAStep) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  const MlaJob job = steps_of(deepseek(Dtype::kBf16), 2);
  const MlaTensors tensors = random_mla_tensors(job, 34);
  const JobResult reference = alone(job, tensors, 2);
  for (const std::int64_t page_size : {0, 64}) {
    MlaDecode decode(mla_decode_job(job, 2, page_size), *self, options());
    MlaSteps steps(decode, job, tensors);
    steps.load(0);
    const Graph graph(steps.stream(), [&] { decode.enqueue(steps.inputs(), steps.outputs(), steps.stream()); });
    for (int step = 0; step < kSteps; ++step) {
      steps.load(step);
      graph.launch();
      EXPECT_EQ(steps.difference(reference, step), "") << "step " << step << ", pages of " << page_size;
    }
  }
}

std::vector<DecodeRow> cuda_decode_rows() {
  std::vector<DecodeRow> rows;
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuMlaDecode);
INSTANTIATE_TEST_SUITE_P(Kernels, GpuMlaDecode, ::testing::ValuesIn(cuda_decode_rows()),
                         [](const ::testing::TestParamInfo<DecodeRow>& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace ringattn::testing
