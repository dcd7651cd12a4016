// Makes the calls that it reads on torch's own caching allocator, and prints its counters after each of them:
// whether it ran out of memory, then reserved and allocated bytes, segments, retries.
//   a HOLDER BYTES STREAM  allocate          f HOLDER  free          u HOLDER STREAM  record a use
//   d STREAM               its work is done  e         empty the cache
//   h                      begin a history   o STAMP   stamp what follows
//   t                      print the history: lines of "= ACTION ADDRESS BYTES STREAM STAMP"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <unordered_map>

namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex)); // libtorch_cuda.so sets it; in no header
}
extern "C" void standin_finish(unsigned long stream);

// even, as a pointer is: by the last bit torch tells its own streams
static cudaStream_t stream_of(long number)
{
    return reinterpret_cast<cudaStream_t>(number << 8);
}

static void print_history()
{
    // as torch/csrc/cuda/memory_snapshot.cpp names them
    static const char* const names[] = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                                        "segment_map", "segment_unmap", "snapshot", "oom"};
    const auto snapshot = c10::cuda::CUDACachingAllocator::snapshot();
    for (const auto& entry : snapshot.device_traces.at(0))
        printf("= %s %zu %zu %zu %s\n", names[entry.action_], entry.addr_, entry.size_,
               reinterpret_cast<size_t>(entry.stream_), entry.user_metadata_.c_str());
}

int main()
{
    using namespace c10::cuda::CUDACachingAllocator;
    c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
    c10::cuda::detail::init_p2p_access_cache(1);
    init(1);
    std::unordered_map<long, void*> held;
    char call, stamp[32];
    long holder, stream;
    size_t bytes;
    while (scanf(" %c", &call) == 1) {
        bool failed = false;
        if (call == 'a' && scanf("%ld %zu %ld", &holder, &bytes, &stream) == 3) {
            try {
                held[holder] = raw_alloc_with_stream(bytes, stream_of(stream));
            } catch (const c10::OutOfMemoryError&) {
                failed = true; // its holder stays without memory
            }
        } else if (call == 'f' && scanf("%ld", &holder) == 1) {
            raw_delete(held[holder]);
        } else if (call == 'u' && scanf("%ld %ld", &holder, &stream) == 2) {
            c10::DataPtr pointer(held[holder], held[holder], get()->raw_deleter(), c10::Device(c10::kCUDA, 0));
            recordStream(pointer, c10::cuda::getStreamFromExternal(stream_of(stream), 0));
            pointer.release_context();
        } else if (call == 'd' && scanf("%ld", &stream) == 1) {
            standin_finish(stream);
        } else if (call == 'e') {
            emptyCache();
        } else if (call == 'h') {
            recordHistory(true, nullptr, 1 << 20, RecordContext::NEVER, true, {});
        } else if (call == 'o' && scanf("%31s", stamp) == 1) {
            get()->setUserMetadata(stamp);
        } else if (call == 't') {
            print_history();
        } else {
            return 1;
        }
        const auto stats = getDeviceStats(0);
        printf("%d %ld %ld %ld %ld\n", failed, stats.reserved_bytes[0].current, stats.allocated_bytes[0].current,
               stats.segment[0].current, stats.num_alloc_retries);
    }
}
