// The CPU kernels of one instruction set: conversions of every 16-bit number, and every regime that takes a problem.
#include "host/cpu/kernels.hpp"
#include "host/cpu/launch.hpp"
#include "problems.hpp"

using namespace ndsoftmax;
using testing::decode;

namespace {

float widened(DType dtype, int bits) {
  const auto memory = static_cast<std::uint16_t>(bits);
  float value = 0;
  cpu::kernels<float>().load[static_cast<int>(dtype)](&memory, cpu::Window{}, &value);
  return value;
}

int narrowed(DType dtype, float value) {
  const float tile[32] = {value};  // a tile is followed by room for one vector
  std::uint16_t memory = 0;
  cpu::kernels<float>().store[static_cast<int>(dtype)](tile, cpu::Window{}, &memory);
  return memory;
}

void test_conversions(DType dtype) {
  const int infinity = testing::format_of(dtype).infinity();
  for (const int sign : {0, 0x8000}) {
    for (int bits = 0; bits < infinity; ++bits) {
      const double value = decode(dtype, sign | bits);
      CHECK(testing::encode(dtype, value) == (sign | bits));
      CHECK(widened(dtype, sign | bits) == value);
      CHECK(std::signbit(widened(dtype, sign | bits)) == (sign != 0));
      // halfway to the next number, and the floats around it
      const double next =
          bits + 1 < infinity ? decode(dtype, sign | (bits + 1)) : 2 * value - decode(dtype, sign | (bits - 1));
      const double halfway = (value + next) / 2;
      const auto middle = static_cast<float>(halfway);
      CHECK(middle == halfway);
      CHECK(narrowed(dtype, widened(dtype, sign | bits)) == (sign | bits));
      CHECK(narrowed(dtype, std::nextafter(middle, 0.f)) == (sign | bits));
      CHECK(narrowed(dtype, middle) == (sign | (bits + (bits & 1))));
      CHECK(narrowed(dtype, std::nextafter(middle, std::copysign(INFINITY, middle))) == (sign | (bits + 1)));
    }
    CHECK(widened(dtype, sign | infinity) == (sign ? -INFINITY : INFINITY));
    CHECK(narrowed(dtype, sign ? -INFINITY : INFINITY) == (sign | infinity));
    for (int bits = infinity + 1; bits < 0x8000; ++bits) {
      CHECK(std::isnan(widened(dtype, sign | bits)));
      CHECK((narrowed(dtype, widened(dtype, sign | bits)) & 0x7fff) > infinity);
    }
  }
}

}  // namespace

int main() {
  std::printf("%s\n", cpu::capability());
  test_conversions(DType::float16);
  test_conversions(DType::bfloat16);

  std::vector<testing::Case> cases{
      // rows: without gaps, with gaps, in parts
      {{5, 1000}, {}, {1}},
      {{40, 33}, {}, {1}},
      {{1, 2049}, {}, {1}},
      {{3, 100}, {117, 1}, {1}},
      {{2, 3, 5, 24}, {360, 24, 72, 1}, {3}},
      {{3, 20'003}, {}, {1}},
      {{1, 70'001}, {}, {1}},
      // columns: few, many, in parts, in a slab
      {{2, 19, 64}, {}, {1}},
      {{3, 19, 50}, {}, {1}},
      {{2, 300, 3}, {}, {1}},
      {{1, 14'000, 5}, {}, {1}},
      {{700, 33}, {}, {0}},
      {{3000, 50}, {}, {0}},
      {{50, 2}, {}, {0}},
      // steps, permutations, broadcasts, several dimensions at once
      {{5, 40}, {80, 2}, {1}},
      {{6, 30}, {1, 6}, {1}},
      {{4, 50}, {0, 1}, {1}},
      {{4, 50}, {1, 0}, {1}},
      {{2, 60, 128}, {7680, 1, 60}, {2}},
      {{3, 4, 5, 6}, {}, {1, 3}},
      {{2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}, {1}},
      {{2, 700, 3}, {4200, 6, 2}, {1, 2}},
      {{1}, {}, {0}},
  };
  for (std::int64_t dim = 1; dim <= 17; ++dim) cases.push_back({{1100 / dim, dim}, {}, {1}});  // several a vector

  Device one, three;
  three.threads = 3;
  const int runs = testing::run(cases, {one, three}, 3, [](auto&&... call) { cpu::launch(call...); }).at("total");
  CHECK(runs > 1000);
  return summary();
}
