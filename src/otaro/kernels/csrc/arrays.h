// What both halves of the Python module take and refuse: contiguous arrays in memory, sizes that cannot
// overflow.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sefp.h"

namespace otaro {

template <class T, int Dimensions>
using Array = nanobind::ndarray<T, nanobind::ndim<Dimensions>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes = Array<const uint8_t, 2>;

template <class What>  // a literal becomes a string only when it is needed
void check(bool holds, const What& what) {
  if (!holds) throw nanobind::value_error(std::string(what).c_str());
}

// Larger rows are refused, so that no size below overflows.
constexpr int64_t kMostWeights = (int64_t{1} << 31) - 1;

inline void check_sizes(int64_t length, int group_size) {
  check(length > 0 && length <= kMostWeights, "length must be positive and below 2^31");
  check(group_size > 0 && group_size % kBlock == 0, "group_size must be a positive multiple of 32");
}

// With others, products of steps and powers of two of activations would not all be normal numbers, nor exact.
inline void check_scale_exponent(int exponent) {
  check(exponent >= kMinScaleExponent && exponent <= kMaxScaleExponent,
        "scale_exponent must lie between -13 and 7");
}

// Packed rows in these arrays, which must outlive them, at the precision that the planes make up.
inline Packed packed_rows(const Bytes& base, const Bytes& scales, const std::vector<Bytes>& planes,
                          int64_t length, int group_size, bool truncate, int scale_exponent) {
  Packed rows;
  check_sizes(length, group_size);
  check_scale_exponent(scale_exponent);
  check(planes.size() <= kPlanes, "there are at most five planes");
  rows.rows = static_cast<int64_t>(base.shape(0));
  rows.length = length;
  rows.group_size = group_size;
  rows.truncate = truncate;
  rows.scale_exponent = scale_exponent;
  rows.bits = kCoarsest + static_cast<int>(planes.size());
  const auto has = [&](const Bytes& array, int64_t columns) {
    return static_cast<int64_t>(array.shape(0)) == rows.rows &&
           static_cast<int64_t>(array.shape(1)) == columns;
  };
  check(has(base, rows.blocks() * kBaseBytes), "base must be [rows, 16 * blocks]");
  check(has(scales, rows.groups()), "scales must be [rows, groups]");
  rows.base = base.data(), rows.scales = scales.data();
  for (size_t p = 0; p < planes.size(); ++p) {
    check(has(planes[p], rows.blocks() * kPlaneBytes), "a plane must be [rows, 4 * blocks]");
    rows.planes[p] = planes[p].data();
  }
  return rows;
}

}  // namespace otaro
