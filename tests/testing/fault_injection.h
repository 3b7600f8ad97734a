// Scenarios in which one call after the other fails: a scenario is run with the
// first call failing, then the second, and so on until none is left to fail.
//
// Include it in one file of a test binary: it replaces operator new (see
// allocation_faults.h).
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_FAULT_INJECTION_H_
#define VARLANE_TESTS_TESTING_FAULT_INJECTION_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/os_calls.h"
#include "tests/testing/allocation_faults.h"
#include "tests/testing/process_use.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/runtime.h"

namespace varlane::testing {

// Makes call `index` of its kind fail while it runs.
class Injector {
 public:
  virtual ~Injector() = default;
  virtual void Arm(int64_t index) = 0;
  virtual void Pause() = 0;
  virtual void Resume() = 0;
  virtual int64_t failed() const = 0;
  // A step of the scenario has failed: for injectors that cannot know.
  virtual void NoteFailure() {}
};

class NoFaults : public Injector {
  void Arm(int64_t /*index*/) override {}
  void Pause() override {}
  void Resume() override {}
  int64_t failed() const override { return 0; }
};

class FailingCalls : public Injector {
 public:
  explicit FailingCalls(int error) : error_(error) {}
  void Arm(int64_t index) override { OsFaults::FailAfter(index, error_); }
  void Pause() override { OsFaults::Pause(); }
  void Resume() override { OsFaults::Resume(); }
  int64_t failed() const override { return OsFaults::failed(); }

 private:
  const int error_;
};

class FailingAllocations : public Injector {
 public:
  void Arm(int64_t index) override { AllocationFaults::FailAfter(index); }
  void Pause() override { AllocationFaults::Disarm(); }
  void Resume() override { AllocationFaults::Rearm(); }
  int64_t failed() const override { return AllocationFaults::failed(); }
};

// What a scenario is made of: steps that fail with an error that fits, leave
// the state as it was, and succeed when they are tried again.
class FaultScenario {
 public:
  FaultScenario(Runtime* runtime, Injector* injector)
      : runtime_(runtime), injector_(injector) {}
  virtual ~FaultScenario() = default;

  virtual void Run() = 0;
  // Comparable between runs.
  const std::string& last_state() const { return last_state_; }

 protected:
  virtual std::string State() const = 0;
  virtual Status CheckInvariants() const = 0;

  template <typename Step>
  void Try(const char* name, const Step& step) {
    const std::string before = State();
    injector_->Resume();
    const Status status = step();
    injector_->Pause();
    if (!status.ok()) {
      injector_->NoteFailure();
      EXPECT_TRUE(status.code() == StatusCode::kResourceExhausted ||
                  status.code() == StatusCode::kUnavailable ||
                  status.code() == StatusCode::kInternal)
          << name << ": " << status.ToString();
      EXPECT_EQ(State(), before) << name << ": " << status.ToString();
      const Status again = step();
      ASSERT_TRUE(IsOk(again)) << name;
    }
    VARLANE_ASSERT_OK(CheckInvariants()) << name;
  }

  Runtime* const runtime_;
  Injector* const injector_;
  std::string last_state_;
};

// A runtime of one worker, so that calls come in one order.
class FaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    runtime_ = MakeOneWorker();
    ASSERT_NE(runtime_, nullptr);
  }
  void TearDown() override {
    OsFaults::Disarm();
    AllocationFaults::Disarm();
  }

  // Under a sanitizer one call in so many is failed.
  static constexpr int kStride = Operations(1, 37);
  // Returns how many calls could be failed; -1 where something was wrong. What
  // the process holds of heap, address space and descriptors must be the same
  // afterwards.
  template <typename Scenario>
  int64_t FailEach(Injector* injector) {
    NoFaults none;
    std::string wanted;
    for (int i = 0; i < 3; ++i) {  // whatever is made once is made now
      Scenario scenario(runtime_.get(), &none);
      scenario.Run();
      wanted = scenario.last_state();
    }
    for (int64_t index = 0; index < 100'000; index += kStride) {
      SCOPED_TRACE("failing number " + std::to_string(index));
      const ProcessUse use = ProcessUse::Now();
      const int64_t live = AllocationFaults::live();
      {
        Scenario scenario(runtime_.get(), injector);
        injector->Arm(index);
        injector->Pause();
        scenario.Run();
        if (HasFatalFailure()) return -1;
        EXPECT_EQ(scenario.last_state(), wanted);
      }
      EXPECT_EQ(AllocationFaults::live(), live) << "heap leaked";
      EXPECT_EQ(ProcessUse::Now(), use);
      if (HasFailure()) return -1;
      if (injector->failed() == 0) return index;
    }
    return -1;
  }

  std::unique_ptr<Runtime> runtime_;
};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_FAULT_INJECTION_H_
