// A test harness in one header. One test program is one .cpp that includes this; main() is here.
//
//   TEST(chunks_are_recycled) { EXPECT_EQ(pool.size(), 3u); }
//
// EXPECT_* records a failure and goes on; ASSERT_* ends the test (by an exception: in the test's own thread only). SKIP
// ends it too, with a reason. Arguments of the program are parts of names: only tests that contain one of them run. The exit
// status is 1 if a test fails, and also if none ran.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace ooc::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline std::atomic<int> failures{0};

struct Stop {};  // thrown by ASSERT_*
struct Skip {
  std::string reason;
};

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<T, unsigned char> || std::is_same_v<T, signed char>) {
    out << static_cast<int>(value);
  } else {
    out << value;
  }
  return out.str();
}

inline bool fail(const char* file, int line, const std::string& message) {
  failures += 1;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, message.c_str());
  return false;
}

template <typename Left, typename Right>
bool expect_equal(const char* file, int line, const char* texts, const Left& left, const Right& right) {
  return left == right || fail(file, line, std::string(texts) + ": " + show(left) + " != " + show(right));
}

inline int run(int count, char** names) {
  int ran = 0, failed = 0, skipped = 0;
  for (const Test& test : tests()) {
    bool chosen = count <= 1;
    for (int i = 1; i < count; ++i) chosen = chosen || std::strstr(test.name, names[i]) != nullptr;
    if (!chosen) continue;
    const int before = failures;
    const char* outcome = "ok";
    std::fprintf(stderr, "%s ...\n", test.name);
    try {
      test.body();
    } catch (const Stop&) {
    } catch (const Skip& skip) {
      outcome = "skipped";
      ++skipped;
      std::fprintf(stderr, "  skipped: %s\n", skip.reason.c_str());
    } catch (const std::exception& exception) {
      fail(test.name, 0, std::string("exception: ") + exception.what());
    }
    if (failures != before) {
      outcome = "FAILED";
      ++failed;
    }
    ++ran;
    std::fprintf(stderr, "%s %s\n", test.name, outcome);
  }
  std::fprintf(stderr, "%d tests, %d failed, %d skipped\n", ran, failed, skipped);
  if (ran == skipped) std::fprintf(stderr, "no test ran\n");
  return failed == 0 && ran > skipped ? 0 : 1;
}

// The driver library that the tests run against.
inline const char* test_driver() {
  const char* driver = std::getenv("OOC_TEST_DRIVER");
  if (driver != nullptr && *driver != '\0') return driver;
  std::fprintf(stderr, "OOC_TEST_DRIVER must name a driver library: the emulated driver's path, or libcuda.so.1\n");
  std::exit(1);
}

}  // namespace ooc::testing

#define TEST(name)                                                                        \
  static void test_##name();                                                              \
  [[maybe_unused]] static const bool added_##name = ooc::testing::add(#name, test_##name); \
  static void test_##name()

#define EXPECT_TRUE(condition) ((condition) || ooc::testing::fail(__FILE__, __LINE__, "not true: " #condition))
#define EXPECT_EQ(left, right) ooc::testing::expect_equal(__FILE__, __LINE__, #left " == " #right, (left), (right))
#define ASSERT_TRUE(condition) (EXPECT_TRUE(condition) ? (void)0 : throw ooc::testing::Stop())
#define ASSERT_EQ(left, right) (EXPECT_EQ(left, right) ? (void)0 : throw ooc::testing::Stop())
#define SKIP(reason) throw ooc::testing::Skip{reason}

int main(int count, char** arguments) { return ooc::testing::run(count, arguments); }
