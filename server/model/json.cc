#include "server/model/json.h"

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;
constexpr int64_t kMaxValueCount = 4 << 20;
constexpr size_t kMaxDescription = 80;

// Builds the document as the parser reads it, and stops the parser where a bound is passed.
class BoundedBuilder final : public nlohmann::json_sax<json> {
 public:
  json TakeRoot() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return Add(json()) != nullptr; }
  bool boolean(bool value) override { return Add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override { return Add(value) != nullptr; }
  bool string(string_t& value) override { return Add(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return Fail("holds binary data"); }
  bool start_object(size_t) override { return Enter(json::object()); }
  bool start_array(size_t) override { return Enter(json::array()); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& value) override {
    if (open_.back()->contains(value)) return Fail(absl::StrCat("has the key ", Describe(value), " twice"));
    key_ = std::move(value);
    return true;
  }
  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("is no JSON at byte ", position, ", near ", Describe(token)));
  }

 private:
  json* Add(json value) {
    if (++value_count_ > kMaxValueCount) {
      Fail(absl::StrCat("has more than ", kMaxValueCount, " values"));
      return nullptr;
    }
    if (open_.empty()) return &(root_ = std::move(value));
    json& parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[key_] = std::move(value));
  }
  bool Enter(json container) {
    if (open_.size() == kMaxDepth) return Fail(absl::StrCat("is nested more than ", kMaxDepth, " levels deep"));
    json* const added = Add(std::move(container));
    if (added != nullptr) open_.push_back(added);
    return added != nullptr;
  }
  bool Leave() {
    open_.pop_back();
    return true;
  }
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  json root_;
  std::vector<json*> open_;  // containers from the root to where the parser is; only the last one grows
  std::string key_;
  int64_t value_count_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJsonObject(absl::string_view text, absl::string_view path, Reason corrupt) {
  BoundedBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return Error(absl::StatusCode::kDataLoss, corrupt, absl::StrCat(path, " ", builder.error()));
  }
  json document = builder.TakeRoot();
  if (!document.is_object()) {
    return Error(absl::StatusCode::kDataLoss, corrupt,
                 absl::StrCat(path, " holds ", Describe(document), "; a JSON object was expected"));
  }
  return document;
}

const json* FindValue(const json& object, absl::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::optional<int64_t> AsCount(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(count);
}

std::string Describe(const json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  if (text.size() > kMaxDescription) text = absl::StrCat(text.substr(0, kMaxDescription), "...");
  return text;
}

}  // namespace shardmlp
