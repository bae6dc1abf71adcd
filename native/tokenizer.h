// Tokens from text and back, as tokenizer.json says: byte-level BPE (GPT-2, LLaMA 3, Qwen, SmolLM2) and BPE
// on characters that falls back to bytes (LLaMA 2, Mistral, Gemma). What is not known here is refused by
// name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "json.h"

namespace otaro {

class Tokenizer {
 public:
  // What is wrong, in words, or nothing.
  std::string read(std::string_view json);
  // Appends tokens; with those that begin and end every text, if wanted.
  std::string encode(std::string_view text, bool begin_and_end, std::vector<int32_t>& out) const;
  // What a token adds to a text: bytes, which may be a part of a character. Special ones add nothing.
  std::string_view piece(int32_t token) const;

 private:
  using Words = std::vector<std::string>;

  struct Added {
    std::string content;
    int32_t id;
    bool strips_left, strips_right;
  };
  struct Normalizer {
    enum { kPrepend, kReplace, kNfc } kind;
    std::string from, to;
  };
  struct PreTokenizer {
    enum Kind { kDigits, kGpt2, kLlama3, kPrefixSpace, kMetaspace } kind;
    bool single_digits = false;  // of kDigits
    int digits = 0;              // of kLlama3: how many numerals belong together at most
    bool splits = false, first_only = false, prepends = false;  // of kMetaspace
  };
  struct Merge {
    uint32_t rank;
    int32_t made;
  };

  std::string read_model(const Value& model);
  std::string read_added(const Value& added);
  std::string read_normalizer(const Value& stated);
  std::string read_pre_tokenizer(const Value& stated);
  std::string read_template(const Value& stated);
  std::string read_decoder(const Value& stated) const;
  bool add_token(const std::string& content, int64_t id);

  void encode_part(std::string text, bool first, std::vector<int32_t>& out) const;
  Words split(const PreTokenizer& step, const std::string& text, bool first) const;
  void merge(std::string_view word, std::vector<int32_t>& out) const;
  std::vector<int32_t> symbols(std::string_view word) const;
  const Merge* merged(int32_t left, int32_t right) const;

  bool byte_level_ = false, byte_fallback_ = false, fuses_unknown_ = false, ignores_merges_ = false;
  int32_t unknown_ = -1;
  int32_t bytes_[256];
  std::unordered_map<std::string, int32_t> vocabulary_;  // by its bytes
  std::unordered_map<uint64_t, Merge> merges_;           // of pairs
  std::vector<std::string> pieces_;
  std::vector<Added> added_;  // longest first
  std::vector<Normalizer> normalizers_;
  std::vector<PreTokenizer> steps_;
  std::vector<int32_t> before_, after_;
};

// Canonical composition, of UTF-8.
std::string to_nfc(const std::string& text);

// The character at a place, and how many bytes it has; 0 bytes where there is none.
struct Character {
  uint32_t code;
  int bytes;
};
Character character_at(std::string_view text, size_t at);

}  // namespace otaro
