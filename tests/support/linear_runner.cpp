// SPDX-License-Identifier: Apache-2.0
#include "tests/support/linear_runner.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>

#include "kernels/linear/linear_oracle.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

std::size_t bytes_of(std::int64_t elements, std::size_t each) { return static_cast<std::size_t>(elements) * each; }

template <class T>
std::vector<std::byte> as_bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// Rows [begin, end) of K of a tensor of rows.
std::vector<std::byte> rows_cut(const std::vector<std::byte>& rows, std::size_t row_bytes, std::size_t begin,
                                std::size_t end) {
  std::vector<std::byte> cut;
  for (std::size_t at = 0; at < rows.size(); at += row_bytes) {
    cut.insert(cut.end(), rows.begin() + static_cast<std::ptrdiff_t>(at + begin),
               rows.begin() + static_cast<std::ptrdiff_t>(at + end));
  }
  return cut;
}

// A layer's weights in the kernel's kind of memory.
class DeviceWeights {
 public:
  DeviceWeights(Backend& backend, const LinearData& data) {
    const LinearWeights host = data.weights();
    weights_ = host;
    for (int m = 0; m < (data.spec.gated ? 2 : 1); ++m) {
      const LinearData::Matrix& from = data.matrices[m];
      LinearMatrix& matrix = m == 0 ? weights_.matrix : weights_.up;
      matrix.data = place(backend, from.values);
      if (!from.scales.empty())
        matrix.scales = reinterpret_cast<const float*>(place(backend, as_bytes_of(from.scales)));
      if (!from.zeros.empty()) {
        matrix.zeros = reinterpret_cast<const std::uint8_t*>(place(backend, as_bytes_of(from.zeros)));
      }
      if (!from.bias.empty()) matrix.bias = place(backend, from.bias);
    }
  }
  const LinearWeights& weights() const { return weights_; }

 private:
  const std::byte* place(Backend& backend, const std::vector<std::byte>& bytes) {
    arrays_.push_back(std::make_unique<DeviceArray>(backend, bytes.size()));
    arrays_.back()->write(bytes);
    return arrays_.back()->data();
  }

  LinearWeights weights_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
};

LinearOperands operands_of(LinearKernel& kernel, Backend& backend, const LinearWeights& weights, LeafRange leaves,
                           std::unique_ptr<DeviceArray>& packed) {
  if (kernel.packed_bytes(leaves) == 0) return {weights, nullptr};
  packed = std::make_unique<DeviceArray>(backend, kernel.packed_bytes(leaves));
  kernel.pack(weights, leaves, packed->data(), backend.stream());
  return {weights, packed->data()};
}

}  // namespace

std::int64_t LinearData::weight_row_bytes() const {
  if (spec.weights == WeightFormat::kInt4) return features / 2;
  return features * (spec.weights == WeightFormat::kInt8 ? 1 : static_cast<std::int64_t>(size_of(spec.dtype)));
}

LinearWeights LinearData::weights() const {
  const auto view = [&](const Matrix& matrix) {
    return LinearMatrix{matrix.values.data(),
                        weight_row_bytes(),
                        matrix.scales.empty() ? nullptr : matrix.scales.data(),
                        matrix.zeros.empty() ? nullptr : matrix.zeros.data(),
                        groups(),
                        matrix.bias.empty() ? nullptr : matrix.bias.data()};
  };
  return {view(matrices[0]), spec.gated ? view(matrices[1]) : LinearMatrix{}};
}

TensorView LinearData::x_view() const {
  return dense_view(static_cast<const void*>(x.data()), spec.dtype, rows, 1, spec.in_features);
}

void LinearData::set_x(std::int64_t row, std::int64_t k, float value) {
  store_element(x.data() + bytes_of(row * spec.in_features + k, size_of(spec.dtype)), spec.dtype, value);
}

void LinearData::set_weight(int matrix, std::int64_t n, std::int64_t k, float value) {
  store_element(matrices[matrix].values.data() + bytes_of(n * spec.in_features + k, size_of(spec.dtype)), spec.dtype,
                value);
}

LinearData linear_data(const LinearSpec& spec, std::int64_t rows, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  LinearData data{spec, spec.in_features, rows, random_elements(rows * spec.in_features, spec.dtype, random), {}};
  const float size = 1.0F / std::sqrt(static_cast<float>(spec.in_features));
  for (int m = 0; m < (spec.gated ? 2 : 1); ++m) {
    LinearData::Matrix& matrix = data.matrices[m];
    if (spec.weights == WeightFormat::kFloat) {
      matrix.values = random_elements(spec.out_features * spec.in_features, spec.dtype, random, Normal(0.0F, size));
    } else {
      matrix.values.resize(bytes_of(spec.out_features, static_cast<std::size_t>(data.weight_row_bytes())));
      // −128 is no quantized value of ours, and a file may have it.
      for (std::byte& value : matrix.values) value = static_cast<std::byte>(random());
      const bool int8 = spec.weights == WeightFormat::kInt8;
      const std::int64_t scales = spec.out_features * (int8 ? 1 : data.groups());
      for (std::int64_t i = 0; i < scales; ++i) {
        matrix.scales.push_back(size / (int8 ? 64.0F : 4.0F) * (0.5F + static_cast<float>(random() % 1024) / 1024.0F));
        if (!int8) matrix.zeros.push_back(static_cast<std::uint8_t>(random() % 17));
      }
    }
    if (spec.bias) matrix.bias = random_elements(spec.out_features, spec.dtype, random);
  }
  return data;
}

LinearData leaves_of(const LinearData& data, LeafRange leaves) {
  const std::int64_t before = features_of(data.spec, {0, leaves.begin});
  const std::int64_t count = features_of(data.spec, leaves);
  LinearData part = data;
  part.features = count;
  const auto cut = [&](const std::vector<std::byte>& rows, std::size_t row_bytes) {
    const auto each = static_cast<std::int64_t>(row_bytes);
    const auto at = [&](std::int64_t k) { return static_cast<std::size_t>(each * k / data.spec.in_features); };
    return rows_cut(rows, row_bytes, at(before), at(before + count));
  };
  part.x = cut(data.x, bytes_of(data.spec.in_features, size_of(data.spec.dtype)));
  for (LinearData::Matrix& matrix : part.matrices) {
    if (matrix.values.empty()) continue;
    matrix.values = cut(matrix.values, static_cast<std::size_t>(data.weight_row_bytes()));
    if (data.spec.weights != WeightFormat::kInt4) continue;
    LinearData::Matrix cut_groups = matrix;
    cut_groups.scales.clear();
    cut_groups.zeros.clear();
    for (std::int64_t n = 0; n < data.spec.out_features; ++n) {
      for (std::int64_t group = before / kInt4Group; group < (before + count) / kInt4Group; ++group) {
        const auto at = static_cast<std::size_t>(n * data.groups() + group);
        cut_groups.scales.push_back(matrix.scales[at]);
        cut_groups.zeros.push_back(matrix.zeros[at]);
      }
    }
    matrix = cut_groups;
  }
  return part;
}

LinearData columns_of(const LinearData& data, std::int64_t begin, std::int64_t end) {
  LinearData part = data;
  part.spec.out_features = end - begin;
  const auto keep = [&](auto& values) {
    const auto each = static_cast<std::ptrdiff_t>(values.size()) / data.spec.out_features;
    values = {values.begin() + begin * each, values.begin() + end * each};
  };
  for (LinearData::Matrix& matrix : part.matrices) {
    keep(matrix.values);
    keep(matrix.scales);
    keep(matrix.zeros);
    keep(matrix.bias);
  }
  return part;
}

std::string describe(const LinearArrangement& arrangement) {
  return fmt::format("{} threads, cut at rows {}, gap {} and {} more in y", arrangement.threads, arrangement.cuts,
                     arrangement.gap, arrangement.y_gap);
}

std::vector<std::byte> multiplied(const KernelRow<LinearSpec>& row, const LinearData& data,
                                  const LinearArrangement& arrangement) {
  const LinearSpec& spec = data.spec;
  const std::unique_ptr<Backend> backend = row.make_backend({arrangement.threads, 0});
  const std::unique_ptr<LinearKernel> kernel = row.make_kernel(spec, *backend);
  kernel->reserve(data.rows);
  const DeviceWeights weights(*backend, data);
  std::unique_ptr<DeviceArray> packed;
  const LinearOperands operands = operands_of(*kernel, *backend, weights.weights(), {}, packed);

  const std::size_t element = size_of(spec.dtype);
  const std::int64_t x_stride = spec.in_features + arrangement.gap;
  const std::int64_t y_stride = spec.out_features + arrangement.gap + arrangement.y_gap;
  std::vector<std::byte> x(bytes_of(data.rows * x_stride, element), std::byte{0xff});
  for (std::int64_t i = 0; i < data.rows; ++i) {
    std::memcpy(x.data() + bytes_of(i * x_stride, element), data.x.data() + bytes_of(i * spec.in_features, element),
                bytes_of(spec.in_features, element));
  }
  DeviceArray x_array(*backend, x.size());
  x_array.write(x);
  DeviceArray y_array(*backend, bytes_of(data.rows * y_stride, element));
  std::vector<std::int64_t> begins{0};
  begins.insert(begins.end(), arrangement.cuts.begin(), arrangement.cuts.end());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const std::int64_t begin = begins[i];
    const std::int64_t rows = (i + 1 < begins.size() ? begins[i + 1] : data.rows) - begin;
    kernel->multiply({{x_array.data() + bytes_of(begin * x_stride, element), spec.dtype, rows, 1, spec.in_features,
                       x_stride, spec.in_features},
                      operands,
                      {y_array.data() + bytes_of(begin * y_stride, element), spec.dtype, rows, 1, spec.out_features,
                       y_stride, spec.out_features}},
                     backend->stream(), {});
  }
  const std::vector<std::byte> wide = y_array.read();
  const std::size_t y_row = bytes_of(y_stride, element);
  const std::size_t kept = bytes_of(spec.out_features, element);
  for (const std::byte byte : rows_cut(wide, y_row, kept, y_row)) {
    if (byte != std::byte{0xff}) return {};  // differs from every result in its size
  }
  return rows_cut(wide, y_row, 0, kept);
}

std::vector<std::byte> multiplied_in_parts(const KernelRow<LinearSpec>& row, const LinearData& data, int devices) {
  const LinearSpec& spec = data.spec;
  const std::unique_ptr<Backend> backend = row.make_backend({1, 0});
  const std::unique_ptr<LinearKernel> kernel = row.make_kernel(spec, *backend);
  kernel->reserve(data.rows);
  const bool int8 = spec.weights == WeightFormat::kInt8;
  const std::int64_t row_columns = spec.sum_columns();

  struct Device {
    LeafRange leaves;
    LinearData data;
    std::unique_ptr<DeviceWeights> weights;
    std::unique_ptr<DeviceArray> x, packed, sums;
  };
  std::vector<Device> parts;
  std::vector<float> absmax;  // [devices, rows]
  for (int i = 0; i < devices; ++i) {
    Device& device = parts.emplace_back();
    device.leaves = {kLinearLeaves * i / devices, kLinearLeaves * (i + 1) / devices};
    device.data = leaves_of(data, device.leaves);
    device.weights = std::make_unique<DeviceWeights>(*backend, device.data);
    device.x = std::make_unique<DeviceArray>(*backend, device.data.x.size());
    device.x->write(device.data.x);
    if (!int8) continue;
    DeviceArray mine(*backend, bytes_of(data.rows, sizeof(float)));
    kernel->find_absmax(dense_view(static_cast<const void*>(device.x->data()), spec.dtype, data.rows, 1,
                                   features_of(spec, device.leaves)),
                        mine.floats(), backend->stream(), {});
    const std::vector<float> found = mine.read_floats();
    absmax.insert(absmax.end(), found.begin(), found.end());
  }
  DeviceArray maxima(*backend, std::max<std::size_t>(1, absmax.size()) * sizeof(float));
  maxima.write(as_bytes_of(absmax));
  const LinearAbsmax row_maxima{int8 ? maxima.floats() : nullptr, devices, data.rows};
  for (Device& device : parts) {
    const auto nodes = int8 ? std::int64_t{1} : std::ssize(aligned_nodes(device.leaves));
    device.sums = std::make_unique<DeviceArray>(*backend, bytes_of(nodes * data.rows * row_columns, 4));
    LinearPartialTask task;
    task.x = dense_view(static_cast<const void*>(device.x->data()), spec.dtype, data.rows, 1,
                        features_of(spec, device.leaves));
    task.weights = operands_of(*kernel, *backend, device.weights->weights(), device.leaves, device.packed);
    task.leaves = device.leaves;
    task.absmax = row_maxima;
    task.sums = device.sums->data();
    kernel->add_leaves(task, backend->stream(), {});
  }
  DeviceArray y(*backend, bytes_of(data.rows * spec.out_features, size_of(spec.dtype)));
  for (int i = 0; i < devices; ++i) {
    const std::int64_t begin = data.rows * i / devices;
    const std::int64_t rows = data.rows * (i + 1) / devices - begin;
    std::vector<LinearPartial> partials;
    for (const Device& device : parts) {
      partials.push_back(
          {device.sums->data() + bytes_of(begin * row_columns, 4), data.rows * row_columns, device.leaves});
    }
    LinearFinishTask task;
    task.partials = partials;
    task.weights = parts.front().weights->weights();
    task.absmax = row_maxima;
    if (int8) task.absmax.values += begin;
    task.y = dense_view(static_cast<void*>(y.data() + bytes_of(begin * spec.out_features, size_of(spec.dtype))),
                        spec.dtype, rows, 1, spec.out_features);
    kernel->finish(task, backend->stream(), {});
  }
  return y.read();
}

std::string first_difference(const LinearData& data, const std::vector<std::byte>& y,
                             const std::vector<std::byte>& expected) {
  if (y.size() != expected.size()) return fmt::format("{} bytes, not {}", y.size(), expected.size());
  const std::size_t element = size_of(data.spec.dtype);
  for (std::size_t at = 0; at < y.size(); at += element) {
    if (std::memcmp(y.data() + at, expected.data() + at, element) == 0) continue;
    const auto i = static_cast<std::int64_t>(at / element);
    return fmt::format("row {}, column {}: {}, expected {}", i / data.spec.out_features, i % data.spec.out_features,
                       load_element(y.data() + at, data.spec.dtype),
                       load_element(expected.data() + at, data.spec.dtype));
  }
  return {};
}

std::string first_inaccuracy(const LinearData& data, const std::vector<std::byte>& y) {
  const LinearSpec& spec = data.spec;
  if (y.size() != bytes_of(data.rows * spec.out_features, size_of(spec.dtype))) return "y has another size";
  for (std::int64_t row = 0; row < data.rows; ++row) {
    const LinearOracleRow oracle = linear_oracle(spec, data.weights(), data.x_view(), row);
    for (std::int64_t n = 0; n < spec.out_features; ++n) {
      const double got =
          load_element(y.data() + bytes_of(row * spec.out_features + n, size_of(spec.dtype)), spec.dtype);
      const double wanted = oracle.y[static_cast<std::size_t>(n)];
      const double allowed = oracle.allowed[static_cast<std::size_t>(n)];
      const bool same = std::isnan(wanted) ? std::isnan(got) : got == wanted || std::abs(got - wanted) <= allowed;
      if (!same) return fmt::format("row {}, column {}: {}, in fp64 {}, allowed {}", row, n, got, wanted, allowed);
    }
  }
  return {};
}

}  // namespace ringattn::testing
