// The engine over the emulated GPU: the devices that device_twin_test.cc runs over, waits that are left out, and a
// device that fails.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/handles.h"
#include "launch.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/engine/twin.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/forwarding_backend.h"

namespace shardmlp::testing {
namespace {

std::unique_ptr<Backend> Emulated(uint64_t seed) {
  emulation::SetSeed(seed);
  return MakeCudaBackend({.device = 1}).value();
}

// Each buffer is an allocation of its own, so that the emulation sees what goes beyond it or comes after it was given
// back, as it can't within the block that the engine reserves.
class ApartBackend : public ForwardingBackend {
 public:
  explicit ApartBackend(std::unique_ptr<Backend> backend) : ForwardingBackend(*backend), backend_(std::move(backend)) {}

  absl::Status Reserve(int64_t /*bytes*/) override { return absl::OkStatus(); }

 private:
  const std::unique_ptr<Backend> backend_;
};

class EmulatedEngineTest : public ::testing::Test {
 protected:
  ~EmulatedEngineTest() override {
    emulation::Reset();
    EXPECT_EQ(emulation::live_object_count(), 0);
  }

  const TinyModel model_{{OddMlp()}};
  const Dense x_ = InputOf(OddMlp(), 40, 1);
  const Dense dy_ = OutputGradientOf(OddMlp(), 40, 1);
};

// Leaves out the n-th of the waits of one stream for another, in turn.
class ForgetfulBackend final : public ApartBackend {
 public:
  ForgetfulBackend(std::unique_ptr<Backend> backend, int forgotten)
      : ApartBackend(std::move(backend)), forgotten_(forgotten) {}

  absl::Status Wait(Stream stream, const Event& event) override {
    return waits_++ % 2 == forgotten_ ? absl::OkStatus() : ForwardingBackend::Wait(stream, event);
  }

 private:
  const int forgotten_;
  int waits_ = 0;
};

// Every tile has two: computing waits for what is copied in, and copying out for what is computed. What is not waited
// for may be seen in the values, or in work that comes after the memory it is for was freed. The call is of one tile:
// another might be received into rows that the first was not copied from yet, which is a true race between host threads
// too, and a sanitizer's to report.
TEST_F(EmulatedEngineTest, AWaitThatIsLeftOutIsSeen) {
  const Dense x = InputOf(OddMlp(), 16, 1);
  const Dense expected = NaiveForward(model_.layers()[0], x);
  for (const int forgotten : {0, 1, 2}) {
    int wrong = 0;
    for (uint64_t seed = 0; seed < 16; ++seed) {
      bool right = false;
      {
        const TestEngine engine(model_, TilesOf(16, model_),
                                std::make_unique<ForgetfulBackend>(Emulated(seed), forgotten));
        Trainer trainer(*engine);
        right = RelativeDifference(trainer.Forward(0, x, 2), expected) <= kTwinBound;
      }
      wrong += right && emulation::TakeFaults().empty() ? 0 : 1;
      emulation::Reset();
    }
    if (forgotten == 2) {
      EXPECT_EQ(wrong, 0) << "none is left out";
    } else {
      EXPECT_GE(wrong, 3) << "wait " << forgotten;
    }
  }
}

// What the engine takes of the device is one block, of the plan's size, and all goes back.
TEST_F(EmulatedEngineTest, TheDevicesMemoryIsTakenOnceAsPlanned) {
  const auto free_bytes = [] {
    size_t free = 0, total = 0;
    cudaSetDevice(1);
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return static_cast<int64_t>(free);
  };
  auto backend = Emulated(1);
  const int64_t before = free_bytes();
  {
    EngineOptions options = TilesOf(16, model_);
    options.stash_bytes = 1000;
    const TestEngine engine(model_, options, std::move(backend));
    EXPECT_EQ(before - free_bytes(), engine->memory_plan().device_bytes());
    Trainer trainer(*engine);
    trainer.Backward(0, x_, dy_);
    EXPECT_EQ(before - free_bytes(), engine->memory_plan().device_bytes());
  }
  EXPECT_GE(free_bytes(), before) << "with the backend's own";
}

// Another process took what the device had when the plan was made.
TEST_F(EmulatedEngineTest, APlanThatTheDeviceHasNoMemoryForFailsAtTheStart) {
  auto backend = Emulated(1);
  size_t free = 0, total = 0;
  cudaSetDevice(1);
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  void* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, free - (1 << 20)), cudaSuccess);
  const DeviceBlock others(data);
  Metrics metrics;
  const auto engine =
      Engine::Create(TilesOf(16, model_), std::move(backend), model_, MakeLocalReplicas(), nullptr, metrics);
  EXPECT_TRUE(Fails(engine, absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                    {"the memory plan does not fit", "cudaMalloc"}));
}

// Writes where there is no memory.
struct Stray {
  void operator()(int64_t /*row*/, int64_t /*unit*/) const { *address = 1; }
  char* address = reinterpret_cast<char*>(8);
};

TEST_F(EmulatedEngineTest, AFailureOfTheDeviceEndsHealth) {
  const TestEngine engine(model_, TilesOf(16, model_), Emulated(2));
  Trainer trainer(*engine);
  EXPECT_LE(RelativeDifference(trainer.Backward(0, x_, dy_), NaiveBackward(model_.layers()[0], x_, dy_).dx),
            kTwinBound);
  const StreamHandle stream = MakeStream().value();
  Launch(stream.get(), 1, 1, Stray());
  cudaStreamSynchronize(stream.get());
  const auto call = trainer.Start(trainer.ForwardHeader(0, 40), x_);
  ASSERT_TRUE(Succeeds(call->SendAll()));
  EXPECT_TRUE(Fails(call->Wait(), absl::StatusCode::kInternal, Reason::kDeviceFailed,
                    {"the device failed", "cudaErrorIllegalAddress"}));
  EXPECT_TRUE(Fails(engine->health(), absl::StatusCode::kInternal, Reason::kDeviceFailed));
  EXPECT_TRUE(Fails(trainer.Seal(), absl::StatusCode::kInternal, Reason::kDeviceFailed));
}

}  // namespace

std::vector<BackendFactory> Backends() {
  std::vector<BackendFactory> backends = {{"cuda_emulated_late", [] { return Emulated(0); }},
                                          {"cuda_emulated_1", [] { return Emulated(1); }}};
  for (uint64_t seed = 0; seed <= 3; ++seed) {
    backends.push_back({"cuda_emulated_apart_" + std::to_string(seed),
                        [seed] { return std::make_unique<ApartBackend>(Emulated(seed)); }});
  }
  return backends;
}

}  // namespace shardmlp::testing
