// Tells the stub what memory torch's allocator gives to a stream, and gets back from it.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void card_poison(void *at, size_t bytes, const void *stream);

extern "C" void card_watch_allocator(void) {
  using c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry &entry) {
    bool is_new = entry.action_ == TraceEntry::ALLOC, is_free = entry.action_ == TraceEntry::FREE_COMPLETED;
    if (is_new || is_free) card_poison((void *)entry.addr_, entry.size_, entry.stream_);
  });
}
