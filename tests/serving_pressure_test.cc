// Memory pressure through the whole of serving: monitor, ladder, scheduler and
// pool. A service writes what each slot holds into the pool's memory and reads
// everything back through the block tables, every step.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/machine_fixture.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/serving_pressure.h"

namespace varlane {
namespace {

using testing::kMiB;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kBlockSize = 16;
// 64 KiB a block, 32 blocks a slab of 2 MiB.
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 8,
                              .num_kv_heads = 2,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = static_cast<int>(kBlockSize)};
constexpr int64_t kSlab = 32;  // blocks

class Service {
 public:
  // With `swap_slabs`, preempted requests go to a file of so many.
  explicit Service(int64_t num_slabs, SchedulerOptions options = {},
                   int64_t swap_slabs = 0) {
    pool_ = testing::MakePool({.layout = kLayout,
                               .num_blocks = num_slabs * kSlab,
                               .huge_pages = HugePages::kOff,
                               .shuffle = true,
                               .seed = 3},
                              testing::OneWorker());
    options.watermark = 0;
    if (swap_slabs > 0) {
      auto swapper = SequenceSwapper::Create(
          {.folder = folder_.path(), .max_bytes = swap_slabs * 2 * kMiB},
          pool_.get());
      VARLANE_EXPECT_OK(swapper);
      swapper_ = *std::move(swapper);
      options.swapper = swapper_.get();
      options.eviction = EvictionPolicy::kSwap;
    }
    auto scheduler = Scheduler::Create(options, pool_.get());
    VARLANE_EXPECT_OK(scheduler);
    scheduler_ = *std::move(scheduler);
  }

  KvPool& pool() { return *pool_; }
  Scheduler& scheduler() { return *scheduler_; }
  SequenceSwapper& swapper() { return *swapper_; }
  int64_t slabs() { return pool_->stats().num_slabs; }

  void Submit(RequestId id, int64_t prompt, int64_t output, int priority = 0) {
    const Result<Admission> admission =
        scheduler_->Submit({.id = id,
                            .prompt_tokens = prompt,
                            .max_new_tokens = output,
                            .priority = priority});
    VARLANE_EXPECT_OK(admission);
    EXPECT_NE(admission->kind, Admission::Kind::kNeverFits);
  }

  // A step; false when there was nothing to do.
  bool RunStep() {
    Step step;
    VARLANE_EXPECT_OK(scheduler_->Schedule(&step));
    if (step.empty()) return false;
    for (size_t i = 0; i < step.entries.size(); ++i) {
      const StepEntry& entry = step.entries[i];
      for (int64_t j = 0; j < entry.count; ++j) {
        Store(step.slot_mapping[size_t(step.cu_seqlens_q[i] + j)],
              Tag(entry.request, entry.begin + j));
      }
    }
    for (size_t i = 0; i < step.entries.size(); ++i) ReadBack(step, i);
    std::vector<RequestId> ended;
    VARLANE_EXPECT_OK(scheduler_->Complete(step, {}, &ended));
    ended_ += std::ssize(ended);
    VARLANE_EXPECT_OK(pool_->CheckInvariants());
    return true;
  }
  int64_t ended() const { return ended_; }
  int64_t wrong() const { return wrong_; }

 private:
  static uint64_t Tag(RequestId request, int64_t position) {
    return static_cast<uint64_t>(request) << 32 |
           static_cast<uint64_t>(position);
  }
  // The last layer's first key and first layer's value, halves of the tag.
  std::array<std::byte*, 2> Places(int64_t slot) {
    const KvView view = pool_->view();
    const int offset = static_cast<int>(slot % kBlockSize);
    return {view.k(slot / kBlockSize, 7, 1) + 4 * kLayout.k_offset(offset, 5),
            view.v(slot / kBlockSize, 0, 0) + 4 * kLayout.v_offset(offset, 9)};
  }
  void Store(int64_t slot, uint64_t tag) {
    const auto halves = std::array{uint32_t(tag), uint32_t(tag >> 32)};
    const auto places = Places(slot);
    for (size_t i = 0; i < 2; ++i) std::memcpy(places[i], &halves[i], 4);
  }
  void ReadBack(const Step& step, size_t i) {
    const StepEntry& entry = step.entries[i];
    const int32_t* const table =
        step.block_tables.data() +
        static_cast<int64_t>(i) * step.block_table_stride;
    for (int64_t p = 0; p < entry.begin + entry.count; ++p) {
      const auto places =
          Places(table[p / kBlockSize] * kBlockSize + p % kBlockSize);
      std::array<uint32_t, 2> halves{};
      for (size_t j = 0; j < 2; ++j) std::memcpy(&halves[j], places[j], 4);
      const uint64_t held = uint64_t{halves[1]} << 32 | halves[0];
      if (held != Tag(entry.request, p)) ++wrong_;
    }
  }

  testing::TemporaryFolder folder_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<SequenceSwapper> swapper_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t ended_ = 0;
  int64_t wrong_ = 0;
};

// --- what each rung does -----------------------------------------------------

TEST(ServingPressureTargetTest, CompactionEmptiesSlabsUnderRunningRequests) {
  Service service(8);
  for (int i = 0; i < 4; ++i) service.Submit(i, 20 * kBlockSize, 8);
  service.RunStep();
  ServingPressureTarget target(&service.pool(), &service.scheduler(), 0);
  const int64_t dropped = target.DropCached(100 * kMiB);
  const int64_t compacted = target.Compact(100 * kMiB);
  // Blocks are handed out at random, so little goes without moving.
  EXPECT_LT(dropped, 4 * kMiB);
  EXPECT_EQ(dropped + compacted, 5 * 2 * kMiB) << "80 blocks need 3 slabs";
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 4);
  EXPECT_EQ(service.wrong(), 0);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
}

TEST(ServingPressureTargetTest, PreemptionGivesWholeSlabsOfTheLowestPriority) {
  Service service(8);
  service.Submit(0, 60 * kBlockSize, 20, /*priority=*/1);
  for (int i = 1; i < 6; ++i) service.Submit(i, 30 * kBlockSize, 20);
  while (service.scheduler().stats().running < 6) service.RunStep();
  ServingPressureTarget target(&service.pool(), &service.scheduler(), 0);
  target.Compact(100 * kMiB);
  const int64_t before = service.slabs();
  EXPECT_EQ(target.Preempt(2 * 2 * kMiB), 2 * 2 * kMiB);
  EXPECT_EQ(service.slabs(), before - 2);
  const SchedulerStats stats = service.scheduler().stats();
  EXPECT_GE(stats.preemptions, 1);
  EXPECT_LE(stats.preemptions, 3);
  // Down to what the longest accepted request needs, whatever is asked.
  target.Preempt(1000 * kMiB);
  EXPECT_EQ(service.slabs(), 2) << "62 blocks";
  EXPECT_EQ(service.scheduler().stats().running, 1);
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 6);
  EXPECT_EQ(service.wrong(), 0);
}

// Blocks that are being written come free later: they count as given, or every
// update of a long pressure would send more requests back.
TEST(ServingPressureTargetTest, BlocksOnTheirWayToTheSwapFileAreNotAskedTwice) {
  Service service(8, {}, /*swap_slabs=*/8);
  for (int i = 0; i < 6; ++i) service.Submit(i, 38 * kBlockSize, 20);
  while (service.scheduler().stats().running < 6) service.RunStep();
  ServingPressureTarget target(&service.pool(), &service.scheduler(), 0);
  const int64_t before = service.slabs();
  ASSERT_EQ(before, 8) << "6 x 39 blocks of 256";
  int64_t released = target.Preempt(2 * 2 * kMiB);
  const int64_t preemptions = service.scheduler().stats().preemptions;
  EXPECT_GE(preemptions, 1);
  EXPECT_LE(preemptions, 2);
  released += target.Preempt(2 * 2 * kMiB - released);
  EXPECT_EQ(service.scheduler().stats().preemptions, preemptions);
  while (service.swapper().busy()) {
    service.swapper().WaitForCompletion(service.swapper().completions());
  }
  released += target.Compact(2 * 2 * kMiB - released);
  EXPECT_EQ(released, 2 * 2 * kMiB);
  EXPECT_EQ(service.slabs(), before - 2);
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 6);
  EXPECT_EQ(service.wrong(), 0);
  EXPECT_EQ(service.scheduler().stats().swapped_in,
            service.scheduler().stats().swapped_out);
}

// What would not make a slab go frees no memory.
TEST(ServingPressureTargetTest, NobodyIsSentBackInVain) {
  Service service(4);
  for (int i = 0; i < 4; ++i) service.Submit(i, 24 * kBlockSize, 20);
  while (service.scheduler().stats().running < 4) service.RunStep();
  ServingPressureTarget target(&service.pool(), &service.scheduler(),
                               /*keep_blocks=*/4 * kSlab);
  EXPECT_EQ(target.Preempt(1000 * kMiB), 0);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 4);
}

TEST(ServingPressureTargetTest, WhatOnlyLentBlocksWouldHoldIsRefusedForNow) {
  Service service(8);
  ServingPressureTarget target(&service.pool(), &service.scheduler(), kSlab);
  EXPECT_EQ(target.DropCached(1000 * kMiB), 7 * 2 * kMiB);
  const Request request = {
      .id = 1, .prompt_tokens = 2 * kSlab * kBlockSize, .max_new_tokens = 1};
  const Result<Admission> refused = service.scheduler().Submit(request);
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(service.scheduler().stats().refused, 1);
  EXPECT_EQ(service.scheduler()
                .Submit({.id = 2,
                         .prompt_tokens = 9 * kSlab * kBlockSize,
                         .max_new_tokens = 1})
                ->kind,
            Admission::Kind::kNeverFits);
  EXPECT_EQ(target.Regrow(4 * kMiB), 4 * kMiB);
  VARLANE_EXPECT_OK(service.scheduler().Submit(request));
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 1);
}

TEST(ServingPressureTargetTest, APoolWithoutASchedulerShrinksToo) {
  Service service(4);
  ServingPressureTarget target(&service.pool(), nullptr, 2 * kSlab);
  target.SetGrowth(false);
  target.SetAdmission(false);
  EXPECT_EQ(target.Preempt(100 * kMiB), 2 * 2 * kMiB);
  EXPECT_EQ(target.Regrow(100 * kMiB), 0) << "growth is stopped";
  target.SetGrowth(true);
  EXPECT_EQ(target.Regrow(100 * kMiB), 2 * 2 * kMiB);
}

// --- the whole ladder --------------------------------------------------------

// A machine made of files, whose memory a test takes away. Without events the
// monitor looks every 2 ms.
class ServingPressureTest : public testing::MachineTest {
 protected:
  // Of 100 GiB, with a reserve of 2 GiB.
  void HostHas(int64_t available_mib) {
    const std::string path = root_ + "/proc/meminfo";
    const std::string next = path + ".next";
    Write("/proc/meminfo.next",
          "MemTotal: " + Kb(100 * testing::kGiB) +
              " kB\nMemAvailable: " + Kb(available_mib * kMiB) + " kB\n");
    std::filesystem::rename(next, path);  // never half of it
  }
  void SetUp() override {
    MachineTest::SetUp();
    HostHas(50'000);
  }
  ServingPressureOptions Options() const {
    ServingPressureOptions options;
    options.monitor.root = root_;
    options.monitor.poll_ns = 2 * kMs;
    options.controller.climb_ns = 5 * kMs;
    options.controller.calm_ns = 5 * kMs;
    options.controller.min_release_bytes = 2 * kMiB;
    options.keep_share = 0;
    return options;
  }
  std::unique_ptr<ServingPressure> Start(Service* service,
                                         ServingPressureOptions options) {
    auto pressure = ServingPressure::Create(options, &service->pool(),
                                            &service->scheduler());
    VARLANE_EXPECT_OK(pressure);
    return pressure.ok() ? *std::move(pressure) : nullptr;
  }
  // Updates, as an engine between steps, until `done`; fails after a minute. A
  // step each time that there was news: so their number does not depend on how
  // fast the machine is.
  static void UpdateUntil(
      ServingPressure* pressure, const std::function<bool()>& done,
      const std::function<void()>& step = [] {}) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end)
          << PressureRungName(pressure->stats().ladder.rung);
      const bool news = pressure->HasNews();
      pressure->Update();
      if (news) step();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  static PressureRung RungOf(const ServingPressure& pressure) {
    return pressure.stats().ladder.rung;
  }
};

TEST_F(ServingPressureTest, TheLadderIsClimbedAndDescendedWhileServing) {
  Service service(16, {.max_seqs = 8});
  auto pressure = Start(&service, Options());
  for (int i = 0; i < 8; ++i) {
    service.Submit(i, (20 + 4 * i) * kBlockSize, 300, /*priority=*/i == 0);
  }
  while (service.scheduler().stats().running < 8) service.RunStep();
  const auto serve = [&] { service.RunStep(); };
  ASSERT_EQ(RungOf(*pressure), PressureRung::kNormal);

  HostHas(1400);  // low
  UpdateUntil(
      pressure.get(),
      [&] { return RungOf(*pressure) == PressureRung::kStopGrowing; }, serve);
  EXPECT_EQ(service.pool().TakeBack(0).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(service.slabs(), 16);

  HostHas(900);  // medium: more is missing than the pool has
  UpdateUntil(
      pressure.get(),
      [&] { return RungOf(*pressure) == PressureRung::kCompact; }, serve);
  EXPECT_LT(service.slabs(), 16);
  EXPECT_EQ(service.scheduler().stats().preemptions, 0);
  EXPECT_TRUE(service.scheduler().stats().takes_work);

  HostHas(100);  // critical
  UpdateUntil(
      pressure.get(),
      [&] { return RungOf(*pressure) == PressureRung::kRefuse; }, serve);
  const SchedulerStats stats = service.scheduler().stats();
  EXPECT_FALSE(stats.takes_work);
  EXPECT_GE(stats.preemptions, 1);
  EXPECT_EQ(service.scheduler()
                .Submit({.id = 99, .prompt_tokens = 1, .max_new_tokens = 1})
                .status()
                .code(),
            StatusCode::kUnavailable);
  // Whoever was accepted goes on all the while.
  const int64_t steps = service.scheduler().stats().steps;
  for (int i = 0; i < 20; ++i) {
    pressure->Update();
    EXPECT_TRUE(service.RunStep());
  }
  EXPECT_EQ(service.scheduler().stats().steps, steps + 20);
  const int64_t needed = service.scheduler().LeastBlocks();
  EXPECT_GE(service.pool().capacity_blocks(), needed);
  EXPECT_LT(service.slabs(), 16);

  HostHas(50'000);
  UpdateUntil(
      pressure.get(), [&] { return service.slabs() == 16; }, serve);
  EXPECT_EQ(RungOf(*pressure), PressureRung::kNormal);
  EXPECT_TRUE(service.scheduler().stats().takes_work);
  const ServingPressureStats after = pressure->stats();
  EXPECT_GE(after.ladder.climbs, 5);
  EXPECT_EQ(after.ladder.climbs, after.ladder.descents);
  EXPECT_EQ(after.ladder.released_bytes, after.ladder.regained_bytes);
  EXPECT_GT(after.longest_update_ns, 0);
  EXPECT_EQ(after.last.limit, "host RAM");
  while (service.RunStep()) {
  }
  EXPECT_EQ(service.ended(), 8);
  EXPECT_EQ(service.wrong(), 0);
}

TEST_F(ServingPressureTest, TheEmbeddersWordIsEnough) {
  Service service(8);
  auto pressure = Start(&service, Options());
  pressure->Notify(PressureLevel::kMedium, 3 * 2 * kMiB);
  UpdateUntil(pressure.get(), [&] { return service.slabs() == 5; });
  EXPECT_EQ(RungOf(*pressure), PressureRung::kDropCached);
  EXPECT_EQ(pressure->stats().ladder.cause, "the embedder");
  // A wish is fulfilled once, however long the level holds.
  const int64_t updates = pressure->stats().updates;
  UpdateUntil(pressure.get(),
              [&] { return pressure->stats().updates > updates + 5; });
  EXPECT_EQ(service.slabs(), 5);
  pressure->Notify(PressureLevel::kNone);
  UpdateUntil(pressure.get(), [&] { return service.slabs() == 8; });
  EXPECT_EQ(RungOf(*pressure), PressureRung::kNormal);
}

// An engine that waits for requests is woken, once for each piece of news.
TEST_F(ServingPressureTest, AnIdleEngineIsTold) {
  Service service(4);
  std::atomic<int> told{0};
  ServingPressureOptions options = Options();
  options.on_news = [&] {
    ++told;
    told.notify_all();
  };
  auto pressure = Start(&service, options);
  EXPECT_FALSE(pressure->Update()) << "nothing has happened";
  pressure->Notify(PressureLevel::kMedium, 2 * kMiB);
  told.wait(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(told.load(), 1) << "not again before the engine has dealt with it";
  EXPECT_TRUE(pressure->HasNews());
  EXPECT_TRUE(pressure->Update());
  EXPECT_EQ(service.slabs(), 3);
}

TEST_F(ServingPressureTest, TheShareThatIsKeptStays) {
  Service service(8);
  ServingPressureOptions options = Options();
  options.keep_share = 0.5;
  auto pressure = Start(&service, options);
  pressure->Notify(PressureLevel::kCritical, 1000 * kMiB);
  UpdateUntil(pressure.get(),
              [&] { return RungOf(*pressure) == PressureRung::kRefuse; });
  EXPECT_EQ(service.slabs(), 4);
}

TEST_F(ServingPressureTest, ItsEndAllowsGrowthAndNewWorkAgain) {
  Service service(4);
  auto pressure = Start(&service, Options());
  pressure->Notify(PressureLevel::kCritical, 1000 * kMiB);
  UpdateUntil(pressure.get(),
              [&] { return RungOf(*pressure) == PressureRung::kRefuse; });
  EXPECT_FALSE(service.scheduler().stats().takes_work);
  pressure.reset();
  EXPECT_TRUE(service.scheduler().stats().takes_work);
  VARLANE_EXPECT_OK(service.pool().TakeBack(100 * kMiB));
  EXPECT_EQ(service.slabs(), 4);
}

TEST_F(ServingPressureTest, BadOptionsAreRefused) {
  Service service(1);
  ServingPressureOptions options = Options();
  options.keep_share = 1.5;
  EXPECT_EQ(ServingPressure::Create(options, &service.pool(), nullptr)
                .status()
                .message(),
            "keep_share = 1.5, but must be in [0, 1]");
  EXPECT_EQ(
      ServingPressure::Create(Options(), nullptr, nullptr).status().code(),
      StatusCode::kInvalidArgument);
}

// --- what it costs -----------------------------------------------------------

// The monitor's own count and the kernel's agree: where nothing happens nobody
// wakes.
TEST(ServingPressureIdleTest, ListeningCostsNothingWhereThereAreEvents) {
  Service service(1);
  auto made = ServingPressure::Create({}, &service.pool(), nullptr);
  VARLANE_ASSERT_OK(made);
  const std::unique_ptr<ServingPressure> pressure = *std::move(made);
  const auto sources = pressure->stats().sources;
  const bool events =
      std::any_of(sources.begin(), sources.end(), [](const auto& source) {
        return source.active && !source.name.starts_with("MemAvailable");
      });
  if (!events) GTEST_SKIP() << "no source of events here";
  // Its first measurement done, it sleeps.
  for (int i = 0; i < 5000; ++i) {
    if (pressure->listener_use().context_switches > 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const PressureListenerUse before = pressure->listener_use();
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  const PressureListenerUse after = pressure->listener_use();
  int64_t heard = 0;
  for (const PressureSource& source : pressure->stats().sources) {
    heard += source.events;
  }
  if (heard > 0 || pressure->HasNews()) {
    GTEST_SKIP() << "this machine is short of memory just now";
  }
  ASSERT_GE(before.context_switches, 0);
  EXPECT_EQ(after.wakeups, before.wakeups);
  EXPECT_EQ(after.context_switches, before.context_switches);
  EXPECT_EQ(after.cpu_ns, before.cpu_ns);
}

}  // namespace
}  // namespace varlane
