// Metrics: what a snapshot says, and that its text is what Prometheus reads: a
// strict parser of the format stands here.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <atomic>
#include <charconv>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/metrics.h"

namespace varlane {
namespace {

using testing::ServingHarness;

// --- the text format, version 0.0.4 ------------------------------------------
//
// Stricter than a scraper: HELP and TYPE stand before a family's samples, once;
// a family's samples stand together, no series twice, no timestamp; counters
// end in _total, gauges do not.
class Scrape {
 public:
  // Fails the test at the first line that is wrong.
  explicit Scrape(const std::string& text) {
    EXPECT_TRUE(text.ends_with('\n'));
    std::string_view rest = text;
    while (!rest.empty() && !::testing::Test::HasFailure()) {
      const size_t end = rest.find('\n');
      line_ = rest.substr(0, end);
      rest.remove_prefix(end + 1);
      if (line_.starts_with('#')) {
        Comment();
      } else {
        Sample();
      }
    }
    EXPECT_TRUE(help_.empty()) << "HELP without TYPE";
  }

  // The value of "name" or "name{a=\"b\"}".
  std::optional<double> operator[](const std::string& series) const {
    const auto found = series_.find(series);
    if (found == series_.end()) return std::nullopt;
    return found->second;
  }
  size_t size() const { return series_.size(); }
  const std::map<std::string, std::string>& types() const { return types_; }

 private:
  static bool IsName(std::string_view name) {
    if (name.empty() || (name[0] >= '0' && name[0] <= '9')) return false;
    return name.find_first_not_of(
               "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
               "0123456789_") == std::string_view::npos;
  }
  std::string Word(char end) {
    const size_t at = line_.find(end);
    std::string word(line_.substr(0, at));
    line_.remove_prefix(at == std::string_view::npos ? line_.size() : at + 1);
    return word;
  }
  void Comment() {
    const std::string all(line_);
    ASSERT_EQ(Word(' '), "#") << all;
    const std::string what = Word(' ');
    const std::string name = Word(' ');
    ASSERT_TRUE(IsName(name)) << all;
    if (what == "HELP") {
      ASSERT_TRUE(help_.empty()) << all;
      ASSERT_FALSE(line_.empty()) << all;
      help_ = name;
    } else {
      ASSERT_EQ(what, "TYPE") << all;
      ASSERT_EQ(name, help_) << "HELP comes first: " << all;
      ASSERT_TRUE(line_ == "counter" || line_ == "gauge") << all;
      ASSERT_EQ(line_ == "counter", name.ends_with("_total")) << all;
      ASSERT_TRUE(types_.emplace(name, line_).second) << "twice: " << all;
      family_ = name;
      help_.clear();
    }
  }
  void Sample() {
    const std::string all(line_);
    ASSERT_TRUE(help_.empty()) << "HELP without TYPE before " << all;
    const size_t name_end = line_.find_first_of("{ ");
    ASSERT_NE(name_end, std::string_view::npos) << all;
    ASSERT_EQ(line_.substr(0, name_end), family_) << "not its family: " << all;
    line_.remove_prefix(name_end);
    std::set<std::string> names;
    if (line_.starts_with('{')) {
      do {
        line_.remove_prefix(1);
        const std::string name = Word('=');
        ASSERT_TRUE(IsName(name) && !name.starts_with("__")) << all;
        ASSERT_TRUE(names.insert(name).second) << "label twice: " << all;
        ASSERT_NO_FATAL_FAILURE(Quoted(all));
      } while (line_.starts_with(','));
      ASSERT_TRUE(line_.starts_with('}')) << all;
      line_.remove_prefix(1);
    }
    ASSERT_TRUE(line_.starts_with(' ')) << all;
    line_.remove_prefix(1);
    double value = 0;
    const auto [end, error] =
        std::from_chars(line_.data(), line_.data() + line_.size(), value);
    ASSERT_TRUE(error == std::errc() && end == line_.data() + line_.size())
        << all;
    const std::string series = all.substr(0, all.rfind(' '));
    ASSERT_TRUE(series_.emplace(series, value).second) << "twice: " << all;
    if (types_[family_] == "counter") {
      ASSERT_GE(value, 0) << all;
    }
  }
  // "..." with \\, \" and \n, no other escape, and nothing but UTF-8.
  void Quoted(const std::string& all) {
    ASSERT_TRUE(line_.starts_with('"')) << all;
    line_.remove_prefix(1);
    while (!line_.starts_with('"')) {
      ASSERT_FALSE(line_.empty()) << all;
      if (line_.starts_with('\\')) {
        ASSERT_TRUE(line_.size() > 1 && std::string_view("\\\"n").find(
                                            line_[1]) != std::string_view::npos)
            << all;
        line_.remove_prefix(1);
      }
      line_.remove_prefix(1);
    }
    line_.remove_prefix(1);
  }

  std::string_view line_;
  std::string help_;    // of a HELP whose TYPE is to come
  std::string family_;  // whose samples may come
  std::map<std::string, std::string> types_;
  std::map<std::string, double> series_;
};

std::string TextOf(const Metrics& metrics,
                   std::span<const MetricsLabel> labels = {}) {
  const Result<std::string> text = PrometheusText(metrics, labels);
  VARLANE_EXPECT_OK(text);
  return text.ok() ? *text : "";
}

Metrics Take(const MetricsSources& sources) {
  Result<Metrics> metrics = TakeMetrics(sources);
  VARLANE_EXPECT_OK(metrics);
  return metrics.ok() ? *std::move(metrics) : Metrics();
}

// --- what it says

TEST(MetricsTest, PoolAndSchedulerAreToldAsTheyAre) {
  ServingHarness service(1024, {.watermark = 0});
  VARLANE_ASSERT_OK(service.pool().SetTenantQuota(7, 30));
  for (int i = 0; i < 3; ++i) {
    service.Submit({.id = i, .prompt_tokens = 40, .max_new_tokens = 5});
  }
  service.RunStep();
  ASSERT_TRUE(service.scheduler().Preempt(1).ok());
  const SeqId fork = *service.pool().Fork(service.step().entries[0].sequence);
  VARLANE_ASSERT_OK(service.pool().Append(fork, 1));
  const Scrape scrape(TextOf(
      Take({.pool = &service.pool(), .scheduler = &service.scheduler()})));
  const KvPoolStats pool = service.pool().stats();
  const auto expect = [&](const std::string& series, int64_t value) {
    EXPECT_EQ(scrape[series], static_cast<double>(value)) << series;
  };
  expect("varlane_kv_blocks{state=\"free\"}", pool.free_blocks);
  expect("varlane_kv_blocks{state=\"cached\"}", 0);
  expect("varlane_kv_blocks{state=\"referenced\"}", 7);
  expect("varlane_kv_capacity_blocks", 1024);
  expect("varlane_kv_block_bytes", service.pool().layout().block_bytes());
  expect("varlane_kv_references", 9);
  expect("varlane_kv_sequences", 3);
  expect("varlane_kv_cow_copies_total", 1);
  expect("varlane_kv_committed_bytes", pool.committed_bytes);
  expect("varlane_kv_slabs{state=\"committed\"}", pool.num_slabs);
  expect("varlane_kv_slabs{state=\"reserved\"}", 0);
  expect("varlane_kv_node_blocks{node=\"0\",state=\"referenced\"}", 7);
  expect("varlane_kv_node_committed_bytes{node=\"0\"}", pool.committed_bytes);
  expect("varlane_tenant_used_blocks{tenant=\"0\"}", 7);
  expect("varlane_tenant_quota_blocks{tenant=\"0\"}", -1);
  expect("varlane_tenant_quota_blocks{tenant=\"7\"}", 30);
  expect("varlane_requests{state=\"running\"}", 2);
  expect("varlane_requests{state=\"waiting\"}", 1);
  expect("varlane_requests_total{outcome=\"finished\"}", 0);
  expect("varlane_preemptions_total", 1);
  expect("varlane_prefill_tokens_total", 120);
  expect("varlane_takes_work", 1);
  EXPECT_EQ(scrape["varlane_pressure_level"], std::nullopt) << "not asked";
  VARLANE_ASSERT_OK(service.pool().Free(fork));
  service.Drain(100);
}

TEST(MetricsTest, SlabsThatWereLentAreReserved) {
  ServingHarness service(2048, {});  // 4 slabs of 2 MiB
  VARLANE_ASSERT_OK(service.pool().GiveBack({.bytes = 1}));
  const Scrape scrape(TextOf(Take({.pool = &service.pool()})));
  EXPECT_EQ(scrape["varlane_kv_slabs{state=\"committed\"}"], 3);
  EXPECT_EQ(scrape["varlane_kv_slabs{state=\"reserved\"}"], 1);
  EXPECT_EQ(scrape["varlane_kv_released_slabs_total"], 1);
  EXPECT_EQ(scrape["varlane_kv_lent_blocks"], 512);
}

TEST(MetricsTest, WherePagesAreIsToldIfAsked) {
  ServingHarness service(1024, {});
  EXPECT_TRUE(Take({.pool = &service.pool()}).pool->placement.empty());
  const Scrape scrape(
      TextOf(Take({.pool = &service.pool(), .placement = true})));
  double sum = 0;
  for (const char* state : {"local", "remote", "absent", "unknown"}) {
    const auto value =
        scrape["varlane_kv_node_placement_bytes{node=\"0\",state=\"" +
               std::string(state) + "\"}"];
    ASSERT_TRUE(value.has_value()) << state;
    sum += *value;
  }
  EXPECT_EQ(sum, static_cast<double>(service.pool().stats().committed_bytes));
}

TEST(MetricsTest, PressureAndMemoryAreTold) {
  ServingHarness service(2048, {});
  auto pressure = ServingPressure::Create({.keep_share = 0}, &service.pool(),
                                          &service.scheduler());
  VARLANE_ASSERT_OK(pressure);
  auto account = MemoryAccount::Create({});
  VARLANE_ASSERT_OK(account);
  const auto claim = [&](MemoryUse use, const char* name) {
    auto claimed = (*account)->Claim({.use = use, .name = name, .bytes = 4096});
    VARLANE_EXPECT_OK(claimed);
    return *std::move(claimed);
  };
  const MemoryClaim a = claim(MemoryUse::kWeights, "a \"name\"\\\n");
  const MemoryClaim b = claim(MemoryUse::kEmbedder, "same");
  const MemoryClaim c = claim(MemoryUse::kEmbedder, "same");
  (*pressure)->Notify(PressureLevel::kMedium, 1);
  while ((*pressure)->stats().ladder.released_bytes == 0) {
    (*pressure)->Update();
    std::this_thread::yield();
  }
  const std::string text =
      TextOf(Take({.pressure = pressure->get(), .account = account->get()}));
  const Scrape scrape(text);
  EXPECT_GE(*scrape["varlane_pressure_level"], 2) << text;
  EXPECT_GE(*scrape["varlane_pressure_rung"], 2);
  EXPECT_GE(*scrape["varlane_pressure_released_bytes_total"], 2 << 20);
  EXPECT_GE(*scrape["varlane_pressure_wakeups_total"], 1);
  EXPECT_GT(*scrape["varlane_pressure_update_seconds_total"], 0);
  EXPECT_GT(*scrape["varlane_memory_limit_bytes{limit=\"host RAM\"}"], 0);
  EXPECT_EQ(scrape["varlane_memory_claim_bytes{use=\"weights\",name=\"a "
                   "\\\"name\\\"\\\\\\n\"}"],
            4096)
      << text;
  EXPECT_EQ(
      scrape["varlane_memory_claim_bytes{use=\"embedder\",name=\"same\"}"],
      8192)
      << "one series for claims of one name";
  // One for each source that is, or could not be, listened to.
  const auto sources = (*pressure)->stats().sources;
  ASSERT_FALSE(sources.empty());
  EXPECT_NE(text.find("varlane_pressure_source_active{source=\"" +
                      sources[0].name + "\"} "),
            std::string::npos)
      << text;
}

TEST(MetricsTest, PrefixesAreTold) {
  Metrics metrics;
  metrics.pool.emplace();
  metrics.pool->prefixes = {.lookups = 1,
                            .lookup_blocks = 2,
                            .hit_blocks = 3,
                            .copied_blocks = 4,
                            .inserted_blocks = 5,
                            .duplicate_blocks = 6,
                            .collisions = 7,
                            .indexed_blocks = 8,
                            .pinned_blocks = 9,
                            .evictable_blocks = 10};
  metrics.scheduler = SchedulerStats{.started_tokens = 11, .cached_tokens = 12};
  const Scrape scrape(TextOf(metrics));
  double next = 0;
  for (const char* name :
       {"prefix_lookups_total", "prefix_lookup_blocks_total",
        "prefix_hit_blocks_total", "prefix_copied_blocks_total",
        "prefix_inserted_blocks_total", "prefix_duplicate_blocks_total",
        "prefix_collisions_total", "prefix_indexed_blocks",
        "prefix_pinned_blocks", "prefix_evictable_blocks",
        "started_tokens_total", "cached_tokens_total"}) {
    EXPECT_EQ(scrape[std::string("varlane_") + name], ++next) << name;
  }
}

TEST(MetricsTest, TheSwapFileIsTold) {
  ServingHarness service(64, {});
  const testing::TemporaryFolder folder;
  auto swapper = SequenceSwapper::Create(
      {.folder = folder.path(), .max_bytes = 1 << 20}, &service.pool());
  VARLANE_ASSERT_OK(swapper);
  const SeqId seq = service.pool().CreateSequence();
  VARLANE_ASSERT_OK(service.pool().Append(seq, 40));
  const Result<SwapId> swap = (*swapper)->SwapOut(seq);
  VARLANE_ASSERT_OK(swap);
  ASSERT_EQ((*swapper)->Wait(*swap), SwapState::kStored);
  const Scrape scrape(TextOf(Take({.swapper = swapper->get()})));
  EXPECT_EQ(scrape["varlane_swap_sequences_total{direction=\"out\"}"], 1);
  EXPECT_EQ(scrape["varlane_swap_blocks{state=\"stored\"}"], 3);
  EXPECT_EQ(scrape["varlane_swap_bytes_total{direction=\"out\"}"],
            3.0 * double(service.pool().layout().block_bytes()));
}

// --- the text

TEST(MetricsTest, CommonLabelsStandInEverySample) {
  ServingHarness service(64, {});
  const std::vector<MetricsLabel> labels = {{"replica", "3"},
                                            {"zone", "a\"b\\c\nd"}};
  const Metrics metrics = Take({.pool = &service.pool()});
  const std::string text = TextOf(metrics, labels);
  const Scrape scrape(text);
  EXPECT_EQ(scrape["varlane_kv_capacity_blocks{replica=\"3\",zone=\"a\\\"b\\\\c"
                   "\\nd\"}"],
            64)
      << text;
  EXPECT_EQ(scrape.size(), Scrape(TextOf(metrics)).size());
}

TEST(MetricsTest, BytesThatAreNoUtf8AreReplaced) {
  ServingHarness service(64, {});
  const Metrics metrics = Take({.pool = &service.pool()});
  struct Case {
    std::string bytes;
    std::string text;
  };
  const std::string bad = "\xef\xbf\xbd";
  for (const Case& c :
       {Case{"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", ""},
        Case{"a\xff z", "a" + bad + " z"}, Case{"\xc3", bad},
        Case{"\xc0\x80", bad + bad}, Case{"\xe0\x80\x80", bad + bad + bad},
        Case{"\xed\xa0\x80", bad + bad + bad},
        Case{"\xf4\x90\x80\x80", bad + bad + bad + bad}}) {
    const std::vector<MetricsLabel> labels = {{"x", c.bytes}};
    const std::string text = TextOf(metrics, labels);
    EXPECT_NE(text.find("varlane_kv_capacity_blocks{x=\"" +
                        (c.text.empty() ? c.bytes : c.text) + "\"} 64\n"),
              std::string::npos)
        << text.substr(0, 400);
  }
}

TEST(MetricsTest, LabelsThatWouldClashAreRefused) {
  const auto refused = [](const std::vector<MetricsLabel>& labels) {
    const Result<std::string> text = PrometheusText({}, labels);
    EXPECT_EQ(text.status().code(), StatusCode::kInvalidArgument);
    return std::string(text.status().message());
  };
  EXPECT_EQ(refused({{"state", "x"}}),
            "labels[0].name = \"state\", but samples use it themselves");
  EXPECT_EQ(refused({{"a", "x"}, {"a", "y"}}),
            "labels[1].name = \"a\", as has labels[0]");
  for (const char* name : {"", "1a", "a-b", "__a", "a b", "\xc3\xa4"}) {
    EXPECT_NE(refused({{name, "x"}}).find("letters, digits"), std::string::npos)
        << name;
  }
}

TEST(MetricsTest, NothingAskedIsNothingTold) {
  EXPECT_EQ(TextOf(Take({})), "");
}

// Every metric of the text stands in the documentation, with its type.
TEST(MetricsTest, EveryMetricIsDocumented) {
  ServingHarness service(64, {});
  auto pressure =
      ServingPressure::Create({}, &service.pool(), &service.scheduler());
  VARLANE_ASSERT_OK(pressure);
  auto account = MemoryAccount::Create({});
  VARLANE_ASSERT_OK(account);
  Metrics metrics = Take({.pool = &service.pool(),
                          .scheduler = &service.scheduler(),
                          .pressure = pressure->get(),
                          .account = account->get()});
  metrics.swap.emplace();
  const Scrape scrape(TextOf(metrics));
  const std::string docs = testing::ReadWholeFile(
      std::string(VARLANE_SOURCE_DIR) + "/docs/metrics.md");
  std::set<std::string> documented;
  for (size_t at = 0; (at = docs.find("| `varlane_", at)) != std::string::npos;
       ++at) {
    const size_t begin = at + 3;
    documented.insert(
        docs.substr(begin, docs.find_first_of("`{", begin) - begin));
  }
  std::set<std::string> told;
  for (const auto& [name, type] : scrape.types()) told.insert(name);
  EXPECT_EQ(told, documented);
}

// --- while it runs

TEST(MetricsTest, TakenWhileServing) {
  ServingHarness service(2048, {.watermark = 0});
  auto pressure =
      ServingPressure::Create({}, &service.pool(), &service.scheduler());
  VARLANE_ASSERT_OK(pressure);
  std::atomic<bool> stop{false};
  std::atomic<int> scrapes{0};
  std::thread scraper([&] {
    double steps = 0;
    while (!stop.load() && !::testing::Test::HasFailure()) {
      const Scrape scrape(TextOf(Take({.pool = &service.pool(),
                                       .scheduler = &service.scheduler(),
                                       .pressure = pressure->get()})));
      EXPECT_GE(*scrape["varlane_steps_total"], steps);
      steps = *scrape["varlane_steps_total"];
      EXPECT_EQ(*scrape["varlane_kv_blocks{state=\"free\"}"] +
                    *scrape["varlane_kv_blocks{state=\"cached\"}"] +
                    *scrape["varlane_kv_blocks{state=\"referenced\"}"],
                *scrape["varlane_kv_capacity_blocks"]);
      ++scrapes;
    }
  });
  for (RequestId id = 0; id < 20 || scrapes.load() < 3; ++id) {
    service.Submit({.id = id, .prompt_tokens = 60, .max_new_tokens = 4});
    service.RunStep();
    if (id > 100'000) break;
  }
  service.Drain(100'000);
  stop = true;
  scraper.join();
  EXPECT_GE(scrapes.load(), 3);
}

}  // namespace
}  // namespace varlane
