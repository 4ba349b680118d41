// What reads each number once or twice: norms, rotation of heads, the activation of dense MLPs,
// arg-max. Sizes of all but the last are multiples of 16.

#include "tile.h"

// 1 / sqrt(mean(x^2) + eps)
inline float norm_scale(const bf16* x, int64_t size, float eps) {
  Floats squares = set(0);
  for (int64_t d = 0; d < size; d += kLanes) squares = fma(load(x + d), load(x + d), squares);
  return 1 / std::sqrt(sum(squares) / size + eps);
}

// y = total / sqrt(mean(total^2) + eps) * weight, where total is x, or with `added`, x + added,
// which takes the place of `added`. x has `stride` from row to row; added and y [rows, size] are
// dense.
void add_norm(const bf16* x, int64_t stride, bf16* added, const bf16* weight, bf16* y, int64_t rows,
              int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 16)
  for (int64_t i = 0; i < rows; i++) {
    const bf16* row = x + i * stride;
    if (added) {
      bf16* const total = added + i * size;
      for (int64_t d = 0; d < size; d += kLanes) store(total + d, load(row + d) + load(total + d));
      row = total;  // rounded, as the next layer reads it
    }
    const float scale = norm_scale(row, size, eps);
    for (int64_t d = 0; d < size; d += kLanes)
      store(y + i * size + d, load(row + d) * scale * load(weight + d));
  }
}

// y [rows, size] = silu(gate) * up, of gate_up [rows, 2 size], gate first.
void silu_and_mul(const bf16* gate_up, bf16* y, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 16)
  for (int64_t i = 0; i < rows; i++) {
    const bf16 *gates = gate_up + i * 2 * size, *ups = gates + size;
    for (int64_t d = 0; d < size; d += kLanes) {
      const Floats gate = load(gates + d);
      store(y + i * size + d, gate * sigmoid(gate) * load(ups + d));
    }
  }
}

// Norms each head of x, if there are weights, and turns pairs (i, i + turned / 2) of its first
// `turned` columns to its row's position. All in place, in float32, rounded once.
//
// x [rows, heads, width], with strides from row to row and head to head; weights [heads, width];
// turns [limit, turned], cosines and then sines. Positions outside are the nearest one.
void prepare_heads(bf16* x, int64_t row_stride, int64_t head_stride, const bf16* weights,
                   const float* turns, const int64_t* positions, int64_t limit, int64_t rows,
                   int64_t heads, int64_t width, int64_t turned, float eps) {
#pragma omp parallel for schedule(static) if (rows * heads * width > 1 << 16)
  for (int64_t t = 0; t < rows; t++) {
    const int64_t half = turned / 2;
    const int64_t position = turned ? std::clamp<int64_t>(positions[t], 0, limit - 1) : 0;
    const float *cosines = turns + position * turned, *sines = cosines + half;
    float* const y = scratch<float>(width);
    for (int64_t h = 0; h < heads; h++) {
      bf16* const head = x + t * row_stride + h * head_stride;
      const float scale = weights ? norm_scale(head, width, eps) : 1;
      for (int64_t d = 0; d < width; d += kLanes)
        store(y + d, load(head + d) * scale * (weights ? load(weights + h * width + d) : set(1)));
      for (int64_t d = 0; d < half; d++) {
        const float a = y[d], b = y[d + half];
        y[d] = a * cosines[d] - b * sines[d];
        y[d + half] = b * cosines[d] + a * sines[d];
      }
      for (int64_t d = 0; d < width; d += kLanes) store(head + d, load(y + d));
    }
  }
}

// tokens [rows] = the first place of the largest of float32 logits [rows, size], with `stride` from
// row to row. NaN is passed over; 0 for a row of nothing else.
void arg_max(const float* logits, int64_t stride, int64_t* tokens, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 1 << 18)
  for (int64_t i = 0; i < rows; i++) {
    const float* row = logits + i * stride;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t v = 0; v < size; v++) most = row[v] > most ? row[v] : most;
    int place = size;
#pragma omp simd reduction(min : place)
    for (int v = 0; v < size; v++) place = row[v] == most ? std::min(place, v) : place;
    tokens[i] = place < size ? place : 0;
  }
}
