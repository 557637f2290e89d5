#include "tests/cuda_emulation/guard.h"

#include <setjmp.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

namespace shardmlp::emulation {
namespace {

thread_local sigjmp_buf* escape = nullptr;  // of the guarded work on this thread
thread_local BadAccess last_access;
AddressSpace* spaces[2];

// With what a signal handler may call.
void Say(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::abort();
}

void OnBadAccess(int /*signal*/, siginfo_t* info, void* /*context*/) {
  if (escape != nullptr) {
    if (spaces[0]->Open(info->si_addr)) return;  // and the access is made again
    EndWork({cudaErrorIllegalAddress, info->si_addr});
  }
  for (const AddressSpace* space : spaces) {
    if (!space->Contains(info->si_addr)) continue;
    Say("host code touched ");
    Say(space->name().c_str());
    Say(" that it may not touch, or that was freed\n");
  }
  signal(SIGSEGV, SIG_DFL);  // the access is made again, and ends the process
}

}  // namespace

void CatchBadAccesses(AddressSpace* device, AddressSpace* pinned) {
  spaces[0] = device;
  spaces[1] = pinned;
  struct sigaction action = {};
  action.sa_sigaction = OnBadAccess;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

std::optional<BadAccess> RunGuarded(const std::function<void()>& work) {
  sigjmp_buf here;
  if (sigsetjmp(here, /*savemask=*/1) != 0) {
    escape = nullptr;
    return last_access;
  }
  escape = &here;
  work();
  escape = nullptr;
  return std::nullopt;
}

void EndWork(BadAccess access) {
  if (escape == nullptr) std::abort();
  last_access = access;
  siglongjmp(*escape, 1);
}

}  // namespace shardmlp::emulation
