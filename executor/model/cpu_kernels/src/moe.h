// Experts: gate and up, their activation, down; weighted and summed for each row.
//
//     1  each thread takes some columns of some experts:  hidden = gate * sigmoid(alpha gate) * up
//     2  each thread takes some columns of the result:    y = sum over experts of weight * down(hidden)
//
// Rows are gathered by pointer, each weight is read once, threads meet once in between. A row's
// experts are added in the order of their numbers.
#pragma once

#include "tile.h"

// The rows that go to each expert, experts in order: of expert e, starts[e] to starts[e + 1].
struct Groups {
  std::vector<int64_t> starts, used, rows;
  std::vector<float> weights;

  // Ids of other experts than these are for somebody else.
  Groups(const int32_t* ids, const float* all_weights, int64_t num_rows, int64_t top_k,
         int64_t experts)
      : starts(experts + 1) {
    const auto is_here = [&](int64_t i) { return ids[i] >= 0 && ids[i] < experts; };
    for (int64_t i = 0; i < num_rows * top_k; i++)
      if (is_here(i)) starts[ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
      if (starts[e + 1]) used.push_back(e);
      starts[e + 1] += starts[e];
    }
    rows.resize(starts[experts]);
    weights.resize(starts[experts]);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < num_rows * top_k; i++) {
      if (!is_here(i)) continue;
      const int64_t place = next[ids[i]]++;
      rows[place] = i / top_k;
      weights[place] = all_weights[i];
    }
  }
};

// Memory that a thread keeps for its next call.
template <class T>
inline T* scratch(size_t size) {
  static thread_local std::vector<T> memory;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// x [rows, width], dense, as is y; ids and weights [rows, top_k].
// w13: for each expert inner / 16 panels of `width`, each with 16 columns of gate and the same of up;
// w2: for each expert width / 32 panels of `inner`; biases float32, columns as the panels', or null.
// With a limit, gate is at most that, and up within +-limit; up has `up_offset` added.
KERNEL void moe(const bf16* x, const int32_t* ids, const float* weights, const bf16* w13,
                const bf16* w2, const float* b13, const float* b2, bf16* y, int64_t rows,
                int64_t top_k, int64_t experts, int64_t width, int64_t inner, float alpha,
                float limit, float up_offset) {
  const Groups groups(ids, weights, rows, top_k, experts);
  const int64_t used = groups.used.size(), pairs = groups.rows.size();
  bf16* const hidden = scratch<bf16>(pairs * inner);
  const int64_t inner_panels = inner / kLanes, width_panels = width / kColumns;
  const int64_t weight_count = 3 * used * width * inner;
#pragma omp parallel if (worth_sharing(weight_count, used ? pairs / used : 0))
  {
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < used * inner_panels; item++) {
      const int64_t expert = groups.used[item / inner_panels], panel = item % inner_panels;
      const int64_t at = expert * inner_panels + panel;
      const Floats gate_bias = b13 ? load(b13 + at * kColumns) : set(0);
      const Floats up_bias = b13 ? load(b13 + at * kColumns + kLanes) : set(0);
      multiply(
          groups.starts[expert], groups.starts[expert + 1], width, w13 + at * kColumns * width,
          [&](int64_t i) { return x + groups.rows[i] * width; },
          [&](int64_t i, Floats gate, Floats up) {
            gate = min(set(limit), gate + gate_bias);  // in this order NaN stays NaN
            up = max(set(-limit), min(set(limit), up + up_bias)) + set(up_offset);
            store(hidden + i * inner + panel * kLanes, gate * sigmoid(set(alpha) * gate) * up);
          });
    }
    float* const sums = scratch<float>(rows * kColumns);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < width_panels; panel++) {
      std::fill(sums, sums + rows * kColumns, 0.f);
      for (int64_t expert : groups.used) {
        const int64_t at = expert * width_panels + panel;
        const Floats low_bias = b2 ? load(b2 + at * kColumns) : set(0);
        const Floats high_bias = b2 ? load(b2 + at * kColumns + kLanes) : set(0);
        multiply(
            groups.starts[expert], groups.starts[expert + 1], inner, w2 + at * kColumns * inner,
            [&](int64_t i) { return hidden + i * inner; },
            [&](int64_t i, Floats low, Floats high) {
              float* const sum = sums + groups.rows[i] * kColumns;
              const Floats weight = set(groups.weights[i]);
              store(sum, fma(weight, low + low_bias, load(sum)));
              store(sum + kLanes, fma(weight, high + high_bias, load(sum + kLanes)));
            });
      }
      for (int64_t i = 0; i < rows; i++) {
        store(y + i * width + panel * kColumns, load(sums + i * kColumns));
        store(y + i * width + panel * kColumns + kLanes, load(sums + i * kColumns + kLanes));
      }
    }
  }
}
