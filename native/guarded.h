// Exceptions stay on this side of otaro.h.
#pragma once

#include <exception>

namespace otaro {

// Runs a body that returns what a function of the header returns; `object` has the last error.
template <class Object, class Result, class Body>
Result guarded(Object* object, Result failed, Body&& body) {
#ifdef __cpp_exceptions
  try {
    object->error.clear();
    return body();
  } catch (const std::exception& error) {
    object->error = error.what();  // std::bad_alloc, in practice
  }
  return failed;
#else
  static_cast<void>(failed);
  object->error.clear();
  return body();
#endif
}

}  // namespace otaro
