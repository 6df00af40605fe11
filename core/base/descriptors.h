// Reserves file descriptors for this process, and says where there are none left.
#ifndef DISTGRAD_CORE_BASE_DESCRIPTORS_H_
#define DISTGRAD_CORE_BASE_DESCRIPTORS_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Makes sure that `more` of them can be opened. Where the process's soft limit is too low for that
// it is raised: to the hard limit, or to 65,536 if that is less (a program that closes all
// descriptors that there might be before it starts another takes long with a limit of a billion).
// It is not touched where it suffices, for a program that uses select() breaks when it gets a
// descriptor beyond 1,023.
//
// kResourceExhausted where the hard limit does not suffice: with the limit, the need, `what` needs
// them, and what to do.
absl::Status ReserveDescriptors(size_t more, absl::string_view what);

// Returns whether that socket has something to read, its end among it, or a connection to accept.
// (Where there are no descriptors accept() fails before it looks for one, so its EMFILE does not
// say.)
bool IsReadable(int socket);

// Returns whether accept() fails with that error for want of descriptors, or of memory in the
// kernel: who waits to be accepted goes on waiting, and can be later.
bool IsExhaustion(int error);

// Returns strerror()'s text; where there are no descriptors left, with the limit and what to do.
std::string ErrnoText(int error);
// Returns absl::ErrnoToStatus() with that text; but kUnknown for EINVAL, and for a device that is
// not there, of which kNotFound would say that a name is not.
absl::Status ErrnoStatus(int error, absl::string_view what);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_DESCRIPTORS_H_
