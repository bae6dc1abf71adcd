#include "tokenizer.h"

#include <algorithm>
#include <cstring>
#include <queue>

#include "unicode.h"

namespace otaro {
namespace {

constexpr std::string_view kSpace =
  "\xe2\x96\x81";  // U+2581, which stands for a space in LLaMA's vocabularies

// Patterns that texts are split by, as tokenizer.json spells them.
constexpr std::string_view kGpt2Pattern =
  R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
struct Pattern {
  std::string_view text;
  int digits;
};
constexpr Pattern kLlama3Patterns[] = {
  {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
   R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
   3},
  {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
   R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
   1},
  {R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*)"
   R"(|\s*[\r\n]|\s+(?!\S)|\s+)",
   3},
};

template <size_t count>
bool in(const Range (&ranges)[count], uint32_t code) {
  const Range* after = std::upper_bound(ranges, ranges + count, code,
                                        [](uint32_t c, const Range& range) { return c < range.first; });
  return after != ranges && code <= after[-1].last;
}

bool is_letter(uint32_t code) {
  return code < 128 ? (code | 32) >= 'a' && (code | 32) <= 'z' : in(kLetters, code);
}
bool is_number(uint32_t code) { return code < 128 ? code >= '0' && code <= '9' : in(kNumbers, code); }
bool is_space(uint32_t code) {
  return code < 128 ? code == ' ' || (code >= 9 && code <= 13) : in(kSpaces, code);
}
bool is_newline(uint32_t code) { return code == '\r' || code == '\n'; }
bool is_other(uint32_t code) { return !is_space(code) && !is_letter(code) && !is_number(code); }

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const int bytes = character_at(text, at).bytes;
    if (!bytes) return false;
    at += static_cast<size_t>(bytes);
  }
  return true;
}

// The end of a run of characters from a place on, of at most so many.
template <class Is>
size_t run(std::string_view text, size_t at, Is&& is, int most = INT32_MAX) {
  for (; at < text.size() && most > 0; --most) {
    const Character c = character_at(text, at);
    if (!is(c.code)) break;
    at += static_cast<size_t>(c.bytes);
  }
  return at;
}

// The end of 's, 't, 're, 've, 'm, 'll or 'd; or `at`.
size_t contraction(std::string_view text, size_t at, bool any_case) {
  if (text[at] != '\'') return at;
  const std::string_view rest = text.substr(at + 1);
  const auto letter = [&](size_t i) -> char {
    if (i >= rest.size()) return 0;
    const char c = rest[i];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  const char first = letter(0), second = letter(1);
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
    return at + 3;
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  if (any_case && rest.substr(0, 2) == "\xc5\xbf") return at + 3;  // the long s
  return at;
}

// What \s+(?!\S)|\s+ takes of white space: all but the last of it, where something follows.
size_t space(std::string_view text, size_t at) {
  const size_t end = run(text, at, is_space);
  if (end == text.size()) return end;
  size_t last = at;
  for (size_t i = at; i < end; i += static_cast<size_t>(character_at(text, i).bytes)) last = i;
  return last > at ? last : end;
}

size_t gpt2(std::string_view text, size_t at) {
  if (const size_t end = contraction(text, at, false); end > at) return end;
  const size_t from = at + (text[at] == ' ');
  for (const auto is : {is_letter, is_number, is_other})
    if (const size_t end = run(text, from, is); end > from) return end;
  return space(text, at);
}

size_t llama3(std::string_view text, size_t at, int digits) {
  if (const size_t end = contraction(text, at, true); end > at) return end;
  const Character c = character_at(text, at);
  const size_t next = at + static_cast<size_t>(c.bytes);
  if (is_letter(c.code)) return run(text, at, is_letter);
  if (is_number(c.code)) return run(text, at, is_number, digits);
  if (!is_newline(c.code))
    if (const size_t end = run(text, next, is_letter); end > next) return end;
  const size_t from = at + (c.code == ' ');
  if (const size_t end = run(text, from, is_other); end > from) return run(text, end, is_newline);
  const size_t last = text.substr(0, run(text, at, is_space)).find_last_of("\r\n");
  return last != std::string_view::npos && last >= at ? last + 1 : space(text, at);
}

// GPT-2's letters for bytes: those that can be seen stand for themselves, others follow from 256 on.
struct Letters {
  uint32_t of_byte[256];
  std::unordered_map<uint32_t, uint8_t> bytes;

  Letters() {
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool seen = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      of_byte[byte] = seen ? byte : next++;
      bytes[of_byte[byte]] = static_cast<uint8_t>(byte);
    }
  }

  // The bytes of a token; whether it is one.
  bool decode(std::string_view token, std::string& out) const {
    out.clear();
    for (size_t at = 0; at < token.size();) {
      const Character c = character_at(token, at);
      const auto found = bytes.find(c.code);
      if (!c.bytes || found == bytes.end()) return false;
      out += static_cast<char>(found->second);
      at += static_cast<size_t>(c.bytes);
    }
    return true;
  }
};

const Letters& letters() {
  static const Letters one;
  return one;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at; (at = text.find(from)) != std::string_view::npos; text.remove_prefix(at + from.size()))
    out.append(text.substr(0, at)).append(to);
  return out.append(text);
}

std::string unknown(const char* what, const std::string& name) {
  return "this program knows no " + std::string(what) + " " + (name.empty() ? "of such a form" : name);
}

bool is_none(const Value& value) { return !value || value.is(Value::kNull); }

int combining_class(uint32_t code) {
  const auto* found = std::lower_bound(std::begin(kCombining), std::end(kCombining), code,
                                       [](const CombiningClass& one, uint32_t c) { return one.code < c; });
  return found != std::end(kCombining) && found->code == code ? static_cast<int>(found->number) : 0;
}

constexpr uint32_t kHangul = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7;
constexpr uint32_t kLeads = 19, kVowels = 21, kTails = 28, kSyllables = kLeads * kVowels * kTails;

void decompose(uint32_t code, std::vector<uint32_t>& out) {
  if (code - kHangul < kSyllables) {
    const uint32_t syllable = code - kHangul;
    out.push_back(kLead + syllable / (kVowels * kTails));
    out.push_back(kVowel + syllable / kTails % kVowels);
    if (syllable % kTails) out.push_back(kTail + syllable % kTails);
    return;
  }
  const auto* found = std::lower_bound(std::begin(kCanonical), std::end(kCanonical), code,
                                       [](const Canonical& one, uint32_t c) { return one.code < c; });
  if (found == std::end(kCanonical) || found->code != code) return out.push_back(code);
  decompose(static_cast<uint32_t>(found->first), out);
  if (found->second) decompose(static_cast<uint32_t>(found->second), out);
}

// The character that two make, or 0.
uint32_t compose(uint32_t first, uint32_t second) {
  static const auto made = [] {
    std::unordered_map<uint64_t, uint32_t> pairs;
    for (const Canonical& one : kCanonical)
      if (one.composed) pairs[uint64_t{one.first} << 32 | one.second] = static_cast<uint32_t>(one.code);
    return pairs;
  }();
  if (first - kLead < kLeads && second - kVowel < kVowels)
    return kHangul + ((first - kLead) * kVowels + (second - kVowel)) * kTails;
  if (first - kHangul < kSyllables && (first - kHangul) % kTails == 0 && second - kTail - 1 < kTails - 1)
    return first + (second - kTail);
  const auto found = made.find(uint64_t{first} << 32 | second);
  return found == made.end() ? 0 : found->second;
}

}  // namespace

Character character_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<uint8_t>(text[at + i]) : 0u; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const uint32_t first = byte(0);
  if (at >= text.size()) return {0, 0};
  if (first < 0x80) return {first, 1};
  if (first >= 0xc2 && first < 0xe0 && follows(1)) return {(first & 31) << 6 | (byte(1) & 63), 2};
  if (first >= 0xe0 && first < 0xf0 && follows(1) && follows(2)) {
    const uint32_t code = (first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
    if (code >= 0x800 && (code < 0xd800 || code > 0xdfff)) return {code, 3};
  }
  if (first >= 0xf0 && first < 0xf5 && follows(1) && follows(2) && follows(3)) {
    const uint32_t code = (first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
    if (code >= 0x10000 && code < 0x110000) return {code, 4};
  }
  return {0, 0};
}

std::string to_nfc(const std::string& text) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 128; }))
    return text;
  std::vector<uint32_t> codes;
  for (size_t at = 0; at < text.size();) {
    const Character c = character_at(text, at);
    decompose(c.code, codes);
    at += static_cast<size_t>(c.bytes);
  }
  for (size_t begin = 0; begin < codes.size();) {  // marks in the order of their classes
    size_t end = begin;
    while (end < codes.size() && combining_class(codes[end])) ++end;
    std::stable_sort(codes.begin() + static_cast<std::ptrdiff_t>(begin),
                     codes.begin() + static_cast<std::ptrdiff_t>(end),
                     [](uint32_t a, uint32_t b) { return combining_class(a) < combining_class(b); });
    begin = end + 1;
  }
  std::vector<uint32_t> out;
  size_t starter = SIZE_MAX;
  int before = 0;  // the class of the last mark that was kept after the starter
  for (const uint32_t code : codes) {
    const int its = combining_class(code);
    const bool blocked = starter == SIZE_MAX || (out.size() - 1 > starter && (before >= its || before == 0));
    if (const uint32_t made = blocked ? 0 : compose(out[starter], code)) {
      out[starter] = made;
      continue;
    }
    if (its == 0) starter = out.size();
    before = its;
    out.push_back(code);
  }
  std::string composed;
  for (const uint32_t code : out) append_utf8(composed, code);
  return composed;
}

std::string Tokenizer::read(std::string_view json) {
  Json document;
  if (std::string why = document.parse(json); !why.empty()) return "it is not valid JSON: " + why;
  const Value root = document.root();
  if (!root.is(Value::kObject)) return "it is no object";
  std::fill(std::begin(bytes_), std::end(bytes_), -1);
  if (std::string why = read_normalizer(root["normalizer"]); !why.empty()) return why;
  if (std::string why = read_pre_tokenizer(root["pre_tokenizer"]); !why.empty()) return why;
  if (std::string why = read_decoder(root["decoder"]); !why.empty()) return why;
  if (std::string why = read_model(root["model"]); !why.empty()) return why;
  if (std::string why = read_added(root["added_tokens"]); !why.empty()) return why;
  return read_template(root["post_processor"]);
}

// What it says in a text, by its number. Whether that is a number that a vocabulary can have.
bool Tokenizer::add_token(const std::string& content, int64_t id) {
  constexpr int64_t kMostTokens = 1 << 22;
  if (id < 0 || id >= kMostTokens) return false;
  if (static_cast<size_t>(id) >= pieces_.size()) pieces_.resize(static_cast<size_t>(id) + 1);
  pieces_[static_cast<size_t>(id)] = content;
  return true;
}

std::string Tokenizer::read_model(const Value& model) {
  if (model["type"].text() != "BPE") return unknown("model", model["type"].text());
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    if (const Value value = model[name];
        !is_none(value) && !(value.is(Value::kString) && value.raw().empty()))
      return unknown("setting", name);
  byte_fallback_ = model["byte_fallback"].is(Value::kTrue);
  fuses_unknown_ = model["fuse_unk"].is(Value::kTrue);
  ignores_merges_ = model["ignore_merges"].is(Value::kTrue);
  const Value vocabulary = model["vocab"], merges = model["merges"];
  if (!vocabulary.is(Value::kObject) || !merges.is(Value::kArray))
    return "its model has no vocabulary or no merges";
  std::unordered_map<std::string, int32_t> ids;  // as they are spelt
  for (Value token = vocabulary.first(); token; token = token.next()) {
    int64_t id;
    const std::string spelt = token.key();
    std::string content = spelt;
    const bool plain = !byte_level_ || letters().decode(spelt, content);
    if (!byte_level_ && byte_fallback_ && spelt.size() == 6 && spelt.compare(0, 3, "<0x") == 0 &&
        spelt[5] == '>') {
      const int byte = static_cast<int>(std::strtol(spelt.substr(3, 2).c_str(), nullptr, 16));
      if (token.integer(id)) bytes_[byte] = static_cast<int32_t>(id);
      content.assign(1, static_cast<char>(byte));
    } else if (!byte_level_) {
      content = replaced(spelt, kSpace, " ");
    }
    if (!plain) content = spelt;
    if (!token.integer(id) || !add_token(content, id))
      return "the token " + spelt + " has no number, or too large a one";
    ids.emplace(spelt, static_cast<int32_t>(id));
    if (byte_level_ && plain && content.size() == 1)
      bytes_[static_cast<uint8_t>(content[0])] = static_cast<int32_t>(id);
    if (plain) vocabulary_.emplace(byte_level_ ? content : spelt, static_cast<int32_t>(id));
  }
  if (!is_none(model["unk_token"])) {
    const auto found = ids.find(model["unk_token"].text());
    if (found == ids.end()) return "its unknown token is not in its vocabulary";
    unknown_ = found->second;
  }
  uint32_t rank = 0;
  for (Value item = merges.first(); item; item = item.next(), ++rank) {
    std::string left, right;
    if (item.is(Value::kArray) && item.size() == 2) {
      left = item.first().text(), right = item.first().next().text();
    } else {
      const std::string both = item.text();
      const size_t at = both.find(' ');
      if (at != std::string::npos) left = both.substr(0, at), right = both.substr(at + 1);
    }
    const auto first = ids.find(left), second = ids.find(right), made = ids.find(left + right);
    if (first == ids.end() || second == ids.end() || made == ids.end())
      return "merge " + std::to_string(rank) + " is of tokens that are not in the vocabulary";
    merges_[uint64_t{static_cast<uint32_t>(first->second)} << 32 | static_cast<uint32_t>(second->second)] = {
      rank, made->second};
  }
  return "";
}

std::string Tokenizer::read_added(const Value& added) {
  for (Value token = added.first(); token; token = token.next()) {
    int64_t id;
    Added one{token["content"].text(), 0, token["lstrip"].is(Value::kTrue), token["rstrip"].is(Value::kTrue)};
    if (one.content.empty() || !token["id"].integer(id) || !add_token(one.content, id))
      return "an added token has no text or no number";
    one.id = static_cast<int32_t>(id);
    if (token["single_word"].is(Value::kTrue))
      return unknown("added token that is a single word:", one.content);
    if (token["normalized"].is(Value::kTrue) && !normalizers_.empty())
      return unknown("added token that is found after normalization:", one.content);
    if (token["special"].is(Value::kTrue)) pieces_[static_cast<size_t>(id)].clear();
    added_.push_back(std::move(one));
  }
  std::stable_sort(added_.begin(), added_.end(),
                   [](const Added& a, const Added& b) { return a.content.size() > b.content.size(); });
  return "";
}

std::string Tokenizer::read_normalizer(const Value& stated) {
  if (is_none(stated)) return "";
  const std::string type = stated["type"].text();
  if (type == "Sequence") {
    for (Value one = stated["normalizers"].first(); one; one = one.next())
      if (std::string why = read_normalizer(one); !why.empty()) return why;
  } else if (type == "Prepend") {
    normalizers_.push_back({Normalizer::kPrepend, "", stated["prepend"].text()});
  } else if (type == "Replace" && !stated["pattern"]["String"].raw().empty()) {
    normalizers_.push_back(
      {Normalizer::kReplace, stated["pattern"]["String"].text(), stated["content"].text()});
  } else if (type == "NFC") {
    normalizers_.push_back({Normalizer::kNfc, "", ""});
  } else {
    return unknown("normalizer", type);
  }
  return "";
}

std::string Tokenizer::read_pre_tokenizer(const Value& stated) {
  if (is_none(stated)) return "";
  const std::string type = stated["type"].text();
  PreTokenizer step{PreTokenizer::kDigits};
  if (type == "Sequence") {
    for (Value one = stated["pretokenizers"].first(); one; one = one.next())
      if (std::string why = read_pre_tokenizer(one); !why.empty()) return why;
    return "";
  }
  if (type == "ByteLevel") {
    byte_level_ = true;
    if (stated["add_prefix_space"].is(Value::kTrue)) steps_.push_back({PreTokenizer::kPrefixSpace});
    if (stated["use_regex"].is(Value::kFalse)) return "";
    step.kind = PreTokenizer::kGpt2;
  } else if (type == "Digits") {
    step.single_digits = stated["individual_digits"].is(Value::kTrue);
  } else if (type == "Metaspace") {
    if (stated["replacement"].text() != kSpace) return unknown("replacement in", type);
    const std::string scheme = stated["prepend_scheme"].text();
    step.kind = PreTokenizer::kMetaspace;
    step.splits = !stated["split"].is(Value::kFalse);
    step.first_only = scheme == "first", step.prepends = scheme != "never";
  } else if (type == "Split" && stated["invert"].is(Value::kFalse)) {
    const std::string pattern = stated["pattern"]["Regex"].text(), behavior = stated["behavior"].text();
    const auto is_space_away = [](const Normalizer& one) {
      return one.kind == Normalizer::kReplace && one.from == " ";
    };
    if (stated["pattern"]["String"].text() == " " &&
        std::any_of(normalizers_.begin(), normalizers_.end(), is_space_away))
      return "";  // there are no spaces left to split at: Gemma's
    const auto* known = std::find_if(std::begin(kLlama3Patterns), std::end(kLlama3Patterns),
                                     [&](const Pattern& one) { return one.text == pattern; });
    if (behavior != "Isolated") return unknown("behavior of a split:", behavior);
    if (known != std::end(kLlama3Patterns)) {
      step.kind = PreTokenizer::kLlama3, step.digits = known->digits;
    } else if (pattern == kGpt2Pattern) {
      step.kind = PreTokenizer::kGpt2;
    } else {
      return unknown("pattern to split by:", pattern);
    }
  } else {
    return unknown("pre-tokenizer", type);
  }
  steps_.push_back(step);
  return "";
}

std::string Tokenizer::read_template(const Value& stated) {
  if (is_none(stated)) return "";
  const std::string type = stated["type"].text();
  if (type == "ByteLevel") return "";
  if (type == "Sequence") {
    for (Value one = stated["processors"].first(); one; one = one.next())
      if (std::string why = read_template(one); !why.empty()) return why;
    return "";
  }
  if (type != "TemplateProcessing") return unknown("post-processor", type);
  bool behind = false;
  for (Value item = stated["single"].first(); item; item = item.next()) {
    if (item["Sequence"]) {
      behind = true;
      continue;
    }
    const Value ids = stated["special_tokens"][item["SpecialToken"]["id"].text()]["ids"];
    if (!ids.size()) return "its post-processor names a token without a number";
    for (Value one = ids.first(); one; one = one.next()) {
      int64_t id;
      if (!one.integer(id) || id < 0 || id >= static_cast<int64_t>(pieces_.size()))
        return "its post-processor names a token without a number";
      (behind ? after_ : before_).push_back(static_cast<int32_t>(id));
    }
  }
  return "";
}

// Pieces are made when tokens are read. Here is only seen that nothing else is meant.
std::string Tokenizer::read_decoder(const Value& stated) const {
  if (is_none(stated)) return "";
  const std::string type = stated["type"].text();
  if (type == "Sequence") {
    for (Value one = stated["decoders"].first(); one; one = one.next())
      if (std::string why = read_decoder(one); !why.empty()) return why;
    return "";
  }
  const bool of_spaces =
    type == "Replace" && stated["pattern"]["String"].text() == kSpace && stated["content"].text() == " ";
  const bool known = byte_level_ ? type == "ByteLevel"
                                 : of_spaces || type == "ByteFallback" || type == "Fuse" || type == "Strip" ||
                                     type == "Metaspace";
  return known ? "" : unknown("decoder", type);
}

std::string_view Tokenizer::piece(int32_t token) const {
  const auto number = static_cast<size_t>(token);
  return token >= 0 && number < pieces_.size() ? pieces_[number] : std::string_view();
}

std::string Tokenizer::encode(std::string_view text, bool begin_and_end, std::vector<int32_t>& out) const {
  if (!is_utf8(text)) return "the text is not UTF-8";
  if (begin_and_end) out.insert(out.end(), before_.begin(), before_.end());
  size_t from = 0;  // what was encoded
  for (size_t at = 0; at < text.size();) {
    const auto found = std::find_if(added_.begin(), added_.end(), [&](const Added& one) {
      return text[at] == one.content[0] && text.compare(at, one.content.size(), one.content) == 0;
    });
    if (found == added_.end()) {
      ++at;
      continue;
    }
    size_t end = at;
    if (found->strips_left) {
      while (end > from) {
        size_t before = end - 1;
        while (before > from && (static_cast<uint8_t>(text[before]) & 0xc0) == 0x80) --before;
        if (!is_space(character_at(text, before).code)) break;
        end = before;
      }
    }
    encode_part(std::string(text.substr(from, end - from)), from == 0, out);
    out.push_back(found->id);
    at += found->content.size();
    if (found->strips_right) at = run(text, at, is_space);
    from = at;
  }
  encode_part(std::string(text.substr(from)), from == 0, out);
  if (begin_and_end) out.insert(out.end(), after_.begin(), after_.end());
  return "";
}

// Text without added tokens; `first` where the whole text begins with it.
void Tokenizer::encode_part(std::string text, bool first, std::vector<int32_t>& out) const {
  if (text.empty()) return;
  for (const Normalizer& one : normalizers_) {
    if (one.kind == Normalizer::kPrepend)
      text.insert(0, one.to);
    else
      text = one.kind == Normalizer::kNfc ? to_nfc(text) : replaced(text, one.from, one.to);
  }
  Words words = {std::move(text)};
  for (const PreTokenizer& step : steps_) {
    Words next;
    for (size_t i = 0; i < words.size(); ++i)
      for (std::string& word : split(step, words[i], first && i == 0)) next.push_back(std::move(word));
    words = std::move(next);
  }
  for (const std::string& word : words) merge(word, out);
}

Tokenizer::Words Tokenizer::split(const PreTokenizer& step, const std::string& text, bool first) const {
  Words words;
  const auto until = [&](auto&& end_of) {
    for (size_t at = 0; at < text.size();) {
      const size_t end = end_of(at);
      words.push_back(text.substr(at, end - at));
      at = end;
    }
  };
  switch (step.kind) {
    case PreTokenizer::kGpt2: until([&](size_t at) { return gpt2(text, at); }); break;
    case PreTokenizer::kLlama3: until([&](size_t at) { return llama3(text, at, step.digits); }); break;
    case PreTokenizer::kPrefixSpace: words.push_back(text[0] == ' ' ? text : " " + text); break;
    case PreTokenizer::kDigits:
      until([&](size_t at) {
        const bool number = is_number(character_at(text, at).code);
        return run(
          text, at, [&](uint32_t c) { return is_number(c) == number; },
          number && step.single_digits ? 1 : INT32_MAX);
      });
      break;
    case PreTokenizer::kMetaspace: {
      std::string marked = replaced(text, " ", kSpace);
      if (step.prepends && (first || !step.first_only) && marked.compare(0, kSpace.size(), kSpace) != 0)
        marked.insert(0, kSpace);
      for (size_t at = 0; at < marked.size();) {
        const size_t end = step.splits ? marked.find(kSpace, at + 1) : std::string::npos;
        words.push_back(marked.substr(at, end - at));
        at = std::min(end, marked.size());
      }
    }
  }
  return words;
}

std::vector<int32_t> Tokenizer::symbols(std::string_view word) const {
  std::vector<int32_t> found;
  bool unknown_before = false;
  for (size_t at = 0; at < word.size();) {
    const size_t size = byte_level_ ? 1 : static_cast<size_t>(character_at(word, at).bytes);
    const std::string_view character = word.substr(at, size);
    at += size;
    bool is_unknown = false;
    if (const auto token = vocabulary_.find(std::string(character)); token != vocabulary_.end()) {
      found.push_back(token->second);
    } else {
      const auto has = [&](char c) { return bytes_[static_cast<uint8_t>(c)] >= 0; };
      if (byte_fallback_ && !byte_level_ && std::all_of(character.begin(), character.end(), has)) {
        for (const char c : character) found.push_back(bytes_[static_cast<uint8_t>(c)]);
      } else if (unknown_ >= 0) {
        is_unknown = true;
        if (!fuses_unknown_ || !unknown_before) found.push_back(unknown_);
      }
    }
    unknown_before = is_unknown;
  }
  return found;
}

const Tokenizer::Merge* Tokenizer::merged(int32_t left, int32_t right) const {
  const auto found = merges_.find(uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right));
  return found == merges_.end() ? nullptr : &found->second;
}

// Of all neighbours those that the earliest merge is for become one, the leftmost first, until there are
// none.
void Tokenizer::merge(std::string_view word, std::vector<int32_t>& out) const {
  if (ignores_merges_)
    if (const auto whole = vocabulary_.find(std::string(word)); whole != vocabulary_.end())
      return out.push_back(whole->second);
  std::vector<int32_t> tokens = symbols(word);
  const auto count = static_cast<int32_t>(tokens.size());
  std::vector<int32_t> before(tokens.size()), after(tokens.size());
  struct Pair {
    uint32_t rank;
    int32_t left, made;
    bool operator<(const Pair& other) const {  // the largest is on top
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::priority_queue<Pair> pairs;
  const auto consider = [&](int32_t left, int32_t right) {
    if (left < 0 || right >= count) return;
    if (const Merge* one = merged(tokens[static_cast<size_t>(left)], tokens[static_cast<size_t>(right)]))
      pairs.push({one->rank, left, one->made});
  };
  for (int32_t i = 0; i < count; ++i) {
    before[static_cast<size_t>(i)] = i - 1, after[static_cast<size_t>(i)] = i + 1;
    consider(i, i + 1);
  }
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    const auto left = static_cast<size_t>(pair.left);
    const int32_t right = after[left];
    if (tokens[left] < 0 || right >= count) continue;
    const Merge* now = merged(tokens[left], tokens[static_cast<size_t>(right)]);
    if (!now || now->made != pair.made) continue;
    tokens[left] = pair.made, tokens[static_cast<size_t>(right)] = -1;
    after[left] = after[static_cast<size_t>(right)];
    if (after[left] < count) before[static_cast<size_t>(after[left])] = pair.left;
    consider(before[left], pair.left);
    consider(pair.left, after[left]);
  }
  for (const int32_t token : tokens)
    if (token >= 0) out.push_back(token);
}

}  // namespace otaro
