// SPDX-License-Identifier: Apache-2.0
// Files whose tensors have roles' names, other libraries' and any others, of any shapes and dtypes: opened as a job, or
// refused by an Error with a short message. An input is text, a tensor a line: NAME DTYPE DIMS VALUES, where dims are
// d,d,… and values integers (lengths, tables); "@ROLE NAME" names the tensor of a role.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>

#include "base/error.hpp"
#include "io/input_names.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/ssm/ssm_input.hpp"
#include "tests/fuzz/fuzz_target.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

namespace {

constexpr std::int64_t kMaxBytes = 1 << 16;  // of a tensor

constexpr std::string_view kDtypes[] = {"BF16", "F16", "F32", "I32", "I64", "U8", "BOOL", "F8_E4M3"};

std::vector<std::int64_t> numbers_of(std::string_view text) {
  std::vector<std::int64_t> numbers;
  while (!text.empty() && numbers.size() < 16) {
    const std::size_t end = std::min(text.find(','), text.size());
    std::int64_t number = 0;
    std::from_chars(text.data(), text.data() + end, number);
    numbers.push_back(number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return numbers;
}

// The words of a line.
std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  while (!line.empty()) {
    const std::size_t end = std::min(line.find(' '), line.size());
    if (end > 0) words.push_back(line.substr(0, end));
    line.remove_prefix(std::min(end + 1, line.size()));
  }
  return words;
}

// Nothing where the line is none, or the tensor too large.
std::optional<NamedTensor> tensor_of(std::span<const std::string_view> words) {
  if (words.size() < 2) return std::nullopt;
  const auto dtype = parse_file_dtype(words[1]);
  if (!dtype || bits_of(*dtype) % 8 != 0) return std::nullopt;
  NamedTensor tensor{*dtype, words.size() > 2 ? numbers_of(words[2]) : std::vector<std::int64_t>(), {}};
  std::int64_t bytes = bits_of(*dtype) / 8;
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || (extent > 0 && bytes > kMaxBytes / extent)) return std::nullopt;
    bytes *= extent;
  }
  tensor.bytes.resize(static_cast<std::size_t>(bytes));
  const std::vector<std::int64_t> values = words.size() > 3 ? numbers_of(words[3]) : std::vector<std::int64_t>();
  const auto size = static_cast<std::size_t>(bits_of(*dtype) / 8);
  for (std::size_t i = 0; i < tensor.bytes.size(); ++i) {
    const std::size_t element = i / size;
    const bool given = element < values.size();
    const auto value = static_cast<std::uint64_t>(given ? values[element] : static_cast<std::int64_t>(i * 7 % 61));
    tensor.bytes[i] = static_cast<std::byte>(value >> (given ? 8 * (i % size) : 0));
  }
  return tensor;
}

// As any program writes it, without the care of our writer, which waits for the disk.
void write_file(const std::string& path, const NamedTensors& tensors) {
  std::vector<OutputTensor> outputs;
  for (const auto& [name, tensor] : tensors) outputs.push_back({name, tensor.dtype, tensor.shape});
  const SafetensorsPlan plan = plan_safetensors(outputs, {});
  std::string bytes = plan.head;
  bytes.resize(static_cast<std::size_t>(plan.file_bytes()));
  for (const auto& [name, tensor] : tensors) {
    std::ranges::transform(tensor.bytes, bytes.begin() + plan.header.data_offset + plan.header.find(name)->begin,
                           [](std::byte byte) { return static_cast<char>(byte); });
  }
  std::ofstream(path, std::ios::binary) << bytes;
}

void name_role(InputNames& names, std::string_view role, std::string_view name) {
  const auto found = std::ranges::find(tensor_roles(), role, &TensorRole::name);
  if (found != tensor_roles().end()) names.*found->member = name;
}

void read_matrices(const JobInput& input) {
  const MlaSpec& spec = input.mla()->spec;
  const PackedRun heads{0, spec.heads};
  for (const auto& [tensor, dim, there] : {std::tuple{SyntheticTensor::kWeightKeys, spec.head_dim, !spec.q_in_latent},
                                           {SyntheticTensor::kWeightValues, spec.head_dim_v, !spec.out_in_latent}}) {
    if (!there) continue;
    std::vector<std::byte> rows(static_cast<std::size_t>(spec.heads) * static_cast<std::size_t>(dim) *
                                static_cast<std::size_t>(spec.latent_dim) * size_of(spec.dtype));
    input.read(tensor, {&heads, 1},
               dense_view(static_cast<void*>(rows.data()), spec.dtype, spec.heads, dim, spec.latent_dim), 1);
  }
}

void open_job(const std::string& path, const InputNames& names, std::size_t tensors) {
  const FileInput request{path, names};
  JobShare share;
  const bool scan = holds_ssm(open_tensor_file(request, share)->file, request.names);
  UnreadTensors unread;
  if (scan) {
    const SsmInput input(request, {});
    unread = input.unread();
  } else {
    const JobInput input(request, {});
    unread = input.unread();
    if (input.mla() != nullptr) read_matrices(input);
  }
  fuzz_check(unread.count < tensors, "a job reads a tensor");
  fuzz_check(unread.text().size() < 1000, "a list is short");
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  return {
      "q BF16 6,4,16\nk BF16 6,2,16\nv BF16 6,2,16\n",
      "q F16 6,4,16\nk F16 8,2,16\nv F16 8,2,8\ncu_seqlens I32 3 0,2,6\ncu_seqlens_kv I64 3 0,3,8\ns_aux F32 4\n",
      "q BF16 2,4,16\nk_pages BF16 3,16,2,16\nv_pages BF16 3,16,2,16\npage_table I32 2,2 0,1,2\nseqused_k I32 2 17,5\n",
      "q BF16 6,2,24\nlatent BF16 6,128\nk_rope BF16 6,8\nw_uk BF16 2,16,128\nw_uv BF16 2,16,128\n",
      "q BF16 6,2,24\nlatent BF16 6,128\nk_rope BF16 6,8\nkv_b_proj F8_E4M3 64,128\nkv_b_proj_scale_inv F32 1,1 "
      "1065353216\n",
      "@kv_b_proj w.weight\nq BF16 6,2,24\nlatent BF16 6,128\nk_rope BF16 6,8\nw.weight F8_E4M3 64,128\n"
      "w.weight_scale_inv F32 1,1 1065353216\n",
      "q BF16 2,2,136\nlatent_pages BF16 3,16,136\nblock_table I32 2,2 0,1,2\nlengths_k I32 2 17,5\nw_uv BF16 "
      "2,16,128\n",
      "x BF16 6,2,16\ndt BF16 6,2\nA F32 2\nB BF16 6,1,16\nC BF16 6,1,16\ncu_seqlens_q I32 3 0,2,6\ninitial_state F32 "
      "2,2,16,16\n",
      "u BF16 6,8\ndelta BF16 6,8\nA F32 8,4\nB BF16 6,4\nC BF16 6,4\nstate F32 6,8,4\ndt_bias F32 8\n",
      "x F32 6,8\nweight F32 8,4\nbias F32 8\ninitial_states F32 1,8,3\n",
      "q BF16 6,4,16\nk BF16 6,2,16\nv BF16 6,2,16\nalibi_slopes F32 4\nother U8 1\n",
      "@sinks mine\nq BF16 6,4,16\nk BF16 6,2,16\nv BF16 6,2,16\nmine F32 4\nk_positions I32 6,1 "
      "0,1,2,3,4,5\nk_lengths I64 1 9\n",
  };
}

std::vector<std::string> fuzz_words() {
  std::vector<std::string> words{"\n", " ", "@", ",", "1", "2", "4", "16", "128", "0", "1,", "6,2,16", " 3 0,2,6\n"};
  for (const TensorRole& role : tensor_roles()) words.push_back(fmt::format("\n{} ", role.name));
  for (const KnownName& known : known_names()) words.push_back(fmt::format("\n{} ", known.name));
  for (const std::string_view dtype : kDtypes) words.push_back(fmt::format(" {} ", dtype));
  return words;
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  static const TemporaryFolder folder;
  static const std::string path = folder.file("fuzzed.safetensors");
  std::string_view text(reinterpret_cast<const char*>(data), std::min<std::size_t>(size, 4096));
  NamedTensors tensors;
  InputNames names;
  while (!text.empty() && tensors.size() < 40) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::vector<std::string_view> words = words_of(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (words.empty()) continue;
    if (words[0].starts_with('@')) {
      if (words.size() > 1) name_role(names, words[0].substr(1), words[1]);
    } else if (const auto tensor = tensor_of(words)) {
      tensors[std::string(words[0])] = *tensor;
    }
  }
  try {
    write_file(path, tensors);
    open_job(path, names, tensors.size());
  } catch (const Error& error) {
    const std::string_view message = error.what();
    fuzz_check(error.code() != ErrorCode::kInternal, "refusals are no bugs", message);
    fuzz_check(message.find_first_of(std::string_view("\n\r\0", 3)) == std::string_view::npos && message.size() < 2000,
               "a message is one short line", message);
  }
  return 0;
}
