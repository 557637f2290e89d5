#include "client/cli/flags.h"

#include <CLI/CLI.hpp>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

template <typename Field>
void AddDType(CLI::App& app, const char* name, Field& field, const char* help) {
  static const std::map<std::string, DType> dtypes = {
      {"f32", DType::kF32}, {"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f64", DType::kF64}};
  app.add_option_function<std::string>(
         name, [&field](const std::string& text) { field = dtypes.at(text); }, help)
      ->type_name("f32|bf16|f16|f64")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "f64"}).description(""));
}

}  // namespace

void AddTimeFlag(CLI::App& app, const char* name, absl::Duration& field, const char* help, absl::Duration least) {
  const auto set = [name, &field, least](const std::string& text) {
    if (!absl::ParseDuration(text, &field) || field < least) {
      const std::string bound =
          least > absl::ZeroDuration() ? absl::StrCat(" of ", absl::FormatDuration(least), " at least") : "";
      throw CLI::ValidationError(name, absl::StrCat("got \"", text, "\", expected a time such as 10s", bound));
    }
  };
  app.add_option_function<std::string>(name, set, help)->type_name("TIME");
}

void AddBytesFlag(CLI::App& app, const char* name, int64_t& field, const char* help) {
  app.add_option(name, field, help)
      ->type_name("BYTES")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true).description(""))
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""));
}

void AddCountFlag(CLI::App& app, const char* name, int64_t& field, const char* help, int64_t max) {
  app.add_option(name, field, help)->type_name("N")->check(CLI::Range(int64_t{1}, max).description(""));
}

void AddNumberFlag(CLI::App& app, const char* name, double& field, const char* help) {
  constexpr double kMost = 1e18;
  app.add_option(name, field, help)
      ->type_name("NUMBER")
      ->check(CLI::Range(std::numeric_limits<double>::min(), kMost).description(""));
}

void AddDTypeFlag(CLI::App& app, const char* name, DType& field, const char* help) { AddDType(app, name, field, help); }

void AddDTypeFlag(CLI::App& app, const char* name, std::optional<DType>& field, const char* help) {
  AddDType(app, name, field, help);
}

void AddSwitch(CLI::App& app, const char* name, bool& field, const char* help) {
  app.add_flag(name, field, help)->check(CLI::IsMember({"true", "false"}).description(""));
}

}  // namespace shardmlp
