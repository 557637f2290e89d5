// The names of a checkpoint folder, and the renames that keep each of them whole whenever a process dies.
//
//   <name>             a checkpoint, whole
//   .saving-<name>     one that is being written, or the one that was just replaced or deleted
//   .replaced-<name>   the one being replaced, where the file system can't exchange two names at once
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/file.h"

namespace shardmlp {

// INVALID_ARGUMENT for a name that is not 1 to 128 letters, digits, '.', '_', '-', or starts with '.'.
absl::Status CheckCheckpointName(absl::string_view name);

// Makes the folder where it is missing, and those above it.
absl::Status MakeFolder(const std::string& path);

// Makes and removes a file in the folder, or, where it is missing, in the nearest above it that is there.
absl::Status CheckWritable(const std::string& path);

// RESOURCE_EXHAUSTED (STORAGE_FULL), with both numbers, where the folder's file system has less than `bytes` free for
// this process. What a quota leaves of it shows when it is written.
absl::Status CheckRoom(const std::string& path, int64_t bytes);

// Keeps other processes from saving and recovering in the folder for as long as the result lives. UNAVAILABLE where one
// does.
absl::StatusOr<FileDescriptor> LockFolder(const std::string& path);

// Keeps other processes from deleting the checkpoint in `folder` for as long as the result lives. UNAVAILABLE where one
// does. ClaimCheckpoint also keeps them from reading it; UNAVAILABLE where one does.
absl::StatusOr<FileDescriptor> ShareCheckpoint(const std::string& folder);
absl::StatusOr<FileDescriptor> ClaimCheckpoint(const std::string& folder);

// Makes the folder that checkpoint `name` is written into before it has its name. Recover comes first.
absl::StatusOr<std::string> MakeSavingFolder(const std::string& path, const std::string& name);

// Gives what MakeSavingFolder returned the name of a checkpoint, in the place of the one that has it. The folder must
// be locked. Until this returns OK the name stands for the old one or the new one, whole; then for the new one, on
// disk.
absl::Status Publish(const std::string& path, const std::string& name);

// Takes its name from checkpoint `name`, at once; Recover then removes what it was. The folder must be locked.
absl::Status Unpublish(const std::string& path, const std::string& name);

// Puts back or removes what saves that were cut off left behind. The folder must be locked.
absl::Status Recover(const std::string& path);

}  // namespace shardmlp
