// Makes the context of the group, and ends its collectives.
#include "core/parallel/process_group/encrypted_gloo.h"

#include <utility>

#include "core/parallel/process_group/encrypted_context.h"

namespace distgrad {

EncryptedGloo::EncryptedGloo(EncryptedGlooOptions options) : options_(std::move(options)) {}

EncryptedGloo::~EncryptedGloo() = default;

std::shared_ptr<gloo::transport::Context> EncryptedGloo::createContext(int rank, int size) {
  return context_ = std::make_shared<EncryptedContext>(options_, rank, size);
}

void EncryptedGloo::Abort() {
  context_->Abort(absl::CancelledError("the group was aborted")).IgnoreError();
}

}  // namespace distgrad
