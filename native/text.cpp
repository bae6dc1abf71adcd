// The tokenizer's part of otaro.h.
#include <algorithm>
#include <new>

#include "guarded.h"
#include "text.h"

otaro_tokenizer* otaro_tokenizer_new(void) { return new (std::nothrow) otaro_tokenizer; }

void otaro_tokenizer_free(otaro_tokenizer* tokenizer) { delete tokenizer; }

const char* otaro_tokenizer_error(const otaro_tokenizer* tokenizer) { return tokenizer->error.c_str(); }

int otaro_tokenizer_read(otaro_tokenizer* tokenizer, const char* json, size_t bytes) {
  return otaro::guarded(tokenizer, -1, [&] {
    otaro::Tokenizer made;
    tokenizer->error = made.read({json, bytes});
    if (!tokenizer->error.empty()) return -1;
    tokenizer->tokenizer = std::move(made);
    tokenizer->read = true;
    return 0;
  });
}

ptrdiff_t otaro_encode(otaro_tokenizer* tokenizer, const char* text, size_t bytes, int begin_and_end,
                       int32_t* tokens, size_t room) {
  return otaro::guarded(tokenizer, ptrdiff_t{-1}, [&]() -> ptrdiff_t {
    std::vector<int32_t> found;
    tokenizer->error = tokenizer->read ? tokenizer->tokenizer.encode({text, bytes}, begin_and_end, found)
                                       : "no tokenizer.json was read";
    if (!tokenizer->error.empty()) return -1;
    std::copy_n(found.begin(), std::min(room, found.size()), tokens);
    return static_cast<ptrdiff_t>(found.size());
  });
}

const char* otaro_piece(const otaro_tokenizer* tokenizer, int32_t token, size_t* bytes) {
  const std::string_view piece = tokenizer->tokenizer.piece(token);
  *bytes = piece.size();
  return piece.data();
}
