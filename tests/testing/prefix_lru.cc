// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/prefix_lru.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

namespace varlane::testing {

int64_t NaivePrefixLru::Request(const HashIds& ids) {
  int64_t hits = 0;
  for (const int64_t id : ids) {
    if (!place_.contains(id)) break;
    ++hits;
  }
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    const auto known = place_.find(*id);
    if (known != place_.end()) order_.erase(known->second);
    order_.push_front(*id);
    place_[*id] = order_.begin();
  }
  while (static_cast<int64_t>(order_.size()) > capacity_) {
    place_.erase(order_.back());
    order_.pop_back();
  }
  return hits;
}

std::vector<HashIds> MakeConversations(int num_prompts, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<HashIds> prompts;
  int64_t next_id = 0;
  for (int i = 0; i < num_prompts; ++i) {
    HashIds prompt;
    if (!prompts.empty() && random() % 5 != 0) {
      const size_t back = 1 + random() % 60;
      prompt = prompts[prompts.size() - std::min(back, prompts.size())];
      if (random() % 4 == 0) prompt.resize(1 + random() % prompt.size());
    }
    const size_t more = 1 + random() % 12;
    if (prompt.size() + more > 90) prompt.resize(90 - more);
    for (size_t n = 0; n < more; ++n) prompt.push_back(next_id++);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

std::vector<HashIds> ReadHashIds(const std::string& path) {
  std::vector<HashIds> prompts;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    HashIds& prompt = prompts.emplace_back();
    const char* at = std::strstr(line.c_str(), "\"hash_ids\": [");
    if (at == nullptr) return {};
    at += std::strlen("\"hash_ids\": [");
    while (*at != ']' && *at != '\0') {
      char* end = nullptr;
      prompt.push_back(std::strtoll(at, &end, 10));
      if (end == at) return {};
      at = *end == ',' ? end + 1 : end;
    }
  }
  return prompts;
}

std::string Percent(int64_t hits, int64_t blocks) {
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), "%.2f",
                      100.0 * double(hits) / double(blocks));
  return text.data();
}

}  // namespace varlane::testing
