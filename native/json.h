// JSON from strangers: a reader of a few pages. A document is a flat list of values that point into its text;
// strings are unescaped when they are asked for. Nesting and size are limited, no object has a key twice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace otaro {

class Json;

// Whoever asks a missing or another kind of value gets a value of kind kNone, or nothing.
class Value {
 public:
  enum Kind : uint8_t { kNone, kNull, kFalse, kTrue, kNumber, kString, kArray, kObject };

  Value() = default;
  Kind kind() const;
  bool is(Kind one) const { return kind() == one; }
  explicit operator bool() const { return kind() != kNone; }
  // Of an object's member, or none.
  Value operator[](std::string_view key) const;
  // The first value of an array or object, and the one after this; none after the last.
  Value first() const;
  Value next() const;
  uint32_t size() const;
  std::string key() const;  // of a member
  std::string text() const;
  // As it stands in the document: a string without its quotes, not unescaped.
  std::string_view raw() const;
  bool integer(int64_t& out) const;  // whether it is one
  bool number(double& out) const;

 private:
  friend class Json;
  Value(const Json* document, uint32_t index) : document_(document), index_(index) {}
  const Json* document_ = nullptr;
  uint32_t index_ = 0;
};

class Json {
 public:
  // The text is not copied. What is wrong, in words; empty if nothing.
  std::string parse(std::string_view text);
  Value root() const { return nodes_.empty() ? Value() : Value(this, 0); }

 private:
  friend class Value;
  struct Node {
    Value::Kind kind;
    bool last;               // of an array or object
    uint32_t key, key_size;  // where a member's key is, without its quotes
    uint32_t begin, size;    // where its text is; of arrays and objects how many values
    uint32_t end;            // the node after it and all that is in it
  };

  bool value(int depth, uint32_t key, uint32_t key_size);
  bool string(uint32_t& begin, uint32_t& size);
  bool number();
  bool word(std::string_view expected);
  bool keys_differ(uint32_t object) const;
  void space();
  bool wrong(const char* what);

  std::string_view text_;
  uint32_t at_ = 0;
  std::string problem_;
  std::vector<Node> nodes_;
};

// Appends a code point as UTF-8.
void append_utf8(std::string& out, uint32_t code);

}  // namespace otaro
