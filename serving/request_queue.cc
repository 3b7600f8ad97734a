// SPDX-License-Identifier: Apache-2.0

#include "serving/request_queue.h"

#include "base/check.h"

namespace varlane {

TrackedRequest* RequestQueue::Find(RequestId id) {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : &it->second;
}

TrackedRequest* RequestQueue::Add(const Request& request) {
  TrackedRequest* tracked = &requests_[request.id];
  tracked->request = request;
  tracked->request.prompt = {};
  tracked->arrival = next_arrival_;
  try {
    tracked->tokens.assign(request.prompt.begin(), request.prompt.end());
    waiting_.insert(tracked);
  } catch (...) {
    requests_.erase(request.id);
    throw;
  }
  ++next_arrival_;
  return tracked;
}

void RequestQueue::Erase(TrackedRequest* request) {
  if (waiting_.erase(request) == 0) running_.erase(request);
  requests_.erase(request->request.id);
}

void RequestQueue::Start(TrackedRequest* request) {
  // Node handles: the node moves, nothing is allocated.
  running_.insert(waiting_.extract(request));
  VARLANE_DCHECK(running_.contains(request));
}

void RequestQueue::Return(TrackedRequest* request) {
  waiting_.insert(running_.extract(request));
  VARLANE_DCHECK(waiting_.contains(request));
}

}  // namespace varlane
