// absl::Mutex and absl::CondVar over pthread locks, which tsan sees. See CMakeLists.txt for why. Same contract as
// abseil's own, except that conditions are awaited under an exclusive lock alone.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

struct PthreadLock {
  std::shared_mutex mutex;
  std::condition_variable_any released;  // a writer changed what conditions look at
};

// The object that `place` points to, made on first use: abseil's own classes have room for one word and are constant
// initialized.
template <typename T>
T& Lazy(std::atomic<intptr_t>& place) {
  intptr_t present = place.load(std::memory_order_acquire);
  if (present == 0) {
    auto made = std::make_unique<T>();
    const auto value = reinterpret_cast<intptr_t>(made.get());
    if (place.compare_exchange_strong(present, value, std::memory_order_acq_rel)) {
      present = value;
      made.release();
    }
  }
  return *reinterpret_cast<T*>(present);
}

template <typename T>
void Destroy(std::atomic<intptr_t>& place) {
  std::unique_ptr<T>(reinterpret_cast<T*>(place.load(std::memory_order_acquire)));
}

// Waits on `signal` with `mutex` held, until notified or past `deadline`. False where it was the deadline.
bool WaitUntil(std::condition_variable_any& signal, std::shared_mutex& mutex, Time deadline) {
  if (deadline == InfiniteFuture()) {
    signal.wait(mutex);
    return true;
  }
  return signal.wait_until(mutex, ToChronoTime(deadline)) == std::cv_status::no_timeout;
}

Time DeadlineOf(Duration timeout) { return Now() + timeout; }

}  // namespace

Mutex::~Mutex() { Destroy<PthreadLock>(mu_); }

void Mutex::Lock() { Lazy<PthreadLock>(mu_).mutex.lock(); }

void Mutex::Unlock() {
  auto& lock = Lazy<PthreadLock>(mu_);
  // First, since whoever gets the mutex next may destroy it.
  lock.released.notify_all();
  lock.mutex.unlock();
}

bool Mutex::TryLock() { return Lazy<PthreadLock>(mu_).mutex.try_lock(); }

void Mutex::ReaderLock() { Lazy<PthreadLock>(mu_).mutex.lock_shared(); }

void Mutex::ReaderUnlock() { Lazy<PthreadLock>(mu_).mutex.unlock_shared(); }

bool Mutex::ReaderTryLock() { return Lazy<PthreadLock>(mu_).mutex.try_lock_shared(); }

bool Mutex::AwaitWithDeadline(const Condition& cond, Time deadline) {
  auto& lock = Lazy<PthreadLock>(mu_);
  while (!cond.Eval()) {
    if (!WaitUntil(lock.released, lock.mutex, deadline)) return cond.Eval();
  }
  return true;
}

void Mutex::Await(const Condition& cond) { AwaitWithDeadline(cond, InfiniteFuture()); }

bool Mutex::AwaitWithTimeout(const Condition& cond, Duration timeout) {
  return AwaitWithDeadline(cond, DeadlineOf(timeout));
}

bool Mutex::LockWhenWithDeadline(const Condition& cond, Time deadline) {
  Lock();
  return AwaitWithDeadline(cond, deadline);
}

void Mutex::LockWhen(const Condition& cond) { LockWhenWithDeadline(cond, InfiniteFuture()); }

bool Mutex::LockWhenWithTimeout(const Condition& cond, Duration timeout) {
  return LockWhenWithDeadline(cond, DeadlineOf(timeout));
}

bool Mutex::ReaderLockWhenWithDeadline(const Condition& cond, Time deadline) {
  const bool met = LockWhenWithDeadline(cond, deadline);
  Unlock();
  ReaderLock();
  return met && cond.Eval();
}

void Mutex::ReaderLockWhen(const Condition& cond) {
  while (!ReaderLockWhenWithDeadline(cond, InfiniteFuture())) ReaderUnlock();
}

bool Mutex::ReaderLockWhenWithTimeout(const Condition& cond, Duration timeout) {
  return ReaderLockWhenWithDeadline(cond, DeadlineOf(timeout));
}

void Mutex::AssertHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::EnableDebugLog(const char*) {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}

CondVar::~CondVar() { Destroy<std::condition_variable_any>(cv_); }

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  auto& signal = Lazy<std::condition_variable_any>(cv_);
  // Gives up and takes the mutex as any other caller would, so that those who await a condition hear of it.
  struct {
    Mutex* mutex;
    void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex->Lock(); }
    void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex->Unlock(); }
  } held{mutex};
  if (deadline == InfiniteFuture()) {
    signal.wait(held);
    return false;
  }
  return signal.wait_until(held, ToChronoTime(deadline)) == std::cv_status::timeout;
}

void CondVar::Wait(Mutex* mutex) { WaitWithDeadline(mutex, InfiniteFuture()); }

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) { return WaitWithDeadline(mutex, DeadlineOf(timeout)); }

void CondVar::Signal() { Lazy<std::condition_variable_any>(cv_).notify_one(); }
void CondVar::SignalAll() { Lazy<std::condition_variable_any>(cv_).notify_all(); }
void CondVar::EnableDebugLog(const char*) {}

ABSL_NAMESPACE_END
}  // namespace absl
