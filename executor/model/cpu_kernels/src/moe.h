// Experts: gate and up, their activation, down; weighted and summed for each row.
//
//     1  each thread takes some columns of some experts:  hidden = gate * sigmoid(alpha gate) * up
//     2  each thread takes some columns of the result:    y = sum of experts' weight * down(hidden)
//
// Rows are gathered by pointer, each weight is read once, threads meet once in between. A row's
// experts are added in the order of their numbers.
#include "tile.h"

constexpr int kGates = kColumns / 2;  // of a panel, before as many columns of up

// The rows that go to each expert, experts in order: of expert e, starts[e] to starts[e + 1].
struct Groups {
  std::vector<int64_t> starts, used, rows;
  std::vector<float> weights;

  Groups(const int32_t* ids, const float* all_weights, int64_t num_rows, int64_t top_k,
         int64_t experts)
      : starts(experts + 2), rows(num_rows * top_k), weights(num_rows * top_k) {
    // What goes to other experts than these stands behind all, and is for somebody else.
    const auto expert_of = [&](int64_t i) { return std::min<uint64_t>(ids[i], experts); };
    for (size_t i = 0; i < rows.size(); i++) starts[expert_of(i) + 1]++;
    for (int64_t e = 0; e < experts; e++) {
      if (starts[e + 1]) used.push_back(e);
      starts[e + 1] += starts[e];
    }
    std::vector<int64_t> next = starts;
    for (size_t i = 0; i < rows.size(); i++) {
      const int64_t place = next[expert_of(i)]++;
      rows[place] = i / top_k;
      weights[place] = all_weights[i];
    }
  }
};

// x [rows, width], dense, as is y; ids and weights [rows, top_k].
// w13: for each expert inner / 16 panels of `width`, each with 16 columns of gate and the same of
// up; w2: for each expert width / 32 panels of `inner`; scales and biases as of `Panels`, or null.
// With a limit, gate is at most that, and up within +-limit; up has `up_offset` added.
void moe(const bf16* x, const int32_t* ids, const float* weights, const void* w13, const void* w2,
         const float* s13, const float* s2, const float* b13, const float* b2, bf16* y,
         int64_t rows, int64_t top_k, int64_t experts, int64_t width, int64_t inner, float alpha,
         float limit, float up_offset) {
  const Groups groups(ids, weights, rows, top_k, experts);
  const Panels gate_up{w13, s13, b13, width}, down{w2, s2, b2, inner};
  const int64_t used = groups.used.size(), pairs = groups.starts[experts];
  bf16* const hidden = scratch<bf16>(pairs * inner);
  const int64_t inner_panels = inner / kGates, width_panels = width / kColumns;
#pragma omp parallel if (worth_sharing(3 * used * width * inner, used ? pairs / used : 0))
  {
    const Configured configured;
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < used * inner_panels; item++) {
      const int64_t expert = groups.used[item / inner_panels], panel = item % inner_panels;
      multiply(
          groups.starts[expert], groups.starts[expert + 1], gate_up, expert * inner_panels + panel,
          [&](int64_t i) { return x + groups.rows[i] * width; },
          [&](int64_t i, const float* sums) {
            for (int c = 0; c < kGates; c += kLanes) {
              const Floats gate = min(set(limit), load(sums + c));  // in this order NaN stays NaN
              const Floats up = max(set(-limit), min(set(limit), load(sums + kGates + c)));
              store(hidden + i * inner + panel * kGates + c,
                    gate * sigmoid(alpha * gate) * (up + up_offset));
            }
          });
    }
    float* const totals = scratch<float>(rows * kColumns);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < width_panels; panel++) {
      std::fill_n(totals, rows * kColumns, 0.f);
      for (int64_t expert : groups.used)
        multiply(
            groups.starts[expert], groups.starts[expert + 1], down, expert * width_panels + panel,
            [&](int64_t i) { return hidden + i * inner; },
            [&](int64_t i, const float* sums) {
              float* const total = totals + groups.rows[i] * kColumns;
              for (int c = 0; c < kColumns; c += kLanes)
                store(total + c, fma(set(groups.weights[i]), load(sums + c), load(total + c)));
            });
      for (int64_t i = 0; i < rows; i++)
        store_columns(y + i * width + panel * kColumns, totals + i * kColumns);
    }
  }
}
