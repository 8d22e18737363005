// CHECK and its kin: print what failed and where, and make the test's exit status 1. The tests need no more than this.
#pragma once

#include <cstdio>
#include <cstdlib>

inline int failures = 0;

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                                        \
    }                                                                                    \
  } while (false)

#define CHECK_EQUAL(number, expected)                                                                            \
  do {                                                                                                           \
    const long long got = (number);                                                                              \
    if (got != (expected)) {                                                                                     \
      std::fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #number, got, (expected) + 0LL); \
      ++failures;                                                                                                \
    }                                                                                                            \
  } while (false)

#define CHECK_THROWS(type, expression)                                                              \
  do {                                                                                              \
    bool thrown = false;                                                                            \
    try {                                                                                           \
      static_cast<void>(expression);                                                                \
    } catch (const type&) {                                                                         \
      thrown = true;                                                                                \
    }                                                                                               \
    if (!thrown) {                                                                                  \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, #type); \
      ++failures;                                                                                   \
    }                                                                                               \
  } while (false)

inline int summary() { return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE; }
