// SPDX-License-Identifier: Apache-2.0

#include "bench/padded_baseline.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace varlane::bench {
namespace {

// Sixteen floats; compilers cut it to what the machine has.
typedef float Vec __attribute__((vector_size(64), aligned(64)));
typedef uint32_t IntVec __attribute__((vector_size(64), aligned(64)));
constexpr int kLanes = 16;

constexpr int kTile = 64;     // keys
constexpr int kMaxRows = 64;  // (token, head of the group) rows of one task
constexpr int kQuad = 4;      // rows, and vectors, of a register tile
constexpr float kMasked = -1e30f;

Vec Load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
void Store(const Vec& v, float* to) { std::memcpy(to, &v, sizeof(v)); }
Vec Splat(float x) { return Vec{} + x; }

float Sum(const Vec& v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// 2^x for x <= 0; Taylor's series on [-0.5, 0.5], 2e-6 relative.
Vec Exp2(Vec x) {
  x = x < -126.0f ? Splat(-126.0f) : x;
  const Vec shifted = x + 12582912.0f;  // rounds to an integer in the low bits
  const Vec f = x - (shifted - 12582912.0f);
  Vec p = f * 0.00133335581f + 0.00961812911f;
  p = p * f + 0.0555041087f;
  p = p * f + 0.240226507f;
  p = p * f + 0.693147181f;
  p = p * f + 1.0f;
  const IntVec exponent = std::bit_cast<IntVec>(shifted) << 23;
  return std::bit_cast<Vec>(std::bit_cast<IntVec>(p) + exponent);
}

// The scratch of one task.
struct Work {
  float* q;        // [rows][D], scaled to log2 units
  float* acc;      // [rows][D]
  float* scores;   // [rows][kTile]
  float* k;        // [D][kTile], transposed
  float* highest;  // [rows]
  float* sum;      // [rows]
};

size_t WorkFloats(int d) {
  return size_t{kMaxRows} * size_t(d) * 2 + size_t{kMaxRows} * kTile +
         size_t(d) * kTile + size_t{kMaxRows} * 2;
}

Work Carve(float* floats, int d) {
  Work w;
  w.q = floats;
  w.acc = w.q + kMaxRows * d;
  w.scores = w.acc + kMaxRows * d;
  w.k = w.scores + kMaxRows * kTile;
  w.highest = w.k + d * kTile;
  w.sum = w.highest + kMaxRows;
  return w;
}

// Few rows: dot products along the keys as they stand.
void ScoresByDot(const Work& w, int rows, const float* k, int keys, int d) {
  for (int t = 0; t < keys; ++t) {
    for (int r = 0; r < rows; ++r) {
      Vec sum = {};
      for (int i = 0; i < d; i += kLanes) {
        sum += Load(w.q + r * d + i) * Load(k + t * d + i);
      }
      w.scores[r * kTile + t] = Sum(sum);
    }
  }
}

// Many rows: the tile transposed once, then register tiles of 4 x 64.
void ScoresByTile(const Work& w, int rows, const float* k, int keys, int d) {
  for (int i = 0; i < d; ++i) {
    for (int t = 0; t < keys; ++t) w.k[i * kTile + t] = k[t * d + i];
    for (int t = keys; t < kTile; ++t) w.k[i * kTile + t] = 0;
  }
  for (int r = 0; r < rows; r += kQuad) {
    Vec s[kQuad][kQuad] = {};
    for (int i = 0; i < d; ++i) {
      for (int a = 0; a < kQuad; ++a) {
        for (int b = 0; b < kQuad; ++b) {
          s[a][b] += w.q[(r + a) * d + i] * Load(w.k + i * kTile + b * kLanes);
        }
      }
    }
    for (int a = 0; a < kQuad; ++a) {
      for (int b = 0; b < kQuad; ++b) {
        Store(s[a][b], w.scores + (r + a) * kTile + b * kLanes);
      }
    }
  }
}

// Scores of one row to weights; rescales what it has gathered so far.
void Softmax(const Work& w, int row, int64_t visible, int d) {
  float* s = w.scores + row * kTile;
  const int seen = static_cast<int>(std::clamp<int64_t>(visible, 0, kTile));
  for (int t = seen; t < kTile; ++t) s[t] = kMasked;
  Vec high = Load(s);
  for (int t = kLanes; t < kTile; t += kLanes) {
    const Vec v = Load(s + t);
    high = v > high ? v : high;
  }
  float top = w.highest[row];
  for (int i = 0; i < kLanes; ++i) top = std::max(top, float(high[i]));
  if (top > w.highest[row]) {
    const float scale = Exp2(Splat(w.highest[row] - top))[0];
    w.sum[row] *= scale;
    for (int i = 0; i < d; i += kLanes) {
      Store(Load(w.acc + row * d + i) * scale, w.acc + row * d + i);
    }
    w.highest[row] = top;
  }
  Vec sum = {};
  for (int t = 0; t < kTile; t += kLanes) {
    const Vec p = Exp2(Load(s + t) - top);
    sum += p;
    Store(p, s + t);
  }
  w.sum[row] += Sum(sum);
}

// acc += p v in register tiles of 4 rows x 64 dims.
void AddValues(const Work& w, int rows, const float* v, int keys, int d) {
  for (int r = 0; r < rows; r += kQuad) {
    for (int i = 0; i < d; i += kQuad * kLanes) {
      Vec acc[kQuad][kQuad];
      for (int a = 0; a < kQuad; ++a) {
        for (int b = 0; b < kQuad; ++b) {
          acc[a][b] = Load(w.acc + (r + a) * d + i + b * kLanes);
        }
      }
      for (int t = 0; t < keys; ++t) {
        for (int a = 0; a < kQuad; ++a) {
          for (int b = 0; b < kQuad; ++b) {
            acc[a][b] += w.scores[(r + a) * kTile + t] *
                         Load(v + t * d + i + b * kLanes);
          }
        }
      }
      for (int a = 0; a < kQuad; ++a) {
        for (int b = 0; b < kQuad; ++b) {
          Store(acc[a][b], w.acc + (r + a) * d + i + b * kLanes);
        }
      }
    }
  }
}

// Rows of one (sequence, KV head): tokens [first, first + tokens) x group.
class Task {
 public:
  Task(const PaddedShape& shape, const PaddedTensors& tensors, int64_t b,
       int head, int64_t first, int tokens)
      : shape_(shape),
        tensors_(tensors),
        b_(b),
        head_(head),
        first_(first),
        rows_(tokens * shape.group()) {}

  void Run(const Work& w) const {
    const int d = shape_.head_size;
    const int padded = (rows_ + kQuad - 1) / kQuad * kQuad;
    LoadQuery(w, padded);
    // The rectangle: what the longest sequence's last row here sees.
    const int64_t last = first_ + (rows_ - 1) / shape_.group();
    const int64_t end =
        std::min(shape_.kv_len, shape_.kv_len - shape_.q_len + last + 1);
    const int64_t kv = (b_ * shape_.kv_heads + head_) * shape_.kv_len * d;
    for (int64_t t = 0; t < end; t += kTile) {
      const int keys = static_cast<int>(std::min<int64_t>(kTile, end - t));
      const float* k = tensors_.k + kv + t * d;
      if (rows_ < kLanes) {
        ScoresByDot(w, padded, k, keys, d);
      } else {
        ScoresByTile(w, padded, k, keys, d);
      }
      for (int r = 0; r < padded; ++r) {
        Softmax(w, r, std::min<int64_t>(Limit(r) - t, keys), d);
      }
      AddValues(w, padded, tensors_.v + kv + t * d, keys, d);
    }
    StoreOut(w);
  }

 private:
  int64_t RowAt(int row) const {  // in q and out
    const int64_t token = first_ + row / shape_.group();
    const int64_t head = head_ * shape_.group() + row % shape_.group();
    return ((b_ * shape_.q_heads + head) * shape_.q_len + token) *
           shape_.head_size;
  }

  int64_t Limit(int row) const {
    const auto b = static_cast<size_t>(b_);
    const int64_t token = first_ + std::min(row, rows_ - 1) / shape_.group();
    return std::min(tensors_.lens[b], tensors_.first_position[b] + token + 1);
  }

  void LoadQuery(const Work& w, int padded) const {
    const int d = shape_.head_size;
    const float scale = 1.44269504f / std::sqrt(static_cast<float>(d));
    for (int r = 0; r < padded; ++r) {
      const float* q = tensors_.q + RowAt(std::min(r, rows_ - 1));
      for (int i = 0; i < d; ++i) w.q[r * d + i] = q[i] * scale;
      w.highest[r] = kMasked;
      w.sum[r] = 0;
    }
    std::memset(w.acc, 0, size_t(padded) * size_t(d) * sizeof(float));
  }

  void StoreOut(const Work& w) const {
    const int d = shape_.head_size;
    for (int r = 0; r < rows_; ++r) {
      const float inverse = 1.0f / w.sum[r];
      float* out = tensors_.out + RowAt(r);
      for (int i = 0; i < d; ++i) out[i] = w.acc[r * d + i] * inverse;
    }
  }

  const PaddedShape& shape_;
  const PaddedTensors& tensors_;
  int64_t b_;
  int head_;
  int64_t first_;
  int rows_;
};

}  // namespace

Status PaddedAttention(Runtime* runtime, const PaddedShape& shape,
                       const PaddedTensors& tensors) {
  if (shape.kv_heads <= 0 || shape.q_heads % shape.kv_heads != 0 ||
      shape.group() > kMaxRows || shape.head_size <= 0 ||
      shape.head_size % (kQuad * kLanes) != 0 || shape.q_len > shape.kv_len) {
    return {StatusCode::kInvalidArgument,
            "the baseline takes head sizes of 64 n and groups up to 64"};
  }
  const int tokens = kMaxRows / kQuad * kQuad / shape.group();
  const int64_t blocks = (shape.q_len + tokens - 1) / tokens;
  const auto body = [&](const Threadgroup& tg) {
    const int64_t first = (blocks - 1 - tg.index() % blocks) * tokens;
    const int64_t rest = tg.index() / blocks;
    const Task task(
        shape, tensors, rest / shape.kv_heads,
        static_cast<int>(rest % shape.kv_heads), first,
        static_cast<int>(std::min<int64_t>(tokens, shape.q_len - first)));
    task.Run(
        Carve(reinterpret_cast<float*>(tg.scratch().data()), shape.head_size));
  };
  LaunchOptions options;
  options.scratch_bytes = WorkFloats(shape.head_size) * sizeof(float);
  return runtime->Launch(Grid{shape.batch * shape.kv_heads * blocks}, body,
                         options);
}

}  // namespace varlane::bench
