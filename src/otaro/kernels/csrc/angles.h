// Cosines and sines of rotary positions, with the same bits on every machine: libraries differ in the last
// one.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace otaro {

// A rope turns dimension i of a head with dimension i + n by position * frequencies[i].
struct Rope {
  std::vector<float> frequencies;  // n
  float scale = 1;                 // of cosines and sines
};

// Both from series on [-pi/4, pi/4], in double: errors stay below 2^-50, so that a float of it is the nearest
// one but for one case in millions.
inline void cosine_and_sine(float angle, double& cosine, double& sine) {
  // pi/2 in three parts; products of the first two with a number below 2^20 are exact.
  constexpr double kFirst = 0x1.921fb544p+0, kSecond = 0x1.0b4611a6p-34, kThird = 0x1.3198a2e037073p-69;
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  const double x = angle, turns = std::floor(x * kTwoOverPi + 0.5);
  const double r = ((x - turns * kFirst) - turns * kSecond) - turns * kThird, square = r * r;
  double c = 1, s = 1;
  for (int n = 18; n > 0; n -= 2) {  // 1 - r^2/(1*2) (1 - r^2/(3*4) (1 - ...))
    c = 1 - square / (n * (n - 1)) * c;
    s = 1 - square / (n * (n + 1)) * s;
  }
  s *= r;
  const auto quarter = static_cast<int64_t>(turns) & 3;
  cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
  sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
}

}  // namespace otaro
