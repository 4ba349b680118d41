// What lies between the projection of queries and keys and attention: norms of heads, and rotation.
#pragma once

#include "tile.h"

constexpr int64_t kMostHeadWidth = 1024;

// Norms each head of x, if there are weights, and turns pairs (i, i + turned / 2) of its first `turned`
// columns to its row's position. All in place, in float32, rounded once.
//
// x [rows, heads, width], with strides from row to row and head to head; weights [heads, width];
// turns [limit, turned], cosines and then sines. Positions outside are the nearest one.
KERNEL void prepare_heads(bf16* x, int64_t row_stride, int64_t head_stride, const bf16* weights,
                          const float* turns, const int64_t* positions, int64_t limit, int64_t rows,
                          int64_t heads, int64_t width, int64_t turned, float eps) {
#pragma omp parallel for schedule(static) if (rows * heads * width > 1 << 16)
  for (int64_t t = 0; t < rows; t++) {
    const int64_t half = turned / 2;
    const int64_t position = turned ? std::clamp<int64_t>(positions[t], 0, limit - 1) : 0;
    const float *cosines = turns + position * turned, *sines = cosines + half;
    for (int64_t h = 0; h < heads; h++) {
      bf16* head = x + t * row_stride + h * head_stride;
      float y[kMostHeadWidth];
      Floats squares = set(0);
      for (int64_t d = 0; d < width; d += kLanes) {
        const Floats part = load(head + d);
        squares = fma(part, part, squares);
        store(y + d, part);
      }
      const Floats scale = set(1 / std::sqrt(sum(squares) / width + eps));
      for (int64_t d = 0; d < (weights ? width : 0); d += kLanes)
        store(y + d, load(y + d) * scale * load(weights + h * width + d));
      for (int64_t d = 0; d < half; d++) {
        const float a = y[d], b = y[d + half];
        y[d] = a * cosines[d] - b * sines[d];
        y[d + half] = b * cosines[d] + a * sines[d];
      }
      for (int64_t d = 0; d < width; d += kLanes) store(head + d, load(y + d));
    }
  }
}
