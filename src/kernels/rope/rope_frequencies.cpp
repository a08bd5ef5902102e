// SPDX-License-Identifier: Apache-2.0
#include "kernels/rope/rope_frequencies.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "base/error.hpp"
#include "kernels/rope/double_double.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kTypeNames[] = {"default",  "linear", "dynamic",     "yarn",
                                           "longrope", "llama3", "proportional"};

[[noreturn]] void refuse_rope(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

// Numeric members of RopeParameters, by name.
struct NumberRow {
  std::string_view name;
  std::optional<double> RopeParameters::*member;
  unsigned types;  // that use it: bits 1 << RopeType
};
constexpr unsigned bit(RopeType type) { return 1U << static_cast<unsigned>(type); }
constexpr NumberRow kNumbers[] = {
    {"factor", &RopeParameters::factor, ~bit(RopeType::kDefault)},
    {"attention_factor", &RopeParameters::attention_factor, bit(RopeType::kYarn) | bit(RopeType::kLongrope)},
    {"original_max_position_embeddings", &RopeParameters::original_max_position_embeddings,
     bit(RopeType::kYarn) | bit(RopeType::kLongrope) | bit(RopeType::kLlama3)},
    {"max_position_embeddings", &RopeParameters::max_position_embeddings,
     bit(RopeType::kDynamic) | bit(RopeType::kYarn) | bit(RopeType::kLongrope)},
    {"beta_fast", &RopeParameters::beta_fast, bit(RopeType::kYarn)},
    {"beta_slow", &RopeParameters::beta_slow, bit(RopeType::kYarn)},
    {"mscale", &RopeParameters::mscale, bit(RopeType::kYarn)},
    {"mscale_all_dim", &RopeParameters::mscale_all_dim, bit(RopeType::kYarn)},
    {"low_freq_factor", &RopeParameters::low_freq_factor, bit(RopeType::kLlama3)},
    {"high_freq_factor", &RopeParameters::high_freq_factor, bit(RopeType::kLlama3)},
};

std::optional<double> real_of(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<std::vector<double>> list_of(std::string_view text) {
  std::vector<double> values;
  while (true) {
    const std::size_t colon = text.find(':');
    const auto value = real_of(text.substr(0, colon));
    if (!value) return std::nullopt;
    values.push_back(*value);
    if (colon == std::string_view::npos) return values;
    text.remove_prefix(colon + 1);
  }
}

bool set_flag(bool& flag, std::string_view text) {
  flag = text == "true";
  return text == "true" || text == "false";
}

// Throws if a given number is out of range or not used by the type, or if a number that the type needs is missing.
void check_parameters(const RopeParameters& p) {
  const std::string_view type = rope_type_name(p.type);
  for (const NumberRow& row : kNumbers) {
    const std::optional<double>& value = p.*row.member;
    if (!value) continue;
    if ((row.types & bit(p.type)) == 0) {
      refuse_rope(fmt::format("{} is given for RoPE of type {}", row.name, type), "the type doesn't use it",
                  "Leave it out, or check rope_type.");
    }
    if (!(*value > 0.0) || !std::isfinite(*value)) {
      refuse_rope(fmt::format("{} of RoPE is {}", row.name, *value), "it is positive and finite", "Check it.");
    }
  }
  const auto need = [&](std::string_view name, bool given) {
    if (given) return;
    refuse_rope(fmt::format("{} is missing", name), fmt::format("RoPE of type {} needs it", type),
                "Give the value in the model's rope_parameters.");
  };
  const bool by_length = p.type == RopeType::kDynamic || p.type == RopeType::kLongrope;
  if (by_length && !p.length) {
    refuse_rope(fmt::format("RoPE of type {} without a length", type),
                "its frequencies depend on the sequence length, so keys in a cache would change as it grows",
                "Fix the length: give the longest one that sequences reach.");
  }
  if (!by_length && p.length) {
    refuse_rope(fmt::format("length is given for RoPE of type {}", type),
                "only dynamic and longrope depend on the sequence length", "Leave it out.");
  }
  if (p.length && *p.length < 1) {
    refuse_rope(fmt::format("length of RoPE is {}", *p.length), "it is at least 1", "Check it.");
  }
  if (!(p.theta > 1.0) || !std::isfinite(p.theta)) {
    refuse_rope(fmt::format("rope_theta is {}", p.theta), "it is greater than 1 and finite", "Check it.");
  }
  if (!(p.partial_rotary_factor > 0.0) || p.partial_rotary_factor > 1.0) {
    refuse_rope(fmt::format("partial_rotary_factor is {}", p.partial_rotary_factor),
                "it is greater than 0, and at most 1", "Check it.");
  }
  const bool factor_needed = p.type == RopeType::kLinear || p.type == RopeType::kDynamic || p.type == RopeType::kLlama3;
  need("factor", !factor_needed || p.factor);
  if (p.factor && *p.factor < 1.0) {
    refuse_rope(fmt::format("factor of RoPE is {}", *p.factor), "it is at least 1", "Check it.");
  }
  const bool original = p.type == RopeType::kYarn || p.type == RopeType::kLongrope || p.type == RopeType::kLlama3;
  need("original_max_position_embeddings", !original || p.original_max_position_embeddings);
  need("max_position_embeddings", p.type != RopeType::kDynamic || p.max_position_embeddings);
  if (p.type == RopeType::kYarn || p.type == RopeType::kLongrope) {
    need("factor or max_position_embeddings", p.factor || p.max_position_embeddings);
  }
  if (p.type == RopeType::kLlama3) {
    need("low_freq_factor", p.low_freq_factor.has_value());
    need("high_freq_factor", p.high_freq_factor.has_value());
    if (*p.high_freq_factor <= *p.low_freq_factor) {
      refuse_rope(fmt::format("high_freq_factor is {}", *p.high_freq_factor),
                  fmt::format("it is greater than low_freq_factor, {}", *p.low_freq_factor), "Check them.");
    }
  }
  if (p.type == RopeType::kLongrope) {
    need("short_factor", !p.short_factor.empty());
    need("long_factor", !p.long_factor.empty());
  } else if (!p.short_factor.empty() || !p.long_factor.empty()) {
    refuse_rope(fmt::format("short_factor or long_factor is given for RoPE of type {}", type),
                "the type doesn't use it", "Leave it out, or check rope_type.");
  }
}

double exact_log(double x) { return log(DoubleDouble{x}).high; }

// yarn and longrope: the ratio of lengths, unless the factor is given.
double factor_of(const RopeParameters& p) {
  return p.factor ? *p.factor : *p.max_position_embeddings / *p.original_max_position_embeddings;
}

double attention_factor_of(const RopeParameters& p) {
  if (p.attention_factor) return *p.attention_factor;
  if (p.type == RopeType::kLongrope) {
    const double factor = factor_of(p);
    if (factor <= 1.0) return 1.0;
    return std::sqrt(1.0 + exact_log(factor) / exact_log(*p.original_max_position_embeddings));
  }
  if (p.type != RopeType::kYarn) return 1.0;
  const auto mscale = [factor = factor_of(p)](double scale) {
    return factor <= 1.0 ? 1.0 : 0.1 * scale * exact_log(factor) + 1.0;
  };
  return p.mscale && p.mscale_all_dim ? mscale(*p.mscale) / mscale(*p.mscale_all_dim) : mscale(1.0);
}

// The formulas in Real, evaluated as in PyTorch: a Python number in an operation with a tensor becomes Real, and a
// number divided by a tensor is the number times the reciprocal.
template <class Real>
class Frequencies {
 public:
  // `dim`: elements that divide the exponents.
  Frequencies(const RopeParameters& parameters, int dim) : p_(parameters), dim_(dim) {}

  std::vector<Real> compute(int pairs) const {
    std::vector<Real> powers;
    for (int i = 0; i < pairs; ++i) powers.push_back(power(i));
    switch (p_.type) {
      case RopeType::kDefault:
      case RopeType::kDynamic:
        return each(powers, [](Real power, std::size_t) { return Real{1} / power; });
      case RopeType::kLinear:
      case RopeType::kProportional:
        return each(powers, [&](Real power, std::size_t) {
          return Real{1} / power / static_cast<Real>(p_.factor.value_or(1.0));
        });
      case RopeType::kLongrope: {
        const bool is_long = static_cast<double>(*p_.length) > *p_.original_max_position_embeddings;
        const std::vector<double>& factors = is_long ? p_.long_factor : p_.short_factor;
        return each(powers,
                    [&](Real power, std::size_t i) { return Real{1} / (static_cast<Real>(factors[i]) * power); });
      }
      case RopeType::kYarn:
        return yarn(powers);
      case RopeType::kLlama3:
        return each(powers, [&](Real power, std::size_t) { return llama3(Real{1} / power); });
    }
    return {};
  }

 private:
  template <class Each>
  static std::vector<Real> each(const std::vector<Real>& powers, const Each& value) {
    std::vector<Real> values;
    for (std::size_t i = 0; i < powers.size(); ++i) values.push_back(value(powers[i], i));
    return values;
  }

  double base() const {
    if (p_.type != RopeType::kDynamic) return p_.theta;
    const double most = *p_.max_position_embeddings;
    const double length = std::max(static_cast<double>(*p_.length), most);
    const double stretch = *p_.factor * length / most - (*p_.factor - 1.0);
    const double exponent = static_cast<double>(dim_) / static_cast<double>(dim_ - 2);
    return p_.theta * pow(DoubleDouble{stretch}, DoubleDouble{exponent}).high;
  }

  // theta^(2i / dim), correctly rounded for the rounded exponent. Exact: for the exact one.
  Real power(int i) const {
    const auto of_real = [](Real value) { return DoubleDouble{static_cast<double>(value)}; };
    DoubleDouble exponent = of_real(static_cast<Real>(2 * i) / static_cast<Real>(dim_));
    if constexpr (sizeof(Real) == sizeof(double)) exponent = of_real(2 * i) / of_real(dim_);
    const DoubleDouble power = pow(of_real(static_cast<Real>(base())), exponent);
    return static_cast<Real>(power.high);
  }

  std::vector<Real> yarn(const std::vector<Real>& powers) const {
    const double original = *p_.original_max_position_embeddings;
    const auto correction = [&](double rotations) {
      return dim_ * exact_log(original / (rotations * 2.0 * std::numbers::pi)) / (2.0 * exact_log(p_.theta));
    };
    double low = correction(p_.beta_fast.value_or(32.0));
    double high = correction(p_.beta_slow.value_or(1.0));
    if (p_.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(dim_ - 1));
    if (low == high) high += 0.001;
    return each(powers, [&](Real power, std::size_t i) {
      const Real linear = (static_cast<Real>(i) - static_cast<Real>(low)) / static_cast<Real>(high - low);
      const Real extrapolated = Real{1} - std::clamp(linear, Real{0}, Real{1});
      const Real interpolation = Real{1} / (static_cast<Real>(factor_of(p_)) * power);
      return interpolation * (Real{1} - extrapolated) + Real{1} / power * extrapolated;
    });
  }

  Real llama3(Real frequency) const {
    const double original = *p_.original_max_position_embeddings;
    const double low = *p_.low_freq_factor, high = *p_.high_freq_factor;
    const auto factor = static_cast<Real>(*p_.factor);
    const Real wavelength = Real{1} / frequency * static_cast<Real>(2.0 * std::numbers::pi);
    if (wavelength > static_cast<Real>(original / low)) return frequency / factor;
    if (wavelength < static_cast<Real>(original / high)) return frequency;
    const Real smooth =
        (Real{1} / wavelength * static_cast<Real>(original) - static_cast<Real>(low)) / static_cast<Real>(high - low);
    return (Real{1} - smooth) * frequency / factor + smooth * frequency;
  }

  const RopeParameters& p_;
  int dim_;
};

std::vector<std::uint8_t> axes_of(const RopeParameters& p, int pairs) {
  if (p.mrope_section.empty()) {
    if (!p.mrope_interleaved) return {};
    refuse_rope("mrope_interleaved is given without mrope_section", "it says how its sections alternate",
                "Give both, or none.");
  }
  std::int64_t sum = 0;
  bool fits = p.mrope_section.size() == kMaxRopeAxes;
  for (const std::int64_t section : p.mrope_section) {
    fits = fits && section >= 0 && section <= pairs;
    sum += fits ? section : 0;
  }
  if (!fits || sum != pairs) {
    refuse_rope("mrope_section does not fit",
                fmt::format("it has the pairs of {} axes, {} together", kMaxRopeAxes, pairs), "Check it.");
  }
  std::vector<std::uint8_t> axes(static_cast<std::size_t>(pairs), 0);
  if (!p.mrope_interleaved) {
    auto at = axes.begin();
    for (std::size_t axis = 0; axis < p.mrope_section.size(); ++axis) {
      at = std::fill_n(at, p.mrope_section[axis], static_cast<std::uint8_t>(axis));
    }
    return axes;
  }
  // Height has pairs 1, 4, …, and width has pairs 2, 5, …, as many as their sections say. Time has the others.
  for (std::size_t axis = 1; axis < p.mrope_section.size(); ++axis) {
    for (std::int64_t i = 0; i < p.mrope_section[axis]; ++i) {
      const auto pair = axis + 3 * static_cast<std::size_t>(i);
      if (pair >= axes.size()) {
        refuse_rope("mrope_section does not fit", fmt::format("alternating sections leave {} pairs", pairs),
                    "Check mrope_section and mrope_interleaved.");
      }
      axes[pair] = static_cast<std::uint8_t>(axis);
    }
  }
  return axes;
}

}  // namespace

std::string_view rope_type_name(RopeType type) { return kTypeNames[static_cast<std::size_t>(type)]; }
std::span<const std::string_view> rope_type_names() { return kTypeNames; }

std::string_view rope_parameter_names() {
  static const std::string names = [] {
    std::string text;
    for (const NumberRow& row : kNumbers) text += fmt::format("{}, ", row.name);
    return text + "truncate, short_factor, long_factor, mrope_section, mrope_interleaved, length";
  }();
  return names;
}

bool set_rope_parameter(RopeParameters& p, std::string_view name, std::string_view text) {
  for (const NumberRow& row : kNumbers) {
    if (row.name == name) return (p.*row.member = real_of(text)).has_value();
  }
  if (name == "truncate") return set_flag(p.truncate, text);
  if (name == "mrope_interleaved") return set_flag(p.mrope_interleaved, text);
  const auto list = list_of(text);
  if (!list) return false;
  if (name == "short_factor" || name == "long_factor") {
    (name == "short_factor" ? p.short_factor : p.long_factor) = *list;
    return true;
  }
  if (name == "length") {
    p.length = static_cast<std::int64_t>(list->front());
    return list->size() == 1 && list->front() >= 1.0 && list->front() < 0x1p53;
  }
  if (name != "mrope_section") return false;
  p.mrope_section.clear();
  for (const double section : *list) {
    if (section != std::floor(section) || section < 0.0 || section > kMaxRopeDim) return false;
    p.mrope_section.push_back(static_cast<std::int64_t>(section));
  }
  return true;
}

std::string_view set_rope_parameters(RopeParameters& parameters, std::string_view text) {
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view pair = text.substr(0, comma);
    const std::size_t equals = std::min(pair.find('='), pair.size());
    const std::string_view value = equals < pair.size() ? pair.substr(equals + 1) : std::string_view();
    if (!set_rope_parameter(parameters, pair.substr(0, equals), value)) return pair.empty() ? "," : pair;
    if (comma == std::string_view::npos) return {};
    text.remove_prefix(comma + 1);
  }
}

RopeSpec make_rope_spec(const RopeParameters& p, Dtype dtype, int head_dim, RopePairs pairs, bool exact) {
  check_parameters(p);
  RopeSpec spec;
  spec.dtype = dtype;
  spec.head_dim = head_dim;
  spec.pairs = pairs;
  spec.exact = exact;
  spec.attention_factor = static_cast<float>(attention_factor_of(p));
  // A proportional type pairs elements of the whole head, and turns the first part of the pairs.
  const bool proportional = p.type == RopeType::kProportional;
  const int part = static_cast<int>(head_dim * p.partial_rotary_factor);
  spec.rotary_dim = proportional ? head_dim : part;
  if (spec.rotary_dim < 2 || spec.rotary_dim % 2 != 0 || head_dim > kMaxRopeDim) {
    spec.frequencies.assign(static_cast<std::size_t>(std::max(spec.rotary_dim, 0) / 2), 0.0);
    check_rope(spec);  // throws
  }
  const int turned = proportional ? static_cast<int>(p.partial_rotary_factor * head_dim / 2) : spec.pair_count();
  for (const std::vector<double>* factors : {&p.short_factor, &p.long_factor}) {
    if (factors->empty() || std::ssize(*factors) == turned) continue;
    refuse_rope(fmt::format("short_factor or long_factor has {} numbers", factors->size()),
                fmt::format("rotary_dim {} has {} pairs", spec.rotary_dim, turned), "Give one for each pair.");
  }
  if (p.type == RopeType::kDynamic && spec.rotary_dim == 2) {
    refuse_rope("RoPE of type dynamic with rotary_dim 2", "its formula divides by rotary_dim - 2", "Use another type.");
  }
  if (exact) {
    spec.frequencies = Frequencies<double>(p, spec.rotary_dim).compute(turned);
  } else {
    const std::vector<float> values = Frequencies<float>(p, spec.rotary_dim).compute(turned);
    spec.frequencies.assign(values.begin(), values.end());
  }
  spec.frequencies.resize(static_cast<std::size_t>(spec.pair_count()), 0.0);
  spec.axes = axes_of(p, spec.pair_count());
  check_rope(spec);
  return spec;
}

}  // namespace ringattn
