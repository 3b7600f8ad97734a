// Small pools with known contents, and what tests of files need.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_POOLS_H_
#define VARLANE_TESTS_TESTING_POOLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "varlane/kv_pool.h"

namespace varlane::testing {

// 2 layers, 2 heads of 16 and 24, blocks of 16 tokens.
KvLayout SmallLayout(DType dtype = DType::kBF16);

// A pool on one worker, blocks in shuffled order, every byte of it 0xff (NaN in
// all types). Fails the test when it cannot be made.
std::unique_ptr<KvPool> SmallPool(const KvLayout& layout, int64_t num_blocks);

// A sequence of `length` tokens whose slots, padding aside, are a function of
// (seed, position, layer, head, dimension). -1 when the pool is too full.
SeqId MakeSequence(KvPool* pool, int64_t length, uint64_t seed);
// Writes positions [begin, end) of it.
void FillSequence(KvPool* pool, SeqId seq, int64_t begin, int64_t end,
                  uint64_t seed);
// Whether positions [0, length) hold those values still, and no more.
void ExpectSequence(const KvPool& pool, SeqId seq, int64_t length,
                    uint64_t seed);

// A folder of its own that is removed with all in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> names() const;  // of the files in it, sorted

 private:
  std::string path_;
};

std::string ReadWholeFile(const std::string& path);
void WriteWholeFile(const std::string& path, const std::string& contents);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_POOLS_H_
