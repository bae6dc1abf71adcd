#include "json.h"

#include <algorithm>
#include <cstdlib>

namespace otaro {
namespace {

constexpr int kDepth = 64;
constexpr size_t kMostBytes = size_t{1} << 30;

int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Four hexadecimal digits, or -1.
int64_t unit(std::string_view text) {
  if (text.size() < 4) return -1;
  int64_t code = 0;
  for (size_t i = 0; i < 4; ++i) {
    if (hex(text[i]) < 0) return -1;
    code = code * 16 + hex(text[i]);
  }
  return code;
}

// The code point after "\u", of which `used` digits and letters are part; -1 for half of a pair.
int64_t escaped(std::string_view text, size_t& used) {
  const int64_t first = unit(text);
  used = 4;
  if (first < 0xd800 || first > 0xdfff) return first;
  if (first > 0xdbff || text.substr(4, 2) != "\\u") return -1;
  const int64_t second = unit(text.substr(6));
  if (second < 0xdc00 || second > 0xdfff) return -1;
  used = 10;
  return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
}

// The text was checked when it was parsed.
std::string unescape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      out += text[i];
      continue;
    }
    constexpr std::string_view kLetters = "bfnrt", kMeant = "\b\f\n\r\t";
    const char letter = text[++i];
    if (letter == 'u') {
      size_t used;
      append_utf8(out, static_cast<uint32_t>(escaped(text.substr(i + 1), used)));
      i += used;
    } else {
      const size_t known = kLetters.find(letter);
      out += known == std::string_view::npos ? letter : kMeant[known];
    }
  }
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

void append_utf8(std::string& out, uint32_t code) {
  const auto add = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      add(0xe0 | code >> 12);
    } else {
      add(0xf0 | code >> 18), add(0x80 | (code >> 12 & 63));
    }
    add(0x80 | (code >> 6 & 63));
  }
  add(0x80 | (code & 63));
}

Value::Kind Value::kind() const { return document_ ? document_->nodes_[index_].kind : kNone; }

Value Value::operator[](std::string_view key) const {
  if (is(kObject))
    for (Value member = first(); member; member = member.next())
      if (member.key() == key) return member;
  return {};
}

Value Value::first() const {
  return (is(kArray) || is(kObject)) && size() ? Value(document_, index_ + 1) : Value();
}

Value Value::next() const {
  const Json::Node& node = document_->nodes_[index_];
  return node.last ? Value() : Value(document_, node.end);
}

uint32_t Value::size() const { return is(kArray) || is(kObject) ? document_->nodes_[index_].size : 0; }

std::string Value::key() const {
  const Json::Node& node = document_->nodes_[index_];
  return unescape(document_->text_.substr(node.key, node.key_size));
}

std::string_view Value::raw() const {
  if (!is(kString) && !is(kNumber)) return {};
  const Json::Node& node = document_->nodes_[index_];
  return document_->text_.substr(node.begin, node.size);
}

std::string Value::text() const { return is(kString) ? unescape(raw()) : std::string(); }

bool Value::integer(int64_t& out) const {
  const std::string_view digits = raw();
  const bool negative = !digits.empty() && digits[0] == '-';
  if (!is(kNumber) || digits.size() - negative > 18) return false;
  int64_t sum = 0;
  for (const char c : digits.substr(negative)) {
    if (!is_digit(c)) return false;
    sum = sum * 10 + (c - '0');
  }
  out = negative ? -sum : sum;
  return true;
}

// Up to 15 digits and powers of ten that a double has exactly make one rounding: right, and the same
// everywhere.
bool Value::number(double& out) const {
  if (!is(kNumber)) return false;
  const std::string_view digits = raw();
  int64_t mantissa = 0, power = 0;
  int significant = 0;
  size_t i = digits[0] == '-';
  for (bool fraction = false; i < digits.size() && digits[i] != 'e' && digits[i] != 'E'; ++i) {
    if (digits[i] == '.') {
      fraction = true;
      continue;
    }
    if (significant || digits[i] != '0') ++significant;
    if (significant <= 18) mantissa = mantissa * 10 + (digits[i] - '0');
    power -= fraction;
  }
  if (i < digits.size()) {
    const bool signed_ = digits[i + 1] == '-' || digits[i + 1] == '+';
    int64_t exponent = 0;
    for (size_t j = i + 1 + signed_; j < digits.size() && exponent < 10000; ++j)
      exponent = exponent * 10 + (digits[j] - '0');
    power += digits[i + 1] == '-' ? -exponent : exponent;
  }
  if (significant <= 15 && power >= -22 && power <= 22) {
    double ten = 1;
    for (int64_t p = power < 0 ? -power : power; p > 0; --p) ten *= 10;
    out = power < 0 ? static_cast<double>(mantissa) / ten : static_cast<double>(mantissa) * ten;
    if (digits[0] == '-') out = -out;
  } else {
    out = std::strtod(std::string(digits).c_str(), nullptr);
  }
  return true;
}

std::string Json::parse(std::string_view text) {
  text_ = text, at_ = 0;
  nodes_.clear(), problem_.clear();
  if (text.size() > kMostBytes) return "it is longer than a gigabyte";
  if (value(0, 0, 0)) {
    space();
    if (at_ != text_.size()) wrong("something follows");
  }
  if (!problem_.empty()) nodes_.clear();
  return problem_;
}

bool Json::wrong(const char* what) {
  if (problem_.empty()) problem_ = std::string(what) + " at byte " + std::to_string(at_);
  return false;
}

void Json::space() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
    ++at_;
}

bool Json::value(int depth, uint32_t key, uint32_t key_size) {
  if (depth > kDepth) return wrong("it is nested too deeply");
  space();
  if (at_ == text_.size()) return wrong("it ends too early");
  const auto index = static_cast<uint32_t>(nodes_.size());
  nodes_.push_back({Value::kNull, false, key, key_size, at_, 0, 0});
  const char c = text_[at_];
  if (c == '"') {
    uint32_t begin, size;
    if (!string(begin, size)) return false;
    nodes_[index].kind = Value::kString, nodes_[index].begin = begin, nodes_[index].size = size;
  } else if (c == '{' || c == '[') {
    const char close = c == '{' ? '}' : ']';
    uint32_t count = 0, last = 0;
    ++at_;
    space();
    while (at_ < text_.size() && text_[at_] != close) {
      if (count && text_[at_] != ',') return wrong("a comma is missing");
      if (count) ++at_, space();
      uint32_t member = 0, member_size = 0;
      if (c == '{') {
        if (at_ == text_.size() || text_[at_] != '"') return wrong("a key is missing");
        if (!string(member, member_size)) return false;
        space();
        if (at_ == text_.size() || text_[at_] != ':') return wrong("a colon is missing");
        ++at_;
      }
      last = static_cast<uint32_t>(nodes_.size());
      if (!value(depth + 1, member, member_size)) return false;
      ++count;
      space();
    }
    if (at_ == text_.size()) return wrong("it ends too early");
    ++at_;
    nodes_[index].kind = c == '{' ? Value::kObject : Value::kArray, nodes_[index].size = count;
    if (count) nodes_[last].last = true;
  } else if (c == 't' || c == 'f' || c == 'n') {
    nodes_[index].kind = c == 't' ? Value::kTrue : c == 'f' ? Value::kFalse : Value::kNull;
    if (!word(c == 't' ? "true" : c == 'f' ? "false" : "null")) return false;
  } else {
    nodes_[index].kind = Value::kNumber;
    if (!number()) return false;
    nodes_[index].size = at_ - nodes_[index].begin;
  }
  nodes_[index].end = static_cast<uint32_t>(nodes_.size());
  if (depth == 0) nodes_[index].last = true;
  return c != '{' || keys_differ(index) || wrong("a key occurs twice in what ends");
}

bool Json::string(uint32_t& begin, uint32_t& size) {
  begin = ++at_;
  for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
    if (static_cast<unsigned char>(text_[at_]) < 0x20) return wrong("a control character is in a string");
    if (text_[at_] != '\\') continue;
    if (++at_ == text_.size()) break;
    if (text_[at_] == 'u') {
      size_t used;
      if (escaped(text_.substr(at_ + 1), used) < 0) return wrong("an escaped character is none");
      at_ += static_cast<uint32_t>(used);
    } else if (std::string_view("\"\\/bfnrt").find(text_[at_]) == std::string_view::npos) {
      return wrong("an escape is unknown");
    }
  }
  if (at_ >= text_.size()) return wrong("a string does not end");
  size = at_++ - begin;
  return true;
}

bool Json::number() {
  const auto digits = [&] {
    const uint32_t before = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    return at_ > before;
  };
  const auto is = [&](char c) { return at_ < text_.size() && text_[at_] == c; };
  if (is('-')) ++at_;
  const uint32_t first = at_;
  if (!digits() || (text_[first] == '0' && at_ > first + 1)) return wrong("a value is none");
  if (is('.') && (++at_, !digits())) return wrong("a number has no digits");
  if (is('e') || is('E')) {
    ++at_;
    if (is('-') || is('+')) ++at_;
    if (!digits()) return wrong("a number has no digits");
  }
  return true;
}

bool Json::word(std::string_view expected) {
  if (text_.substr(at_, expected.size()) != expected) return wrong("a value is none");
  at_ += static_cast<uint32_t>(expected.size());
  return true;
}

bool Json::keys_differ(uint32_t object) const {
  std::vector<std::string> keys;
  keys.reserve(nodes_[object].size);
  for (Value member = Value(this, object).first(); member; member = member.next())
    keys.push_back(member.key());
  std::sort(keys.begin(), keys.end());
  return std::adjacent_find(keys.begin(), keys.end()) == keys.end();
}

}  // namespace otaro
