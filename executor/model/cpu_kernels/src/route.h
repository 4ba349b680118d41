// The router: logits of a row, scores, and the choice of its experts.
#include "tile.h"

struct Choice {
  int64_t experts, top_k, groups, kept_groups;
  int64_t is_sigmoid, sums_two, renormalises;  // sums_two: a group counts as its best two, else one
  float factor;

  // Makes `scores`, which end with -infinity to full vectors, of logits: a softmax, or sigmoids.
  void score(float* scores) const {
    const float most = *std::max_element(scores, scores + experts);
    Floats total = set(0);
    for (int64_t e = 0; e < experts; e += kLanes) {
      const Floats logits = load(scores + e);
      store(scores + e, is_sigmoid ? sigmoid(logits) : exp(logits - most));
      total += load(scores + e);
    }
    const float scale = is_sigmoid ? 1 : 1 / sum(total);
    for (int64_t e = 0; e < experts; e++) scores[e] *= scale;
  }

  // Sets what is in other groups than the best to -infinity.
  void keep_groups(float* scores) const {
    const int64_t size = experts / groups;
    std::vector<float> totals(groups);
    for (int64_t g = 0; g < groups; g++) {
      float best = -INFINITY, second = -INFINITY;
      for (const float* s = scores + g * size; s < scores + (g + 1) * size; s++) {
        second = std::max(second, std::min(best, *s));
        best = std::max(best, *s);
      }
      totals[g] = sums_two ? best + second : best;
    }
    for (int64_t i = kept_groups; i < groups; i++) {
      // Of groups that are alike, the first are kept.
      const int64_t worst = totals.rend() - std::min_element(totals.rbegin(), totals.rend()) - 1;
      totals[worst] = INFINITY;
      std::fill_n(scores + worst * size, size, -INFINITY);
    }
  }

  // Writes a row's experts and weights, the first choice first. `logits` and `ranks` are scratch.
  void choose(float* logits, float* ranks, const float* correction, int32_t* ids,
              float* weights) const {
    score(logits);
    for (int64_t e = 0; e < experts; e++) ranks[e] = logits[e] + (correction ? correction[e] : 0);
    if (groups > 1) keep_groups(ranks);
    float total = is_sigmoid ? 1e-20f : 0;  // sigmoids may all be 0
    for (int64_t k = 0; k < top_k; k++) {
      ids[k] = std::max_element(ranks, ranks + experts) - ranks;
      weights[k] = logits[ids[k]];
      ranks[ids[k]] = -INFINITY;
      total += weights[k];
    }
    for (int64_t k = 0; k < top_k; k++)
      weights[k] = (renormalises ? weights[k] / total : weights[k]) * factor;
  }
};

// x [rows, width], with `stride` from row to row; weight packed, or if that is null, `weight32`
// float32 [experts, width], with width a multiple of 16; bias float32, as columns of panels, or
// null; correction float32 [experts], added to scores for the choice, or null; ids and weights
// [rows, top_k]. Rows of padding, which may be null, get `experts` for ids.
void route(Choice choice, const bf16* x, int64_t stride, const bf16* weight, const float* weight32,
           const float* bias, const float* correction, const bool* is_padding, int32_t* ids,
           float* weights, int64_t rows, int64_t width) {
  const int64_t experts = choice.experts, panels = (experts + kColumns - 1) / kColumns;
#pragma omp parallel if (worth_sharing(experts * width, rows))
  {
    const Configured configured;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < rows; first += kTileRows) {
      const int64_t last = std::min(rows, first + kTileRows);
      std::vector<float> logits(kTileRows * panels * kColumns), ranks(experts);
      const auto row_of = [&](int64_t i) {
        return logits.data() + (i - first) * panels * kColumns;
      };
      for (int64_t panel = 0; weight && panel < panels; panel++)
        multiply(
            first, last, {weight, nullptr, bias, width}, panel,
            [&](int64_t i) { return x + i * stride; },
            [&](int64_t i, const float* sums) {
              std::copy_n(sums, kColumns, row_of(i) + panel * kColumns);
            });
      for (int64_t i = first; i < last; i++) {
        float* const row = row_of(i);
        for (int64_t e = 0; !weight && e < experts; e++) {
          Floats dot = set(0);
          for (int64_t d = 0; d < width; d += kLanes)
            dot = fma(load(x + i * stride + d), load(weight32 + e * width + d), dot);
          row[e] = sum(dot) + (bias ? bias[e] : 0);
        }
        std::fill(row + experts, row_of(i + 1), -INFINITY);
        const int64_t at = i * choice.top_k;
        choice.choose(row, ranks.data(), correction, ids + at, weights + at);
        if (is_padding && is_padding[i]) std::fill_n(ids + at, choice.top_k, int32_t(experts));
      }
    }
  }
}
