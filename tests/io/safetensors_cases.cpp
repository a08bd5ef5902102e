// SPDX-License-Identifier: Apache-2.0
#include "tests/io/safetensors_cases.hpp"

#include <fmt/format.h>

namespace ringattn::testing {

namespace {

// A file of one F32 tensor `a` of four bytes, with one field replaced.
std::string with(std::string_view field, std::string_view value, std::size_t data_bytes = 4) {
  return safetensors_bytes(
      fmt::format(R"({{"a":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", field == "dtype" ? value : R"("F32")",
                  field == "shape" ? value : "[1]", field == "data_offsets" ? value : "[0,4]"),
      std::string(data_bytes, 'x'));
}

std::string named(std::string_view json_name) {
  return safetensors_bytes(fmt::format(R"({{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}})", json_name),
                           "xxxx");
}

// Two F32 tensors with the given offsets over `data_bytes` bytes.
std::string two(std::string_view first, std::string_view second, std::size_t data_bytes) {
  return safetensors_bytes(fmt::format(R"({{"a":{{"dtype":"F32","shape":[1],"data_offsets":{}}},)"
                                       R"("b":{{"dtype":"F32","shape":[1],"data_offsets":{}}}}})",
                                       first, second),
                           std::string(data_bytes, 'x'));
}

std::string many_tensors(std::size_t count) {
  std::string header = "{";
  for (std::size_t i = 0; i < count; ++i) {
    header += fmt::format(R"({}"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", i == 0 ? "" : ",", i);
  }
  return safetensors_bytes(header + "}");
}

std::string repeat(std::string_view text, std::size_t times) {
  std::string all;
  for (std::size_t i = 0; i < times; ++i) all += text;
  return all;
}

const std::string kGood = with("", "");

}  // namespace

std::string length_field(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
  return bytes;
}

std::string safetensors_bytes(std::string_view header, std::string_view data) {
  return length_field(header.size()) + std::string(header) + std::string(data);
}

std::vector<FileCase> malformed_safetensors() {
  std::vector<FileCase> cases = {
      {"empty", "", "it is empty"},
      {"header_of_0_bytes", length_field(0), "isn't JSON"},
      {"header_longer_than_file", length_field(1000) + "{}", "claims a header of 1000 bytes"},
      {"header_longer_by_one", length_field(3) + "{}", "claims a header of 3 bytes"},
      {"header_of_100_MB_and_1", length_field(100'000'001) + "{}", "more than 100000000"},
      {"header_of_2^63", length_field(std::uint64_t{1} << 63) + "{}", "more than 100000000"},
      {"header_of_2^64-1", length_field(~std::uint64_t{0}) + "{}", "more than 100000000"},
      {"header_of_2^64-8", length_field(~std::uint64_t{0} - 7) + "{}", "more than 100000000"},
      {"not_utf8", named("\xff"), "isn't JSON in UTF-8"},
      {"overlong_utf8", named("\xc0\x80"), "isn't JSON in UTF-8"},
      {"utf8_surrogate", named("\xed\xa0\x80"), "isn't JSON in UTF-8"},
      {"lone_surrogate", named("\\ud800"), "isn't JSON in UTF-8"},
      {"not_json", safetensors_bytes("hello"), "isn't JSON"},
      {"cut_json", safetensors_bytes(R"({"a":{"dtype":"F32")"), "isn't JSON"},
      {"open_string", safetensors_bytes(R"({"a)"), "isn't JSON"},
      {"comment", safetensors_bytes("/* no */{}"), "isn't JSON"},
      {"trailing_comma", with("shape", "[1,]"), "isn't JSON"},
      {"two_values", safetensors_bytes("{}{}"), "isn't JSON"},
      {"text_behind", safetensors_bytes("{}x"), "isn't JSON"},
      {"nul_behind", safetensors_bytes(std::string_view("{}\0", 3)), "a byte of value 0"},
      {"nul_and_text_behind", safetensors_bytes(std::string_view("{}\0garbage", 10)), "a byte of value 0"},
      {"json_array", safetensors_bytes("[]"), "its header is an array"},
      {"json_null", safetensors_bytes("null"), "its header is null"},
      {"json_number", safetensors_bytes("12"), "its header is the number 12"},
      {"json_string", safetensors_bytes("\"a\""), "its header is the string"},
      {"byte_order_mark", safetensors_bytes("\xef\xbb\xbf{}"), "byte order mark"},
      {"nesting_of_10000", safetensors_bytes(repeat("[", 10'000) + repeat("]", 10'000)), "nested deeper"},
      {"nested_value", with("shape", "[[[1]]]"), "nested deeper"},
      {"nested_shape", with("shape", "[[1]]"), "the shape of tensor `a` holds an array"},
      {"million_tensors", many_tensors(1'000'000), "more than"},
      {"tensors_over_the_limit", many_tensors((std::size_t{1} << 16) + 1), "more than 65536 tensors"},
      {"duplicate_tensor",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                         R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                         "xxxxxxxx"),
       "names tensor `a` twice"},
      {"duplicate_tensor_by_escape",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                         R"("\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                         "xxxxxxxx"),
       "names tensor `a` twice"},
      {"duplicate_field",
       safetensors_bytes(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "xxxx"),
       "two fields dtype"},
      {"duplicate_metadata", safetensors_bytes(R"({"__metadata__":{},"__metadata__":{}})"), "two entries __metadata__"},
      {"duplicate_metadata_key", safetensors_bytes(R"({"__metadata__":{"k":"1","k":"2"}})"), "names `k` twice"},
      {"no_dtype", safetensors_bytes(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "xxxx"), "has no dtype"},
      {"no_shape", safetensors_bytes(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "xxxx"), "has no shape"},
      {"no_offsets", safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1]}})", "xxxx"), "has no data_offsets"},
      {"tensor_is_a_list", safetensors_bytes(R"({"a":["F32",[1],[0,4]]})", "xxxx"), "tensor `a` is an array"},
      {"tensor_is_null", safetensors_bytes(R"({"a":null})"), "tensor `a` is null"},
      {"unknown_field", safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", "xxxx"),
       "unknown field `x`"},
      {"unknown_dtype", with("dtype", R"("F128")"), "unknown dtype `F128`"},
      {"dtype_in_lower_case", with("dtype", R"("f32")"), "unknown dtype `f32`"},
      {"endless_number", with("shape", "[" + repeat("1", 100'000) + "]"), "a number of more than 512 characters"},
      {"dtype_is_a_number", with("dtype", "32"), "dtype of tensor `a` is the number 32"},
      {"negative_dimension", with("shape", "[-1]"), "a negative number"},
      {"minus_zero", with("data_offsets", "[-0,4]"), "a negative number"},
      {"fractional_dimension", with("shape", "[1.0]"), "the number 1.0"},
      {"exponent_dimension", with("shape", "[1e0]"), "the number 1e0"},
      {"string_dimension", with("shape", R"(["1"])"), "the string `1`"},
      {"leading_zero", with("shape", "[01]"), "isn't JSON"},
      {"dimension_of_2^53+1", with("shape", "[9007199254740993]"), "needs 36028797018963972 bytes and has 4"},
      {"dimension_of_2^63", with("shape", "[9223372036854775808,0]"), "past 2^63"},
      {"dimension_of_2^64", with("shape", "[18446744073709551616]"), "the number 18446744073709551616"},
      {"dimension_of_1e999", with("shape", "[1e999]"), "isn't JSON"},
      {"product_wraps_to_0",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})"),
       "larger than 2^63 bits"},
      {"product_wraps_to_4", with("shape", "[4611686018427387905]"), "larger than 2^63 bits"},
      {"product_wraps_beside_0",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})"),
       "larger than 2^63 bits"},
      {"bits_wrap", with("shape", "[2305843009213693953]"), "larger than 2^63 bits"},
      {"empty_with_bytes", with("shape", "[0]"), "needs 0 bytes and has 4"},
      {"rank_100", with("shape", fmt::format("[{}1]", repeat("1,", 99))), "more than 64 dimensions"},
      {"one_offset", with("data_offsets", "[0]"), "has 1 data_offsets"},
      {"three_offsets", with("data_offsets", "[0,4,8]"), "has 3 data_offsets"},
      {"offsets_are_a_number", with("data_offsets", "4"), "data_offsets of tensor `a` hold the number 4"},
      {"offsets_reversed", with("data_offsets", "[4,0]"), "before it begins"},
      {"offset_negative", with("data_offsets", "[-4,0]"), "a negative number"},
      {"offset_past_file", with("data_offsets", "[4,8]"), "ends at byte 8 of 4"},
      {"offset_near_2^63", with("data_offsets", "[9223372036854775803,9223372036854775807]"), "ends at byte"},
      {"overlap", two("[0,4]", "[2,6]", 6), "begins at byte 2, inside another tensor"},
      {"same_place", two("[0,4]", "[0,4]", 4), "begins at byte 0, inside another tensor"},
      {"hole", two("[0,4]", "[8,12]", 12), "after a gap that starts at 4"},
      {"hole_at_start", two("[4,8]", "[8,12]", 12), "after a gap that starts at 0"},
      {"empty_tensor_inside_another",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                         R"("b":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})",
                         "xxxxxxxx"),
       "begins at byte 4, inside another tensor"},
      {"span_too_long", with("data_offsets", "[0,8]", 8), "needs 4 bytes and has 8"},
      {"span_too_short", with("data_offsets", "[0,3]", 3), "needs 4 bytes and has 3"},
      {"half_a_byte", safetensors_bytes(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "xx"),
       "doesn't fill whole bytes"},
      {"trailing_byte", kGood + "x", "end at byte 4 of 5"},
      {"data_without_tensors", safetensors_bytes("{}", "x"), "end at byte 0 of 1"},
      {"metadata_is_a_string", safetensors_bytes(R"({"__metadata__":"x"})"), "__metadata__ is the string"},
      {"metadata_is_null_twice", safetensors_bytes(R"({"__metadata__":null,"__metadata__":{}})"),
       "two entries __metadata__"},
      {"metadata_of_null", safetensors_bytes(R"({"__metadata__":{"k":null}})"), "metadata `k` is null"},
      {"metadata_of_numbers", safetensors_bytes(R"({"__metadata__":{"k":1}})"), "metadata `k` is the number 1"},
      {"metadata_of_objects", safetensors_bytes(R"({"__metadata__":{"k":{}}})"), "metadata `k` is an object"},
      {"name_with_nul", named("a\\u0000b"), "control character"},
      {"name_with_newline", named("a\\nb"), "control character"},
      {"name_with_raw_newline", named("a\nb"), "isn't JSON"},
      {"name_of_1_MB", named(std::string(1'000'000, 'a')), "a tensor's name has 1000000 bytes"},
      {"name_of_20_MB", named(std::string(20'000'000, 'a')), "a string of more than"},
      {"name_like_a_path", named("/etc/passwd"), "absolute path"},
      {"name_that_climbs", named("a/../../b"), "leaves its folder"},
  };
  for (std::size_t bytes = 1; bytes < 8; ++bytes) {
    cases.push_back({fmt::format("file_of_{}_bytes", bytes), std::string(bytes, '\1'), "fewer than its length field"});
  }
  for (std::size_t cut = 1; cut <= 4; ++cut) {
    cases.push_back({fmt::format("data_cut_by_{}", cut), kGood.substr(0, kGood.size() - cut), "ends at byte 4 of"});
  }
  return cases;
}

std::vector<FileCase> accepted_safetensors() {
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  std::vector<FileCase> cases = {
      {"plain", kGood, ""},
      {"no_tensors", safetensors_bytes("{}"), ""},
      {"leading_whitespace", safetensors_bytes(" \t\r\n" + header, "xxxx"), ""},
      {"trailing_whitespace", safetensors_bytes(header + "   \n", "xxxx"), ""},
      {"fields_in_another_order",
       safetensors_bytes(R"({"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}})", "xxxx"), ""},
      {"tensors_in_another_order", two("[4,8]", "[0,4]", 8), ""},
      {"empty_tensor", safetensors_bytes(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})"), ""},
      {"empty_tensors_between",
       safetensors_bytes(R"({"z":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                         R"("b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                         R"("c":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})",
                         "xxxx"),
       ""},
      {"scalar", with("shape", "[]"), ""},
      {"rank_64", with("shape", fmt::format("[{}1]", repeat("1,", 63))), ""},
      {"metadata",
       safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{"k":"v\n\u0000"}})",
                         "xxxx"),
       ""},
      {"empty_metadata", safetensors_bytes(R"({"__metadata__":{}})"), ""},
      {"metadata_is_null",
       safetensors_bytes(R"({"__metadata__":null,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "xxxx"), ""},
      {"escaped_name", named("\\u0061\\/b"), ""},
      {"name_in_utf8", named("q\xc3\xa4"), ""},
      {"empty_name", named(""), ""},
      {"name_with_slashes", named("params/layer_0/..kernel"), ""},
      {"name_of_4096_bytes", named(std::string(4096, 'a')), ""},
  };
  constexpr std::pair<const char*, int> kBits[] = {
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  for (const auto& [dtype, bits] : kBits) {
    cases.push_back(
        {fmt::format("dtype_{}", dtype),
         safetensors_bytes(fmt::format(R"({{"a":{{"dtype":"{}","shape":[2,4],"data_offsets":[0,{}]}}}})", dtype, bits),
                           std::string(static_cast<std::size_t>(bits), 'x')),
         ""});
  }
  return cases;
}

std::vector<FileCase> malformed_indexes() {
  const auto mapped = [](std::string_view file) { return fmt::format(R"({{"weight_map":{{"q":"{}"}}}})", file); };
  return {
      {"empty", "", "isn't JSON"},
      {"list", "[]", "it is an array"},
      {"no_map", R"({"metadata":{}})", "no weight_map"},
      {"map_is_a_list", R"({"weight_map":["q"]})", "weight_map is an array"},
      {"map_is_null", R"({"weight_map":null})", "weight_map is null"},
      {"two_maps", R"({"weight_map":{},"weight_map":{}})", "two entries weight_map"},
      {"tensor_twice", R"({"weight_map":{"q":"a.safetensors","q":"b.safetensors"}})", "names tensor `q` twice"},
      {"file_is_a_number", R"({"weight_map":{"q":1}})", "the file of tensor `q` is the number 1"},
      {"file_is_an_object", R"({"weight_map":{"q":{}}})", "the file of tensor `q` is an object"},
      {"file_is_a_list", R"({"weight_map":{"q":["a"]}})", "the file of tensor `q` is an array"},
      {"file_is_empty", mapped(""), "not a file inside"},
      {"absolute", mapped("/etc/passwd"), "not a file inside"},
      {"parent", mapped("../a.safetensors"), "not a file inside"},
      {"parent_inside", mapped("a/../../b.safetensors"), "not a file inside"},
      {"parent_alone", mapped(".."), "not a file inside"},
      {"folder", mapped("a/"), "not a file inside"},
      {"file_with_nul", mapped("a\\u0000b"), "not a file inside"},
      {"file_with_newline", mapped("a\\nb"), "not a file inside"},
      {"byte_order_mark", "\xef\xbb\xbf" + mapped("a.safetensors"), "byte order mark"},
      {"nesting", R"({"metadata":)" + repeat("[", 10'000) + repeat("]", 10'000) + "}", "nested deeper"},
      {"million_members", "{\"weight_map\":{" + repeat("\"q\":\"a\",", (std::size_t{1} << 20) + 1) + "\"z\":\"a\"}}",
       "more than 262144 members"},
      {"long_name", R"({"weight_map":{")" + std::string(5000, 'a') + R"(":"a"}})", "a string of more than 4096"},
      {"text_behind", R"({"weight_map":{}} x)", "isn't JSON"},
      {"nul_behind", std::string(R"({"weight_map":{}})") + '\0', "a byte of value 0"},
  };
}

std::vector<FileCase> accepted_indexes() {
  return {
      {"plain", R"({"metadata":{"total_size":123},"weight_map":{"q":"a.safetensors"}})", ""},
      {"map_first", R"({"weight_map":{"q":"a.safetensors","k":"b.safetensors"},"metadata":{"x":[1,-2.5,null,{}]}})",
       ""},
      {"empty_map", R"({"weight_map":{}})", ""},
      {"inner_map_in_metadata", R"({"metadata":{"weight_map":{"q":7}},"weight_map":{"q":"sub/a.safetensors"}})", ""},
  };
}

}  // namespace ringattn::testing
